"""The engine thread, which runs one model or several in turns.

It executes the decisions of `decide_models` (`schedule/models.py`): a step of one model, loading or unloading. Weights
are read on a separate thread, so that other models' answers continue; only the first model is loaded on this one. All
models share one memory budget (`memory.py: SharedMemory`).
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from reprise.core.clock import Clock, monotonic
from reprise.core.errors import EngineLost, LoadFailed, RepriseError, first_line
from reprise.core.sizes import nbytes_text
from reprise.engine import memory as device_memory
from reprise.engine.models.adapters import SharedBases
from reprise.loop.heartbeat import Heartbeat
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits, ModelState, ModelStep, decide_models, room_for, weights_nbytes

_SHARE = 0.01
"""The largest share of the engine thread's time for inspections while it has work."""


class InspectionQueue:
    """Inspections waiting for the engine thread. Used only on that thread.

    While there is work, the next one starts no sooner than 100 t after one that took t seconds started. So requests
    lose at most a hundredth of the thread's time, however many clients watch.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._not_before_s = 0.0
        self.num_answered = 0
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, inspect: Callable[[], None]) -> None:
        self._waiting.append(inspect)

    def answer(self, *, has_work: bool) -> None:
        """Answer those that are due: all if there is no other work."""
        while len(self._waiting) > 0:
            began_s = self._clock()
            if has_work and began_s < self._not_before_s:
                return
            self._waiting.popleft()()
            took_s = self._clock() - began_s
            self.num_answered += 1
            self.spent_s += took_s
            self._not_before_s = began_s + took_s / _SHARE


if TYPE_CHECKING:
    from reprise.loop.engine_loop import EngineLoop

log = logging.getLogger("reprise.loop")

_LEAST_STATE = 8
"""At least this fraction (1/8) of the memory is for layer states."""


class EngineThread:
    """The thread, its command queue, and its models."""

    def __init__(
        self, memory: SharedMemory | None = None, *, limits: ModelLimits | None = None, clock: Clock = monotonic
    ) -> None:
        """`memory`: shared by all models; None: a single model with its own memory. `limits`: None: derived from
        `memory`."""
        self.memory = memory
        self._limits = _limits_of(memory) if limits is None else limits
        self._clock = clock
        self._loops: dict[str, EngineLoop] = {}
        self.bases = SharedBases()
        """The weights that models share with their adapters."""
        self.weights: Mapping[str, int] = {}
        """Bytes of the weights in memory or being loaded, by model. Replaced as a whole, so any thread may read it."""
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reprise-engine", daemon=True)
        self._starting = threading.Lock()
        self.heartbeat = Heartbeat()
        self.inspections = InspectionQueue()
        """Inspections of all models: their limit is a share of this thread's time."""
        self._busy_since_s = clock()
        """The start time, moved forward by all time spent waiting for work."""
        self.failure: RepriseError | None = None
        """Why nothing is computed any more; None while the thread works, and if it ended because all models are
        closed."""
        self._num_steps = 0
        self._is_blocked = False
        """The last step did nothing, so the next one waits for a command or a timeout."""
        self._wakes_in_s: float | None = None
        if memory is not None:
            memory.unload_one = self._unload_one

    # Thread-safe.

    def add(self, loop: EngineLoop) -> None:
        """Add a model, before the thread is started."""
        assert loop.name not in self._loops, f"{loop.name} was added twice"
        self._loops[loop.name] = loop

    def start(self) -> None:
        """Start the thread, unless it is started."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float | None) -> None:
        """If every model is closed, wait until the thread has ended."""
        if self._thread.is_alive() and all(loop.is_closed for loop in self._loops.values()):
            self._thread.join(timeout_s)

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the thread between two steps."""
        self._inbox.put(command)

    def give_up(self, error: RepriseError, *, within_s: float) -> None:
        """End the thread with `error`, which whoever waits gets: also where it hangs for longer than `within_s`."""
        self.failure = error

        def end() -> None:
            raise error

        self.call(end)
        self._thread.join(within_s)
        self._fail(error)

    def stack(self) -> str:
        """The thread's current stack as a traceback; "" if it is not running."""
        # The only way to another thread's stack.
        frame = sys._current_frames().get(self._thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
        return "" if frame is None else "".join(traceback.format_stack(frame))

    # The thread.

    def _run(self) -> None:
        try:
            device_memory.keep_resident()
            first, *_ = self._loops.values()
            error = self._load_first(first)
            if error is None:
                self._serve()
            else:
                self._fail(error)
        except BaseException as error:
            # A bug, and the state that all models share can no longer be trusted.
            log.critical("the engine thread has ended", exc_info=error)
            self._fail(
                EngineLost(
                    f"The engine has stopped because of an error in the program: {first_line(error)} The "
                    "server has to be started again; its log has the whole error."
                )
            )
        finally:
            # Break reference cycles, so that models are freed now.
            self._loops = {}
            if self.memory is not None:
                self.memory.unload_one = lambda: False
            device_memory.leave_thread()

    def _fail(self, error: RepriseError) -> None:
        """Fail everything that was requested so far. Thread-safe; who calls later finds `failure`."""
        self.failure = failure = self.failure or error
        for loop in self._loops.values():
            loop.fail_waiting(failure)

    @property
    def busy_s(self) -> float:
        """Seconds worked: all time except waiting for work."""
        return self._clock() - self._busy_since_s

    def _serve(self) -> None:
        self._busy_since_s = self._clock()
        while True:
            self._receive()
            self.inspections.answer(has_work=self._has_work and not self._may_end)
            if self._may_end:
                for loop in self._loops.values():
                    loop.shutdown()
                return
            self._step()

    @property
    def _may_end(self) -> bool:
        return all(loop.may_end for loop in self._loops.values())

    @property
    def _has_work(self) -> bool:
        return not self._is_blocked and any(loop.has_work for loop in self._loops.values())

    def _receive(self) -> None:
        """Run all queued commands; wait for one if there is nothing to do."""
        loops = self._loops.values()
        block = not self._has_work and len(self.inspections) == 0 and not self._may_end
        # Loading may take minutes: that is not a hang.
        rests = all(loop.num_requests == 0 for loop in loops) or any(loop.is_loading for loop in loops)
        naps = [nap_s for nap_s in (self._wakes_in_s, *(loop.wakes_in_s for loop in loops)) if nap_s is not None]
        while True:
            if block and rests:
                self.heartbeat.rest()
            waits_from_s = self._clock()
            try:
                command = self._inbox.get(block=block, timeout=min(naps, default=None))
            except queue.Empty:
                return
            finally:
                self._busy_since_s += self._clock() - waits_from_s if block else 0.0
                self.heartbeat.wake()
            block = self._is_blocked = False
            command()
            self.note_progress()

    def note_progress(self) -> None:
        """Tell the heartbeat, which checks for progress, after each command and step."""
        self.heartbeat.note(*(loop.published for loop in self._loops.values()))

    def _step(self) -> None:
        step = self._decide()
        self._wakes_in_s = step.wakes_in_s
        for name in step.unload:
            self._unload(self._loops[name])
        if step.load is not None:
            self._load_in_background(self._loops[step.load])
        if step.run is not None:
            loop = self._loops[step.run]
            self._num_steps += 1
            loop.step(
                number=self._num_steps,
                num_others=sum(other.num_running > 0 for other in self._loops.values() if other is not loop),
                is_closed=step.run in step.closed,
            )
        for other in self._loops.values():
            if other.name != step.run:
                other.write_to_disk()
        self._is_blocked = step.run is None and step.load is None and not step.unload
        self.note_progress()

    def _decide(self) -> ModelStep:
        loops = self._loops
        if len(loops) == 1:
            (loop,) = loops.values()
            if loop.is_loaded and loop.stays_loaded:
                # A single model needs no decision.
                return ModelStep(run=loop.name)
        states = [loop.state() for loop in loops.values()]
        states = [state for state in states if not self._refuse(state, states)]
        return decide_models(states, self._limits, now_s=self._clock())

    def _refuse(self, state: ModelState, states: list[ModelState]) -> bool:
        """Fail what waits for a model that can never fit; returns whether that is so."""
        if state.waits_since_s is None or state.is_loaded or state.is_loading:
            return False
        room = room_for(state.name, states, self._limits)
        if room is None or state.nbytes <= room:
            return False
        pinned = [each.name for each in states if each.is_pinned and each.is_loaded]
        self._loops[state.name].note_failure(too_large(state.name, nbytes=state.nbytes, room=room, pinned=pinned))
        return True

    def lacks_room(self, loop: EngineLoop) -> LoadFailed | None:
        """Why a model's weights do not fit beside those in memory or being loaded; None if they fit."""
        most_nbytes = self._limits.most_nbytes
        others = [other.state() for other in self._loops.values() if other is not loop]
        taken = weights_nbytes([*(each for each in others if each.is_loaded or each.is_loading), loop.state()])
        if most_nbytes is None or sum(taken.values()) <= most_nbytes:
            return None
        nbytes = taken.pop(loop.name)
        return LoadFailed(
            f"{loop.name} does not fit beside {', '.join(taken)}: its weights take {nbytes_text(nbytes)}, and of the "
            f"{nbytes_text(most_nbytes)} for models {nbytes_text(max(0, most_nbytes - sum(taken.values())))} are left."
        )

    # Weights.

    def _load_first(self, loop: EngineLoop) -> RepriseError | None:
        """Load the first model on this thread; returns an error if it failed."""
        room = self._limits.most_nbytes
        if room is not None and loop.nbytes > room:
            return too_large(loop.name, nbytes=loop.nbytes, room=room)
        self._begin_load(loop)
        return self._take(loop, loop.read_weights(downloads=True))

    def _load_in_background(self, loop: EngineLoop) -> None:
        """Read the weights on another thread, while other models run."""
        self._begin_load(loop)
        if self.memory is not None:
            self.memory.reserve(0)

        def load() -> None:
            error: RepriseError | None = LoadFailed(f"The weights of {loop.name} were not read.")
            try:
                error = loop.read_weights()
            except BaseException:
                log.exception("the weights of %s were not read", loop.name)
            finally:
                self.call(lambda: self._take_later(loop, error))
                device_memory.leave_thread()

        threading.Thread(target=load, name="reprise-load", daemon=True).start()

    def _begin_load(self, loop: EngineLoop) -> None:
        log.info("loading %s", loop.name)
        loop.begin_load()
        self._charge_weights()

    def _charge_weights(self) -> None:
        """Charge the weights in memory or being loaded, which determines what is left for layer states."""
        states = [loop.state() for loop in self._loops.values()]
        self.weights = weights_nbytes([each for each in states if each.is_loaded or each.is_loading])
        if self.memory is not None:
            self.memory.charge_weights(self.weights)
        for loop in self._loops.values():
            loop.publish()

    def _take(self, loop: EngineLoop, error: RepriseError | None) -> RepriseError | None:
        """Start to serve a model whose weights were read; returns an error if that failed, or `error`."""
        if error is None:
            # Their exact size is known now.
            self._charge_weights()
        if error is None and self.memory is not None:
            room = room_for(loop.name, [other.state() for other in self._loops.values()], self._limits)
            if room is not None and loop.nbytes > room:
                error = too_large(loop.name, nbytes=loop.nbytes, room=room)
        if error is None:
            error = loop.take_weights(self.memory)
        if error is not None:
            loop.note_failure(error)
            self._give_back()
            return error
        self._connect_preemptions()
        self._charge_weights()
        if self.memory is not None:
            self.memory.reserve(0)
        return None

    def _take_later(self, loop: EngineLoop, error: RepriseError | None) -> None:
        """As `_take`, where nobody waits to report the error."""
        error = self._take(loop, error)
        if error is not None:
            log.error("%s was not loaded: %s", loop.name, error)

    def _connect_preemptions(self) -> None:
        """Let each model's preemption see the others': the youngest request of all models is preempted first."""
        preemptions = [loop.preemption for loop in self._loops.values() if loop.preemption is not None]
        for preemption in preemptions:
            preemption.others = [other for other in preemptions if other is not preemption]

    def _unload(self, loop: EngineLoop) -> None:
        log.info("unloading %s: its prefixes stay", loop.name)
        loop.unload()
        self._give_back()
        loop.note_unloaded()

    def _give_back(self) -> None:
        self._charge_weights()
        device_memory.give_back()

    def release_draft_model(self) -> bool:
        """Release the weights of one draft model to make room for requests. False if that frees nothing."""
        if not any(loop.release_draft_model() for loop in self._loops.values()):
            return False
        self._give_back()
        return True

    def _unload_one(self) -> bool:
        """Unload a draft model, or the least recently used idle model, when nothing is left to evict. False if none."""
        if self.release_draft_model():
            return True
        states = [state for loop in self._loops.values() if not (state := loop.state()).is_pinned]
        idle = [s for s in states if s.is_loaded and not s.is_used and not s.has_requests]
        if not idle:
            return False
        self._unload(self._loops[min(idle, key=lambda state: state.asked_s).name])
        return True


def _limits_of(memory: SharedMemory | None) -> ModelLimits:
    if memory is None or memory.budget is None:
        return ModelLimits()
    return ModelLimits(most_nbytes=memory.budget - memory.budget // _LEAST_STATE)


def too_large(name: str, *, nbytes: int, room: int, pinned: Sequence[str] = ()) -> LoadFailed:
    """The error for a model that does not fit beside the pinned models."""
    beside = f" beside {', '.join(pinned)}, which --pin keeps" if pinned else ""
    return LoadFailed(
        f"{name} does not fit: its weights are {nbytes_text(nbytes)}, and models may take {nbytes_text(max(0, room))} "
        f"here{beside}. Raise --memory, or choose a smaller model or a stronger quantization."
    )

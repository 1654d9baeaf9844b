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
from collections.abc import Callable, Mapping, Sequence

from reprise.core.clock import Clock, monotonic
from reprise.core.errors import EngineLost, LoadFailed, RepriseError, first_line
from reprise.core.sizes import nbytes_text
from reprise.engine import memory as device_memory
from reprise.engine.models.adapters import SharedBases
from reprise.loop.heartbeat import Heartbeat
from reprise.loop.inspection_queue import InspectionQueue
from reprise.loop.model_engine import ModelEngine
from reprise.loop.threads import THIS_THREAD
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelLimits, ModelState, ModelStep, decide_models, room_for, weights_nbytes

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
        self.clock = clock
        self._engines: dict[str, ModelEngine] = {}
        self._fail_waiting: list[Callable[[RepriseError], None]] = []
        self.bases = SharedBases()
        self.weights: Mapping[str, int] = {}
        """Bytes of the weights in memory or being loaded, by model. Replaced as a whole, so any thread may read it."""
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reprise-engine", daemon=True)
        self._starting = threading.Lock()
        self.heartbeat = Heartbeat()
        self.inspections = InspectionQueue()
        self._busy_since_s = clock()
        """The start time, moved forward by all time spent waiting for work."""
        self.failure: RepriseError | None = None
        """Why nothing is computed any more; None while the thread works, and if it ended because all models are
        closed."""
        self._num_steps = 0
        self._stepping: ModelEngine | None = None
        """The model whose step runs: its weights do not go for it."""
        self._is_blocked = False
        """The last step did nothing, so the next one waits for a command or a timeout."""
        self._wakes_in_s: float | None = None
        if memory is not None:
            memory.unload_one = self._unload_one

    # Thread-safe.

    def add(self, engine: ModelEngine, fail_waiting: Callable[[RepriseError], None]) -> None:
        """Add a model. `fail_waiting` fails what waits for it, on any thread."""
        assert engine.name not in self._engines, f"{engine.name} was added twice"
        # Replaced as a whole: the thread may be iterating over the others.
        self._engines = {**self._engines, engine.name: engine}
        self._fail_waiting.append(fail_waiting)

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
        if self._thread.is_alive() and all(engine.gate.is_closed for engine in self._engines.values()):
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
        THIS_THREAD.is_engine = True
        try:
            device_memory.keep_resident()
            first, *_ = self._engines.values()
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
            self._engines, self._fail_waiting = {}, []
            if self.memory is not None:
                self.memory.unload_one = lambda: False
            device_memory.leave_thread()

    def _fail(self, error: RepriseError) -> None:
        """Fail everything that was requested so far. Thread-safe; who calls later finds `failure`."""
        self.failure = failure = self.failure or error
        for fail_waiting in self._fail_waiting:
            fail_waiting(failure)

    @property
    def busy_s(self) -> float:
        """Seconds worked: all time except waiting for work."""
        return self.clock() - self._busy_since_s

    def _serve(self) -> None:
        self._busy_since_s = self.clock()
        self.heartbeat.wake()
        while True:
            self._receive()
            may_end = self._may_end
            if len(self.inspections) > 0:
                self.inspections.answer(has_work=not may_end and self._has_work)
            if may_end:
                for engine in self._engines.values():
                    engine.shutdown()
                return
            self._step()

    @property
    def _may_end(self) -> bool:
        return all(engine.may_end for engine in self._engines.values())

    @property
    def _has_work(self) -> bool:
        return not self._is_blocked and any(engine.has_work for engine in self._engines.values())

    def _receive(self) -> None:
        """Run all queued commands; wait for one if there is nothing to do."""
        if not self._has_work and len(self.inspections) == 0 and not self._may_end:
            self._wait()
        while not self._inbox.empty():
            self._is_blocked = False
            self._inbox.get()()
            self.note_progress()

    def _wait(self) -> None:
        """Wait for a command, and run it."""
        engines = self._engines.values()
        # Loading may take minutes: that is not a hang.
        if all(engine.num_requests == 0 for engine in engines) or any(engine.is_loading for engine in engines):
            self.heartbeat.rest()
        naps = [nap_s for nap_s in (self._wakes_in_s, *(engine.wakes_in_s for engine in engines)) if nap_s is not None]
        waits_from_s = self.clock()
        try:
            command = self._inbox.get(timeout=min(naps, default=None))
        except queue.Empty:
            return
        finally:
            self._busy_since_s += self.clock() - waits_from_s
            self.heartbeat.wake()
        self._is_blocked = False
        command()
        self.note_progress()

    def note_progress(self) -> None:
        """Tell the heartbeat, which checks for progress, after each command and step."""
        self.heartbeat.note(*(engine.published for engine in self._engines.values()))

    def _step(self) -> None:
        step = self._decide()
        self._wakes_in_s = step.wakes_in_s
        for name in step.unload:
            self._unload(self._engines[name])
        if step.load is not None:
            self._load_in_background(self._engines[step.load])
        # The other that is loaded may have taken the room of its weights.
        if step.run is not None and self._engines[step.run].is_loaded:
            engine = self._stepping = self._engines[step.run]
            self._num_steps += 1
            try:
                engine.step(
                    number=self._num_steps,
                    num_others=sum(other.is_busy for other in self._engines.values() if other is not engine),
                    is_closed=step.run in step.closed,
                )
            finally:
                self._stepping = None
            if not engine.stays_loaded and not engine.has_work:
                # When it is to be unloaded was not known while it ran.
                self._wakes_in_s = 0.0
        for other in self._engines.values():
            if other.name != step.run:
                other.write_to_disk()
        self._is_blocked = step.run is None and step.load is None and not step.unload
        self.note_progress()

    def _decide(self) -> ModelStep:
        engines = self._engines
        if len(engines) == 1:
            (engine,) = engines.values()
            if engine.is_loaded and engine.stays_loaded:
                # A single model needs no decision.
                return ModelStep(run=engine.name)
        states = [engine.state() for engine in engines.values()]
        states = [state for state in states if not self._refuse(state, states)]
        return decide_models(states, self._limits, now_s=self.clock())

    def _refuse(self, state: ModelState, states: list[ModelState]) -> bool:
        """Fail what waits for a model that can never fit; returns whether that is so."""
        if state.waits_since_s is None or state.is_loaded or state.is_loading:
            return False
        room = room_for(state.name, states, self._limits)
        if room is None or state.nbytes <= room:
            return False
        pinned = [each.name for each in states if each.is_pinned and each.is_loaded]
        self._engines[state.name].note_failure(too_large(state.name, nbytes=state.nbytes, room=room, pinned=pinned))
        return True

    def lacks_room(self, engine: ModelEngine) -> LoadFailed | None:
        """Why a model's weights do not fit beside those in memory or being loaded; None if they fit."""
        most_nbytes = self._limits.most_nbytes
        others = [other.state() for other in self._engines.values() if other is not engine]
        taken = weights_nbytes([*(each for each in others if each.is_loaded or each.is_loading), engine.state()])
        if most_nbytes is None or sum(taken.values()) <= most_nbytes:
            return None
        nbytes = taken.pop(engine.name)
        return LoadFailed(
            f"{engine.name} does not fit beside {', '.join(taken)}: its weights take {nbytes_text(nbytes)}, and of the "
            f"{nbytes_text(most_nbytes)} for models {nbytes_text(max(0, most_nbytes - sum(taken.values())))} are left."
        )

    # Weights.

    def _load_first(self, engine: ModelEngine) -> RepriseError | None:
        """Load the first model on this thread; returns an error if it failed."""
        room = self._limits.most_nbytes
        if room is not None and engine.nbytes > room:
            return too_large(engine.name, nbytes=engine.nbytes, room=room)
        self._begin_load(engine)
        return self._take(engine, engine.read_weights(downloads=True))

    def _load_in_background(self, engine: ModelEngine) -> None:
        """Read the weights on another thread, while other models run."""
        self._begin_load(engine)
        if self.memory is not None:
            self.memory.reserve(0)

        def load() -> None:
            error: RepriseError | None = LoadFailed(f"The weights of {engine.name} were not read.")
            try:
                error = engine.read_weights()
            except BaseException:
                log.exception("the weights of %s were not read", engine.name)
            finally:
                self.call(lambda: self._take_later(engine, error))
                device_memory.leave_thread()

        threading.Thread(target=load, name="reprise-load", daemon=True).start()

    def _begin_load(self, engine: ModelEngine) -> None:
        log.info("loading %s", engine.name)
        engine.begin_load()
        self._charge_weights()

    def _charge_weights(self) -> None:
        """Charge the weights in memory or being loaded, which determines what is left for layer states."""
        states = [engine.state() for engine in self._engines.values()]
        self.weights = weights_nbytes([each for each in states if each.is_loaded or each.is_loading])
        if self.memory is not None:
            self.memory.charge_weights(self.weights)
        for engine in self._engines.values():
            engine.publish()

    def _take(self, engine: ModelEngine, error: RepriseError | None) -> RepriseError | None:
        """Start to serve a model whose weights were read; returns an error if that failed, or `error`."""
        if error is None:
            # Their exact size is known now.
            self._charge_weights()
        if error is None and self.memory is not None:
            room = room_for(engine.name, [other.state() for other in self._engines.values()], self._limits)
            if room is not None and engine.nbytes > room:
                error = too_large(engine.name, nbytes=engine.nbytes, room=room)
        if error is None:
            error = engine.take_weights(self.memory)
        if error is not None:
            engine.note_failure(error)
            self._give_back()
            return error
        self._connect_preemptions()
        self._charge_weights()
        if self.memory is not None:
            self.memory.reserve(0)
        return None

    def _take_later(self, engine: ModelEngine, error: RepriseError | None) -> None:
        """As `_take`, where nobody waits to report the error."""
        error = self._take(engine, error)
        if error is not None:
            log.error("%s was not loaded: %s", engine.name, error)

    def _connect_preemptions(self) -> None:
        """Let each model's preemption see the others': the youngest request of all models is preempted first."""
        preemptions = [engine.preemption for engine in self._engines.values() if engine.preemption is not None]
        for preemption in preemptions:
            preemption.others = [other for other in preemptions if other is not preemption]

    def _unload(self, engine: ModelEngine) -> None:
        log.info("unloading %s: its prefixes stay", engine.name)
        engine.unload()
        self._give_back()
        engine.note_unloaded()

    def _give_back(self) -> None:
        self._charge_weights()
        device_memory.give_back()

    def _unload_one(self) -> bool:
        """Unload the least recently used idle model, when nothing is left to evict. False if none."""
        states = [engine.state() for engine in self._engines.values() if engine is not self._stepping]
        idle = [s for s in states if s.is_loaded and not (s.is_pinned or s.is_used or s.has_requests)]
        if not idle:
            return False
        # One that was loaded just now is about to be asked.
        self._unload(self._engines[min(idle, key=lambda state: max(state.asked_s, state.loaded_s)).name])
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

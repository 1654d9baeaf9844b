"""The engine loop: one thread that owns the model, the prefix cache and all leases.

Commands come in through a queue; between two of them the loop asks the scheduler what to do and does it. Nothing that a
request does wrong ends the thread: it ends the request.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from reprise.core.backend import Looks, Lookup, Status, StoredRun
from reprise.core.errors import EngineFailed, RepriseError, ShuttingDown
from reprise.core.events import Event
from reprise.core.inspection import WHOLE_TREE, DiskTree, EdgeTokens, InspectedEviction, Inspection, TreePart
from reprise.core.job import Job
from reprise.core.pin import PinList
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import Span, Tokens
from reprise.disk.tier import DiskTier
from reprise.engine.adapters import load_for
from reprise.engine.load import LoadedModel
from reprise.engine.memory import leave_thread
from reprise.engine.runner import SHARES_FROM
from reprise.loop.admission import Gate
from reprise.loop.heartbeat import Heartbeat
from reprise.loop.inspection import inspect, inspect_evictions, lookup, status_of
from reprise.loop.looks import LookQueue
from reprise.loop.tree_inspection import edge_tokens
from reprise.loop.worker import Worker

log = logging.getLogger("reprise.loop")

T = TypeVar("T")


Command = Callable[[Worker], None]
"""What the engine thread does between two steps."""


class EngineLoop:
    """The engine side of a server (`reprise.core.backend.Backend`), on a thread of its own."""

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[], LoadedModel] | None = None,
        shares_from: int = SHARES_FROM,
        disk_block: int | None = None,
    ) -> None:
        """`load` gives the model; it is called on the engine thread. By default the model that `settings` name.

        `shares_from`: from how many positions on a sequence and the cache share buffers. `disk_block`: tokens of a file
        on disk, None: as fits the model.
        """
        self._settings = settings
        self._shares_from = shares_from
        self._disk_block = disk_block
        self._load = load if load is not None else lambda: load_for(settings)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reprise-engine", daemon=True)
        self._is_ready = threading.Event()
        self._failure: Exception | None = None
        self._loaded: LoadedModel | None = None
        self._disk: DiskTier | None = None
        self._gate = Gate()
        self._status = Status()
        self._heartbeat = Heartbeat()
        self._looks = LookQueue()
        self._busy_since_s = time.monotonic()
        """When the thread would have begun, had it never waited for something to do."""
        self._is_ending = False
        self._ends_now = False
        self._asking = threading.Lock()
        self._is_closed = False

    def start(self) -> LoadedModel:
        """Load the model and start serving. Raises LoadFailed."""
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            raise self._failure
        assert self._loaded is not None
        return self._loaded

    def close(self, *, now: bool = False, timeout_s: float | None = None) -> None:
        """Take no more jobs; return when those under way have ended. `now`: cancel them."""
        self._gate.close()
        with self._asking:
            self._is_closed = True
            self.call(lambda worker: self._end_soon(now=now))
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # Backend: from any thread.

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        self._gate.enter(job)
        arrived_s = time.monotonic()
        self.call(lambda worker: worker.arrive(job, sink, arrived_s))

    def cancel(self, job_id: str) -> bool:
        if not self._gate.is_inside(job_id):
            return False
        self.call(lambda worker: worker.cancel(job_id))
        return True

    def status(self) -> Status:
        # The writer goes on while the loop sleeps, and publishes nothing.
        on_disk = self._disk.stats() if self._disk is not None else None
        has_died = self._loaded is not None and not self._is_closed and not self._thread.is_alive()
        now = replace(self._status, disk=on_disk, stalled_s=self._heartbeat.stalled_s, has_died=has_died)
        return self._gate.adjust(now)

    def stack(self) -> str:
        """Where the engine's thread is now, as a traceback; "" if it is not running."""
        # The one way to another thread's stack.
        frame = sys._current_frames().get(self._thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        return self._ask(lambda worker: worker.clear_cache(namespace, owner=owner))

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Future[Inspection]:
        return self._look(
            lambda w: inspect(
                w, max_nodes=max_nodes, part=part, num_inside=self._gate.num_inside, now_s=time.monotonic()
            )
        )

    def edge_tokens(self, part: TreePart, *, max_nodes: int = 1000) -> Future[Sequence[EdgeTokens]]:
        return self._look(lambda worker: edge_tokens(worker.cache, part, max_nodes=max_nodes))

    def next_evictions(self, nbytes: int, *, most: int = 64) -> Future[Sequence[InspectedEviction]]:
        return self._look(lambda w: inspect_evictions(w.cache, nbytes=nbytes, most=most, now_s=time.monotonic()))

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        return self._disk.runs(namespace) if self._disk is not None else ()

    def disk_tree(self, namespace: str) -> DiskTree | None:
        return self._disk.tree(namespace) if self._disk is not None else None

    def disk_tokens(self, namespace: str, key: str, span: Span) -> Tokens | None:
        return self._disk.path_tokens(namespace, bytes.fromhex(key), span) if self._disk is not None else None

    def read_note(self, namespace: str) -> str | None:
        return self._disk.read_note(namespace) if self._disk is not None else None

    def keep_note(self, namespace: str, text: str) -> None:
        if self._disk is not None:
            self._disk.keep_note(namespace, text)

    def hurry(self) -> None:
        self.call(lambda worker: worker.disk.hurry())

    def lookup(self, prompt: Prompt, *, namespace: str) -> Future[Lookup]:
        return self._ask(lambda worker: lookup(worker, prompt, namespace=namespace))

    def pins(self, namespace: str, *, owner: str = "") -> Future[PinList]:
        return self._ask(lambda worker: worker.cache.list_pins(namespace, owner=owner))

    def unpin(self, pin_id: str, *, namespace: str, owner: str = "") -> Future[bool]:
        return self._ask(lambda worker: worker.cache.unpin(pin_id, namespace=namespace, owner=owner))

    def set_budget(self, nbytes: int, *, returns_buffers: bool = False) -> None:
        """Keep layer state within `nbytes` from now on. `returns_buffers`: give the system idle buffers back, too."""
        self.call(lambda worker: worker.set_budget(nbytes, returns_buffers=returns_buffers))

    def call(self, command: Command) -> None:
        """Have the engine thread do this between two steps."""
        self._inbox.put(command)

    def _ask(self, question: Callable[[Worker], T]) -> Future[T]:
        """What the engine thread answers between two steps. Raises ShuttingDown."""
        answer: Future[T] = Future()
        self._call_unless_closed(lambda worker: self._answer(worker, question, answer))
        return answer

    def _look(self, question: Callable[[Worker], T]) -> Future[T]:
        """The same for what changes nothing, and may wait for its turn while there is work. Raises ShuttingDown."""
        answer: Future[T] = Future()
        self._call_unless_closed(lambda worker: self._looks.add(lambda: self._answer(worker, question, answer)))
        return answer

    def _call_unless_closed(self, command: Command) -> None:
        # Before the command to close, behind which nothing is answered any more.
        with self._asking:
            if self._is_closed:
                raise ShuttingDown("The server is shutting down. Try again when it is back.")
            self.call(command)

    def _answer(self, worker: Worker, question: Callable[[Worker], T], answer: Future[T]) -> None:
        if not answer.set_running_or_notify_cancel():
            return  # Whoever asked has gone.
        try:
            result = question(worker)
        except Exception as error:
            answer.set_exception(error)
        else:
            # Who has the answer may look at the status next.
            self._publish(worker)
            answer.set_result(result)

    # The engine thread.

    def _run(self) -> None:
        try:
            worker = self._make_worker()
            if worker is not None:
                self._serve(worker)
        finally:
            leave_thread()

    def _make_worker(self) -> Worker | None:
        try:
            loaded = self._load()
            worker = Worker(
                loaded,
                self._settings,
                self._gate,
                shares_from=self._shares_from,
                disk_block=self._disk_block,
                # An empty command: the loop takes its next step.
                wake=lambda: self.call(lambda worker: None),
            )
        except RepriseError as error:
            self._failure = error
        except Exception as error:
            log.exception("the engine could not start")
            self._failure = EngineFailed(f"The engine could not start: {type(error).__name__}: {error}")
        else:
            self._loaded, self._disk = loaded, worker.disk
            self._publish(worker)
            return worker
        finally:
            self._is_ready.set()
        return None

    def _serve(self, worker: Worker) -> None:
        self._busy_since_s = time.monotonic()
        while True:
            self._receive(worker)
            self._looks.answer(has_work=worker.has_work and not self._may_end(worker))
            if self._may_end(worker):
                worker.cancel_all()
                self._publish(worker)
                worker.shutdown()
                return
            try:
                worker.step()
            except Exception as error:
                # A bug of ours: nobody's job is worth the thread.
                log.exception("a step of the engine failed")
                worker.fail_all(EngineFailed(f"The engine failed: {error}"))
            self._publish(worker)

    def _may_end(self, worker: Worker) -> bool:
        is_all_here = self._gate.num_inside == len(worker.requests)
        return self._is_ending and is_all_here and (self._ends_now or worker.is_empty)

    def _receive(self, worker: Worker) -> None:
        """Take all commands; wait for one if there is nothing to do and nothing to tell."""
        block = not worker.has_work and len(self._looks) == 0 and not self._may_end(worker)
        while True:
            if block and len(worker.requests) == 0:
                self._heartbeat.rest()
            waits_from_s = time.monotonic()
            try:
                command = self._inbox.get(block=block, timeout=worker.wakes_in_s)
            except queue.Empty:
                return
            finally:
                self._busy_since_s += time.monotonic() - waits_from_s if block else 0.0
                self._heartbeat.wake()
            block = False
            try:
                command(worker)
            except Exception:
                log.exception("a command failed")
            self._publish(worker)

    def _end_soon(self, *, now: bool) -> None:
        """End when all that runs has ended; `now`: at once. The last one who asked for it is heard."""
        self._is_ending, self._ends_now = True, now

    def _publish(self, worker: Worker) -> None:
        busy_s = time.monotonic() - self._busy_since_s
        looks = Looks(num=self._looks.num_answered, spent_s=self._looks.spent_s)
        self._status = replace(status_of(worker), looks=looks, busy_s=busy_s)
        self._heartbeat.note(self._status)

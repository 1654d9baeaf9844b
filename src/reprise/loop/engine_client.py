"""What any thread may ask of the engine of one model: the API's side of it.

Commands arrive on the engine thread through its queue (`model_engine.py` runs them between two steps).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from reprise.core.backend import Lookup, Status, StoredRun, WeightsState
from reprise.core.embedding import EmbeddingJob, EmbeddingResult
from reprise.core.errors import QueueFull, RepriseError
from reprise.core.events import Event
from reprise.core.inspection import WHOLE_TREE, DiskTree, EdgeTokens, InspectedEviction, Inspection, TreePart
from reprise.core.job import Job, Purpose
from reprise.core.kinds import Footprint
from reprise.core.pin import PinList
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import Span, Tokens
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.runner import SHARES_FROM
from reprise.loop.admission import Gate
from reprise.loop.engine_thread import EngineThread
from reprise.loop.inspection import inspect, inspect_evictions, lookup, stats_of
from reprise.loop.model_engine import Command, ModelEngine, shutting_down
from reprise.loop.tree_inspection import edge_tokens
from reprise.loop.worker import Worker

T = TypeVar("T")


class EngineClient:
    """One model on an engine thread (`reprise.core.backend.Backend`). Methods can be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[], LoadedModel] | None = None,
        shares_from: int = SHARES_FROM,
        disk_block: int | None = None,
        thread: EngineThread | None = None,
        name: str | None = None,
        nbytes: int = 0,
        is_pinned: bool = False,
        keep_alive_s: float | None = None,
    ) -> None:
        """`load` gives the model. By default the one that `settings` name, downloaded if it is the first
        to be loaded here or `settings` require it.

        `shares_from`: sequences of at least this length share their buffers with the cache. `disk_block`: tokens per
        block on disk, None: chosen for the model. `thread`: an engine thread shared with other models, each with its
        own `name` and weights of `nbytes` (0: unknown until loaded); None: a new one. `is_pinned`, `keep_alive_s`: see
        `ModelState`.
        """
        self.name = settings.model if name is None else name
        self._thread = EngineThread() if thread is None else thread
        self._gate = Gate()
        self._engine = ModelEngine(
            settings,
            self._gate,
            self._thread,
            name=self.name,
            load=load,
            shares_from=shares_from,
            disk_block=disk_block,
            nbytes=nbytes,
            is_pinned=is_pinned,
            keep_alive_s=keep_alive_s,
        )
        self._thread.add(self._engine, self.fail_waiting)
        self._asking = threading.Lock()
        self._pending: set[Future[Any]] = set()
        """What callers wait for."""
        self._embedding: set[Future[EmbeddingResult]] = set()
        """Of that, vectors."""

    def start(self) -> LoadedModel:
        """Load the model and start serving. Raises LoadFailed."""
        ready = self.ready()
        self._thread.start()
        return ready.result()

    def ready(self) -> Future[LoadedModel]:
        """The loaded model; loads it if needed, once there is memory or other models can be unloaded.

        Raises ShuttingDown; errors of loading are in the future.
        """
        return self._call_unless_closed(self._engine.want)

    def preload(self) -> Future[LoadedModel]:
        """As `ready`, if there is room beside the models that are loaded: none of them is unloaded for it."""
        return self._call_unless_closed(
            lambda answer: self._engine.want(answer, error=self._thread.lacks_room(self._engine))
        )

    def dismiss(self) -> Future[None]:
        """Unload the weights as soon as no request runs; the prefix cache stays.

        Done when they are unloaded, or the model was requested again. Raises ShuttingDown.
        """
        return self._call_unless_closed(self._engine.dismiss)

    def refuse_loads(self) -> None:
        """Fail what waits for the weights, now and later: the server is about to stop. Running requests continue."""
        self._thread.call(self._engine.refuse_loads)

    def close(self, *, now: bool = False, timeout_s: float | None = None) -> None:
        """Refuse further jobs; if all models are closed, wait until running jobs have ended. `now`: cancel them."""
        with self._asking:
            self._gate.close()
            self._thread.call(lambda: self._engine.end_soon(now=now))
        self._thread.join(timeout_s)

    def give_up(self, error: RepriseError, *, within_s: float) -> None:
        """End the engine thread and fail everything that waits with `error`. If the thread hangs in MLX for longer than
        `within_s`, it is left as it is."""
        self._thread.give_up(error, within_s=within_s)

    def fail_waiting(self, error: RepriseError) -> None:
        """End every request and every question with `error`, on any thread: the engine thread will not."""
        for job, sink in self._gate.inside():
            self._engine.fail_job(job, sink, error)
        for answer in list(self._pending):
            # Its caller may cancel it at the same time.
            with suppress(InvalidStateError):
                answer.set_exception(error)

    @property
    def is_loading(self) -> bool:
        """Whether the weights are being read."""
        return self._engine.published.weights is WeightsState.LOADING

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; 0: unknown."""
        return self._engine.nbytes

    @nbytes.setter
    def nbytes(self, nbytes: int) -> None:
        self._engine.nbytes = nbytes

    @property
    def fingerprint(self) -> str:
        """Of the model that was loaded last; "" before the first load."""
        return self._engine.fingerprint

    # Backend.

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        if self._thread.failure is not None:
            raise self._thread.failure
        if job.purpose is Purpose.SETTLE and self._engine.published.weights is not WeightsState.READY:
            raise QueueFull(f"{self.name} is not loaded, and background work does not load it.")
        self._gate.enter(job, sink)
        arrived_s = time.monotonic()
        self._thread.call(lambda: self._engine.arrive(job, sink, arrived_s))
        # Asked again after queueing: either the thread finds the job when it ends, or this finds that it has ended.
        if self._thread.failure is not None and self._gate.ended(job.id):
            raise self._thread.failure

    def embed(self, job: EmbeddingJob) -> Future[EmbeddingResult]:
        arrived_s = time.monotonic()
        return self._call_unless_closed(
            lambda answer: self._engine.embed(job, answer, arrived_s), among=self._embedding
        )

    def cancel(self, job_id: str) -> bool:
        if not self._gate.is_inside(job_id):
            return False
        self.call(lambda worker: worker.cancel(job_id))
        return True

    def status(self) -> Status:
        # First: what is published after it counts all jobs that have ended.
        is_idle = self._gate.is_idle and not self._embedding
        # Read here: the disk writer runs while the loop sleeps, and does not publish.
        on_disk = stats_of(self._engine.disk)
        stalled_s = self._thread.heartbeat.stalled_s
        return replace(
            self._engine.published,
            is_idle=is_idle,
            is_closing=self._gate.is_closed,
            disk=on_disk,
            stalled_s=stalled_s,
            has_died=self._thread.failure is not None,
            weights_nbytes=self._thread.weights.get(self.name, 0),
        )

    def stack(self) -> str:
        """The engine thread's current stack as a traceback; "" if it is not running."""
        return self._thread.stack()

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        return self._call_unless_closed(lambda done: self._engine.clear(namespace, owner, done))

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Future[Inspection]:
        return self._inspect(
            lambda w: inspect(
                w,
                max_nodes=max_nodes,
                part=part,
                num_inside=self._gate.num_inside,
                weights_nbytes=self._thread.weights.get(self.name, 0),
                now_s=time.monotonic(),
            )
        )

    def edge_tokens(self, part: TreePart, *, max_nodes: int = 1000) -> Future[Sequence[EdgeTokens]]:
        return self._inspect(lambda worker: edge_tokens(worker.cache, part, max_nodes=max_nodes))

    def next_evictions(self, nbytes: int, *, most: int = 64) -> Future[Sequence[InspectedEviction]]:
        return self._inspect(lambda w: inspect_evictions(w.cache, nbytes=nbytes, most=most, now_s=time.monotonic()))

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        if (disk := self._engine.disk) is None:
            return ()
        root = disk.root(namespace)
        return [
            StoredRun(name=key.hex(), parent=None if parent == root else parent.hex(), tokens=tokens)
            for key, parent, tokens in disk.runs(namespace)
        ]

    def disk_tree(self, namespace: str) -> DiskTree | None:
        return None if (disk := self._engine.disk) is None else disk.tree(namespace)

    def disk_tokens(self, namespace: str, key: str, span: Span) -> Tokens | None:
        return None if (disk := self._engine.disk) is None else disk.path_tokens(namespace, bytes.fromhex(key), span)

    def read_note(self, namespace: str) -> str | None:
        return None if (disk := self._engine.disk) is None else disk.read_note(namespace)

    def keep_note(self, namespace: str, text: str) -> None:
        if (disk := self._engine.disk) is not None:
            disk.keep_note(namespace, text)

    def hurry(self) -> None:
        self.call(lambda worker: worker.disk.hurry())

    def lookup(self, prompt: Prompt, *, namespace: str) -> Future[Lookup]:
        return self._ask(lambda worker: lookup(worker, prompt, namespace=namespace))

    def pins(self, namespace: str, *, owner: str = "") -> Future[PinList]:
        return self._ask(lambda worker: worker.cache.list_pins(namespace, owner=owner))

    def unpin(self, pin_id: str, *, namespace: str, owner: str = "") -> Future[bool]:
        return self._ask(lambda worker: worker.cache.unpin(pin_id, namespace=namespace, owner=owner))

    def footprint(self) -> Future[Footprint]:
        """Bytes of layer state by kind. Raises ShuttingDown."""
        return self._ask(lambda worker: worker.runner.footprint)

    def set_budget(self, nbytes: int, *, returns_buffers: bool = False) -> None:
        """Limit layer state to `nbytes` from now on. `returns_buffers`: also return free buffers to the system."""
        self.call(lambda worker: worker.set_budget(nbytes, returns_buffers=returns_buffers))

    def call(self, command: Command) -> None:
        """Run a command on the engine thread between two steps; ignored before the model was first loaded."""
        self._thread.call(lambda: self._engine.run(command))

    def _ask(self, question: Callable[[Worker], T]) -> Future[T]:
        """The result of a query that the engine thread runs between two steps. Raises ShuttingDown."""
        return self._call_unless_closed(lambda answer: self._engine.answer(question, answer))

    def _inspect(self, question: Callable[[Worker], T]) -> Future[T]:
        """Like `_ask`, for inspection, which changes nothing and may be delayed while there is work."""
        return self._call_unless_closed(
            lambda answer: self._thread.inspections.add(lambda: self._engine.answer(question, answer))
        )

    def _call_unless_closed(
        self, command: Callable[[Future[T]], None], *, among: set[Future[T]] | None = None
    ) -> Future[T]:
        """Run a command that resolves the future, which is returned, and is `among` these until then."""
        answer: Future[T] = Future()
        # Under a lock, so that it is queued before the command to close, after which nothing is answered.
        with self._asking:
            if self._gate.is_closed:
                raise shutting_down()
            for each in (self._pending, among):
                if each is not None:
                    each.add(answer)
                    answer.add_done_callback(each.discard)
            self._thread.call(lambda: command(answer))
        # As in `submit`.
        if self._thread.failure is not None:
            with suppress(InvalidStateError):
                answer.set_exception(self._thread.failure)
        return answer

"""The engine of one model: its worker and its weights, on the engine thread.

Commands arrive through the thread's queue; in between, the thread runs the scheduler's steps. An error in a request
ends the request, never the thread. The model can be unloaded and loaded again; its prefix cache stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from reprise.core.backend import Status, WeightsState
from reprise.core.clock import Clock
from reprise.core.embedding import EmbeddingJob, EmbeddingResult
from reprise.core.errors import (
    CacheNotCleared,
    EngineFailed,
    RepriseError,
    ShuttingDown,
    engine_failed,
)
from reprise.core.events import Event, Finished, FinishReason
from reprise.core.job import Job, Purpose
from reprise.core.settings import DRAFTS_ALWAYS, OFF, Settings
from reprise.disk.store.cache import DiskCache
from reprise.engine.memory import paging_hint
from reprise.engine.models.adapters import SharedBases
from reprise.engine.models.companion import with_companion
from reprise.engine.models.heads import HeadFacts
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.running.batching import reason_to_run_alone
from reprise.engine.running.pass_trial import why_never_the_same
from reprise.loop.admission import Gate
from reprise.loop.disk import close_soon, open_disk
from reprise.loop.draft_trial import tolerance_of
from reprise.loop.inspection import status_of
from reprise.loop.inspection_queue import InspectionQueue
from reprise.loop.preemption import Preemption
from reprise.loop.requests import Decoding, RunningRequest
from reprise.loop.threads import THIS_THREAD
from reprise.loop.worker import Worker
from reprise.memory import SharedMemory
from reprise.schedule.models import ModelState

log = logging.getLogger("reprise.loop")

_PUBLISH_EVERY_S = 0.02
"""How old the status of an answer that is being decoded may be."""

T = TypeVar("T")


Command = Callable[[Worker], None]
"""Run by the engine thread between two steps."""


class Host(Protocol):
    """The engine thread, as the models on it see it."""

    bases: SharedBases
    """The weights that models share with their adapters."""
    inspections: InspectionQueue
    """Inspections of all models: their limit is a share of this thread's time."""
    clock: Clock

    @property
    def busy_s(self) -> float:
        """Seconds worked: all time except waiting for work."""
        ...

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the thread between two steps."""
        ...


class ModelEngine:
    """The worker and the weights of one model. Methods are the engine thread's, unless noted otherwise.

    Any thread may read `published`, `nbytes` and `disk`, which are replaced as a whole.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        host: Host,
        *,
        name: str,
        load: Callable[[], LoadedModel] | None,
        shares_from: int,
        disk_block: int | None,
        nbytes: int,
        is_pinned: bool,
        keep_alive_s: float | None,
    ) -> None:
        """See `EngineClient`."""
        self._settings = settings
        self._shares_from = shares_from
        self._disk_block = disk_block
        self.name = name
        self.nbytes = nbytes
        self._host = host
        self._load = load
        self._made: Worker | None = None
        """See `_worker`."""
        self._weights = _Weights(is_pinned=is_pinned, keep_alive_s=keep_alive_s)
        self._loaded: LoadedModel | None = None
        """Without weights while it is unloaded."""
        self._tried: tuple[str, str | None] = ("", None)
        """The fingerprint of the weights that were read last, and why their sequences run one at a time."""
        self.disk: DiskCache | None = None
        self.gate = gate
        self.published = Status(weights=WeightsState.UNLOADED)
        """Set after each command and step."""
        self._published_s = 0.0
        self._published_phases: list[tuple[str, type]] = []
        self._is_ending = False
        self._ends_now = False
        self._refuses_loads = False

    @property
    def _worker(self) -> Worker | None:
        """None before the first load, and after weights that are not those of its tree."""
        assert THIS_THREAD.is_engine, "only the engine thread uses a worker"
        return self._made

    # Commands.

    def want(self, answer: Future[LoadedModel], *, error: RepriseError | None = None) -> None:
        """Resolve the future with the loaded model, after it was loaded if need be; or, not loaded, with `error`."""
        error = shutting_down() if self._refuses_loads else error
        if self.is_loaded and self._loaded is not None:
            self._weights.end_dismissal()
            _resolve(answer, self._loaded)
        elif error is None:
            self._weights.wanted.append((time.monotonic(), answer))
        elif answer.set_running_or_notify_cancel():
            answer.set_exception(error)

    def dismiss(self, answer: Future[None]) -> None:
        """Unload the weights as soon as no request runs, and resolve the future."""
        if self.is_loaded:
            self._weights.is_dismissed = True
            self._weights.leaving.append(answer)
        else:
            _resolve(answer, None)

    def refuse_loads(self) -> None:
        self._refuses_loads = True
        self._weights.fail(shutting_down())
        if self._worker is not None and not self.is_loaded:
            for request in list(self._worker.requests.values()):
                self._worker.requests.fail(request, shutting_down())
            self._worker.embedding.fail_all(shutting_down())
        self.publish()

    def end_soon(self, *, now: bool) -> None:
        """End when nothing runs, or `now`: the last call counts."""
        self._is_ending, self._ends_now = True, now
        self._weights.fail(shutting_down())
        self._weights.end_dismissal()

    def run(self, command: Command) -> None:
        """Run a command; ignored before the model was first loaded."""
        if self._worker is not None:
            try:
                command(self._worker)
            except Exception:
                log.exception("a command failed")
            self.publish()

    def answer(self, question: Callable[[Worker], T], answer: Future[T]) -> None:
        """Resolve the future with the result of a query."""
        if not answer.set_running_or_notify_cancel():
            return  # The caller has cancelled it.
        try:
            if self._worker is None:
                raise EngineFailed(f"{self.name} has not been loaded yet.")
            result = question(self._worker)
        except Exception as error:
            answer.set_exception(error)
        else:
            # First: the caller may read the status next.
            self.publish()
            answer.set_result(result)

    def clear(self, namespace: str | None, owner: str | None, done: Future[None]) -> None:
        """Clear the cache, and resolve the future when no copy is left on disk either."""
        if not done.set_running_or_notify_cancel():
            return  # The caller has cancelled it.
        asked: Future[Future[None] | None] = Future()
        self.answer(lambda worker: worker.clear_cache(namespace, owner=owner), asked)
        removed = None if asked.exception() is not None else asked.result()
        (removed or asked).add_done_callback(lambda ended: _pass_on(ended, done))

    def fail_job(self, job: Job, sink: Callable[[Event], None], error: RepriseError) -> None:
        """End a job that its worker does not end, on any thread: the engine's may have died, or hang."""
        now_s = time.monotonic()
        outcome = RunningRequest(job=job, sink=sink, arrived_s=now_s).outcome(now_s)
        # Behind what may fail: a job that has left the gate without its end is nobody's.
        if not self.gate.ended(job.id):
            return
        request = self._made.requests.get(job.id) if self._made is not None else None
        try:
            outcome = outcome if request is None else request.outcome(now_s)
        except Exception:
            log.debug("the state of %s is broken", job.id, exc_info=True)
        try:
            sink(Finished(reason=FinishReason.FAILED, outcome=outcome, error=error))
        except Exception:
            log.debug("the sink of %s raised", job.id, exc_info=True)

    def arrive(self, job: Job, sink: Callable[[Event], None], arrived_s: float) -> None:
        worker = self._worker
        if worker is None:
            self.fail_job(job, sink, EngineFailed(f"{self.name} could not be loaded again. The reason is in the log."))
            return
        self._weights.asked_s = time.monotonic()
        try:
            worker.arrive(job, sink, arrived_s)
        except Exception as error:
            log.exception("request %s could not be queued", job.id)
            if (request := worker.requests.get(job.id)) is not None:
                worker.requests.fail(request, error)
            self.fail_job(job, sink, engine_failed("The request failed in the engine", error))
        if job.purpose is not Purpose.SETTLE:
            self._weights.num_asked += 1
            worker.memory.shared.note_request(worker.memory)
        elif not self.is_loaded:
            worker.cancel(job.id)
        self.publish()

    def embed(self, job: EmbeddingJob, answer: Future[EmbeddingResult], arrived_s: float) -> None:
        """Queue an embedding job, whose future is resolved with its vectors."""
        worker = self._worker
        if worker is None or worker.runner.loaded.embedder is None or (self._refuses_loads and not self.is_loaded):
            answer.set_exception(
                shutting_down() if self._refuses_loads else EngineFailed(f"{self.name} does not make embeddings now.")
            )
            return
        self._weights.asked_s = time.monotonic()
        self._weights.num_asked += 1
        worker.memory.shared.note_request(worker.memory)
        try:
            worker.embedding.add(job, answer, arrived_s)
        except Exception as error:
            log.exception("embeddings could not be queued")
            worker.embedding.fail_all(engine_failed("The embedding failed in the engine", error))
        self.publish()

    def state(self) -> ModelState:
        """The model's state for `decide_models`. Forgets what was given up while it waited for weights."""
        weights, worker = self._weights, self._worker
        weights.wanted = [(since_s, answer) for since_s, answer in weights.wanted if not answer.cancelled()]
        if worker is not None and not self.is_loaded:
            worker.embedding.drop_unwanted()
        requests = [r for r in worker.requests.values() if not r.is_settle] if worker is not None else []
        waits_s = [r.arrived_s for r in requests if r.is_waiting] + [since_s for since_s, _ in weights.wanted]
        num_embedding, since_s = (
            (0, None) if worker is None else (len(worker.embedding), worker.embedding.waits_since_s)
        )
        if since_s is not None:
            waits_s.append(since_s)
        has_work = worker is not None and self.is_loaded and worker.has_work
        base = self._base()
        shared_nbytes = 0 if base is None else base.nbytes
        return ModelState(
            name=self.name,
            nbytes=max(self.nbytes, shared_nbytes),
            base=None if base is None else id(base),
            shared_nbytes=shared_nbytes,
            is_loaded=self.is_loaded,
            is_loading=self.is_loading,
            is_pinned=weights.is_pinned,
            waits_since_s=min(waits_s, default=None),
            num_running=self.num_running,
            num_asked=weights.num_asked,
            loaded_s=weights.loaded_s,
            asked_s=weights.asked_s,
            keep_alive_s=weights.keep_alive_s,
            is_dismissed=weights.is_dismissed,
            has_requests=has_work and len(requests) + num_embedding > 0,
            has_idle_work=has_work,
            last_step=weights.last_step,
        )

    def _base(self) -> LoadedModel | None:
        """The base whose weights this model shares, or would share if it were loaded now."""
        if self._loaded is not None and self.is_loaded:
            return self._loaded if self._loaded.base is None else self._loaded.base
        return None if self._load is not None else self._host.bases.held(self._settings)

    @property
    def is_loaded(self) -> bool:
        return self._weights.state is WeightsState.READY

    @property
    def fingerprint(self) -> str:
        """Of the model that was loaded last; "" before the first load. Any thread may ask."""
        return "" if self._loaded is None else self._loaded.fingerprint

    @property
    def is_loading(self) -> bool:
        return self._weights.state is WeightsState.LOADING

    @property
    def stays_loaded(self) -> bool:
        """Whether it is only unloaded when another model needs its memory."""
        return self._weights.keep_alive_s is None and not self._weights.is_dismissed

    @property
    def num_requests(self) -> int:
        worker = self._worker
        return 0 if worker is None else len(worker.requests) + len(worker.embedding)

    @property
    def num_running(self) -> int:
        """Requests with live state, settling jobs not counted, and embedding jobs of the pass that runs."""
        worker = self._worker
        if worker is None or not self.is_loaded:
            return 0
        return worker.embedding.num_in_pass + sum(not request.is_settle for request in worker.requests.running)

    @property
    def is_busy(self) -> bool:
        """Whether steps of other models are to be short for it."""
        worker = self._worker
        return self.num_running > 0 or (worker is not None and self.is_loaded and len(worker.embedding) > 0)

    @property
    def preemption(self) -> Preemption | None:
        return None if self._worker is None else self._worker.preemption

    @property
    def has_work(self) -> bool:
        worker = self._worker
        if worker is None or not self.is_loaded:
            return len(self._weights.wanted) > 0 or self.num_requests > 0
        return worker.has_work or self._weights.is_dismissed

    @property
    def wakes_in_s(self) -> float | None:
        worker = self._worker
        return None if worker is None else worker.wakes_in_s

    @property
    def may_end(self) -> bool:
        worker = self._worker
        if worker is None or not self._is_ending:
            # Nothing waits for weights that are being read: what other models computed is to be written in time.
            return self._is_ending
        is_all_here = self.gate.num_inside == len(worker.requests)
        return is_all_here and (self._ends_now or worker.is_empty or not self.is_loaded)

    def step(self, *, number: int, num_others: int, is_closed: bool) -> None:
        """Run step `number` (counted over all models) of this model; for the rest see `SchedulerState`."""
        worker = self._worker
        assert worker is not None and self.is_loaded, self.name
        self._weights.last_step = number
        try:
            worker.num_others, worker.is_closed = num_others, is_closed
            worker.step()
        except Exception as error:
            # A bug: fail the jobs and keep the thread.
            log.exception("a step of the engine failed")
            worker.fail_all(EngineFailed(f"The engine failed: {error}"))
        if self.is_busy:
            self._weights.asked_s = time.monotonic()
        # Between two tokens little changes that a watcher could see; a step follows as long as a request decodes.
        phases = [(name, type(request.phase)) for name, request in worker.requests.items()]
        is_between_tokens = phases == self._published_phases and any(phase is Decoding for _, phase in phases)
        if not is_between_tokens or time.monotonic() - self._published_s >= _PUBLISH_EVERY_S:
            self._published_phases = phases
            self.publish()

    def write_to_disk(self) -> None:
        """Write what is due while other models run steps."""
        if self._worker is not None:
            self._worker.disk.write()

    def begin_load(self) -> None:
        self._weights.state, self._weights.began_s = WeightsState.LOADING, time.monotonic()

    def read_weights(self, *, downloads: bool = False) -> RepriseError | None:
        """Load the model, on any thread; returns the error if that fails. `take_weights` follows.

        `downloads`: allow downloading it, even if the settings do not.
        """
        try:
            downloads = downloads or self._settings.downloads
            loaded = self._read(downloads=downloads)
            if loaded.fingerprint != self._tried[0]:
                # Not for weights that are loaded again: it takes some twenty passes.
                self._tried = loaded.fingerprint, reason_to_run_alone(loaded)
            is_new = self._made is None or self._made.runner.loaded.fingerprint != loaded.fingerprint
            disk = open_disk(self._settings, loaded, block=self._disk_block) if is_new else None
            self._weights.arriving = _Arriving(loaded=loaded, runs_alone=self._tried[1], disk=disk)
        except RepriseError as error:
            return error
        except Exception as error:
            log.exception("the engine could not start")
            return engine_failed("The engine could not start", error)
        self.nbytes = loaded.held_nbytes
        return None

    def _read(self, *, downloads: bool) -> LoadedModel:
        if self._load is not None:
            return self._load()
        settings = self._settings
        loaded = self._host.bases.load(settings, downloads=downloads)
        has_head = loaded.head is not None and loaded.head.is_there
        if (not has_head and settings.draft_model is None) or settings.drafts == OFF or loaded.embedder is not None:
            return loaded
        if settings.drafts != DRAFTS_ALWAYS:
            why = why_never_the_same(loaded, tolerance=tolerance_of(settings.drafts))
            if why is not None:
                place = loaded.head.place if has_head and loaded.head is not None else str(settings.draft_model)
                log.warning("%s is not loaded, as it would draft nothing: %s (see --drafts always)", place, why)
                # First it is dropped: what shares its weights would keep the head.
                del loaded
                loaded = self._host.bases.load(replace(settings, mtp=OFF), downloads=downloads)
                return replace(loaded, head=HeadFacts(reason=why))
        if settings.draft_model is None:
            return loaded
        companion = load_model(
            settings.draft_model,
            trusts_remote_code=settings.trusts_remote_code,
            downloads=downloads,
            images="off",
        )
        return with_companion(loaded, companion)

    def take_weights(self, memory: SharedMemory | None) -> RepriseError | None:
        """Start to serve with the loaded weights; returns an error if that failed. Waiting requests continue."""
        assert self._weights.arriving is not None, self.name
        arriving, self._weights.arriving = self._weights.arriving, None
        loaded = arriving.loaded
        try:
            if self._worker is not None and self._worker.runner.loaded.fingerprint != loaded.fingerprint:
                self._drop_worker("its files have changed")
            if self._worker is None:
                self._made = self._make_worker(arriving, memory)
            else:
                self._worker.load(loaded)
            made = self._made
            assert made is not None
            self.disk = made.disk.cache
        except RepriseError as error:
            return error
        except Exception as error:
            log.exception("the engine could not start")
            return engine_failed("The engine could not start", error)
        finally:
            if self._made is None:
                close_soon(arriving.disk)
        self._loaded = loaded
        if hint := paging_hint(loaded.nbytes):
            log.warning("%s: %s", self.name, hint)
        weights = self._weights
        weights.state, weights.loaded_s = WeightsState.READY, time.monotonic()
        # What has waited here is what they were loaded for, unless somebody who waits for them has yet to ask.
        weights.num_asked = 0 if weights.wanted else len(made.requests) + len(made.embedding)
        weights.num_loads, weights.load_s = weights.num_loads + 1, weights.load_s + weights.loaded_s - weights.began_s
        self.publish()
        wanted, weights.wanted = weights.wanted, []
        for _, answer in wanted:
            _resolve(answer, loaded)
        return None

    def _make_worker(self, arriving: _Arriving, memory: SharedMemory | None) -> Worker:
        if arriving.runs_alone is not None:
            log.info("%s runs one sequence at a time: %s", arriving.loaded.name, arriving.runs_alone)
        return Worker(
            arriving.loaded,
            self._settings,
            self.gate,
            can_batch=arriving.runs_alone is None,
            shared=memory,
            shares_from=self._shares_from,
            disk=arriving.disk,
            clock=self._host.clock,
            # An empty command makes the loop run its next step.
            wake=lambda: self._host.call(lambda: self.run(lambda worker: None)),
        )

    def _drop_worker(self, why: str) -> None:
        """Drop worker and cache, whose state no longer matches the model."""
        worker, self._made = self._worker, None
        assert worker is not None
        log.warning("%s: %s, so its cached prefixes are dropped", self.name, why)
        worker.fail_all(EngineFailed(f"{self.name} was reloaded: {why}. Send the request again."))
        worker.disk.abandon()
        worker.shutdown()
        worker.memory.leave()
        worker.preemption.others = ()

    def unload(self) -> None:
        """Release the weights and keep the cache. `note_unloaded` follows."""
        assert self._worker is not None and self._loaded is not None
        # Before the worker collects what is unreachable: nothing may refer to the weights any more.
        self._loaded = self._loaded.without_weights()
        self._worker.unload()
        self._weights.state = WeightsState.UNLOADED
        self.publish()

    def note_unloaded(self) -> None:
        """Resolve the futures that wait for the weights' memory to be free, which it is now."""
        self._weights.end_dismissal()

    def note_failure(self, error: RepriseError) -> None:
        """Loading failed: fail everything that waits for the model."""
        self._weights.state = WeightsState.UNLOADED
        if self._weights.arriving is not None:
            close_soon(self._weights.arriving.disk)
            self._weights.arriving = None
        if self._worker is not None:
            self._worker.fail_all(error)
        self.publish()
        self._weights.fail(error)

    def shutdown(self) -> None:
        """Cancel all requests and free everything, when the thread ends."""
        worker = self._worker
        if worker is not None:
            for job_id in list(worker.requests):
                worker.cancel(job_id)
            worker.embedding.fail_all(shutting_down())
            self.publish()
            worker.preemption.others = ()
            worker.shutdown()
            self._made = None

    def publish(self) -> None:
        self._published_s = time.monotonic()
        worker, weights, inspections = self._worker, self._weights, self._host.inspections
        self.published = replace(
            self.published if worker is None else status_of(worker),
            num_inspections=inspections.num_answered,
            inspection_s=inspections.spent_s,
            busy_s=self._host.busy_s,
            weights=weights.state,
            num_loads=weights.num_loads,
            load_s=weights.load_s,
        )
        self.gate.published()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arriving:
    """Weights that were read. `runs_alone`: why sequences must run one at a time; None if they may be batched.

    `disk`: the disk cache, if it was opened for them.
    """

    loaded: LoadedModel
    runs_alone: str | None
    disk: DiskCache | None


@dataclass(slots=True, kw_only=True)
class _Weights:
    """The state of a model's weights, on the engine thread."""

    is_pinned: bool
    keep_alive_s: float | None
    state: WeightsState = WeightsState.UNLOADED
    wanted: list[tuple[float, Future[LoadedModel]]] = field(default_factory=list[tuple[float, Future[LoadedModel]]])
    """Futures that wait for them, and since when."""
    arriving: _Arriving | None = None
    is_dismissed: bool = False
    leaving: list[Future[None]] = field(default_factory=list[Future[None]])
    """Futures that wait until they are unloaded."""
    num_asked: int = 0
    """Requests since they were loaded, or that they were loaded for."""
    num_loads: int = 0
    load_s: float = 0.0
    """Total time spent loading them."""
    began_s: float = 0.0
    """When the last load began."""
    loaded_s: float = 0.0
    asked_s: float = 0.0
    last_step: int = 0

    def end_dismissal(self) -> None:
        """Resolve the futures that wait for unloading: it is done, or was cancelled by a request."""
        self.is_dismissed = False
        leaving, self.leaving = self.leaving, []
        for answer in leaving:
            _resolve(answer, None)

    def fail(self, error: RepriseError) -> None:
        wanted, self.wanted = self.wanted, []
        for _, answer in wanted:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)


def shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down. Try again when it is back.")


def _resolve(answer: Future[T], result: T) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_result(result)


def _pass_on(cleared: Future[Any], done: Future[None]) -> None:
    """Resolve the caller's future of a clear as the step did that it waits for."""
    error = cleared.exception()
    if isinstance(error, OSError):
        error = CacheNotCleared(
            f"The memory is cleared, but not all copies on disk could be removed ({error.strerror}). They are not "
            "used any more. Clear again before the server stops, or they may be found after it."
        )
    # The engine thread may have ended meanwhile.
    with suppress(InvalidStateError):
        done.set_result(None) if error is None else done.set_exception(error)

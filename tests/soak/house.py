"""A real server under load, with every job that it computed on record, and an engine that computes each again alone."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Purpose
from reprise.core.prompt import Prompt
from tests.api.server_thread import ServerThread
from tests.loop.driving import PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.passing import Passing

TIE = 1e-3
"""Two tokens whose log-probabilities are closer than this may change places by rounding."""


@dataclass(slots=True, eq=False)
class JobResult:
    """What became of a job."""

    job: Job
    tokens: list[int] = field(default_factory=list[int])
    end: Finished | None = None


@dataclass(eq=False)
class RecordingBackend(Passing):
    """A `Backend` that writes down what it is asked for and what it answers."""

    kept: list[JobResult] = field(default_factory=list[JobResult])
    heard: Callable[[Job, Event], None] = lambda job, event: None
    """Called on the engine thread, once the service has an event of a job."""
    cancelled: Callable[[str], None] = lambda job_id: None
    """Called once the loop is to cancel a job."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        kept = JobResult(job)

        def listen(event: Event) -> None:
            if isinstance(event, Sampled):
                kept.tokens.append(event.token)
            elif isinstance(event, Finished):
                kept.end = event
            sink(event)
            self.heard(job, event)

        self.loop.submit(job, listen)
        with self._lock:
            self.kept.append(kept)

    def cancel(self, job_id: str) -> bool:
        is_known = super().cancel(job_id)
        self.cancelled(job_id)
        return is_known

    def of(self, purpose: Purpose) -> list[JobResult]:
        with self._lock:
            return [kept for kept in self.kept if kept.job.purpose is purpose]


@dataclass(frozen=True, slots=True, eq=False)
class SoakServer:
    """A server on a free port, and what is behind it."""

    url: str
    engine: DrivenEngine
    recorder: RecordingBackend
    service: ChatService


@contextmanager
def house(architecture: str, **settings: Any) -> Generator[SoakServer]:
    engine = DrivenEngine(architecture, **settings)
    chosen = engine.settings
    recorder = RecordingBackend(engine.loop)
    service = ChatService(served=served_model(engine.model, chosen), backend=recorder, settings=chosen)
    server = ServerThread(service, chosen)
    try:
        yield SoakServer(server.url, engine, recorder, service)
    finally:
        server.stop()
        engine.loop.close(now=True, timeout_s=PATIENCE_S)


class Alone:
    """Computes jobs one at a time on an engine that remembers nothing."""

    def __init__(self, architecture: str) -> None:
        self._engine = DrivenEngine(architecture, has_prefix_cache=False, max_batch=1)
        self.num_ties = 0

    def close(self) -> None:
        self._engine.close()

    def check(self, kept: JobResult) -> None:
        """AssertionError if the job's tokens are not those that it gets alone."""
        job, got = kept.job, kept.tokens
        if not got:
            return
        again = self._run(replace(job, max_tokens=len(got), watch=None, pin_for_s=None, retain_for_s=None))
        if again == got:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, again, strict=False)) if a != b)
        assert self._is_tie(job, got, again, at), (job.id, job.sampling, at, got, again, kept.end)
        self.num_ties += 1

    def _is_tie(self, job: Job, got: list[int], again: list[int], at: int) -> bool:
        if job.sampling.temperature > 0:
            return False
        running = self._submit(replace(job, max_tokens=at + 1, watch=None, sampling=replace(job.sampling, logprobs=2)))
        top = [event for event in running.events if isinstance(event, Sampled)][at].top
        return {token for token, _ in top} == {got[at], again[at]} and abs(top[0][1] - top[1][1]) < TIE

    def _run(self, job: Job) -> list[int]:
        return self._submit(job).tokens

    def _submit(self, job: Job) -> SubmittedJob:
        running = SubmittedJob(replace(job, prompt=Prompt(tokens=job.prompt.tokens)))
        self._engine.loop.submit(running.job, running)
        return running.wait()

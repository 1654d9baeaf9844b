"""An engine side for API tests: a thread that emits scripted tokens, no model, no MLX, no clock.

What it "generates" is a function of the job: the script for its prompt. Prefill takes steps; a test can hold them.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from reprise.core.backend import Counts, Held, Lookup, Status, StoredRun
from reprise.core.errors import EngineFailed, RepriseError
from reprise.core.events import Event, Finished, FinishReason, Progress, Sampled, Scored, Started
from reprise.core.inspection import WHOLE_TREE, DiskTree, EdgeTokens, InspectedEviction, Inspection, TreePart
from reprise.core.job import Constraint, Job, Purpose
from reprise.core.outcome import Outcome, Reason
from reprise.core.pin import Pin, PinList, pin_id
from reprise.core.prompt import Prompt
from reprise.core.tokens import Span, Tokens, common_prefix

Script = Callable[[Job], Sequence[int]]
Sink = Callable[[Event], None]


def _is_accepted(constraint: Constraint, token: int) -> bool:
    try:
        constraint.accept(token)
    except ValueError:
        return False
    return True


@dataclass
class FakeBackend:
    """`script` gives the tokens of a job's answer. `hold_prefill` and `hold_decode` stop the jobs there until set.

    A script that breaks a job's grammar fails the job; with `is_cut_by_grammar` its answer ends there.
    """

    script: Script
    refuse: RepriseError | None = None
    fail_after: int | None = None
    is_cut_by_grammar: bool = False
    logprob: float = -0.5
    """Of every token."""
    jobs: list[Job] = field(default_factory=list[Job])
    cancelled: list[str] = field(default_factory=list[str])
    stored: dict[str, list[Tokens]] = field(default_factory=dict[str, list[Tokens]])
    counts: Counts = field(default_factory=Counts)
    num_decoding: int = 0
    """As its status says."""
    is_cleared: bool = False
    is_hurried: bool = False
    pinned: dict[tuple[str, str], Pin] = field(default_factory=dict[tuple[str, str], Pin])

    def __post_init__(self) -> None:
        self.may_prefill = threading.Event()
        self.may_prefill.set()
        self.may_decode = threading.Event()
        self.may_decode.set()
        self._queue: queue.SimpleQueue[tuple[Job, Sink] | None] = queue.SimpleQueue()
        self._num_open = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, job: Job, sink: Sink) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.jobs.append(job)
        with self._lock:
            self._num_open += 1
        self._queue.put((job, sink))

    def cancel(self, job_id: str) -> bool:
        self.cancelled.append(job_id)
        return True

    def status(self) -> Status:
        with self._lock:
            is_idle = self._num_open == 0
        return Status(
            is_idle=is_idle,
            num_decoding=self.num_decoding,
            counts=self.counts,
            held=Held(kv_nbytes=100, snapshot_nbytes=11, budget_nbytes=1000),
        )

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Future[Inspection]:
        found: Future[Inspection] = Future()
        found.set_result(Inspection(num_inside=self._num_open))
        return found

    def edge_tokens(self, part: TreePart, *, max_nodes: int = 1000) -> Future[Sequence[EdgeTokens]]:
        found: Future[Sequence[EdgeTokens]] = Future()
        runs = enumerate(self.stored.get(part.namespace or "", []))
        found.set_result([EdgeTokens(id=at, start=0, tokens=run) for at, run in runs if part.under in (None, at)])
        return found

    def disk_tree(self, namespace: str) -> DiskTree | None:
        return None

    def disk_tokens(self, namespace: str, key: str, span: Span) -> Tokens | None:
        return None

    def next_evictions(self, nbytes: int, *, most: int = 64) -> Future[Sequence[InspectedEviction]]:
        found: Future[Sequence[InspectedEviction]] = Future()
        found.set_result(())
        return found

    def read_note(self, namespace: str) -> str | None:
        return None

    def keep_note(self, namespace: str, text: str) -> None: ...

    def hurry(self) -> None:
        self.is_hurried = True

    def stored_runs(self, namespace: str) -> Sequence[StoredRun]:
        return ()

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        self.is_cleared = True
        for name in [name for name in self.stored if namespace in (None, name)]:
            del self.stored[name]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def lookup(self, prompt: Prompt, *, namespace: str) -> Future[Lookup]:
        total = len(prompt)
        matched = max((common_prefix(run, prompt.tokens) for run in self.stored.get(namespace, [])), default=0)
        resume_at = min(matched, total - 1)
        found: Future[Lookup] = Future()
        found.set_result(
            Lookup(
                num_prompt=total,
                num_matched=matched,
                resume_at=resume_at,
                num_loaded=0,
                queue_s=0.5,
                load_s=0.0,
                prefill_s=(total - resume_at) / 100,
            )
        )
        return found

    def pins(self, namespace: str, *, owner: str = "") -> Future[PinList]:
        found: Future[PinList] = Future()
        found.set_result(PinList(pins=tuple(pin for (name, _), pin in self.pinned.items() if name == namespace)))
        return found

    def unpin(self, pin_id: str, *, namespace: str, owner: str = "") -> Future[bool]:
        found: Future[bool] = Future()
        found.set_result(self.pinned.pop((namespace, pin_id), None) is not None)
        return found

    def stop(self) -> None:
        self.may_prefill.set()
        self.may_decode.set()
        self._queue.put(None)
        self._thread.join()

    def of(self, purpose: Purpose) -> list[Job]:
        return [job for job in self.jobs if job.purpose is purpose]

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job, sink = item
            self._serve(job, sink)
            with self._lock:
                self._num_open -= 1

    def _serve(self, job: Job, sink: Sink) -> None:
        total = len(job.prompt)
        known = self.stored.setdefault(job.namespace, [])
        matched = max((common_prefix(run, job.prompt.tokens) for run in known), default=0)
        reused = min(matched, total - 1)
        outcome = Outcome(
            num_prompt=total,
            num_matched=matched,
            num_reused=reused,
            num_prefilled=total - reused,
            num_stored=total - reused,
            reason=Reason.NEW_TOKENS if reused > 0 else Reason.COLD,
        )
        sink(Started(num_reused=reused, total=total))
        if not self._wait(self.may_prefill, job):
            sink(Finished(reason=FinishReason.CANCELLED, outcome=outcome))
            return
        if job.prompt_logprobs is not None:
            scored = [Sampled(token=int(t), logprob=-1.5, top=((int(t), -1.5),)) for t in job.prompt.tokens[1:]]
            half = len(scored) // 2
            for start, stop in ((0, half), (half, len(scored))):
                if stop > start:
                    sink(Scored(start=start + 1, tokens=tuple(scored[start:stop])))
        sink(Progress(position=total, total=total))
        known.append(job.prompt.tokens)
        self.counts = replace(
            self.counts,
            num_requests=self.counts.num_requests + 1,
            num_prompt=self.counts.num_prompt + total,
            num_reused=self.counts.num_reused + reused,
            num_prefilled=self.counts.num_prefilled + total - reused,
        )
        if job.purpose is not Purpose.GENERATE:
            if job.pin_for_s is not None:
                name = pin_id(job.prompt.tokens)
                pin = Pin(id=name, num_tokens=total, nbytes=total, expires_in_s=job.pin_for_s, follows_chat=False)
                self.pinned[(job.namespace, name)] = pin
                outcome = replace(outcome, pin=pin)
            sink(Finished(reason=FinishReason.DONE, outcome=outcome))
            return
        self._decode(job, sink, outcome)

    def _decode(self, job: Job, sink: Sink, outcome: Outcome) -> None:
        def finish(reason: FinishReason, count: int, error: RepriseError | None = None) -> None:
            sink(Finished(reason=reason, outcome=replace(outcome, num_generated=count, ttft_s=0.0), error=error))

        constraint = None if job.constraint is None else job.constraint()
        count = 0
        for token in self.script(job):
            if not self._wait(self.may_decode, job):
                return finish(FinishReason.CANCELLED, count)
            if self.fail_after == count:
                return finish(FinishReason.FAILED, count, EngineFailed("The sampler failed on this request."))
            if constraint is not None and not _is_accepted(constraint, token):
                if self.is_cut_by_grammar:
                    return finish(FinishReason.LENGTH, count)
                return finish(FinishReason.FAILED, count, EngineFailed("The script breaks the grammar."))
            count += 1
            is_stop = token in job.stop_tokens or (job.watch is not None and job.watch(token))
            wants = job.sampling.logprobs
            top = () if wants is None else tuple((token + i, self.logprob - i) for i in range(wants))
            sink(Sampled(token=token, logprob=None if wants is None else self.logprob, top=top, is_stop=is_stop))
            if is_stop:
                return finish(FinishReason.STOP, count)
            if count == job.max_tokens:
                return finish(FinishReason.LENGTH, count)
        return finish(FinishReason.STOP, count)

    def _wait(self, gate: threading.Event, job: Job) -> bool:
        """Whether the job may go on: False once it was cancelled."""
        while not gate.wait(0.005):
            if job.id in self.cancelled:
                return False
        return job.id not in self.cancelled

"""A loop around the scheduler with an engine that computes nothing: how `decide` is meant to be used.

Time is simulated: a pass takes `PASS_S` plus the time of its tokens. The store keeps prefixes of prompts. With
`resumes_anywhere` each stored prefix can be resumed from at any position; otherwise only at the very positions where a
state was committed, as for recurrent layers.
"""

from dataclasses import dataclass, field

from reprise.core.images import outside
from reprise.core.tokens import Span, Tokens, common_prefix
from reprise.schedule.decide import decide
from reprise.schedule.sharing import common_prefix_lengths
from reprise.schedule.state import (
    DecodingJob,
    PrefillingJob,
    SchedulerLimits,
    SchedulerState,
    Slice,
    Speed,
    Step,
    WaitingJob,
    retry_after_s,
)

PASS_S = 0.002
PREFILL_TOKENS_PER_S = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRequest:
    """What a client sends. `leaves_s`: when it goes away; `is_lost`: then nothing of it can be committed."""

    id: str
    tokens: Tokens
    arrived_s: float = 0.0
    max_tokens: int = 1
    leaves_s: float | None = None
    is_lost: bool = False
    checkpoints: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    live_nbytes: int = 0
    is_auxiliary: bool = False
    is_settle: bool = False
    can_batch: bool = True


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job in the loop. `position` is None while it waits."""

    request: SimulatedRequest
    resume_at: int
    shares: dict[str, int]
    position: int | None = None
    stored: int = 0
    num_generated: int = 0
    group: int | None = None

    @property
    def end(self) -> int:
        return len(self.request.tokens)

    @property
    def is_waiting(self) -> bool:
        return self.position is None

    @property
    def is_decoding(self) -> bool:
        return self.position == self.end


@dataclass(slots=True)
class Store:
    resumes_anywhere: bool
    states: list[Tokens] = field(default_factory=list)

    def commit(self, tokens: Tokens, position: int) -> None:
        self.states.append(tokens[:position])

    def match(self, request: SimulatedRequest) -> int:
        best = 0
        for state in self.states:
            common = common_prefix(request.tokens[:-1], state)
            if self.resumes_anywhere:
                best = max(best, outside(common, request.spans))
            elif common == len(state) == outside(common, request.spans):
                best = max(best, common)
        return best


@dataclass(slots=True)
class SimulationReport:
    """What happened. `steps` with the time at which each was decided."""

    steps: list[tuple[float, Step]] = field(default_factory=list)
    num_prefilled: dict[str, int] = field(default_factory=dict)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    most_waiting: int = 0


class Simulation:
    """Runs the requests to their end. `free_nbytes`: room for live state in all."""

    def __init__(
        self, requests: list[SimulatedRequest], limits: SchedulerLimits, *, room_nbytes: int | None = None
    ) -> None:
        self.limits = limits
        self.room_nbytes = room_nbytes
        self.coming = sorted(requests, key=lambda request: (request.arrived_s, request.id))
        self.store = Store(limits.resumes_anywhere)
        self.jobs: dict[str, SimulatedJob] = {}
        self.speed = Speed(prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
        self.now_s = 0.0
        self.report = SimulationReport()

    def run(self) -> SimulationReport:
        while True:
            self._receive()
            state = self.state()
            step = decide(state, self.limits)
            self.report.steps.append((self.now_s, step))
            check_step(state, step, self.limits)
            if not step.is_idle:
                self._do(step)
            elif self.coming:
                self.now_s = self.coming[0].arrived_s
            else:
                assert not self.jobs, f"idle, and these were forgotten: {list(self.jobs)}"
                return self.report

    def state(self) -> SchedulerState:
        """One record for each job, as the scheduler wants them."""
        waiting: list[WaitingJob] = []
        prefilling: list[PrefillingJob] = []
        decoding: list[DecodingJob] = []
        used = 0
        for job_id, job in self.jobs.items():
            request = job.request
            if job.position is None:
                waiting.append(
                    WaitingJob(
                        id=job_id,
                        arrived_s=request.arrived_s,
                        prompt_len=job.end,
                        resume_at=job.resume_at,
                        common_prefix_lengths=job.shares,
                        live_nbytes=request.live_nbytes,
                        spans=request.spans,
                        can_batch=request.can_batch,
                        is_auxiliary=request.is_auxiliary,
                        is_settle=request.is_settle,
                    )
                )
                continue
            used += request.live_nbytes
            if job.position < job.end:
                prefilling.append(
                    PrefillingJob(
                        id=job_id,
                        arrived_s=request.arrived_s,
                        position=job.position,
                        end=job.end,
                        checkpoints=request.checkpoints,
                        stored=job.stored,
                        common_prefix_lengths=job.shares,
                        spans=request.spans,
                        can_batch=request.can_batch,
                        is_auxiliary=request.is_auxiliary,
                        is_settle=request.is_settle,
                    )
                )
            else:
                decoding.append(
                    DecodingJob(
                        id=job_id,
                        length=job.end + job.num_generated,
                        group=job.group,
                        stored=job.stored,
                        common_prefix_lengths=job.shares,
                        can_batch=request.can_batch,
                    )
                )
        return SchedulerState(
            now_s=self.now_s,
            waiting=tuple(waiting),
            prefilling=tuple(prefilling),
            decoding=tuple(decoding),
            speed=self.speed,
            free_nbytes=None if self.room_nbytes is None else self.room_nbytes - used,
        )

    def _receive(self) -> None:
        """Between two steps: who has come, who has left."""
        while self.coming and self.coming[0].arrived_s <= self.now_s:
            self._arrive(self.coming.pop(0))
        for job in list(self.jobs.values()):
            leaves_s = job.request.leaves_s
            if leaves_s is not None and leaves_s <= self.now_s:
                self._end(job, is_kept=not job.request.is_lost)

    def _arrive(self, request: SimulatedRequest) -> None:
        queued = [job for job in self.jobs.values() if job.is_waiting and not job.request.is_settle]
        num_left = sum(job.end - (job.position or job.resume_at) for job in self.jobs.values() if not job.is_decoding)
        retry = retry_after_s(num_waiting=len(queued), num_left=num_left, limits=self.limits, speed=self.speed)
        if retry is not None and not request.is_settle:
            self.report.refused[request.id] = retry
            return
        live = {job_id: job.request.tokens for job_id, job in self.jobs.items()}
        self.jobs[request.id] = SimulatedJob(
            request, self.store.match(request), common_prefix_lengths(request.tokens, live)
        )
        self.report.num_prefilled[request.id] = 0
        self.report.most_waiting = max(self.report.most_waiting, len(queued) + 1)

    def _do(self, step: Step) -> None:
        for job_id in step.give_up:
            self._end(self.jobs[job_id], is_kept=True)
        for job_id in step.commit:
            self._commit(self.jobs[job_id])
        for job_id in step.admit:
            job = self.jobs[job_id]
            job.position = job.stored = self.store.match(job.request)
        if step.decode:
            self._decode(step)
        if step.prefill:
            self._prefill(step.prefill)

    def _decode(self, step: Step) -> None:
        self.speed = self.speed.after_decode(len(step.decode) * PASS_S)
        self.now_s += len(step.decode) * PASS_S
        for group in step.decode:
            for job_id in group.ids:
                job = self.jobs[job_id]
                job.group = group.key
                self._sample(job)

    def _prefill(self, slices: tuple[Slice, ...]) -> None:
        num_tokens = sum(len(piece) for piece in slices)
        seconds = PASS_S + num_tokens / PREFILL_TOKENS_PER_S
        self.now_s += seconds
        self.speed = self.speed.after_prefill(num_tokens, seconds)
        for piece in slices:
            job = self.jobs[piece.id]
            job.position = piece.stop
            self.report.num_prefilled[piece.id] += len(piece)
            if piece.is_checkpoint:
                self._commit(job)
            if job.is_decoding:
                self._sample(job)

    def _sample(self, job: SimulatedJob) -> None:
        if job.num_generated < job.request.max_tokens:
            job.num_generated += 1
            self.report.token_times.setdefault(job.request.id, []).append(self.now_s)
        if job.num_generated == job.request.max_tokens:
            self._end(job, is_kept=True)

    def _commit(self, job: SimulatedJob) -> None:
        if job.position is not None:
            self.store.commit(job.request.tokens, job.position)
            job.stored = job.position
            self._match_again(job)

    def _end(self, job: SimulatedJob, *, is_kept: bool) -> None:
        del self.jobs[job.request.id]
        self.report.ended_s[job.request.id] = self.now_s
        if is_kept:
            self._commit(job)

    def _match_again(self, source: SimulatedJob) -> None:
        """The waiting jobs that may now go on from what `source` has committed."""
        for job_id, job in self.jobs.items():
            if job.is_waiting and (source.request.id in job.shares or job_id in source.shares):
                job.resume_at = self.store.match(job.request)


def check_step(state: SchedulerState, step: Step, limits: SchedulerLimits) -> None:
    """What holds for each step, whatever the schedule."""
    assert set(step.admit) <= {job.id for job in state.waiting}
    assert len(state.prefilling) + len(state.decoding) + len(step.admit) <= limits.max_batch
    if step.is_change:
        return
    rows = sorted(job_id for group in step.decode for job_id in group.ids)
    assert rows == sorted(row.id for row in state.decoding), "each stream gets one token in each step"
    assert len({group.key for group in step.decode}) == len(step.decode)
    running = {job.id: job for job in state.prefilling}
    assert len({piece.id for piece in step.prefill}) == len(step.prefill)
    longest = max((len(span) for job in state.prefilling for span in job.spans), default=0)
    most = max(limits.prefill_chunk, longest) if limits.whole_images else limits.prefill_chunk
    assert sum(len(piece) for piece in step.prefill) <= most
    assert bool(step.prefill) == bool(state.prefilling), "whoever is admitted goes on"
    for piece in step.prefill:
        job = running[piece.id]
        assert piece.start == job.position
        assert not any(piece.start < stop < piece.stop for stop in (*job.checkpoints, job.end))
        assert piece.is_checkpoint or piece.stop not in job.checkpoints
        assert outside(piece.stop, job.spans) == piece.stop or not (limits.whole_images or piece.is_checkpoint)
        if any(span.stop > job.position for span in job.spans):
            assert len(step.prefill) == 1, "rows with images share no pass"
    if not limits.can_batch:
        assert len(step.prefill) <= 1
        assert all(len(group.ids) == 1 for group in step.decode)

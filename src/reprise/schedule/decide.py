"""The scheduling decision: what the loop does next.

A pure function of state and limits. The loop describes all jobs, calls it, executes the step and repeats:

    while True:
        step = decide(state(), limits)
        if step.is_idle:
            wait for an arrival
        stop, commit and admit jobs; or run the decode groups and the prefill slices

`tests/schedule/simulated.py` is a complete loop of this kind, with an engine that computes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reprise.core.pass_price import beyond
from reprise.schedule.passes import DivergencePoints, chunk_tokens, fitting_tokens, group_rows, may_sample, plan_pass
from reprise.schedule.sharing import Wait, divergence_point, is_worth_waiting, share
from reprise.schedule.state import PrefillingJob, SchedulerLimits, SchedulerState, Slice, Step, WaitingJob

CHAT_TOKENS = 1024
"""Longer prompts are those of chats."""


@dataclass(frozen=True, slots=True, order=True)
class Priority:
    """The order of jobs, lowest first: first come first served, weighted so that short jobs do not wait for long.

    Each job has a due time: its arrival plus `patience` times its remaining prefill time. So jobs of equal size run in
    order of arrival; of those that arrive together, the one with the least left to prefill runs first; and none
    starves, since a due time never moves back while later arrivals have later ones.
    """

    gives_way: bool
    """An auxiliary request within its grace period."""
    due_s: float
    num_left: int
    arrived_s: float
    id: str


def num_left(job: WaitingJob | PrefillingJob) -> int:
    """Tokens that the job still has to prefill."""
    return job.end - job.position if isinstance(job, PrefillingJob) else job.prompt_len - job.resume_at


def priority_of(job: WaitingJob | PrefillingJob, state: SchedulerState, limits: SchedulerLimits) -> Priority:
    """The job's place among all that wait for prefill."""
    left = num_left(job)
    grace = limits.side_grace_s if job.is_auxiliary else 0.0
    return Priority(
        job.is_auxiliary and state.now_s < job.arrived_s + grace,
        job.arrived_s + grace + limits.patience * left / state.speed.prefill_tokens_per_s,
        left,
        job.arrived_s,
        job.id,
    )


def is_auxiliary_request(*, prompt_len: int, resume_at: int, has_chats: bool) -> bool:
    """Whether a request looks auxiliary: a title or tags that a chat front end requests besides the chat.

    Such a prompt is short and mostly not cached. `has_chats`: chats with a history are being served; without any there
    is nothing to give way to.
    """
    return has_chats and prompt_len <= CHAT_TOKENS and resume_at < prompt_len // 2


def decide(state: SchedulerState, limits: SchedulerLimits) -> Step:
    """The next step.

    In this order: stop settling if there is a request; commit what others can resume from; admit the next job; run one
    prefill pass and all decode groups; settle if there is nothing else, or nothing but the answer that starts what is
    settled. All decoding rows run in each step that computes. O(waiting × running).
    """
    requests = replace(
        state,
        waiting=tuple(job for job in state.waiting if not job.is_settle and not state.is_closed),
        prefilling=tuple(job for job in state.prefilling if not job.is_settle),
    )
    is_busy = len(requests.waiting) + len(requests.prefilling) + len(requests.decoding) > 0
    if not is_busy:
        return Step() if state.is_closed else _settle(state, limits)
    answer = _only_answer(requests)
    settling = tuple(job.id for job in state.prefilling if job.is_settle and (answer is None or job.beside != answer))
    if settling:
        return Step(give_up=settling)
    step = _serve(requests, limits)
    return step if answer is None else _settle_beside(answer, step, state, limits)


def _settle(state: SchedulerState, limits: SchedulerLimits) -> Step:
    """One job at a time, in chunks short enough not to delay a request that arrives."""
    if state.prefilling:
        job = min(state.prefilling, key=lambda job: priority_of(job, state, limits))
        return Step() if job.is_restoring else _pass((job,), {}, state, limits, must_be_short=True)
    if state.waiting:
        job = min(state.waiting, key=lambda job: priority_of(job, state, limits))
        return Step(admit=(job.id,))
    return Step()


def _only_answer(requests: SchedulerState) -> str | None:
    """The job that decodes, if it is all that there is to do; of several models, of all of them."""
    if requests.waiting or requests.prefilling or len(requests.decoding) != 1 or requests.num_others > 0:
        return None
    return None if requests.is_closed else requests.decoding[0].id


def _settle_beside(answer: str, decode: Step, state: SchedulerState, limits: SchedulerLimits) -> Step:
    """The step that decodes `answer`, and computes what it starts in what is left of the longest gap."""
    running = [job for job in state.prefilling if job.beside == answer]
    if running:
        job = min(running, key=lambda job: priority_of(job, state, limits))
        if job.is_restoring:
            return decode
        return replace(_pass((job,), {}, state, limits, must_be_short=True), decode=decode.decode)
    # What is there needs no row, nor a copy of it.
    waiting = [job for job in state.waiting if job.beside == answer and num_left(job) > 1]
    if not waiting or limits.max_batch < 2:
        return decode
    job = min(waiting, key=lambda job: priority_of(job, state, limits))
    has_room = state.free_nbytes is None or job.live_nbytes <= state.free_nbytes
    return Step(admit=(job.id,)) if has_room else decode


def _serve(state: SchedulerState, limits: SchedulerLimits) -> Step:
    decode = group_rows(state.decoding, limits)
    num_free = limits.max_batch - len(state.prefilling) - len(state.decoding)
    if num_free <= 0 and not state.prefilling:
        return Step(decode=decode)
    priorities = {job.id: priority_of(job, state, limits) for job in (*state.waiting, *state.prefilling)}
    waiting = sorted(state.waiting, key=lambda job: priorities[job.id])
    sharing = share(waiting, state.prefilling, state.decoding, limits)
    if sharing.commit:
        return Step(commit=sharing.commit)
    admissible = _admissible(sharing.ready, priorities, num_free, state, limits)
    runnable = [job for job in state.prefilling if not job.is_restoring]
    candidates = _in_order((*runnable, *(_admitted(job) for job in admissible)), priorities, sharing.waits)
    if not candidates:
        return Step(decode=decode)
    # A model that resumes anywhere need not pause where others diverge.
    divergence_points = _divergence_points(() if limits.resumes_anywhere else sharing.waits)
    must_be_short = len(state.decoding) > 0 or state.num_others > 0
    step = _pass(candidates, divergence_points, state, limits, must_be_short=must_be_short)
    new = {job.id for job in admissible}
    admit = tuple(piece.id for piece in step.prefill if piece.id in new)
    # The checkpoints of a job are not known before it is admitted.
    return Step(admit=admit) if admit else replace(step, decode=decode)


def _admissible(
    ready: Sequence[WaitingJob],
    priorities: dict[str, Priority],
    num_free: int,
    state: SchedulerState,
    limits: SchedulerLimits,
) -> list[WaitingJob]:
    """The ready jobs that fit, in order, without those that should rather wait for another of them."""
    chosen: list[WaitingJob] = []
    is_alone = len(state.prefilling) + len(state.decoding) + state.num_others == 0
    room = state.free_nbytes
    # One pass runs at a time: the dearest of all, in the smallest chunks, has to fit beside the states.
    dearest = max((_least_pass(job, state, limits) for job in state.prefilling), default=0)
    running = {job.id for job in (*state.prefilling, *state.decoding)}
    for job in ready:
        # Within its grace period, an auxiliary request leaves one row free.
        is_first = is_alone and len(chosen) == 0
        rows = 1 if is_first or not priorities[job.id].gives_way else 2
        if num_free - len(chosen) < rows:
            break
        if room is not None:
            # No job overtakes one that does not fit, or that one would starve. With nothing else running it is admitted
            # anyway: it will never have more room.
            dearest = max(dearest, _least_pass(job, state, limits))
            if job.live_nbytes + dearest > room and not is_first:
                break
            room -= job.live_nbytes
        if job.preempted_beside and job.preempted_beside <= running:
            break
        if not any(is_worth_waiting(job, divergence_point(job, other), limits) for other in chosen):
            chosen.append(job)
    return chosen


def _least_pass(job: WaitingJob | PrefillingJob, state: SchedulerState, limits: SchedulerLimits) -> int:
    """What a prompt's dearest pass takes of this memory: the last, in the smallest chunk, or a tower."""
    end = job.end if isinstance(job, PrefillingJob) else job.prompt_len
    return max(job.tower_nbytes, beyond(state.kept_for_passes, state.price.of(limits.min_chunk, end)))


def _admitted(job: WaitingJob) -> PrefillingJob:
    """The job as it will be once admitted, without its checkpoints."""
    return PrefillingJob(
        id=job.id,
        arrived_s=job.arrived_s,
        position=job.resume_at,
        end=job.prompt_len,
        spans=job.spans,
        can_batch=job.can_batch,
    )


def _in_order(
    jobs: Sequence[PrefillingJob], priorities: dict[str, Priority], waits: Sequence[Wait]
) -> list[PrefillingJob]:
    """The jobs in order of priority; a leader gets the priority of its first follower if that is lower."""
    first = dict(priorities)
    for wait in waits:
        first[wait.leader] = min(first[wait.leader], priorities[wait.follower])
    return sorted(jobs, key=lambda job: first[job.id])


def _divergence_points(waits: Sequence[Wait]) -> DivergencePoints:
    return {
        leader: frozenset(wait.wait_until for wait in waits if wait.leader == leader)
        for leader in sorted({wait.leader for wait in waits})
    }


def _pass(
    jobs: Sequence[PrefillingJob],
    divergence_points: DivergencePoints,
    state: SchedulerState,
    limits: SchedulerLimits,
    *,
    must_be_short: bool,
) -> Step:
    """A step's prefill: slices, and before them one image of the first job where its slice would reach it.

    The tower cannot be cut. Its time is taken from the longest gap as that of other passes is, so what is left is for
    the slice; an image that needs the whole gap, or more, runs without one. Behind an image that was encoded and is not
    computed yet the next one waits: a job needs the features of one at a time.
    """
    slices = _slices(jobs, divergence_points, state, limits, must_be_short=must_be_short)
    head = jobs[0]
    unseen = [span for span in head.unseen if any(s.id == head.id and span.start < s.stop for s in slices)]
    if not unseen:
        return Step(prefill=slices)
    if any(head.position < span.stop <= unseen[0].start for span in head.spans):
        before = replace(head, unseen=(), end=min(head.end, unseen[0].start))
        return Step(prefill=_slices((before,), divergence_points, state, limits, must_be_short=must_be_short))
    tower_s = state.speed.tower_s(len(unseen[0]))
    room_s = limits.max_stall_s / (1 + state.num_others) - state.speed.decode_s - tower_s
    if tower_s == 0 or (must_be_short and room_s <= 0):
        return Step(encode=head.id)
    # The next image has a step of its own.
    known = replace(head, unseen=(), end=min([head.end, *(span.start for span in head.unseen[1:2])]))
    if known.position >= known.end:
        return Step(encode=head.id)
    slower = replace(state, speed=replace(state.speed, decode_s=state.speed.decode_s + tower_s))
    return Step(
        encode=head.id, prefill=_slices((known,), divergence_points, slower, limits, must_be_short=must_be_short)
    )


def _slices(
    jobs: Sequence[PrefillingJob],
    divergence_points: DivergencePoints,
    state: SchedulerState,
    limits: SchedulerLimits,
    *,
    must_be_short: bool,
) -> tuple[Slice, ...]:
    budget = chunk_tokens(
        limits,
        state.speed,
        must_be_short=must_be_short,
        position=jobs[0].position,
        num_sharing=1 + state.num_others,
    )
    budget = fitting_tokens(budget, state, limits, position=jobs[0].position)
    chosen = plan_pass(jobs, divergence_points, budget, limits)
    (head, *others) = chosen.jobs
    if not others and head.position + chosen.length == head.end and may_sample(head, divergence_points, limits):
        return (Slice(id=head.id, start=head.position, stop=head.end + 1, samples=True),)
    return tuple(
        Slice(
            id=job.id,
            start=job.position,
            stop=(stop := job.position + chosen.length),
            is_checkpoint=stop in job.checkpoints or stop in divergence_points.get(job.id, ()),
        )
        for job in chosen.jobs
    )

"""Sharing of prefixes that are being computed: which job is the leader, and which followers wait for it.

Stateless: at every decision, who waits for whom follows from the positions of the running jobs. If a leader is
cancelled, fails or ends, its first follower resumes from what was stored. Only running jobs are leaders, and a running
job never waits, so there are no cycles.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from reprise.core.images import outside
from reprise.core.tokens import Tokens, common_prefix
from reprise.schedule.state import DecodingJob, PrefillingJob, SchedulerLimits, WaitingJob


def common_prefix_lengths(prompt: Tokens, live: Mapping[str, Tokens]) -> dict[str, int]:
    """The length of the common prefix of a new prompt with each of the `live` prompts, where it is not 0.

    `live`: all queued and running jobs of the same namespace. Computed once per arrival; O(tokens in common), about
    10 µs for 10,000 shared tokens.
    """
    return {job_id: common for job_id, other in live.items() if (common := common_prefix(prompt, other)) > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`follower` starts when `leader` has reached position `wait_until`, or has ended."""

    follower: str
    leader: str
    wait_until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which waiting jobs can start and which wait. `commit`: running jobs whose computed tokens others can use now."""

    ready: tuple[WaitingJob, ...] = ()
    waits: tuple[Wait, ...] = ()
    commit: tuple[str, ...] = ()


def divergence_point(follower: WaitingJob, leader: WaitingJob | PrefillingJob | DecodingJob) -> int:
    """The last position at which the follower could resume from the leader's state; 0 if they share nothing.

    It lies within the leader's prompt, outside of the follower's images, and leaves the follower at least one token.
    """
    # Each job knows the jobs that arrived before it.
    common = follower.common_prefix_lengths.get(leader.id, leader.common_prefix_lengths.get(follower.id, 0))
    match leader:
        case PrefillingJob():
            reach = leader.end
        case WaitingJob():
            reach = leader.prompt_len
        case DecodingJob():
            reach = leader.length
    return outside(min(common, reach, follower.prompt_len - 1), follower.spans)


def is_worth_waiting(follower: WaitingJob, wait_until: int, limits: SchedulerLimits) -> bool:
    """Whether a state at `wait_until` extends what the cache has by enough tokens for the follower to wait for it."""
    return wait_until - follower.resume_at >= limits.min_shared


def share(
    waiting: Iterable[WaitingJob],
    prefilling: Iterable[PrefillingJob],
    decoding: Iterable[DecodingJob],
    limits: SchedulerLimits,
) -> Sharing:
    """Sort the waiting jobs (given in order of priority) into those that can start and those that wait for a leader.

    If the model resumes anywhere, a follower starts as soon as its leader has passed the divergence point and
    committed. Otherwise the leader must pause exactly there, and one that has passed it is of no use. O(waiting ×
    running).
    """
    prefilling, decoding = tuple(prefilling), tuple(decoding)
    ready: list[WaitingJob] = []
    waits: list[Wait] = []
    # A dict, for its order: the schedule must be reproducible.
    commit: dict[str, None] = {}
    for job in waiting:
        wait = _wait(job, prefilling, limits)
        source = _source(job, (*prefilling, *decoding), limits) if limits.resumes_anywhere else None
        if wait is not None:
            waits.append(wait)
        elif source is not None:
            commit[source] = None
        else:
            ready.append(job)
    return Sharing(ready=tuple(ready), waits=_merged(waits, prefilling, limits), commit=tuple(commit))


def _wait(job: WaitingJob, leaders: Iterable[PrefillingJob], limits: SchedulerLimits) -> Wait | None:
    """The leader that `job` waits for: the one with the last divergence point, then the one that is furthest."""
    best: tuple[tuple[int, int, str], Wait] | None = None
    for leader in leaders:
        wait_until = divergence_point(job, leader)
        if leader.position < wait_until and is_worth_waiting(job, wait_until, limits):
            key = (wait_until, leader.position, leader.id)
            if best is None or key > best[0]:
                best = (key, Wait(follower=job.id, leader=leader.id, wait_until=wait_until))
    return None if best is None else best[1]


def _source(job: WaitingJob, running: Iterable[PrefillingJob | DecodingJob], limits: SchedulerLimits) -> str | None:
    """The running job with the longest uncommitted prefix that `job` could resume from.

    All of them are past the divergence point: otherwise `job` would wait.
    """
    best: tuple[int, str] | None = None
    for leader in running:
        wait_until = divergence_point(job, leader)
        if leader.stored < wait_until and is_worth_waiting(job, wait_until, limits):
            best = (wait_until, leader.id) if best is None else max(best, (wait_until, leader.id))
    return None if best is None else best[1]


def _merged(waits: Iterable[Wait], prefilling: Iterable[PrefillingJob], limits: SchedulerLimits) -> tuple[Wait, ...]:
    """The waits, with close divergence points of one leader moved to the first of them.

    Each pause costs a snapshot. A follower that starts fewer than `min_shared` tokens early computes these itself.
    """
    first: dict[tuple[str, int], int] = {}
    for leader in prefilling:
        planned = {stop for stop in (*leader.checkpoints, leader.end) if stop > leader.position}
        wanted = {wait.wait_until for wait in waits if wait.leader == leader.id}
        at: int | None = None
        for position in sorted(planned | wanted):
            if position in planned or at is None or position - at >= limits.min_shared:
                at = position
            first[leader.id, position] = at
    return tuple(replace(wait, wait_until=first[wait.leader, wait.wait_until]) for wait in waits)

"""Shared prefixes in flight: who computes them, and who waits for that.

Nothing is remembered: who waits for whom follows, at every decision, from where the running jobs stand now. So a
leader that is cancelled, fails or ends is simply no longer there, and the first of its followers goes on from what
was stored. Only running jobs are waited for, and a running job never waits: there can be no cycle.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from reprise.core.tokens import Tokens, common_prefix
from reprise.schedule.limits import SchedulerLimits
from reprise.schedule.state import DecodingJob, PrefillingJob, WaitingJob


def common_prefix_lengths(prompt: Tokens, live: Mapping[str, Tokens]) -> dict[str, int]:
    """How many leading tokens a prompt that arrives has in common with each of the `live` prompts.

    `live` are all queued and running jobs that it may share with (the same namespace). Once per arrival;
    O(tokens in common), about 10 µs for a prompt that shares 10,000 tokens.
    """
    return {job_id: common for job_id, other in live.items() if (common := common_prefix(prompt, other)) > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`follower` starts when `leader` has reached the position `until`, or is gone."""

    follower: str
    leader: str
    wait_until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What each waiting job can do now: start, or wait. `commit`: leaders whose tokens others can use right now."""

    ready: tuple[WaitingJob, ...] = ()
    waits: tuple[Wait, ...] = ()
    commit: tuple[str, ...] = ()


def divergence_point(follower: WaitingJob, leader: WaitingJob | PrefillingJob | DecodingJob) -> int:
    """The last position where the follower could go on from the leader's state; 0 if they share nothing.

    The leader will have been there when it has computed its prompt, and at least one token is left to the follower.
    """
    # Each knows of those that were there before it.
    common = follower.common_prefix_lengths.get(leader.id, leader.common_prefix_lengths.get(follower.id, 0))
    match leader:
        case PrefillingJob():
            reach = leader.end
        case WaitingJob():
            reach = leader.prompt_len
        case DecodingJob():
            reach = leader.length
    return min(common, reach, follower.prompt_len - 1)


def is_worth_waiting(follower: WaitingJob, wait_until: int, limits: SchedulerLimits) -> bool:
    """Whether a state at `until` has so much more than the cache that the follower does better to wait for it."""
    return wait_until - follower.resume_at >= limits.min_shared


def share(
    waiting: Iterable[WaitingJob],
    prefilling: Iterable[PrefillingJob],
    decoding: Iterable[DecodingJob],
    limits: SchedulerLimits,
) -> Sharing:
    """Sort the waiting jobs (given in their order) into those that can start and those that wait for a leader.

    A model that resumes anywhere lets a follower start as soon as its leader has passed the parting and committed.
    Others must pause exactly there, so a leader that has passed it already is of no use.
    O(waiting x running) look-ups.
    """
    prefilling, decoding = tuple(prefilling), tuple(decoding)
    ready: list[WaitingJob] = []
    waits: list[Wait] = []
    # A mapping keeps the order in which they were found, so that the schedule is reproducible.
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
    """The leader that `job` waits for: the one that it parts from last, and of equals the one that is there first."""
    best: tuple[tuple[int, int, str], Wait] | None = None
    for leader in leaders:
        wait_until = divergence_point(job, leader)
        if leader.position < wait_until and is_worth_waiting(job, wait_until, limits):
            worth = (wait_until, leader.position, leader.id)
            if best is None or worth > best[0]:
                best = (worth, Wait(follower=job.id, leader=leader.id, wait_until=wait_until))
    return None if best is None else best[1]


def _source(job: WaitingJob, running: Iterable[PrefillingJob | DecodingJob], limits: SchedulerLimits) -> str | None:
    """The running job that has computed most of what `job` could go on from, without having committed it yet.

    All of them are past the parting: otherwise `job` would wait.
    """
    best: tuple[int, str] | None = None
    for leader in running:
        wait_until = divergence_point(job, leader)
        if leader.stored < wait_until and is_worth_waiting(job, wait_until, limits):
            best = (wait_until, leader.id) if best is None else max(best, (wait_until, leader.id))
    return None if best is None else best[1]


def _merged(waits: Iterable[Wait], prefilling: Iterable[PrefillingJob], limits: SchedulerLimits) -> tuple[Wait, ...]:
    """The waits, with the divergence points of one leader that fall together moved to the first of them.

    Each pause costs a snapshot. A follower that is let go fewer than `min_shared` tokens early computes these itself.
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

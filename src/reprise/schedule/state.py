"""The scheduler's input, one record per job, built for every decision; and its output, a `Step`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reprise.schedule.limits import Speed


def _no_shares() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job that has not been admitted yet.

    Prefill would compute ``[resume_at, prompt_len)``. `resume_at` is what the cache has now: the loop matches again
    whenever a job with which it has a common prefix commits, ends or is stopped.
    """

    id: str
    arrived_s: float
    prompt_len: int
    resume_at: int = 0
    common_prefix_lengths: Mapping[str, int] = field(default_factory=_no_shares)
    """Job id → length of the common prefix of the two prompts, for the jobs present when this one arrived
    (`sharing.common_prefix_lengths`). May contain jobs that have ended."""
    live_nbytes: int = 0
    """Estimated bytes of its live state."""
    preempted_beside: frozenset[str] = frozenset()
    """The jobs that continued when it was preempted for lack of memory. While all of them run, it has no more room
    than then, whatever the estimate says."""
    can_batch: bool = True
    is_auxiliary: bool = False
    """A short request besides the chats (a title, tags): gives way for `SchedulerLimits.side_grace_s`."""
    is_settle: bool = False
    """Runs only while there is no request."""

    def __post_init__(self) -> None:
        # The last token is always computed: its logits start the decode.
        assert 0 <= self.resume_at < self.prompt_len, self


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillingJob:
    """An admitted job whose live state is (or will be) at `position`; ``[position, end)`` is still to be prefilled.

    `end`: the prompt's length, or one less if its last token starts the decode. A job at its end is no longer
    prefilling.
    """

    id: str
    arrived_s: float
    position: int
    end: int
    checkpoints: tuple[int, ...] = ()
    """The planned positions where prefill pauses, ascending; may include positions already passed."""
    stored: int = 0
    """``[0, stored)`` of its prompt is committed, or was refused by the cache."""
    common_prefix_lengths: Mapping[str, int] = field(default_factory=_no_shares)
    can_batch: bool = True
    is_auxiliary: bool = False
    is_settle: bool = False
    is_restoring: bool = False
    """Its state is still being restored: it cannot run yet."""

    def __post_init__(self) -> None:
        assert 0 <= self.position < self.end, self
        assert list(self.checkpoints) == sorted(self.checkpoints), self


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingJob:
    """A row that decodes. Its live state has `length` positions: 0 at first for a prompt of one token."""

    id: str
    length: int
    group: int | None = None
    """The key of its last decode group; None for a row that has just finished prefill."""
    stored: int = 0
    """``[0, stored)`` of its prompt is committed, or was refused by the cache."""
    common_prefix_lengths: Mapping[str, int] = field(default_factory=_no_shares)
    can_batch: bool = True

    def __post_init__(self) -> None:
        assert self.length >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Everything that a decision depends on besides the limits. Cancelled and failed jobs are not included."""

    now_s: float
    waiting: tuple[WaitingJob, ...] = ()
    """In any order."""
    prefilling: tuple[PrefillingJob, ...] = ()
    decoding: tuple[DecodingJob, ...] = ()
    speed: Speed = field(default_factory=Speed)
    free_nbytes: int | None = None
    """Bytes available for live state; None: unlimited."""
    num_others: int = 0
    """Other models that serve requests: each runs a step between two steps of this one."""
    is_closed: bool = False
    """Admit no further jobs: the model is to be unloaded once the running ones have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Prefill the tokens ``[start, stop)`` of one job."""

    id: str
    start: int
    stop: int
    is_checkpoint: bool = False
    """Commit the state at `stop`: the plan has a checkpoint there, or a waiting job diverges there."""

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, self

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that decode in one pass. `key` identifies the group across passes."""

    key: int
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.ids, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Either changes of jobs, or passes to run, or neither (idle).

    Changes (`give_up`, `commit`, `admit`): the loop applies them, updates its state (a commit can move the `resume_at`
    of waiting jobs) and decides again at once.

    Passes: one over all `prefill` slices, which have the same length, and one for each `decode` group. Every decoding
    row is in exactly one group.
    """

    give_up: tuple[str, ...] = ()
    """Settling jobs to stop, because a request has arrived. What they have computed is committed."""
    commit: tuple[str, ...] = ()
    """Running jobs to commit now, since a waiting job can resume from them. It sets `stored` to what was committed,
    or to the position if the cache refused."""
    admit: tuple[str, ...] = ()
    """Waiting jobs to restore, plan and start."""
    prefill: tuple[Slice, ...] = ()
    decode: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.is_change and (self.prefill or self.decode)), self
        assert len({len(piece) for piece in self.prefill}) <= 1, self

    @property
    def is_change(self) -> bool:
        """Whether the step changes jobs; then no pass runs, and the loop decides again."""
        return len(self.give_up) + len(self.commit) + len(self.admit) > 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until a job arrives."""
        return not self.is_change and len(self.prefill) + len(self.decode) == 0

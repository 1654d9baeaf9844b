"""What the scheduler is told, one record for each job, written anew for every decision; and its answer, a `Step`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reprise.schedule.limits import Speed


def _no_shares() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job that has not been admitted yet.

    Prefill would compute ``[resume_at, prompt_len)``. `resume_at` is what the cache has now: the loop matches again
    whenever a job that is named in the `common_prefix_lengths` of one of the two commits, ends or is given up.
    """

    id: str
    arrived_s: float
    prompt_len: int
    resume_at: int = 0
    common_prefix_lengths: Mapping[str, int] = field(default_factory=_no_shares)
    """Job id → length of the common prefix of the two prompts, for the jobs that were there when this one came
    (`sharing.common_prefix_lengths`). Ids of jobs that are gone do no harm."""
    live_nbytes: int = 0
    """What its live state will take."""
    can_batch: bool = True
    is_auxiliary: bool = False
    """A short request beside the chats (a title, tags): gives way for `SchedulerLimits.side_grace_s`."""
    is_settle: bool = False
    """Runs only while nothing else is there."""

    def __post_init__(self) -> None:
        # The last token is always computed: its logits start the decode.
        assert 0 <= self.resume_at < self.prompt_len, self


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillingJob:
    """An admitted job whose live state stands at `position`, or will; ``[position, end)`` is still to be prefilled.

    `end` is the prompt's length, or one less if the loop gives the last prompt token to the decode. A job that has
    reached its end is no longer prefilling.
    """

    id: str
    arrived_s: float
    position: int
    end: int
    checkpoints: tuple[int, ...] = ()
    """The planned positions where prefill pauses, ascending; those that are passed may stay."""
    stored: int = 0
    """``[0, stored)`` of its prompt is in the cache, or the cache has refused it."""
    common_prefix_lengths: Mapping[str, int] = field(default_factory=_no_shares)
    can_batch: bool = True
    is_auxiliary: bool = False
    is_settle: bool = False
    is_restoring: bool = False
    """What it resumes from is still being copied: nothing of it can run."""

    def __post_init__(self) -> None:
        assert 0 <= self.position < self.end, self
        assert list(self.checkpoints) == sorted(self.checkpoints), self


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingJob:
    """A row that gets a token with every pass. Its live state has `length` positions; none yet for a prompt of one
    token.
    """

    id: str
    length: int
    group: int | None = None
    """The key of the group that it ran in last; None for a row that has just come from prefill."""
    stored: int = 0
    """``[0, stored)`` of its prompt is in the cache, or the cache has refused it."""
    common_prefix_lengths: Mapping[str, int] = field(default_factory=_no_shares)
    can_batch: bool = True

    def __post_init__(self) -> None:
        assert self.length >= 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Everything that a decision depends on, besides the limits. Jobs that are cancelled or failed are not in it."""

    now_s: float
    waiting: tuple[WaitingJob, ...] = ()
    """In any order."""
    prefilling: tuple[PrefillingJob, ...] = ()
    decoding: tuple[DecodingJob, ...] = ()
    speed: Speed = field(default_factory=Speed)
    free_nbytes: int | None = None
    """What live state may still take; None: no bound."""
    num_others: int = 0
    """Other models that compute for somebody: each has a step between two steps of this one."""
    is_closed: bool = False
    """Nobody is admitted: this model's weights have to go when what runs has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Prefill the tokens ``[start, stop)`` of one job."""

    id: str
    start: int
    stop: int
    is_checkpoint: bool = False
    """Commit the state at `stop`, with snapshots where layers need them: the plan has a checkpoint there, or a
    waiting job leaves this one there."""

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, self

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that decode in one pass. A row keeps its group's key for as long as it stays in it."""

    key: int
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.ids, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Either who comes and goes, or what runs, or neither.

    *Who comes and goes* (`give_up`, `commit`, `admit`) computes nothing: the loop does it, brings its records up to
    date (a commit can move the `resume_at` of waiting jobs) and asks again at once.

    *What runs*: one pass over all `prefill` slices together, which have the same length, and one pass for each
    `decode` group. Every decoding row is in exactly one group.
    """

    give_up: tuple[str, ...] = ()
    """Settling jobs to stop, because a request is there. What they have computed is committed."""
    commit: tuple[str, ...] = ()
    """Running jobs whose computed tokens go into the cache now, since a waiting job can go on from them. Set
    `stored` to what was committed, or to the position if the cache refused."""
    admit: tuple[str, ...] = ()
    """Waiting jobs to restore, plan and start."""
    prefill: tuple[Slice, ...] = ()
    decode: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.is_change and (self.prefill or self.decode)), self
        assert len({len(piece) for piece in self.prefill}) <= 1, self

    @property
    def is_change(self) -> bool:
        """Whether jobs come or go; then nothing runs, and the loop asks again."""
        return len(self.give_up) + len(self.commit) + len(self.admit) > 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until a job arrives."""
        return not self.is_change and len(self.prefill) + len(self.decode) == 0

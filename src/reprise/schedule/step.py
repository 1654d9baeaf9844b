"""What the scheduler answers: the next thing for the loop to do."""

from dataclasses import dataclass


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

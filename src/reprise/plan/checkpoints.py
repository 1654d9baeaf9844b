"""Where to resume and where to pause: pure, from the match, the prompt's boundaries and the layer kinds."""

from dataclasses import dataclass
from itertools import pairwise

from reprise.core.kinds import Layout
from reprise.core.prompt import Boundary, BoundaryKind, Prompt

_SHORTEST_INTERVAL = 512
_LONGEST_INTERVAL = 8192
_WORTH = list(BoundaryKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Reuse ``[0, resume_at)``, prefill ``[resume_at, end)``, and make each checkpoint resumable on the way.

    `checkpoints` lie in ``(resume_at, end]``, ascending, one for a position. `has_row`: the logits behind the prompt's
    last token are kept, so nothing is computed: it resumes behind the whole prompt.
    """

    resume_at: int
    end: int
    checkpoints: tuple[Boundary, ...] = ()
    has_row: bool = False

    def __post_init__(self) -> None:
        assert self.resume_at >= 0, self
        # Without its row the last token is always computed: its logits start the decode.
        assert self.resume_at == self.end + 1 if self.has_row else self.resume_at <= self.end, self
        positions = [c.position for c in self.checkpoints]
        assert positions == sorted(set(positions)), self
        assert all(self.resume_at < p <= self.end for p in positions), self

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(c.position for c in self.checkpoints)

    def kind_at(self, position: int) -> BoundaryKind:
        """What the checkpoint at `position` is for; BRANCH for one that was not planned (another request asked)."""
        return next((c.kind for c in self.checkpoints if c.position == position), BoundaryKind.BRANCH)


def interval_tokens(*, checkpoint_nbytes: int, kv_nbytes_per_token: int) -> int:
    """N of "a checkpoint every N tokens": as many tokens as have twice a checkpoint's bytes, within bounds.

    So the checkpoints of a long prefill take half as much again as its KV at most. A model without KV has nothing to
    compare with and takes the longest interval.
    """
    if kv_nbytes_per_token == 0:
        return _LONGEST_INTERVAL
    fair = 2 * checkpoint_nbytes // kv_nbytes_per_token
    return max(_SHORTEST_INTERVAL, min(_LONGEST_INTERVAL, fair))


def make_plan(
    prompt: Prompt,
    *,
    layout: Layout,
    resume_at: int,
    end: int,
    branch_at: int | None,
    interval: int,
    has_row: bool = False,
) -> Plan:
    """The plan for a prompt of which ``[0, resume_at)`` can be reused.

    `end` is where prefill ends: the whole prompt, or all but its last token if that starts a decode. `branch_at` is
    the position where the prompt leaves a path that the tree goes on with, None if it leaves none. `interval` is N of
    "a checkpoint every N tokens". `has_row`: the logits behind the whole prompt are kept; `resume_at` is its length.

    A model that resumes anywhere needs no checkpoints. For others: every boundary that the template gave, the branch,
    the end, and multiples of N in the long stretches between them.
    """
    if layout.resumes_anywhere or has_row:
        return Plan(resume_at=resume_at, end=end, has_row=has_row)
    wanted = [b for b in prompt.boundaries if resume_at < b.position <= end]
    if branch_at is not None and resume_at < branch_at <= end:
        wanted.append(Boundary(branch_at, BoundaryKind.BRANCH))
    if end > resume_at:
        wanted.append(Boundary(end, BoundaryKind.PROMPT_END))
    fixed = sorted({b.position for b in wanted} | {resume_at})
    for low, high in pairwise(fixed):
        # Multiples of N, so that prompts with a common prefix have theirs at the same positions. Not close to
        # another checkpoint, where they would save little.
        first = (low + interval // 2) // interval + 1
        for position in range(first * interval, high - interval // 2, interval):
            wanted.append(Boundary(position, BoundaryKind.INTERVAL))
    best: dict[int, Boundary] = {}
    for boundary in sorted(wanted, key=lambda b: _WORTH.index(b.kind)):
        best.setdefault(boundary.position, boundary)
    return Plan(resume_at=resume_at, end=end, checkpoints=tuple(best[p] for p in sorted(best)))

"""Where to resume and where to pause for checkpoints. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from reprise.core.images import outside
from reprise.core.kinds import Layout
from reprise.core.prompt import Boundary, BoundaryKind, Prompt

_SHORTEST_INTERVAL = 512
_LONGEST_INTERVAL = 8192
_FALLBACK_SHARE = 16
_PRIORITY = list(BoundaryKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Reuse ``[0, resume_at)``, prefill ``[resume_at, end)``, and commit at each checkpoint on the way.

    `checkpoints` lie in ``(resume_at, end]``, ascending, at most one per position. `has_row`: the logits after the
    prompt's last token are stored, so nothing is computed: it resumes at the end of the prompt.
    """

    resume_at: int
    end: int
    checkpoints: tuple[Boundary, ...] = ()
    has_row: bool = False

    def __post_init__(self) -> None:
        assert self.resume_at >= 0, self
        # Without a row the last token is always computed: its logits start the decode.
        assert self.resume_at == self.end + 1 if self.has_row else self.resume_at <= self.end, self
        positions = [c.position for c in self.checkpoints]
        assert positions == sorted(set(positions)), self
        assert all(self.resume_at < p <= self.end for p in positions), self

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the checkpoints are, ascending."""
        return tuple(c.position for c in self.checkpoints)

    def kind_at(self, position: int) -> BoundaryKind:
        """The kind of the checkpoint at `position`; BRANCH if it was added since, for another request."""
        return next((c.kind for c in self.checkpoints if c.position == position), BoundaryKind.BRANCH)


def interval_tokens(*, checkpoint_nbytes: int, kv_nbytes_per_token: int) -> int:
    """N of "a checkpoint every N tokens": the tokens whose KV is twice as large as a checkpoint, within bounds.

    Between its bounds, the checkpoints of a long prefill then take at most half as much as its KV. A model without KV
    gets the longest interval.
    """
    if kv_nbytes_per_token == 0:
        return _LONGEST_INTERVAL
    fair = 2 * checkpoint_nbytes // kv_nbytes_per_token
    return max(_SHORTEST_INTERVAL, min(_LONGEST_INTERVAL, fair))


def fallback_tokens(*, checkpoint_nbytes: int, kv_nbytes_per_token: int) -> int:
    """How far apart the checkpoints of a chat's earlier turns are that stay: what they take is a sixteenth of the KV.

    0, none, for a model without KV: there is no end of a path to evict.
    """
    return 0 if kv_nbytes_per_token == 0 else _FALLBACK_SHARE * checkpoint_nbytes // kv_nbytes_per_token


def make_plan(
    prompt: Prompt,
    *,
    layout: Layout,
    resume_at: int,
    end: int,
    branches: Collection[int],
    interval: int,
    has_row: bool = False,
    end_within: int = 0,
) -> Plan:
    """The plan for a prompt of which ``[0, resume_at)`` can be reused.

    `end`: where prefill ends, which is the prompt's end, or one token before it if that starts a decode. `branches`:
    where the prompt diverges from stored paths. `interval`: N of "a checkpoint every N tokens". `has_row`: the logits
    after the whole prompt are stored, and `resume_at` is its length. `end_within`: the end gets no checkpoint if
    another is fewer tokens before it, or if prefill starts there: what is left then fits into the pass that samples.

    A model that resumes anywhere needs no checkpoints. Others get one at every boundary of the template, the branches,
    the end, and at multiples of N in the long stretches between. One that falls inside an image moves to its start.
    """
    if layout.resumes_anywhere or has_row:
        return Plan(resume_at=resume_at, end=end, has_row=has_row)
    spans = prompt.spans
    asked = [*prompt.boundaries, *(Boundary(at, BoundaryKind.BRANCH) for at in branches)]
    placed = [Boundary(outside(b.position, spans), b.kind) for b in asked]
    wanted = [b for b in placed if resume_at < b.position <= end]
    if end - max([resume_at, *(b.position for b in wanted)]) >= max(1, end_within):
        wanted.append(Boundary(end, BoundaryKind.PROMPT_END))
    fixed = sorted({b.position for b in wanted} | {resume_at})
    for low, high in pairwise(fixed):
        # Multiples of N, so that prompts with a common prefix share positions; not close to another checkpoint, where
        # they would save little.
        first = (low + interval // 2) // interval + 1
        for position in range(first * interval, high - interval // 2, interval):
            at = outside(position, spans)
            if at > low:
                wanted.append(Boundary(at, BoundaryKind.INTERVAL))
    best: dict[int, Boundary] = {}
    for boundary in sorted(wanted, key=lambda b: _PRIORITY.index(b.kind)):
        best.setdefault(boundary.position, boundary)
    return Plan(resume_at=resume_at, end=end, checkpoints=tuple(best[p] for p in sorted(best)))

"""What could have been reused by somebody who knew the future: bounds to judge a policy by.

Entries are blocks of the prompts (those of the trace, or 8 tokens). With a budget of so many blocks, Belady's
rule ("A study of replacement algorithms for a virtual-storage computer", 1966) evicts the block that is used again
last. A block is used no later than those behind it, so the rule keeps prefixes whole, and its hits are the most that
a store of blocks can have. For models that resume anywhere; others can have less.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from reprise.core.tokens import Tokens, join_tokens
from reprise.simulate.traces import Request

_NEVER = 1 << 62


class FutureKnown:
    """A trace as block numbers, kept whole: 8 bytes for each block of each prompt and answer."""

    def __init__(self, *, block: int) -> None:
        """`block`: real tokens of a block."""
        self._block = block
        self._numbers: dict[int, int] = {}
        self._blocks = array("q")
        self._stops = array("q")
        self._num_asked = array("q")
        self._lengths = array("q")

    def add(self, request: Request) -> None:
        """The next request of the trace. Its answer is stored behind the prompt, and nobody has asked for it."""
        tokens, length = request.prompt.tokens, max(1, self._block // request.unit)
        path = tokens if request.answer is None else join_tokens(tokens, request.answer)
        for key in block_keys(path, length):
            self._blocks.append(self._numbers.setdefault(key, len(self._numbers)))
        self._stops.append(len(self._blocks))
        self._num_asked.append(-(-len(tokens) // length))
        self._lengths.append(request.num_tokens)

    def reused_without_bound(self) -> int:
        """Tokens reused if nothing is ever evicted."""
        return self.reused(len(self._numbers))

    def reused_within(self, budget_tokens: int) -> int:
        """Tokens reused by Belady's rule within a budget in tokens."""
        return self.reused(budget_tokens // self._block)

    def reused(self, num_blocks: int) -> int:
        """Tokens reused by Belady's rule with room for so many blocks. O(blocks of the trace · log)."""
        next_use = self._next_uses()
        stored: dict[int, int] = {}
        order: list[tuple[int, int, int]] = []
        total = 0
        for at, (start, stop) in enumerate(zip((0, *self._stops[:-1]), self._stops, strict=True)):
            blocks = self._blocks[start:stop]
            hit = 0
            while hit < self._num_asked[at] and blocks[hit] in stored:
                hit += 1
            total += min(hit * self._block, self._lengths[at] - 1)
            for depth, block in enumerate(blocks):
                use = next_use[start + depth]
                stored[block] = use
                heapq.heappush(order, (-use, -depth, block))
            while len(stored) > num_blocks:
                use, _, block = heapq.heappop(order)
                if stored.get(block) == -use:
                    del stored[block]
        return total

    def _next_uses(self) -> Sequence[int]:
        """For each block of each path, the number of the next request whose prompt has it. An answer uses nothing."""
        uses = array("q", bytes(8 * len(self._blocks)))
        upcoming: dict[int, int] = {}
        starts = (0, *self._stops[:-1])
        for at in range(len(self._stops) - 1, -1, -1):
            for place in range(starts[at], self._stops[at]):
                uses[place] = upcoming.get(self._blocks[place], _NEVER)
            for place in range(starts[at], starts[at] + self._num_asked[at]):
                upcoming[self._blocks[place]] = at
        return uses


def block_keys(tokens: Tokens, length: int) -> Iterable[int]:
    """A key for each block of a prompt, of the block and everything before it; a block that is cut counts."""
    key = 0
    for start in range(0, len(tokens), length):
        block = np.ascontiguousarray(tokens[start : start + length])
        key = hash((key, block.tobytes()))
        yield key

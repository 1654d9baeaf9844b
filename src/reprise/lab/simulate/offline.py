"""What could have been reused by somebody who knew the future: bounds to judge a policy by.

Entries are whole blocks of the prompts (those of the trace, or 8 tokens). With a budget in blocks, Belady's
rule ("A study of replacement algorithms for a virtual-storage computer", 1966) evicts the block that is used again
last. A block that an answer computes again before a prompt asks for it needs no room until then. Each stay of a block,
from a path that has it to the next prompt that asks for it, is one hit for its room in between, so keeping those that
end first gives the most hits that a store of blocks can have, even one that may keep a block without those before it.
For models that resume anywhere. A model with snapshots has at least one beside whatever it reuses: a block that nobody
passed through since is reused from a snapshot further on that has been there as long. So its blocks have that much
less room (a linear program that counts one for each prompt to come is within 0.4 % of this on agent sessions).

A store of tokens reuses, with each request, less than a block more than the whole blocks that it holds. That much is
added, as far as earlier paths have it in common with the prompt. So the figure is a bound that no policy exceeds; it is
above the optimum by less than a block for each request.
"""

import heapq
from array import array
from collections.abc import Sequence

import numpy as np

from reprise.core.tokens import Tokens, common_prefix, join_tokens, own_tokens
from reprise.replay.request import Request

_NEVER = 1 << 62


class FutureKnown:
    """A trace as block numbers, kept whole: 8 bytes for each block of each prompt and answer, and each block once."""

    def __init__(self, *, block: int) -> None:
        """`block`: real tokens of a block."""
        self._block = block
        self._paths = _Paths()
        self._blocks = array("q")
        self._stops = array("q")
        self._num_asked = array("q")
        self._unbounded = 0
        self._partial = 0

    def add(self, request: Request) -> None:
        """The next request of the trace. Its answer is stored behind the prompt, and nobody has asked for it."""
        tokens, length = request.prompt.tokens, max(1, self._block // request.unit)
        # The last token is always computed: its logits start the decode.
        shared = min(self._paths.shared(tokens, length) * request.unit, request.num_tokens - 1)
        self._unbounded += shared
        self._partial += min((length - 1) * request.unit, shared)
        path = tokens if request.answer is None else join_tokens(tokens, request.answer)
        self._append(path, length, num_asked=len(tokens) // length)

    def add_settled(self, request: Request) -> None:
        """What is known of the turn after `request` is computed, and nobody has asked for it."""
        if request.next_known is not None:
            self._append(request.next_known, max(1, self._block // request.unit), num_asked=0)

    def _append(self, path: Tokens, length: int, *, num_asked: int) -> None:
        self._blocks.extend(self._paths.add(path, length))
        self._stops.append(len(self._blocks))
        self._num_asked.append(num_asked)

    def reused_within(self, budget_tokens: int, *, snapshot_tokens: int = 0) -> int:
        """The most tokens that any policy can reuse within a budget in tokens; `snapshot_tokens`: what one takes."""
        whole = self._hits(max(0, budget_tokens - snapshot_tokens) // self._block) * self._block
        return min(whole + self._partial, self._unbounded)

    def _hits(self, num_blocks: int) -> int:
        """Blocks reused by Belady's rule with this room. O(blocks of the trace · log)."""
        next_use = self._next_uses()
        stored: dict[int, int] = {}
        order: list[tuple[int, int, int]] = []
        total = 0
        for at, (start, stop) in enumerate(zip((0, *self._stops[:-1]), self._stops, strict=True)):
            blocks = self._blocks[start:stop]
            hit = 0
            while hit < self._num_asked[at] and blocks[hit] in stored:
                hit += 1
            total += hit
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
        """For each block of each path, the number of the next request whose prompt has it.

        `_NEVER` if an answer computes the block before that: holding it until then saves nothing.
        """
        uses = array("q", bytes(8 * len(self._blocks)))
        upcoming: dict[int, int] = {}
        starts = (0, *self._stops[:-1])
        for at in range(len(self._stops) - 1, -1, -1):
            for place in range(starts[at], self._stops[at]):
                uses[place] = upcoming.get(self._blocks[place], _NEVER)
            num_asked = self._num_asked[at]
            for depth, block in enumerate(self._blocks[starts[at] : self._stops[at]]):
                upcoming[block] = at if depth < num_asked else _NEVER
        return uses


class _Paths:
    """Every path seen, as a tree of blocks: each block once, under the number of the one before it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._beginnings: dict[tuple[int, int], list[Tokens]] = {}
        """By the block before and the first token: what paths go on with there, cut ends included."""

    def shared(self, tokens: Tokens, length: int) -> int:
        """How many tokens some earlier path begins with as well."""
        before, start = _ROOT, 0
        while start + length <= len(tokens):
            number = self._numbers.get((before, _bytes(tokens[start : start + length])))
            if number is None:
                break
            before, start = number, start + length
        rest = tokens[start : start + length]
        if len(rest) == 0:
            return start
        known = self._beginnings.get((before, int(rest[0])), ())
        return start + max((common_prefix(other, rest) for other in known), default=0)

    def add(self, tokens: Tokens, length: int) -> list[int]:
        """The numbers of the path's whole blocks."""
        numbers: list[int] = []
        before = _ROOT
        for start in range(0, len(tokens), length):
            block = tokens[start : start + length]
            key = (before, _bytes(block))
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                self._beginnings.setdefault((before, int(block[0])), []).append(own_tokens(block))
            before = self._numbers[key]
            if len(block) == length:
                numbers.append(before)
        return numbers


_ROOT = -1


def _bytes(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens).tobytes()

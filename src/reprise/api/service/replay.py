"""The latest requests against other memory budgets: what each would have reused."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from reprise.core.inspection import InspectedMemory
from reprise.core.prompt import Boundary, Prompt
from reprise.core.tokens import Tokens, as_tokens
from reprise.replay.payloads import Sizes
from reprise.replay.request import Request
from reprise.replay.store import Replay

BLOCK = 64
"""Tokens that one hash stands for."""

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Of the present budget."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptBlocks:
    """A prompt of `num_tokens` tokens as a hash for each block of it: 4 bytes for 64 tokens, and nothing to be read."""

    prompt: Prompt
    num_tokens: int

    def __post_init__(self) -> None:
        assert 0 < len(self.prompt) <= self.num_tokens, (len(self.prompt), self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a budget of `factor` times the present one would have reused of `prompt` tokens."""

    factor: float
    budget: int
    prompt: int
    reused: int


def blocks_of(prompt: Prompt) -> PromptBlocks:
    """The prompt in blocks. O(length)."""
    # A boundary inside a block becomes one at the block's beginning: behind it prompts may part.
    kinds = {b.position // BLOCK: b.kind for b in reversed(prompt.boundaries) if b.position >= BLOCK}
    boundaries = tuple(sorted(Boundary(at, kind) for at, kind in kinds.items()))
    hashes = Prompt(tokens=_block_hashes(prompt.tokens), boundaries=boundaries)
    return PromptBlocks(prompt=hashes, num_tokens=len(prompt))


def replay(chats: Sequence[tuple[PromptBlocks, int]], memory: InspectedMemory) -> Sequence[Replayed]:
    """The chats with the lengths of their answers, oldest first, against other budgets; none where there is no budget.

    Takes a second or two for some hundreds.
    """
    if memory.budget_nbytes is None or not chats:
        return ()
    requests = [
        Request(
            prompt=blocks.prompt,
            num_tokens=blocks.num_tokens,
            shareable=max(1, blocks.num_tokens // BLOCK),
            unit=BLOCK,
            block=BLOCK,
            num_answered=num_answered,
        )
        for blocks, num_answered in chats
    ]
    sizes = Sizes(full=max(1, memory.token_nbytes), snapshot=memory.snapshot_nbytes)
    found: list[Replayed] = []
    for factor in FACTORS:
        budget = int(memory.budget_nbytes * factor)
        one = Replay(policy="cost", budget=budget, sizes=sizes, unit=BLOCK)
        for request in requests:
            one.take(request)
        found.append(Replayed(factor=factor, budget=budget, prompt=one.tally.prompt, reused=one.tally.reused))
    return found


def _block_hashes(tokens: Tokens) -> Tokens:
    """A hash for each block, of all tokens up to its end."""
    found: list[int] = []
    last = 0
    for start in range(0, len(tokens), BLOCK):
        last = crc32(tokens[start : start + BLOCK].tobytes(), last)
        found.append(last & 0x7FFFFFFF)
    return as_tokens(found)

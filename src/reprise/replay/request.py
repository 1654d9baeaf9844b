"""A request of a trace: what a replay sends to a store."""

from dataclasses import dataclass
from enum import StrEnum

from reprise.core.prompt import Prompt
from reprise.core.tokens import Tokens


class Change(StrEnum):
    """What a prompt is to the one before it of the same agent."""

    FIRST = "first"
    """There is none."""
    GROWN = "grown"
    """It repeats all of it."""
    END_EDITED = "end edited"
    """It parts from it in what was new there."""
    EARLIER_EDITED = "earlier edited"
    """It parts from it before that, and is no shorter."""
    CLEARED = "context cleared"
    """It parts from it before that, and is shorter: something in between was taken out."""
    COMPACTED = "compacted"
    """It is shorter, and not half of what it replaces is left: a summary."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One request of a trace.

    `num_tokens`: the real prompt's length, of which each token of `prompt` stands for `unit`. `answer`: what was
    generated, `num_answered`: how many real tokens that were, None where the trace does not tell. `shareable`: how many
    tokens of `prompt` another prompt can have in common; a block that is cut by the prompt's end is like no other.
    `block`: the real tokens by which an estimate with the future known counts. `next_known`: the next prompt's
    beginning, as far as the server knows it once it has answered. `calls_tool`: whether the answer ends with a call of
    a tool, `change`: what the prompt is to the one before it; None where the trace does not tell. `at_s`: when it came,
    in seconds since any start, and `took_s`: how long it took; 0 where the trace does not tell. `agent`: who asked.
    """

    prompt: Prompt
    num_tokens: int
    shareable: int
    unit: int = 1
    block: int = 8
    answer: Tokens | None = None
    num_answered: int | None = None
    next_known: Tokens | None = None
    is_auxiliary: bool = False
    calls_tool: bool | None = None
    change: Change | None = None
    at_s: float = 0.0
    took_s: float = 0.0
    agent: str = ""

    def __post_init__(self) -> None:
        assert 0 < self.shareable <= len(self.prompt) <= self.num_tokens, (self.shareable, self.num_tokens)

    @property
    def answer_length(self) -> float | None:
        """How long the answer was in tokens like the prompt's, None where the trace does not tell."""
        if self.num_answered is not None:
            return self.num_answered / self.unit
        return len(self.answer) if self.answer is not None else None

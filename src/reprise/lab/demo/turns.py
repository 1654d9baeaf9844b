"""What the demonstration says to the servers, turn by turn, and what it keeps of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reprise.lab.demo.facts import LOOK_UP_TOOL, SYSTEM_PROMPT

MAX_TOKENS = 96
"""Generated in one answer at most, thinking included."""

Message = Mapping[str, Any]
History = tuple[Message, ...]

OPENING: History = ({"role": "system", "content": SYSTEM_PROMPT},)


class Exchange(Protocol):
    """One message of the user and what the model should make of it: see `FactExchange`."""

    @property
    def user(self) -> str: ...
    @property
    def content(self) -> str | list[dict[str, Any]]: ...
    @property
    def answer(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def result(self) -> str | None: ...


TOOLS = (LOOK_UP_TOOL,)


def request_body(history: History, *, tools: Sequence[Mapping[str, Any]] = TOOLS) -> dict[str, Any]:
    """The chat completion request for this history: greedy and streamed."""
    return {
        "messages": list(history),
        **({"tools": list(tools)} if tools else {}),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        # The log-probabilities name every token that was sampled, so that two answers are compared token by token.
        "logprobs": True,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAnswer:
    """One answer, as the client saw it. `tokens` are the texts of the sampled tokens, in order."""

    content: str
    reasoning: str
    tokens: tuple[str, ...]
    num_prompt: int
    num_cached: int
    ttft_s: float
    calls: tuple[Mapping[str, Any], ...] = ()
    """The functions that it calls, as the history gets them back."""
    why: str = ""
    """Why the rest was computed, in the server's words."""
    num_encoded: int = 0
    """Images that the model's tower ran for."""

    @property
    def num_computed(self) -> int:
        """Prompt tokens that were prefilled for this answer."""
        return self.num_prompt - self.num_cached

    @property
    def message(self) -> Message:
        """The answer as a message of the history, with its thought, which the template strips when it is old."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning}
        return message | {"tool_calls": list(self.calls)} if self.calls else message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the chat on both servers, in prompt tokens and seconds; of two requests where it calls the tool.

    `oracle` is what a server that remembers every state would have computed; `typed` what it would have computed while
    the user waits if it had read the rest while idle.
    """

    turn: int
    exchange: Exchange
    answer: str
    history: History
    """The chat with this turn."""
    prompt_tokens: int
    reused: int
    computed: int
    cold_computed: int
    oracle: int
    typed: int
    ttft_s: float
    cold_ttft_s: float
    is_right: bool
    is_cold_right: bool
    is_same_answer: bool
    why: str = ""
    num_encoded: int = 0
    """Images that the model's tower ran for."""
    cold_encoded: int = 0

    def __post_init__(self) -> None:
        assert self.reused + self.computed == self.prompt_tokens, self
        assert 1 <= self.oracle <= self.prompt_tokens, self


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPart:
    """Turns that show one thing."""

    title: str
    turns: tuple[Turn, ...]

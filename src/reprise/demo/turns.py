"""What the demonstration says to the servers, turn by turn, and what it keeps of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

SYSTEM_PROMPT = (
    "You are a patient adviser. Answer in plain words, name what you are not sure of, and keep to what was asked. "
    "When numbers are given, use them."
)
MAX_TOKENS = 64
"""Generated each turn, thinking included."""
THINKING_TOKENS = 24

Message = Mapping[str, str]


def questions() -> tuple[str, ...]:
    """The forty messages of the user."""
    text = (files("reprise.demo") / "texts" / "chat.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def request_body(history: tuple[Message, ...]) -> dict[str, Any]:
    """The chat completion request for this history: greedy, streamed, a fixed number of tokens."""
    return {
        "messages": list(history),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "thinking_budget": THINKING_TOKENS,
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
    why: str = ""
    """Why the rest was computed, in the server's words."""

    @property
    def num_computed(self) -> int:
        """Prompt tokens that were prefilled for this answer."""
        return self.num_prompt - self.num_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the chat on both servers, in prompt tokens and seconds.

    `oracle` is what a server that remembers every state would have computed; `typed` what it would have computed while
    the user waits if it had read the rest while idle.
    """

    turn: int
    prompt_tokens: int
    reused: int
    computed: int
    cold_computed: int
    oracle: int
    typed: int
    ttft_s: float
    cold_ttft_s: float
    is_same_answer: bool
    why: str = ""

    def __post_init__(self) -> None:
        assert self.reused + self.computed == self.prompt_tokens, self
        assert 1 <= self.oracle <= self.prompt_tokens, self

"""The parts of an answer: pieces of reasoning, content and tool calls."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of the tool call number `index` (from 0). `id` and `name` are set on its first piece only.

    The `arguments` of all pieces of a call, joined, are those of the `ToolCall`.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call; `arguments` is the text of a JSON object.

    `is_whole` False: the answer was cut off within the call, or continued in a way that is not a call. Then
    `arguments` are the beginning of a JSON object.
    """

    id: str
    name: str
    arguments: str
    is_whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `content` None: there was none (tool calls only)."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

"""How an answer is written: what its parser on the event loop and its stop watch on the engine thread read it by."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from reprise.chat.answers.markup import Markup, markup_of
from reprise.chat.answers.reader import Reader
from reprise.chat.text_model import TextModel
from reprise.core.job import Thinking


@dataclass(frozen=True, slots=True, eq=False)
class AnswerFormat:
    """The format of the answers to one request.

    `tools` and `tool_choice` are those of the request: without tools, or with "none", tool markup is content.
    `is_thinking_open`: the prompt ends inside thinking; `is_thinking_over`: behind it; `is_content_open`: inside
    content to be continued. `context` are the prompt's last tokens (a few suffice), needed where the answer continues a
    text.
    """

    text: TextModel
    _: KW_ONLY
    stops: Sequence[str] = ()
    is_thinking_open: bool = False
    is_thinking_over: bool = False
    is_content_open: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    context: Sequence[int] = ()
    thinking: Thinking | None = None
    holds_calls: bool = False
    """A call is emitted when it is complete, and not as it is written."""
    min_tokens: int = 0
    """Stop strings are not looked for in this many tokens."""

    @property
    def thinking_to_come(self) -> Thinking | None:
        """How the model may think before what it says; None where the prompt has it say that at once."""
        return None if self.is_thinking_over or self.is_content_open else self.thinking

    @property
    def has_tools(self) -> bool:
        return len(self.tools) > 0 and self.tool_choice != "none"

    def markup(self) -> Markup:
        return markup_of(
            self.text,
            has_tools=self.has_tools,
            is_thinking_open=self.is_thinking_open,
            is_content_open=self.is_content_open,
        )

    def reader(self, markup: Markup, *, holds_calls: bool = False) -> Reader:
        tools = self.tools if self.has_tools else ()
        return Reader(self.text, markup, tools=tools, context=self.context, holds_calls=holds_calls)

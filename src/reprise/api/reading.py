"""How a request's answer is to be read: parsers, stop strings, thinking and grammar for its choices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reprise.api.exchange import ServiceRequest
from reprise.chat.call_format import ModelCalls
from reprise.chat.parse import AnswerParser
from reprise.chat.request import ChatRequest
from reprise.chat.stop import StopWatch
from reprise.chat.text_model import TextModel
from reprise.core.job import Thinking
from reprise.core.tokens import Tokens

# A detokenizer needs the token before to know whether a space begins the text; a few are plenty.
_NUM_CONTEXT = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """Facts about how the answer is written, from which parsers and watches are made, one of each for a choice."""

    text: TextModel
    stops: tuple[str, ...]
    is_thinking_open: bool
    is_content_open: bool
    tools: tuple[Mapping[str, Any], ...]
    tool_choice: str | Mapping[str, Any]
    context: tuple[int, ...]
    thinking: Thinking | None
    holds_calls: bool
    min_tokens: int
    """No stop string is looked for in so many tokens."""

    def parser(self) -> AnswerParser:
        return AnswerParser(
            self.text,
            is_thinking_open=self.is_thinking_open,
            is_content_open=self.is_content_open,
            tools=self.tools,
            tool_choice=self.tool_choice,
            stops=self.stops,
            context=self.context,
            min_tokens=self.min_tokens,
            holds_calls=self.holds_calls,
        )

    def watch(self) -> Callable[[int], bool] | None:
        """The stop strings, for the engine thread; None if there are none."""
        if not self.stops:
            return None
        return StopWatch(
            self.text,
            self.stops,
            is_thinking_open=self.is_thinking_open,
            is_content_open=self.is_content_open,
            tools=self.tools,
            tool_choice=self.tool_choice,
            context=self.context,
            min_tokens=self.min_tokens,
        )


def reading_of(
    request: ServiceRequest, text: TextModel, tokens: Tokens, *, is_thinking_open: bool, default_budget: int | None
) -> Reading:
    """How the answer to this request, whose prompt is `tokens`, is to be read."""
    context = tuple(int(token) for token in tokens[-_NUM_CONTEXT:])
    if request.stop_tokens:
        text = replace(text, eos=text.eos | request.stop_tokens)
    if not isinstance(request.prompt, ChatRequest):
        return Reading(
            text=without_markup(text),
            stops=request.stops,
            is_thinking_open=False,
            is_content_open=True,
            tools=(),
            tool_choice="none",
            context=context,
            thinking=None,
            min_tokens=request.min_tokens,
            holds_calls=True,
        )
    return Reading(
        text=text,
        stops=request.stops,
        is_thinking_open=is_thinking_open,
        is_content_open=request.prompt.continue_final and not is_thinking_open,
        tools=tuple(request.prompt.tools),
        tool_choice=request.tool_choice,
        context=context,
        holds_calls=not request.streams_calls,
        thinking=_thinking(request, text, is_open=is_thinking_open, default_budget=default_budget),
        min_tokens=request.min_tokens,
    )


def _thinking(
    request: ServiceRequest, text: TextModel, *, is_open: bool, default_budget: int | None
) -> Thinking | None:
    if not text.think_start_tokens or not text.think_end_tokens:
        return None
    budget = default_budget if request.thinking_budget is None else request.thinking_budget
    return Thinking(start=text.think_start_tokens, end=text.think_end_tokens, budget=budget, is_open=is_open)


def without_markup(text: TextModel) -> TextModel:
    """The same tokenizer for text that is given as it is: no thinking, tool calls or channels are looked for."""
    return replace(
        text,
        think_start=None,
        think_end=None,
        tool_start=None,
        tool_end=None,
        parse_tool_call=None,
        calls=ModelCalls(),
        structural_markers=(),
        transitions={},
        initial_state=None,
    )

"""Chats with made-up calls, rendered by a model's chat template, for those who learn from the difference."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any

from reprise.chat.message_format import REASONING_KEYS, Form
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.template import ChatTemplate, RenderContext
from reprise.chat.text_model import TextModel
from reprise.core.errors import TemplateFailed

NAME, OTHER = "turnstile", "quarry"
FIRST_KEY, SECOND_KEY = "zebra", "yacht"
FIRST_VALUE, SECOND_VALUE = "Falcon over", "Mango under"
WORDS, ASKED = "Rowboat", "Sycamore"
IDS = ("kP3xQ9vL2", "mT7wZ4bN8")
"""Some templates insist on nine letters or digits."""

TYPED: Mapping[str, Any] = {
    "string": FIRST_VALUE,
    "number": 4711,
    "boolean": True,
    "null": None,
    "object": {"inner": [31, "Quince"]},
    "array": [17, "Quince"],
}
_LIST = {"type": "array", "items": {"type": ["integer", "string"]}}
_SCHEMAS: Mapping[str, Any] = {
    **{f"{kind}_{FIRST_KEY}": {"type": kind} for kind in TYPED},
    f"object_{FIRST_KEY}": {"type": "object", "properties": {"inner": _LIST}},
    f"array_{FIRST_KEY}": _LIST,
    FIRST_KEY: {"type": "string"},
    SECOND_KEY: {"type": "string"},
}


def _probe_tools(schemas: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    parameters: dict[str, Any] = {"type": "object", "properties": schemas, "required": []}
    return tuple(
        {"type": "function", "function": {"name": name, "description": "Counts.", "parameters": parameters}}
        for name in (NAME, OTHER)
    )


PROBE_TOOLS = _probe_tools(_SCHEMAS)
_SHOWN_TOOLS = _probe_tools({key: {"type": "string", "description": "It."} for key in _SCHEMAS})
"""What templates are shown of them: some know few types, and recurse without end at `null` or a list of types."""

MadeCall = tuple[str, Mapping[str, Any]]

FORMS = tuple(
    Form(has_text_arguments=as_text, fills_content=fills, has_null_content=not fills)
    for fills in (True, False)
    for as_text in (False, True)
)


_MARKER = re.compile(r"<\|[^|<>{}\s'\"]+\|>|\]<\][a-z]+\[>\[")
"""How special tokens look that a tokenizer may lack: a template that was put on another model's, or a converted one."""


class NotLearnt(Exception):
    """The renderings do not show a format."""


class CallProbes:
    """Renders chats with made-up calls in one form."""

    def __init__(self, text_model: TextModel, form: Form, *, has_plain_markers: bool = False) -> None:
        """`has_plain_markers`: what the template writes like special tokens counts as such, with any tokenizer."""
        self.text_model = text_model
        self._template = ChatTemplate(text_model)
        self._form = form
        written = _MARKER.findall(text_model.template_source) if has_plain_markers else ()
        self.splitters = sorted({text for text in (*text_model.splitters, *written) if text}, key=len, reverse=True)

    def calls(self, calls: Sequence[MadeCall], *, content: str | None = None, has_results: bool = True) -> str:
        """The chat in which the model made these calls, and each has its result."""
        made = [
            {"id": made_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for made_id, (name, arguments) in zip(IDS, calls, strict=False)
        ]
        results = [
            {"role": "tool", "content": "seen", "tool_call_id": made_id, "name": name}
            for made_id, (name, _) in zip(IDS, calls, strict=False)
        ]
        called: Message = {"role": "assistant", "content": content, "tool_calls": made}
        return self._render((called, *(results if has_results else ())))

    def words(self, *, reasoning: Mapping[str, str] | None = None, has_prompt: bool = False) -> str:
        """The chat in which the model answered in words."""
        said: Message = {"role": "assistant", "content": WORDS, **(reasoning or {})}
        return self._render((said, {"role": "user", "content": ASKED}), has_prompt=has_prompt)

    @cached_property
    def outside(self) -> tuple[str, ...]:
        """What stands in chats without calls, from the first question on."""
        texts: list[str] = []
        for key in dict.fromkeys(("content", *REASONING_KEYS, "tool_plan")):
            with suppress(NotLearnt):
                text = self.words(reasoning={key: WORDS}, has_prompt=True)
                texts.append(text[text.find(ASKED) :])
        return tuple(texts)

    @cached_property
    def opens_result(self) -> str:
        """The special token that the result of a call begins with; "" if it begins with none, or that is not shown."""
        called = [(NAME, {FIRST_KEY: FIRST_VALUE})]
        try:
            with_result, without = self.calls(called), self.calls(called, has_results=False).rstrip()
        except NotLearnt:
            return ""
        markup = first_markup(with_result.removeprefix(without), self.splitters)
        return markup if with_result.startswith(without) and markup in self.splitters else ""

    def instructions(self) -> tuple[str, str]:
        """A question with tools and one without."""
        return self._render((), has_prompt=True), self._render((), has_tools=False, has_prompt=True)

    def _render(self, messages: tuple[Message, ...], *, has_tools: bool = True, has_prompt: bool = False) -> str:
        asked: Message = {"role": "user", "content": ASKED}
        request = ChatRequest(messages=(asked, *messages), tools=_SHOWN_TOOLS if has_tools else ())
        if self.text_model.render is None:
            raise NotLearnt
        context = RenderContext(request=request, moment=datetime(2031, 3, 4), form=self._form)
        try:
            return self._template.text(context, request.messages, has_prompt=has_prompt)
        except TemplateFailed as failed:
            raise NotLearnt from failed


def first_markup(text: str, splitters: Sequence[str]) -> str:
    """The markup that a text begins with, white space left out."""
    text = text.lstrip()
    special = next((special for special in splitters if text.startswith(special)), None)
    if special is not None:
        return special
    tag = re.match(r"<[^\s<>]+>|\S+", text)
    return "" if tag is None else tag[0]

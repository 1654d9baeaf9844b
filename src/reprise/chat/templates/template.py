"""A model's chat template: turns messages into text, in the form that the template accepts."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jinja2 import TemplateSyntaxError

from reprise.chat.images import SeenImages, images_in, seen_in
from reprise.chat.message_format import (
    ID_LENGTHS,
    REASONING,
    REASONING_KEYS,
    USUAL_IDS,
    Form,
    forms,
    is_text_only,
    shortened_id,
    written,
)
from reprise.chat.request import ChatRequest, Message, call_of, result_of
from reprise.chat.templates.probe_turns import PROBE_TOOL, PROBE_TOOL_NAME
from reprise.chat.text_model import TextModel
from reprise.chat.tools import Tool
from reprise.core.abandon import stop_if_abandoned
from reprise.core.errors import BadRequest, TemplateFailed

T = TypeVar("T")

_RESERVED = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "template_dates",
    )
)
"""Names that the template's caller uses itself, so that a request's options cannot."""

_PROBE = "Reprise probe"
_WRITTEN_PART = re.compile("""['"](text|thinking)['"]""")


class ToolsAs(StrEnum):
    """The name under which a template looks for the tools, as far as any are known."""

    TOOLS = "tools"
    XML_TOOLS = "xml_tools"
    """SmolLM3, at first."""
    FUNCTIONS = "functions"
    """Firefunction: as JSON text, and a date beside it, in every chat."""

    def options(self, tools: Sequence[Tool], moment: datetime) -> dict[str, Any]:
        """Options for a rendering with these tools."""
        match self:
            case ToolsAs.TOOLS:
                return {"tools": [dict(tool) for tool in tools] if tools else None}
            case ToolsAs.XML_TOOLS:
                return {"xml_tools": [dict(tool) for tool in tools]} if tools else {}
            case ToolsAs.FUNCTIONS:
                functions = [tool.get("function", tool) for tool in tools]
                return {"functions": json.dumps(functions, ensure_ascii=False), "datetime": f"{moment:%Y-%m-%d}"}


_OTHER_TOOLS = rf"\b({ToolsAs.XML_TOOLS}|{ToolsAs.FUNCTIONS})\b"


_OPTION = "template_dates"
# On its own line, whose end the environment trims, so that the template's own first line stays a first line.
_MACRO = "{%- macro strftime_now(format) -%}{{ " + _OPTION + "[format] }}{%- endmacro %}\n"
_CALL = re.compile(r"\bstrftime_now\s*\(")
_CONSTANT_CALL = re.compile(r"""\bstrftime_now\s*\(\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*\)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateDates:
    """The date formats that a template asks for. `is_controlled`: all of them are known, so the answer is ours.

    Chat templates ask for today's date with `strftime_now(format)`. A macro of that name, put before the template,
    answers in place of the environment's function, with texts that the renderer gives: so the renderer knows and
    decides what date the model reads, one moment for all renderings of a request, and on demand one day for a whole
    chat. A template that computes its formats cannot be answered this way and keeps the clock of its environment.
    """

    source: str
    formats: tuple[str, ...]
    is_controlled: bool
    has_dates: bool

    def texts(self, moment: datetime) -> tuple[str, ...]:
        """What the template writes at this moment, one for each format."""
        return tuple(moment.strftime(form) for form in self.formats)

    def options(self, moment: datetime) -> Mapping[str, Any]:
        """Keyword arguments for `TextModel.render` that make `moment` the present."""
        if not self.is_controlled:
            return {}
        return {"chat_template": self.source, _OPTION: dict(zip(self.formats, self.texts(moment), strict=True))}


def read_dates(template_source: str) -> TemplateDates:
    """The dates in a template's source."""
    calls = len(_CALL.findall(template_source))
    constant = [single or double for single, double in _CONSTANT_CALL.findall(template_source)]
    is_controlled = calls > 0 and calls == len(constant)
    return TemplateDates(
        source=_MACRO + template_source if is_controlled else template_source,
        formats=tuple(dict.fromkeys(constant)) if is_controlled else (),
        is_controlled=is_controlled,
        has_dates=calls > 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderContext:
    """What stays the same in all renderings of one request: its tools, documents and options, and the moment."""

    request: ChatRequest
    moment: datetime
    form: Form


_FINDINGS: WeakKeyDictionary[Callable[..., str], dict[str, dict[str, Any]]] = WeakKeyDictionary()
"""What was found out by trying each template that is in use, by what renders it, by its source and by what was asked.
Whoever learns from a model (its calls, its thinking, its prompts) has a separate `ChatTemplate`, and none tries again
what another has tried."""


class ChatTemplate:
    """The chat template of a model. Everything it raises becomes `TemplateFailed` with the template's own sentence."""

    def __init__(self, text_model: TextModel, images: SeenImages | None = None) -> None:
        """`images`: what is known of those in the messages; None: the model sees none."""
        self._images = images
        self._render = text_model.render
        source = text_model.template_source
        known = {} if self._render is None else _FINDINGS.setdefault(self._render, {})
        self._found = known.setdefault(source, {})
        if not re.search(_OTHER_TOOLS, source):
            # Most templates name no other, and need no trial.
            self._found["tools_as"] = ToolsAs.TOOLS
        self.dates = self._once("dates", lambda: self._try_dates(read_dates(source)))

    def _once(self, name: str, find: Callable[[], T]) -> T:
        """What is known under this name; the first time it is found out by trying."""
        if name not in self._found:
            self._found[name] = find()
        return self._found[name]

    @property
    def takes_parts(self) -> bool:
        """Whether the template writes the text of content that is a list of parts."""
        return self._once("takes_parts", self._try_parts)

    @property
    def reasoning_key(self) -> str:
        """The key of a message under which the template looks for reasoning."""
        return self._once("reasoning_key", lambda: next(filter(self._reads, REASONING_KEYS), REASONING))

    @property
    def id_length(self) -> int | None:
        """How many letters and digits an id of a tool call must have; None: any id does."""
        return self._once("id_length", self._try_ids)

    @property
    def tools_as(self) -> ToolsAs:
        """How the template wants tools."""
        return self._once("tools_as", lambda: next(filter(self._shows_tools, ToolsAs), ToolsAs.TOOLS))

    def open_scene(self, request: ChatRequest, moment: datetime) -> tuple[RenderContext, str]:
        """Render the request. The context renders other messages in the same circumstances.

        Raises BadRequest (wrong request, model without template) and TemplateFailed.
        """
        self._refuse(request)
        complaint: TemplateFailed | None = None
        for form in self._forms(request.messages, takes_parts=self._needs_no_joining(request)):
            context = RenderContext(request=request, moment=moment, form=form)
            try:
                text = self.text(context, request.messages, is_continued=request.continue_final)
            except TemplateFailed as failed:
                # The last form leaves least to stumble over, so its complaint is likeliest the template's own.
                complaint = failed
            else:
                if text == "":
                    raise TemplateFailed("The chat template rendered these messages to nothing.", param="messages")
                return context, text
        assert complaint is not None, "there is at least one form"
        raise complaint

    def text(
        self,
        context: RenderContext,
        messages: Sequence[Message],
        *,
        is_continued: bool = False,
        has_prompt: bool = True,
        tools_as: ToolsAs | None = None,
    ) -> str:
        """Render messages in a context, with the generation prompt unless the last message is continued.

        A marker of images stands for images alone, each with its tag. Raises TemplateFailed.
        """
        request = context.request
        given: dict[str, Any] = {
            "add_generation_prompt": has_prompt and not is_continued,
            "continue_final_message": is_continued,
        }
        own: dict[str, Any] = {
            "documents": [dict(document) for document in request.documents] if request.documents else None,
            **(tools_as or self.tools_as).options(request.tools, context.moment),
            **request.template_options,
        }
        said, images = written(messages, context.form), seen_in(messages)
        if self._images is None:
            return self._rendered(said, **given, **own, **self.dates.options(context.moment))
        if images:
            # A marker in somebody's words could be taken for one of them.
            said, own = self._images.without_markers(said), self._images.without_markers(own)
        text = self._rendered(said, **given, **own, **self.dates.options(context.moment))
        if not images:
            # Also one that the template has joined, from two parts of a message.
            return self._images.without_markers(text)
        seen = self._images.written(text, images)
        if seen is None and (joined := self._images.without_split_markers(said)) is not said:
            text = self._rendered(joined, **given, **own, **self.dates.options(context.moment))
            seen = self._images.written(text, images)
        if seen is None:
            raise TemplateFailed(
                f"The chat template writes {text.count(self._images.marker)} images for the {len(images)} in the chat.",
                param="messages",
            )
        return seen

    def plain(self, text: str) -> str:
        """A rendered text as the model has it; of an image its marker alone."""
        return text if self._images is None else self._images.without_tags(text)

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        assert self._render is not None, "checked when the context was opened"
        stop_if_abandoned()
        try:
            return self._render(messages, **options)
        except Exception as error:
            # A template is a program that came with the model: it may raise anything.
            sentence = str(error) or type(error).__name__
            raise TemplateFailed(sentence, param="messages") from error

    def try_text(self, context: RenderContext, messages: Sequence[Message], *, has_prompt: bool = True) -> str | None:
        """The same in whatever form the template takes these messages, or None if it takes them in none."""
        usual = self._forms(messages, takes_parts=not context.form.joins_parts)
        for form in dict.fromkeys((context.form, *usual)):
            try:
                return self.text(replace(context, form=form), messages, has_prompt=has_prompt)
            except TemplateFailed:
                continue
        return None

    def _forms(self, messages: Sequence[Message], *, takes_parts: bool) -> tuple[Form, ...]:
        # Also where no message has reasoning: the stand-ins and answers that are rendered in this context may.
        return forms(messages, takes_parts=takes_parts, reasoning_as=self.reasoning_key, id_length=self.id_length)

    def _refuse(self, request: ChatRequest) -> None:
        if self._render is None:
            raise BadRequest("This model has no chat template. Send a prompt to /v1/completions instead.")
        if not request.messages:
            raise BadRequest("`messages` is empty. Send at least one message.", param="messages")
        if request.continue_final and request.messages[-1].get("role") != "assistant":
            raise BadRequest(
                "Only an assistant message can be continued: it must be the last message.", param="messages"
            )
        reserved = sorted(_RESERVED & request.template_options.keys())
        if reserved:
            raise BadRequest(f"`{reserved[0]}` cannot be a chat template option.", param="chat_template_kwargs")
        for message in request.messages:
            is_read = is_text_only(message.get("content")) or self.takes_parts
            if not is_read or (self._images is None and images_in([message])):
                raise BadRequest("This model reads text only. Send text content.", param="messages")

    def _needs_no_joining(self, request: ChatRequest) -> bool:
        return not any(isinstance(message.get("content"), list) for message in request.messages) or self.takes_parts

    def _try_dates(self, dates: TemplateDates) -> TemplateDates:
        """The same, not controlled where our date gives another text than the environment's: another source renders."""
        if self._render is None or not dates.is_controlled:
            return dates
        messages = [{"role": "user", "content": _PROBE}]
        try:
            plain = self._render(messages, add_generation_prompt=True)
        except Exception:
            # A template that refuses the probe shows nothing about its date.
            return dates
        try:
            ours = self._render(messages, add_generation_prompt=True, **dates.options(datetime.now()))
        except Exception:
            ours = None
        return dates if ours == plain else replace(dates, is_controlled=False, formats=())

    def _try_parts(self) -> bool:
        text = self._try_plainly(({"role": "user", "content": [{"type": "text", "text": _PROBE}]},), Form())
        if text is None:
            return False
        # A template that knows only text writes the list itself, quotes and all.
        return text.count(_PROBE) == 1 and not _WRITTEN_PART.search(text)

    def _shows_tools(self, tools_as: ToolsAs) -> bool:
        """Whether the template writes tools given under this name."""
        asked: Message = {"role": "user", "content": _PROBE}
        request = ChatRequest(messages=(asked,), tools=(PROBE_TOOL,))
        context = RenderContext(request=request, moment=datetime(2000, 1, 1), form=Form())
        try:
            return PROBE_TOOL_NAME in self.text(context, request.messages, tools_as=tools_as)
        except TemplateFailed:
            return False

    def _try_ids(self) -> int | None:
        if all(self._takes(_called_and_told(given)) for given in USUAL_IDS):
            return None
        for length in ID_LENGTHS:
            if self._takes(_called_and_told(shortened_id(_PROBE, length))):
                return length
        # It refuses tool calls for another reason.
        return None

    def _takes(self, messages: Sequence[Message]) -> bool:
        return any(
            self._try_plainly(messages, form) is not None
            for form in (*forms(messages, takes_parts=True), *forms(messages, takes_parts=False))
        )

    def _try_plainly(self, messages: Sequence[Message], form: Form) -> str | None:
        """The text of these messages in this form, without tools and options; None where they are refused."""
        request = ChatRequest(messages=tuple(messages))
        try:
            return self.text(RenderContext(request=request, moment=datetime(2000, 1, 1), form=form), messages)
        except TemplateFailed:
            return None

    def _reads(self, key: str) -> bool:
        """Whether reasoning under this key is written beside a tool call, where templates keep it longest, or last."""
        asked, called, result = _called_and_told(USUAL_IDS[0])
        called = {**called, "content": "", REASONING: _PROBE}
        answered: Message = {"role": "assistant", "content": "!", REASONING: _PROBE}
        for messages in ((asked, called, result), (asked, answered), (asked, answered, asked)):
            for form in forms(messages, takes_parts=True, reasoning_as=key, id_length=self.id_length):
                text = self._try_plainly(messages, form)
                # A template that knows only text writes a list of parts itself, quotes and all.
                if text is not None and _PROBE in text and not _WRITTEN_PART.search(text):
                    return True
        return False


def _called_and_told(call_id: str) -> tuple[Message, Message, Message]:
    """A question, a tool call with this id, and its result."""
    return (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call_of(call_id, "look", {"at": "it"})]},
        result_of(call_id, "look", "seen"),
    )


def syntax_fault(text_model: TextModel) -> str | None:
    """What keeps the chat template from being parsed, in a sentence; None if it is parsed, or there is none."""
    if text_model.render is None:
        return None
    try:
        text_model.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception:
        # It may want other messages: the error for a request names them.
        return None
    return None

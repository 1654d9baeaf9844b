"""Learning from the chat template what reasoning and content stand between, where a model's markers are not known.

An answer with reasoning, and one without, are rendered: what stands around the thought, and between it and the words,
is the markup. Reasoning that a template writes beside tool calls alone is looked for there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from reprise.chat.answers.markup import is_harmony
from reprise.chat.message_format import shortened_id
from reprise.chat.request import ChatRequest, Message
from reprise.chat.templates.template import ChatTemplate
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest

_ASKED, _THOUGHT, _WORDS = "Sycamore", "Thimble", "Rowboat"
_NAME = "turnstile"
_TAG = r"<[^\s<>]+>|\[[A-Z][A-Z_ ]*\]|\[/[A-Z_]+\]"
_ID = shortened_id(_NAME, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    start: str
    end: str


def with_learnt_thinking(text_model: TextModel) -> TextModel:
    """The model with the markers of its reasoning and of its content, as far as its template shows them.

    What is known already stays. Renders about half a dozen small chats.
    """
    if text_model.render is None or text_model.initial_state is not None or is_harmony(text_model):
        return text_model
    probes = _ThinkingProbes(text_model)
    around = () if text_model.structural_markers else probes.around_words()
    model = replace(text_model, structural_markers=(*text_model.structural_markers, *around))
    marks = None if text_model.think_start is not None else probes.marks("".join(around[:1]))
    if marks is None:
        return model
    return replace(
        model,
        think_start=marks.start,
        think_end=marks.end,
        think_start_tokens=tuple(text_model.encode(marks.start)),
        think_end_tokens=tuple(text_model.encode(marks.end)),
    )


class _ThinkingProbes:
    """Renders answers with and without reasoning."""

    def __init__(self, text_model: TextModel) -> None:
        self._template = ChatTemplate(text_model)
        self._splitters = sorted((text for text in text_model.splitters if text), key=len, reverse=True)
        self._ends = [end for end in (text_model.decode([token]) for token in text_model.eos) if end]
        self._known = [mark for mark in (text_model.think_start, text_model.think_end) if mark]

    def around_words(self) -> tuple[str, ...]:
        """The special tokens that content begins and ends with; nothing if it stands alone."""
        prompt, words = self._prompt(), self._text((_answer(),))
        if prompt is None or words is None or _WORDS not in words:
            return ()
        at = words.rfind(_WORDS)
        lead = words[_shared(prompt, words, self._splitters) : at]
        for mark in self._known:
            lead = lead.replace(mark, "")
        opening = lead.strip()
        if opening not in self._splitters or opening in self._ends or opening in prompt[prompt.rfind(_ASKED) :]:
            return ()
        closing = self._special_at(words[at + len(_WORDS) :])
        return (opening, closing) if closing is not None and closing not in self._ends else (opening,)

    def marks(self, opening: str) -> _Marks | None:
        """What stands around reasoning. `opening`: what content begins with."""
        plain = self._text((_answer(),)) or ""
        for chat in ((_answer(_THOUGHT),), (_answer(_THOUGHT), _question()), (_call(_THOUGHT), _RESULT)):
            text = self._text(chat)
            at = -1 if text is None else text.rfind(_THOUGHT)
            if text is None or at < 0:
                continue
            end = self._end(text[at + len(_THOUGHT) :], opening)
            for start in (self._last_markup(text[:at]), self._begun(text[:at])):
                is_apart = start != "" and not _stands_in(start, end, plain[plain.rfind(_ASKED) :])
                if is_apart and end not in ("", start, *self._ends):
                    return _Marks(start=start, end=end)
        return None

    def _end(self, behind: str, opening: str) -> str:
        """What ends reasoning, from what stands behind it."""
        between = re.split(f"{_WORDS}|{_NAME}", behind)[0].strip()
        if opening and _WORDS in behind and between.endswith(opening):
            return between.removesuffix(opening).rstrip()
        return self._special_at(between) or _tag_at(between)

    def _prompt(self) -> str | None:
        """A question with the generation prompt; None if the template has none."""
        prompt, bare, other = self._text((), has_prompt=True), self._text(()), self._text((_question(),))
        has_one = prompt != bare or (prompt is not None and other is not None and not other.startswith(prompt))
        return prompt if has_one else None

    def _begun(self, before: str) -> str:
        """The words with which the generation prompt alone begins the reasoning; "" if it does not."""
        prompt = self._prompt()
        opened = before[before.rfind(_ASKED) :]
        begun = "" if prompt is None else prompt[prompt.rfind(_ASKED) :]
        return begun[len(opened) :].strip() if begun.startswith(opened) else ""

    def _last_markup(self, text: str) -> str:
        text = text.rstrip()
        special = next((special for special in self._splitters if text.endswith(special)), None)
        tag = re.search(f"(?:{_TAG})$", text)
        return special or ("" if tag is None else tag[0])

    def _special_at(self, text: str) -> str | None:
        text = text.lstrip()
        return next((special for special in self._splitters if text.startswith(special)), None)

    def _text(self, messages: Sequence[Message], *, has_prompt: bool = False) -> str | None:
        request = ChatRequest(
            messages=(_question(), *messages), tools=(_TOOL,), template_options={"enable_thinking": True}
        )
        try:
            context, _ = self._template.open_scene(request, datetime(2031, 3, 4))
            return self._template.text(context, request.messages, has_prompt=has_prompt)
        except BadRequest:
            return None


def _tag_at(text: str) -> str:
    tag = re.match(_TAG, text)
    return "" if tag is None else tag[0]


def _stands_in(start: str, end: str, plain: str) -> bool:
    """Whether what begins reasoning stands in an answer without any, other than around nothing."""
    return start in re.sub(rf"{re.escape(start)}\s*({re.escape(end)}|$)", "", plain)


def _shared(one: str, other: str, splitters: Sequence[str]) -> int:
    """How far two texts are the same, up to a special token that is not cut apart."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    for special in splitters:
        for at in range(max(0, length - len(special) + 1), length):
            if other.startswith(special, at):
                return at
    return length


def _question() -> Message:
    return {"role": "user", "content": _ASKED}


def _answer(thought: str | None = None) -> Message:
    return {"role": "assistant", "content": _WORDS, **_thinking(thought)}


def _call(thought: str | None = None) -> Message:
    function = {"name": _NAME, "arguments": {"gate": "north"}}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **_thinking(thought)}


def _thinking(thought: str | None) -> dict[str, Any]:
    return {} if thought is None else {"reasoning_content": thought}


_RESULT: Message = {"role": "tool", "content": "seen", "tool_call_id": _ID, "name": _NAME}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Counts who passes.",
        "parameters": {"type": "object", "properties": {"gate": {"type": "string", "description": "Which."}}},
    },
}

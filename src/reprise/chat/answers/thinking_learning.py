"""Learning from the chat template what reasoning and content stand between, where a model's markers are not known.

An answer with reasoning, and one without, are rendered: what stands around the thought, and between it and the words,
is the markup. Reasoning that a template writes beside tool calls alone is looked for there.
"""

import re
from dataclasses import replace

from reprise.chat.answers.markup import is_harmony
from reprise.chat.calls.call_learning import (
    ASKED,
    FIRST_KEY,
    FIRST_VALUE,
    NAME,
    QUESTION,
    WORDS,
    CallProbes,
    NotLearnt,
    answer,
    call_chat,
    whole_markup,
)
from reprise.chat.request import Message
from reprise.chat.scan import common_length
from reprise.chat.text_model import TextModel

_THOUGHT = "Thimble"
_TAG = r"<[^\s<>]+>|\[[A-Z][A-Z_ ]*\]|\[/[A-Z_]+\]"


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
    return model.with_thinking(*marks)


class _ThinkingProbes:
    """Renders answers with and without reasoning."""

    def __init__(self, text_model: TextModel) -> None:
        self._probes = CallProbes(text_model, None)
        self._splitters, self._ends = self._probes.splitters, self._probes.message_ends
        self._known = [mark for mark in (text_model.think_start, text_model.think_end) if mark]

    def around_words(self) -> tuple[str, ...]:
        """The special tokens that content begins and ends with; nothing if it stands alone."""
        prompt, words = self._prompt(), self._text(answer({}))
        if prompt is None or words is None or WORDS not in words:
            return ()
        at = words.rfind(WORDS)
        lead = words[whole_markup(words, common_length(prompt, words), self._splitters) : at]
        for mark in self._known:
            lead = lead.replace(mark, "")
        opening = lead.strip()
        if opening not in self._splitters or opening in self._ends or opening in prompt[prompt.rfind(ASKED) :]:
            return ()
        closing = self._special_at(words[at + len(WORDS) :])
        return (opening, closing) if closing is not None and closing not in self._ends else (opening,)

    def marks(self, opening: str) -> tuple[str, str] | None:
        """What reasoning begins and ends with. `opening`: what content begins with."""
        plain = self._text(answer({})) or ""
        thought = {"reasoning_content": _THOUGHT}
        thoughtful = answer(thought)
        call, result = call_chat([(NAME, {FIRST_KEY: FIRST_VALUE})])
        for chat in ((thoughtful,), (thoughtful, QUESTION), ({**call, **thought}, result)):
            text = self._text(*chat)
            at = -1 if text is None else text.rfind(_THOUGHT)
            if text is None or at < 0:
                continue
            end = self._end(text[at + len(_THOUGHT) :], opening)
            for start in (self._last_markup(text[:at]), self._begun(text[:at])):
                is_apart = start != "" and not _stands_in(start, end, plain[plain.rfind(ASKED) :])
                if is_apart and end not in ("", start, *self._ends):
                    return start, end
        return None

    def _end(self, behind: str, opening: str) -> str:
        """What ends reasoning, from what stands behind it."""
        between = re.split(f"{WORDS}|{NAME}", behind)[0].strip()
        if opening and WORDS in behind and between.endswith(opening):
            return between.removesuffix(opening).rstrip()
        return self._special_at(between) or _tag_at(between)

    def _prompt(self) -> str | None:
        """A question with the generation prompt; None if the template has none."""
        prompt, bare, other = self._text(has_prompt=True), self._text(), self._text(QUESTION)
        has_one = prompt != bare or (prompt is not None and other is not None and not other.startswith(prompt))
        return prompt if has_one else None

    def _begun(self, before: str) -> str:
        """The words with which the generation prompt alone begins the reasoning; "" if it does not."""
        prompt = self._prompt()
        opened = before[before.rfind(ASKED) :]
        begun = "" if prompt is None else prompt[prompt.rfind(ASKED) :]
        return begun[len(opened) :].strip() if begun.startswith(opened) else ""

    def _last_markup(self, text: str) -> str:
        text = text.rstrip()
        special = next((special for special in self._splitters if text.endswith(special)), None)
        tag = re.search(f"(?:{_TAG})$", text)
        return special or ("" if tag is None else tag[0])

    def _special_at(self, text: str) -> str | None:
        text = text.lstrip()
        return next((special for special in self._splitters if text.startswith(special)), None)

    def _text(self, *messages: Message, has_prompt: bool = False) -> str | None:
        try:
            return self._probes.render(QUESTION, *messages, has_prompt=has_prompt)
        except NotLearnt:
            return None


def _tag_at(text: str) -> str:
    tag = re.match(_TAG, text)
    return "" if tag is None else tag[0]


def _stands_in(start: str, end: str, plain: str) -> bool:
    """Whether what begins reasoning stands in an answer without any, other than around nothing."""
    return start in re.sub(rf"{re.escape(start)}\s*({re.escape(end)}|$)", "", plain)

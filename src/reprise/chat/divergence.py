"""What kind of change it was: from the part of the prompt, the messages before and now, and the text on both sides."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise.chat.message_format import joined_text
from reprise.chat.probe_turns import head_length, last_user_at
from reprise.chat.rendered import PartKind, PromptPart, Rendered
from reprise.chat.request import Message
from reprise.chat.text_model import TextModel
from reprise.chat.volatile_prefix import moments_in, touches_clock, touches_date
from reprise.core.outcome import Reason

_NUM_AROUND = 24
"""Characters before a divergence that are looked at for a date or a changing value."""

_RANDOM = re.compile(r"[0-9A-Za-z_+/=-]{4,}")
_CHANNEL_OF_THINKING = "<|channel|>analysis"
_EARLY_TOKENS = 16
"""What agrees for fewer tokens than this agrees by the template's own words, not by the chat's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divergence:
    """The prompt `rendered` left the stored path at token `position`, which is character `char`, in `part`.

    `previous` is the earlier rendering that ends or goes on otherwise there, if one is known.
    """

    rendered: Rendered
    previous: Rendered | None
    position: int
    char: int
    part: PromptPart | None
    shared_text: str
    expected_text: str
    actual_text: str


def classify(divergence: Divergence, text_model: TextModel) -> Reason:
    """The reason for a divergence."""
    previous = divergence.previous
    if _is_in_head(divergence):
        return _classify_head(divergence, previous)
    if previous is not None and _options(previous) != _options(divergence.rendered) and not _is_edited(divergence):
        return Reason.TEMPLATE_OPTIONS_CHANGED
    part = divergence.part
    if part is None or part.index is None:
        is_thought = _is_thinking_lost(divergence, text_model)
        return Reason.THINKING_STRIPPED if is_thought else Reason.BRANCHED
    role = "assistant" if _is_behind_an_empty_answer(divergence) else part.role
    if role == "assistant" and _is_thinking_lost(divergence, text_model) and not _is_edited(divergence):
        return Reason.THINKING_STRIPPED
    reason = _classify_message(divergence, part.index, role)
    if reason is Reason.BRANCHED and part.index == 0 and divergence.position < _EARLY_TOKENS:
        return Reason.COLD
    return reason


def _classify_head(divergence: Divergence, previous: Rendered | None) -> Reason:
    rendered = divergence.rendered
    if previous is not None:
        heads_differ = _head(previous) != _head(rendered)
        tools_differ = previous.request.tools != rendered.request.tools
        if tools_differ and (not heads_differ or _is_tools(divergence)):
            return Reason.TOOLS_CHANGED
        if not heads_differ and previous.dates != rendered.dates:
            return _classify_dates(previous.dates, rendered.dates)
        if not heads_differ and not tools_differ:
            options_differ = _options(previous) != _options(rendered)
            return Reason.TEMPLATE_OPTIONS_CHANGED if options_differ else Reason.TEMPLATE_RERENDERED
    before = divergence.shared_text[-_NUM_AROUND:]
    expected, actual = before + divergence.expected_text, before + divergence.actual_text
    at = len(before)
    # The later of the two counts: in `2026-03-01 9:41` the minutes alone change from one request to the next.
    if touches_clock(expected, at) and touches_clock(actual, at):
        return Reason.CLOCK_CHANGED
    if touches_date(expected, at) and touches_date(actual, at):
        return Reason.DATE_CHANGED
    if _has_random_word(expected, len(before)) and _has_random_word(actual, len(before)):
        return Reason.BREAKER
    if previous is None and divergence.position < _EARLY_TOKENS:
        return Reason.COLD
    return Reason.TOOLS_CHANGED if _is_tools(divergence) else Reason.SYSTEM_CHANGED


def _classify_dates(before: tuple[str, ...], now: tuple[str, ...]) -> Reason:
    """What of the dates that the template itself writes is another."""
    days = [[moment.text for moment in moments_in(" ".join(texts)) if not moment.is_clock] for texts in (before, now)]
    return Reason.CLOCK_CHANGED if days[0] == days[1] else Reason.DATE_CHANGED


def _classify_message(divergence: Divergence, index: int, role: str | None) -> Reason:
    previous, messages = divergence.previous, divergence.rendered.request.messages
    if previous is None:
        return Reason.ANSWER_RENDERED_DIFFERENTLY if role == "assistant" else Reason.BRANCHED
    before = previous.request.messages
    if index >= len(before):
        return Reason.ANSWER_RENDERED_DIFFERENTLY if role == "assistant" else Reason.BRANCHED
    if _said(before[index]) == _said(messages[index]):
        # The same message ends otherwise: the chat went on from it in another way, or the template rewrote it.
        is_last = index in (len(before) - 1, len(messages) - 1)
        return Reason.BRANCHED if is_last and len(before) == len(messages) else Reason.TEMPLATE_RERENDERED
    if not _is_same_chat(before, messages, index):
        return Reason.BRANCHED
    last_user = last_user_at(messages)
    is_last = last_user is not None and index >= last_user
    return Reason.LAST_MESSAGE_EDITED if is_last else Reason.EARLIER_MESSAGE_EDITED


def _is_in_head(divergence: Divergence) -> bool:
    part = divergence.part
    return part is not None and (
        part.kind in (PartKind.HEAD, PartKind.SYSTEM, PartKind.TOOLS)
        or (part.index is not None and part.index < head_length(divergence.rendered.request.messages))
    )


def _is_tools(divergence: Divergence) -> bool:
    return divergence.part is not None and divergence.part.kind is PartKind.TOOLS


def _is_thinking_lost(divergence: Divergence, text_model: TextModel) -> bool:
    """Whether what was stored thinks here, and the prompt does not, or has an empty block in its place."""
    start = divergence.part.chars.start if divergence.part is not None else divergence.char
    text = divergence.rendered.text
    stop = divergence.part.chars.stop if divergence.part is not None else len(text)
    stored = text[start : divergence.char] + divergence.expected_text
    actual = text[start:stop]
    opening = text_model.think_start or _CHANNEL_OF_THINKING
    closing = text_model.think_end
    for marker in dict.fromkeys((opening, _CHANNEL_OF_THINKING)):
        if marker not in stored:
            continue
        if marker not in actual:
            return True
        thought = actual.split(marker, 1)[1]
        if closing is not None and thought.split(closing, 1)[0].strip() == "" and closing in thought:
            return True
    return False


def _is_behind_an_empty_answer(divergence: Divergence) -> bool:
    """Whether the answer to the previous request should stand here, and the template writes nothing of it."""
    part, previous = divergence.part, divergence.previous
    if part is None or part.index is None or previous is None:
        return False
    messages, answered_at = divergence.rendered.request.messages, len(previous.request.messages)
    if part.index <= answered_at or messages[answered_at].get("role") != "assistant":
        return False
    return all(other.index != answered_at for other in divergence.rendered.parts)


def _is_edited(divergence: Divergence) -> bool:
    """Whether the message at the divergence, which both requests have, says something else now."""
    part, previous = divergence.part, divergence.previous
    if part is None or part.index is None or previous is None or part.index >= len(previous.request.messages):
        return False
    return _said(previous.request.messages[part.index]) != _said(divergence.rendered.request.messages[part.index])


def _is_same_chat(before: tuple[Message, ...], now: tuple[Message, ...], index: int) -> bool:
    """Whether two chats that differ at `index` are one chat, edited: they agree on a message of the chat elsewhere."""
    head = head_length(now)
    pairs = zip(before, now, strict=False)
    return any(_said(a) == _said(b) and _said(a)[1] != "" for n, (a, b) in enumerate(pairs) if n >= head and n != index)


def _said(message: Message) -> tuple[Any, str, str]:
    return message.get("role"), joined_text(message.get("content")).strip(), repr(message.get("tool_calls"))


def _head(rendered: Rendered) -> list[tuple[Any, str, str]]:
    messages = rendered.request.messages
    return [_said(message) for message in messages[: head_length(messages)]]


def _options(rendered: Rendered) -> Mapping[str, Any]:
    return rendered.request.template_options


def _has_random_word(text: str, at: int) -> bool:
    """Whether the word at `at` looks drawn by lot: letters and digits mixed, or many digits."""
    for found in _RANDOM.finditer(text):
        if found.start() <= at <= found.end():
            word = found.group()
            digits = sum(character.isdigit() for character in word)
            return digits >= 6 or 0 < digits < len(word)
    return False

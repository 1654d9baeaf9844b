"""Prefix breakers: what clients write into the head of a prompt that changes, and costs everything behind it.

The rules are data. Values that mean nothing to the model are left out; what the model may need is named, with advice.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from reprise.chat.images import images_in
from reprise.chat.message_format import function_in, joined_text
from reprise.chat.request import ChatRequest, Cut, Message
from reprise.chat.templates.probe_turns import head_length

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_WEEKDAY = (
    r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    # Short names count as weekdays only before a date.
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b(?=[,.]?\s+(?:\d|[A-Z][a-z]{2}\b)))"
)
_DAY_OF_MONTH = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_NUMBER_OF_MONTH = r"(?:0?[1-9]|1[0-2])"
_DAY_NUMBER = r"(?:0?[1-9]|[12]\d|3[01])"

DATE = re.compile(
    rf"(?:\b{_WEEKDAY},?\s+)?(?:"
    # 2026-03-01
    rf"(?<![\d.-])\d{{4}}[-/]{_NUMBER_OF_MONTH}[-/]{_DAY_NUMBER}(?![\d-])"
    # 01.03.2026, 3/1/26: numbers with points are versions unless the year is whole
    rf"|(?<![\d./]){_DAY_NUMBER}(?:\.{_DAY_NUMBER}\.\d{{4}}|/{_DAY_NUMBER}/(?:\d{{4}}|\d{{2}}))(?![\d/])"
    # 1 March 2026, March 1st, Mar 1
    rf"|\b{_DAY_OF_MONTH}\s+{_MONTH}(?:,?\s+\d{{4}}\b)?"
    rf"|\b{_MONTH}\s+{_DAY_OF_MONTH}\b(?!:)(?:,?\s+\d{{4}}\b)?"
    rf")|\b{_WEEKDAY}"
)
"""A day, as clients and templates write it. Names of months and weekdays have their capital letter."""

CLOCK = re.compile(
    r"(?<![\d:.])(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?![\d:])(?:\s*[AaPp](?:\.[Mm]\.|[Mm]\b))?"
    r"|\b(?:1[0-2]|[1-9])\s*[AaPp][Mm]\b"
)
"""A time of day, with minutes or `am`/`pm`."""

_STAMP = re.compile(r"(?<!\d)1[5-9]\d{8}(?:\d{3})?(?!\d)")
"""Seconds or milliseconds since 1970, of this age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A date (`is_clock` False) or a time of day, as it stands in a text.

    They differ: the one changes with the day, the other with every request.
    """

    text: str
    start: int
    is_clock: bool


def moments_in(text: str) -> list[Moment]:
    """The dates and times of a text, in order."""
    found = [
        Moment(text=match.group().strip(), start=match.start(), is_clock=is_clock)
        for pattern, is_clock in ((DATE, False), (CLOCK, True), (_STAMP, True))
        for match in pattern.finditer(text)
    ]
    return sorted(found, key=lambda moment: moment.start)


def touches_date(text: str, at: int) -> bool:
    """Whether a date holds the character at `at` or ends just before it."""
    return _touches(DATE, text, at)


def touches_clock(text: str, at: int) -> bool:
    """Whether a time of day holds the character at `at` or ends just before it."""
    return _touches(CLOCK, text, at) or _touches(_STAMP, text, at)


def _touches(pattern: re.Pattern[str], text: str, at: int) -> bool:
    return any(found.start() <= at <= found.end() for found in pattern.finditer(text))


_NUM_SHOWN = 80
"""Characters of a system prompt that a note shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A breaker in a system prompt. What `pattern` finds is left out if `is_removed`, else named with the advice."""

    name: str
    pattern: re.Pattern[str]
    is_removed: bool = False
    advice: str = ""


_PRESENT = re.compile(r"\b(?:today|current(?:ly)?|now|date|time|clock)\b|as of\b", re.I)
"""Words that mark a date as the present one: dates in examples and changelogs stay the same."""
_NUM_BEFORE = 60
"""Characters before a date, on its line, that are searched for them."""

RULES = (
    Rule(
        # Claude Code: `x-anthropic-billing-header: cc_version=…; cc_entrypoint=…; cch=…;`, another with each request.
        name="billing line",
        pattern=re.compile(r"^[^\S\n]*x-[a-z0-9-]*(?:billing|attribution)-header:[^\n]*(?:\n|\Z)", re.I | re.M),
        is_removed=True,
    ),
    Rule(
        name="working directory",
        pattern=re.compile(r"^[^\n]*(?:<cwd>|\bworking directory\b[^\n]*[/\\:]|\bcwd\s*[:=])[^\n]*$", re.I | re.M),
        advice="chats in other directories share nothing after it; put it in the first user message",
    ),
    Rule(
        name="git status",
        pattern=re.compile(
            r"^[^\n]*(?:\bgit ?status\b[^\n]*:|\bcurrent branch:|\brecent commits:)[^\n]*$", re.I | re.M
        ),
        advice="everything after it is computed again after each file change; put it in the last message",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalized:
    """A request without what means nothing to the model; `notes` name what was found and done."""

    request: ChatRequest
    notes: tuple[str, ...] = ()


def normalize(
    request: ChatRequest,
    *,
    sorts_tools: bool,
    notes_of: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None,
) -> Normalized:
    """Leave out of the system prompt what may be left out, name the rest, and sort the tools by name if wanted.

    `notes_of`: `head_notes`, from a caller that remembers what it returned.
    """
    head = head_length(request.messages)
    texts = tuple(joined_text(message.get("content")) for message in request.messages[:head])
    notes = list((notes_of or head_notes)(texts))
    for rule in RULES:
        if rule.is_removed:
            request = _without(request, rule.pattern, head)
    if sorts_tools:
        tools = tuple(sorted(request.tools, key=lambda tool: (_tool_name(tool), _json(tool))))
        if tools != request.tools:
            request = replace(request, tools=tools)
            notes.append("tools sorted by name")
    return Normalized(request=request, notes=tuple(notes))


def reordered_tools(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A note if two requests have the same tools in another order."""
    if list(before) == list(now) or sorted(map(_json, before)) != sorted(map(_json, now)):
        return ()
    return ("the order of the tools changed, which breaks the prefix: --stable-tools sorts them",)


def reencoded_images(before: Sequence[Message], now: Sequence[Message]) -> tuple[str, ...]:
    """A note if a message that two requests of a chat have shows another file of the same size now."""
    known = {image.content for image in images_in(before)} if images_in(now) else set[bytes]()
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        if (old.get("role"), joined_text(old.get("content"))) != (new.get("role"), joined_text(new.get("content"))):
            break
        for one, other in zip(images_in([old]), images_in([new]), strict=False):
            is_new = one != other and other.content not in known
            if is_new and (one.width, one.height) == (other.width, other.height):
                return (
                    f"message {index} has another image of {one.width} x {one.height} than before: a client that "
                    "encodes an image again on each request breaks the prefix; send the same bytes",
                )
    return ()


def head_notes(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Notes on the texts of system messages."""
    return (*(note for rule in RULES for note in _notes(rule, texts)), *_moment_notes(texts))


def _notes(rule: Rule, texts: Sequence[str]) -> list[str]:
    for text in texts:
        found = rule.pattern.search(text)
        if found is not None:
            if rule.is_removed:
                return [f"{rule.name} left out of the system prompt"]
            shown = found.group().strip()[:_NUM_SHOWN]
            return [f"the system prompt contains a {rule.name} ({shown!r}): {rule.advice}"]
    return []


def present_moments(text: str) -> list[Moment]:
    """The first date and the first time of day that a text gives as the present one."""
    found: dict[bool, Moment] = {}
    for moment in moments_in(text):
        line_at = text.rfind("\n", 0, moment.start) + 1
        lead = text[max(line_at, moment.start - _NUM_BEFORE) : moment.start]
        if _PRESENT.search(lead) is not None:
            found.setdefault(moment.is_clock, moment)
    return [found[is_clock] for is_clock in (True, False) if is_clock in found]


_MOMENT_ADVICE = {
    True: "everything after it is computed again on every request; leave it out, or use only the date",
    False: "everything after it is computed again when the date changes; put it in the last message",
}


def _moment_notes(texts: Sequence[str]) -> list[str]:
    notes: dict[bool, str] = {}
    for text in texts:
        for moment in present_moments(text):
            name = "time of day" if moment.is_clock else "date"
            notes.setdefault(
                moment.is_clock,
                f"the system prompt contains a {name} ({moment.text!r}): {_MOMENT_ADVICE[moment.is_clock]}",
            )
    return list(notes.values())


def _without(request: ChatRequest, pattern: re.Pattern[str], head: int) -> ChatRequest:
    messages = tuple(
        {**message, "content": _content_without(message.get("content"), pattern)} if index < head else message
        for index, message in enumerate(request.messages)
    )
    if messages == request.messages:
        return request
    cuts = tuple(
        _moved(cut, request.messages[cut.message], pattern) if cut.message < head else cut for cut in request.cuts
    )
    return replace(request, messages=messages, cuts=cuts)


def _content_without(content: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(content, str):
        return pattern.sub("", content)
    if isinstance(content, list):
        return [_part_without(part, pattern) for part in cast(list[Any], content)]
    return content


def _part_without(part: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(part, str):
        return pattern.sub("", part)
    if not isinstance(part, Mapping):
        return part
    fields = cast(Mapping[str, Any], part)
    text = fields.get("text")
    return {**fields, "text": pattern.sub("", text)} if isinstance(text, str) else fields


def _moved(cut: Cut, message: Message, pattern: re.Pattern[str]) -> Cut:
    """The same place in the message's text when what the pattern finds is gone."""
    text = joined_text(message.get("content"))
    spans = [found.span() for found in pattern.finditer(text)]
    gone = sum(min(stop, cut.num_chars) - start for start, stop in spans if start < cut.num_chars)
    return replace(cut, num_chars=cut.num_chars - gone)


def _tool_name(tool: Mapping[str, Any]) -> str:
    name = function_in(tool).get("name")
    return name if isinstance(name, str) else ""


def _json(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool, sort_keys=True, default=str)

"""Dates: as they stand in texts, and as chat templates ask for them.

In a text a date is told apart from a time of day: the one changes with the day, the other with every request.

Chat templates ask for today's date with `strftime_now(format)`. A macro of that name, put before the template, answers
in place of the environment's function, with texts that the renderer gives: so the renderer knows and decides what date
the model reads, one moment for all renderings of a request, and on demand one day for a whole chat. A template that
computes its formats cannot be answered this way and keeps the clock of its environment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_WEEKDAY = (
    r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    # Short names are words of their own kind only before a date.
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
    """A date (`is_clock` False) or a time of day, as it stands in a text."""

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


_OPTION = "template_dates"
# On its own line, whose end the environment trims, so that the template's own first line stays a first line.
_MACRO = "{%- macro strftime_now(format) -%}{{ " + _OPTION + "[format] }}{%- endmacro %}\n"
_CALL = re.compile(r"\bstrftime_now\s*\(")
_CONSTANT_CALL = re.compile(r"""\bstrftime_now\s*\(\s*(?:'([^'\\]*)'|"([^"\\]*)")\s*\)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateDates:
    """The date formats that a template asks for. `is_controlled`: all of them are known, so the answer is ours."""

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

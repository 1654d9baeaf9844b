"""Today's date in a chat template: one moment for all renderings of a request, and on demand one day for a whole chat.

Chat templates ask for the date with `strftime_now(format)`. A macro of that name, put before the template, answers in
place of the environment's function, with texts that the renderer gives: so the renderer knows and decides what date the
model reads. A template that computes its formats cannot be answered this way and keeps the clock of its environment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

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

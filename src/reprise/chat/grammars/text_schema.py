"""What a JSON schema asks of text, as regular expressions: for texts that stand in a call without JSON's quotes."""

import re
from collections.abc import Mapping
from typing import Any, cast

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_%+-]+(\.[A-Za-z0-9_%+-]+)*@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z]{2,24})+",
}
"""Dates, times and addresses as RFC 3339, 4122 and 5321 write them, the usual ones."""

_UNSUPPORTED = re.compile(r"\(\?(?![:])|\\[bBAzZ1-9]")
"""Look-around, named groups, flags, word boundaries and references."""

_MAX_LENGTH_OF_PATTERN = 200

_UNESCAPED = r"(?<!\\)(?:\\\\)*"
_ANCHOR = re.compile(rf"{_UNESCAPED}(?:\[(?:\\.|[^\]\\])*\]|([\^$]))")


def text_terms(schema: Mapping[str, Any]) -> list[str]:
    """Lark regular expressions that a text of this schema matches, all of them, as a whole; none if any text does.

    A pattern with look-around, or with anchors elsewhere than at its ends, and formats that are not known, ask nothing;
    nor do lengths above some hundred beside a pattern.
    """
    pattern = schema.get("pattern")
    found = (whole_pattern(pattern) if isinstance(pattern, str) else None, _FORMATS.get(str(schema.get("format"))))
    terms = [lark_regex(text) for text in found if text is not None]
    fewest, most = schema.get("minLength", 0), schema.get("maxLength")
    # A state for each length and place in a pattern would be too many.
    if (fewest or most is not None) and (not terms or max(fewest, most or 0) <= _MAX_LENGTH_OF_PATTERN):
        terms.append(f"/(?s:.{{{fewest},{'' if most is None else most}}})/")
    return terms


def whole_pattern(pattern: str) -> str | None:
    """The regular expression for whole texts in which this one is found; None where it cannot be had.

    >>> whole_pattern("^[a-c]+")
    '(?:[a-c]+)(?s:.*)'
    """
    if not _is_regex(pattern):
        return None
    begins = pattern.startswith("^")
    ends = re.search(rf"{_UNESCAPED}\$\Z", pattern) is not None
    core = pattern[begins : len(pattern) - ends]
    has_ways = (begins or ends) and "|" in re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|\([^()]*\)", "", core)
    if _UNSUPPORTED.search(core) or any(found[1] for found in _ANCHOR.finditer(core)) or has_ways:
        return None
    anything = "(?s:.*)"
    return f"{'' if begins else anything}(?:{core}){'' if ends else anything}"


def with_known_patterns(schema: Any) -> Any:
    """The schema without regular expressions that no grammar has (look-around, word boundaries, references)."""
    match schema:
        case dict():
            parts = cast("dict[str, Any]", schema)
            return {key: with_known_patterns(part) for key, part in parts.items() if not _has_unknown(key, part)}
        case list():
            return [with_known_patterns(part) for part in cast("list[Any]", schema)]
        case _:
            return schema


def _has_unknown(key: str, part: Any) -> bool:
    patterns: list[str] = []
    if key == "pattern" and isinstance(part, str):
        patterns = [part]
    elif key == "patternProperties" and isinstance(part, dict):
        patterns = [*cast("dict[str, Any]", part)]
    return any(_UNSUPPORTED.search(pattern) or not _is_regex(pattern) for pattern in patterns)


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def lark_regex(pattern: str) -> str:
    """The literal of a regular expression in Lark."""
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern).replace("\n", r"\n") + "/"

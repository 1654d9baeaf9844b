"""Tool calls written in a model's own format, for templates that write none: the reverse of `call_reader`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from reprise.chat.call_format import ID, ID_START, ID_STOP, INDEX, CallFormat, JsonArguments, KeyedArguments
from reprise.chat.calls.tool_types import type_name

_MADE_ID = "a1B2c3D4e"
"""Stands for an id: calls and results are joined by their order where they are text."""


def written_section(form: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """These calls, at least one, between the markers of their sections. O(text)."""
    written = [_written_call(form, number, name, arguments) for number, (name, arguments) in enumerate(calls)]
    joiner = "\n" if form.between is None else form.between
    if form.has_own_section or not form.is_parallel:
        return joiner.join(form.start + form.opening + call + form.ending + form.end for call in written)
    return form.start + form.opening + joiner.join(written) + form.ending + form.end


def _written_call(form: CallFormat, number: int, name: str, arguments: Mapping[str, Any]) -> str:
    match form.arguments:
        case JsonArguments():
            text = _json(arguments)
        case KeyedArguments() as keyed:
            text = keyed.between.join(_argument(keyed, key, value) for key, value in arguments.items())
    head, middle, tail = (_filled(text, number) for text in (form.head, form.middle, form.tail))
    return head + (_json(name)[1:-1] if form.name_is_quoted else name) + middle + text + tail


def _filled(markup: str, number: int) -> str:
    return markup.replace(INDEX, str(number)).replace(ID, _MADE_ID).replace(ID_START, "").replace(ID_STOP, "")


def _argument(keyed: KeyedArguments, key: str, value: Any) -> str:
    if isinstance(value, str):
        text, opening = keyed.quote + _inside(value, keyed.quote) + keyed.quote, keyed.value_opening
    else:
        kind = type_name(value)
        text = _nested(value, keyed) if keyed.item else _native(value, keyed) if keyed.has_bare_keys else _json(value)
        opening = keyed.opening("number" if kind == "integer" else kind)
    return keyed.key_opening + key + opening + text + keyed.ending(key)


def _nested(value: Any, keyed: KeyedArguments) -> str:
    """A value whose parts are written as arguments are."""
    match value:
        case dict() if value:
            items = cast("dict[str, Any]", value).items()
            return keyed.between.join(_argument(keyed, key, part) for key, part in items)
        case list() if value:
            return keyed.between.join(_argument(keyed, keyed.item, part) for part in cast("list[Any]", value))
        case _:
            return _json(value)


def _inside(text: str, quote: str) -> str:
    """Text as it stands between quotes: escaped where the language knows escapes."""
    if quote not in ("'", '"'):
        return text
    escaped = _json(text)[1:-1]
    return escaped if quote == '"' else escaped.replace('\\"', '"').replace("'", "\\'")


def _native(value: Any, keyed: KeyedArguments) -> str:
    """A value whose objects have bare keys, and whose text stands between the format's quotes."""
    match value:
        case str():
            return keyed.quote + value + keyed.quote
        case list():
            return "[" + ",".join(_native(item, keyed) for item in cast("list[Any]", value)) + "]"
        case dict():
            items = cast("dict[str, Any]", value).items()
            return "{" + ",".join(f"{key}:{_native(item, keyed)}" for key, item in items) + "}"
        case _:
            return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

"""What a chat template taught, as TOML: `reprise inspect --learnt` prints it, and a file overrides what is learnt.

    [thinking]
    start = "<think>"
    end = "</think>"

    [content]
    markers = []

    [calls]
    start = "<tool_call>"
    …

    [calls.arguments]
    form = "json"

A table replaces what was learnt of its subject, and what has no table stays as it was learnt. `thinking = "none"` and
`calls = "none"` say that there is nothing. The fields of `calls` are those of `CallFormat`, with hyphens. The channels
of gpt-oss are printed in the same format, and cannot be changed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from difflib import get_close_matches
from typing import Any, cast, get_type_hints

import tomlkit

from reprise.chat.answers.markup import is_harmony
from reprise.chat.call_format import (
    HARMONY_CALLS,
    ID,
    ID_START,
    ID_STOP,
    INDEX,
    KEY,
    CallFormat,
    KeyedArguments,
    ModelCalls,
)
from reprise.chat.text_model import TextModel
from reprise.core.errors import LoadFailed

FILE_NAME = "reprise-learnt.toml"
"""The file beside a model that overrides what its template taught."""

NONE = "none"

_HOLES: Mapping[str, str] = {
    INDEX: "⟨number⟩",
    ID: "⟨id⟩",
    KEY: "⟨key⟩",
    ID_START: "⟨id begins⟩",
    ID_STOP: "⟨id ends⟩",
}
"""How what differs from call to call is written among the markup."""

_JSON, _KEYED = "json", "keyed"
"""Forms of arguments: one JSON object (None in a `CallFormat`), or one by one."""
_HARMONY_THINKING = ("<|channel|>analysis<|message|>", "<|end|>")
_HARMONY_CONTENT = "<|channel|>final<|message|>"
_EXAMPLE = ("look_up", {"what": "Falcon"})


def learnt_toml(text_model: TextModel) -> str:
    """What was learnt of a model, as a file that `with_learnt` reads to the same."""
    found: dict[str, Any] = {}
    calls, start, end = text_model.calls.format, text_model.think_start, text_model.think_end
    markers = list(text_model.structural_markers)
    if is_harmony(text_model):
        calls, start, end, markers = HARMONY_CALLS, *_HARMONY_THINKING, [_HARMONY_CONTENT]
    if start is None or end is None:
        found["thinking"] = NONE
    if calls is None:
        found["calls"] = NONE
    if start is not None and end is not None:
        found["thinking"] = {"start": start, "end": end}
    found["content"] = {"markers": markers}
    if calls is not None:
        found["calls"] = _table(calls)
    return tomlkit.dumps(found)  # pyright: ignore[reportUnknownMemberType]


def _table(record: CallFormat | KeyedArguments) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name == "arguments":
            table[_key(field)] = {"form": _JSON} if value is None else {"form": _KEYED, **_table(value)}
        elif isinstance(value, tuple):
            pairs = cast("tuple[tuple[str, str], ...]", value)
            table |= {_key(field): {kind: _shown(text) for kind, text in pairs}} if pairs else {}
        elif value is not None:
            table[_key(field)] = _shown(value) if isinstance(value, str) else value
    # In TOML, tables follow the values.
    return dict(sorted(table.items(), key=lambda item: isinstance(item[1], dict)))


def with_learnt(text_model: TextModel, text: str, *, source: str) -> TextModel:
    """The model with what this TOML says, in place of what was learnt. Raises LoadFailed; `source`: where it stands."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LoadFailed(f"{source}: it is not valid TOML: {error}.") from error
    try:
        _check_keys(given, known=("thinking", "content", "calls"), place="")
        if is_harmony(text_model):
            own = tomllib.loads(learnt_toml(text_model))
            if any(given[key] != own[key] for key in given):
                raise ValueError("the model answers in the channels of gpt-oss, which cannot be changed.")
            return text_model
        if "thinking" in given:
            text_model = text_model.with_thinking(*_thinking(given["thinking"]))
        if "content" in given:
            text_model = replace(text_model, structural_markers=_markers(given["content"]))
        if "calls" in given:
            calls = calls_in(given["calls"], shows_tools=text_model.calls.shows_tools)
            text_model = replace(text_model, calls=calls)
    except ValueError as error:
        raise LoadFailed(f"{source}: {error} `reprise inspect MODEL --learnt` prints a whole file.") from error
    return text_model


def _thinking(given: object) -> tuple[str | None, str | None]:
    if given == NONE:
        return None, None
    table = _of_table(given, "thinking")
    _check_keys(table, known=("start", "end"), place="thinking")
    return _markup(table.get("start"), "thinking.start"), _markup(table.get("end"), "thinking.end")


def _markers(given: object) -> tuple[str, ...]:
    table = _of_table(given, "content")
    _check_keys(table, known=("markers",), place="content")
    markers = table.get("markers")
    if not isinstance(markers, list):
        raise ValueError("content.markers must be a list of texts.")
    return tuple(_markup(marker, "content.markers") for marker in cast("list[object]", markers))


def calls_in(given: object, *, shows_tools: bool) -> ModelCalls:
    """The calls that a file's `calls` describes. Raises ValueError."""
    if given == NONE:
        return ModelCalls(shows_tools=shows_tools)
    form = _record(CallFormat, _of_table(given, "calls"), "calls")
    return ModelCalls(format=form, example=form.written([_EXAMPLE]), shows_tools=shows_tools)


def _record(kind: type[Any], table: Mapping[str, Any], place: str) -> Any:
    """A record of this kind from a table with its fields."""
    known = {_key(field): field for field in fields(kind)}
    _check_keys(table, known=tuple(known), place=place)
    hints = get_type_hints(kind)
    values = {
        field.name: _value(hints[field.name], table[key], f"{place}.{key}")
        for key, field in known.items()
        if key in table
    }
    for key, field in known.items():
        if field.name not in values and field.default is MISSING:
            if type(None) not in getattr(hints[field.name], "__args__", ()):
                raise ValueError(f"{place}.{key} is missing.")
            values[field.name] = None
    try:
        return kind(**values)
    except AssertionError:
        raise ValueError(
            f"[{place}] cannot be read back: markup that begins or ends something must not be blank."
        ) from None


def _value(hint: Any, given: object, place: str) -> Any:
    if hint is bool:
        if not isinstance(given, bool):
            raise ValueError(f"{place} must be true or false.")
        return given
    if hint == KeyedArguments | None:
        table = dict(_of_table(given, place))
        form = table.pop("form", None)
        if form not in (_JSON, _KEYED):
            raise ValueError(f'{place}.form must be "json" or "keyed".')
        if form == _KEYED:
            return _record(KeyedArguments, table, place)
        _check_keys(table, known=("form",), place=place)
        return None
    if getattr(hint, "__origin__", None) is tuple:
        return tuple((kind, _text(text, f"{place}.{kind}")) for kind, text in _of_table(given, place).items())
    return _text(given, place)


def _markup(given: object, place: str) -> str:
    text = _text(given, place)
    if not text.strip():
        raise ValueError(f"{place} must not be blank.")
    return text


def _text(given: object, place: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{place} is missing." if given is None else f"{place} must be a text.")
    for hole, shown in _HOLES.items():
        given = given.replace(shown, hole)
    return given


def _shown(text: str) -> str:
    for hole, shown in _HOLES.items():
        text = text.replace(hole, shown)
    return text


def _of_table(given: object, place: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{place} must be a table{'' if '.' in place or place == 'content' else f', or {NONE!r}'}.")
    return cast("dict[str, Any]", given)


def _check_keys(table: Mapping[str, Any], *, known: tuple[str, ...], place: str) -> None:
    for key in table:
        if key not in known:
            name = f"{place}.{key}" if place else key
            near = get_close_matches(key, known, n=1)
            hint = f"do you mean {near[0]}?" if near else f"known here: {', '.join(known)}."
            raise ValueError(f"{name} is unknown: {hint}")


def _key(field: Field[Any]) -> str:
    return field.name.replace("_", "-")

"""Tools and tool calls: what a model's parser gets, and how its results are used."""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from reprise.chat.answer import ToolCall
from reprise.chat.text_model import TextModel

_MAX_CLOSED = 20
"""Places that are tried: a key without its value is never far from the end."""

Tool = Mapping[str, Any]
"""A tool in OpenAI form."""


def new_call_id() -> str:
    """A fresh id, as OpenAI forms it."""
    return f"call_{secrets.token_hex(12)}"


def function_of(tool: Tool) -> dict[str, Any]:
    """The function of a tool, with `parameters` that parsers can rely on: an object of named schemas."""
    function = _as_dict(tool.get("function")) or {}
    parameters = _as_dict(function.get("parameters")) or {}
    properties = _as_dict(parameters.get("properties")) or {}
    schemas = {name: _as_dict(schema) or {} for name, schema in properties.items()}
    return {**function, "parameters": {**parameters, "properties": schemas}}


def names_of(tools: Sequence[Tool]) -> tuple[str, ...]:
    """The names of the tools that have one."""
    return tuple(name for tool in tools if isinstance(name := function_of(tool).get("name"), str))


def parse_calls(
    text_model: TextModel,
    text: str,
    *,
    tools: Sequence[Tool],
    taken: Collection[str] = (),
    new_id: Callable[[], str] = new_call_id,
) -> tuple[ToolCall, ...] | None:
    """The calls in the text between the model's tool markers, or None if that is not a call as it should be.

    A model's own ids are kept unless they are `taken`.
    """
    parse = text_model.parse_tool_call
    if parse is None:
        return None
    known = [{"type": "function", "function": function_of(tool)} for tool in tools]
    # Some parsers refuse a call with one argument of the wrong type. Without the tools' types they take it as text,
    # and the client can tell the model what is wrong.
    for given in (known, None):
        try:
            parsed: Any = parse(text.strip(), given)
        except Exception:  # whatever a parser raises at a model's text
            continue
        return make_calls(parsed, taken=taken, new_id=new_id)
    # LongCat's parser does not know calls without arguments. Without an end marker it may be a call cut short.
    name = text.strip()
    is_bare = bool(text_model.tool_end) and name in names_of(tools)
    return make_calls({"name": name}, taken=taken, new_id=new_id) if is_bare else None


def make_calls(
    parsed: object, *, taken: Collection[str] = (), new_id: Callable[[], str] = new_call_id
) -> tuple[ToolCall, ...] | None:
    """Calls from what a parser gave: a mapping or a list of them; None if any is malformed, or there is none."""
    entries = cast("list[object]", parsed) if isinstance(parsed, list) else [parsed]
    calls: list[ToolCall] = []
    used = set(taken)
    for entry in entries:
        call = _make_call(entry, used=used, new_id=new_id)
        if call is None:
            return None
        used.add(call.id)
        calls.append(call)
    return tuple(calls) or None


def _make_call(entry: object, *, used: Collection[str], new_id: Callable[[], str]) -> ToolCall | None:
    fields = _as_dict(entry)
    if fields is None:
        return None
    name = fields.get("name")
    # Llama and some fine-tunes say `parameters`.
    arguments = arguments_text(fields.get("arguments", fields.get("parameters", {})))
    if not isinstance(name, str) or not name or not is_encodable(name) or arguments is None:
        return None
    if name == "unknown" and json.loads(arguments).keys() == {"raw"}:
        # The GLM parser's answer instead of an exception.
        return None
    own_id = fields.get("id")
    keeps_id = isinstance(own_id, str) and len(own_id) > 0 and own_id not in used and is_encodable(own_id)
    return ToolCall(id=cast("str", own_id) if keeps_id else new_id(), name=name, arguments=arguments)


def arguments_text(arguments: object) -> str | None:
    """The text of one JSON object, or None if the arguments are none. Text that holds a JSON object is taken as it."""
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        # Parsers that read Python literals give values that JSON lacks, such as sets: their text stands for them.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False, default=str)
        return text if is_encodable(text) else json.dumps(arguments, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return None


def begun_object(text: str) -> dict[str, Any]:
    """The object that a text of arguments stands for; of one that was cut short what is whole, with begun text.

    >>> begun_object('{"path": "a.py", "lines": [1, 2')
    {'path': 'a.py', 'lines': [1]}
    """
    try:
        whole: Any = json.loads(text)
    except (ValueError, RecursionError):
        whole = _closed(text)
    return _as_dict(whole) or {}


def _closed(text: str) -> Any:
    """A JSON text that was cut short, with what is open closed; what cannot be closed is left out."""
    closing = ""
    # Where the text can be cut, and what closes it there: behind values, and behind what opens.
    places: list[tuple[int, str]] = []
    is_string = is_escaped = False
    for at, char in enumerate(text):
        if is_string:
            is_string = is_escaped or char != '"'
            is_escaped = not is_escaped and char == "\\"
            places += [] if is_string else [(at + 1, closing)]
        elif char == '"':
            is_string = True
        elif char in "{[":
            closing = ("}" if char == "{" else "]") + closing
            places.append((at + 1, closing))
        elif char in "}]":
            closing = closing[1:]
            places.append((at + 1, closing))
        elif char == ",":
            places.append((at, closing))
    if is_string:
        places.append((len(text) - is_escaped, '"' + closing))
    for at, close in reversed(places[-_MAX_CLOSED:]):
        try:
            return json.loads(text[:at] + close)
        except (ValueError, RecursionError):
            continue
    return None


def is_encodable(text: str) -> bool:
    """Whether the text can be sent: JSON's escapes can make half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_dict(value: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None

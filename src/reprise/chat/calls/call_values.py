"""Values of a call's arguments: their types by the tools' schemas, where they end in a text, and what the text means.

Pure functions of text and schemas; `call_reader` finds where a value begins and waits for more text.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from reprise.chat.call_format import KeyedArguments, inside_string, json_text, type_name
from reprise.chat.tools import function_of

_ANY = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_JSON_CHARS = frozenset(" \t\r\n,:.+-0123456789aeflnrstuE")
"""Those of JSON values, outside of strings and brackets."""
UNREAD = object()
"""The value of a text that has none."""


class NotACall(Exception):
    """The text is not of the format."""


def property_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The schemas of all functions' arguments by name, references resolved, each with the definitions."""
    functions = [function_of(tool) for tool in tools]
    return {
        function["name"]: {
            key: {**definitions_in(function["parameters"]), **resolved(schema, function["parameters"])}
            for key, schema in function["parameters"]["properties"].items()
        }
        for function in functions
        if isinstance(function.get("name"), str)
    }


def definitions_in(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema defines for references to it."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def schema_of_part(schema: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The schema of an object's value of this key, or (None) of a list's items; empty if it has none."""
    ways = [schema, *(part for name in ("anyOf", "oneOf", "allOf") for part in schemas_in(schema.get(name, ())))]
    for way in (resolved(dict(way), schema) for way in ways):
        properties: Mapping[str, Any] = way.get("properties") or {}
        part: Any = way.get("items") if key is None else properties.get(key, way.get("additionalProperties"))
        if isinstance(part, dict):
            return {**definitions_in(schema), **resolved(cast("dict[str, Any]", part), schema)}
    return {}


def resolved(schema: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a reference to one of the definitions stands for."""
    match str(schema.get("$ref", "")).split("/"):
        case ["#", ("$defs" | "definitions") as place, name]:
            found: object = parameters.get(place, {}).get(name)
            return cast("dict[str, Any]", found) if isinstance(found, dict) else schema
        case _:
            return schema


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a value of this schema can have; empty if it names none."""
    kinds: object = schema.get("type")
    if isinstance(kinds, str):
        return frozenset((kinds,))
    if isinstance(kinds, list):
        return frozenset(kind for kind in cast("list[object]", kinds) if isinstance(kind, str))
    options: object = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list):
        return frozenset(type_name(option) for option in cast("list[object]", options))
    for key in ("anyOf", "oneOf", "allOf"):
        parts: object = schema.get(key)
        if isinstance(parts, list):
            known = [
                types_of(cast("dict[str, Any]", part)) for part in cast("list[object]", parts) if isinstance(part, dict)
            ]
            return frozenset[str]().union(*known) if all(known) else _ANY
    return (
        frozenset(("object",))
        if "properties" in schema
        else frozenset(("array",))
        if "items" in schema
        else frozenset()
    )


def schemas_in(parts: Any) -> list[dict[str, Any]]:
    """Those of the parts that are schemas with keywords."""
    return [cast("dict[str, Any]", part) for part in cast("list[object]", parts) if isinstance(part, dict)]


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether values are text and nothing else: what has no type is text to most parsers."""
    kinds = types_of(schema)
    return kinds == frozenset(("string",)) or (not kinds and "$ref" not in schema)


def could_be_text(schema: Mapping[str, Any]) -> bool:
    kinds = types_of(schema)
    return not kinds or "string" in kinds


def typed(text: str, schema: Mapping[str, Any] | None, *, kind: str | None = None) -> Any:
    """The value that a text means: JSON, or Python's spelling of it; text where the schema has it or nothing else fits.

    `kind`: the JSON type that the model named, or "json" for any but text.
    """
    value = read_literal(text)
    if value is UNREAD and text.lower() not in ("true", "false"):
        return text
    value = text.lower() == "true" if value is UNREAD else value
    if kind is not None:
        return value
    kinds = types_of(schema or {})
    if not kinds:
        # Of a value without a type only what is clearly no text is taken for something else.
        return cast("Any", value) if isinstance(value, dict | list) else text
    if type_name(value) in kinds or (type_name(value) == "integer" and "number" in kinds):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value)
    return text


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def _refuse(word: str) -> Any:
    raise ValueError(word)


class JsonScan:
    """Where a JSON object ends. It does not say whether the text is JSON."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_over = False
        self._has_content = False

    @property
    def is_sure(self) -> bool:
        """Whether it begins as a JSON object does."""
        return self._has_content and not self._is_escaped

    def take(self, char: str) -> str:
        """The character as it stands in JSON."""
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
            elif char < " " or self._spell(char) != char:
                return inside_string(self._spell(char))
            return char
        if char == '"':
            self._is_string = self._has_content = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._has_content = True
            self.is_over = self._depth == 0
        elif (self._depth > 0 and not self._has_content and not char.isspace()) or char not in _JSON_CHARS:
            raise NotACall
        return char


def end_of(text: str, at: int, ending: str, again: str) -> int:
    """Where the ending stands that closes what is open at `at`; -1 if it does not. O(text)."""
    depth = 1
    while (found := text.find(ending, at)) >= 0 and again:
        depth += text.count(again, at, found) - 1
        if depth == 0:
            break
        at = found + len(ending)
    return found


def read_nested(text: str, keyed: KeyedArguments, schema: dict[str, Any], *, spell: Callable[[str], str]) -> Any:
    """A value whose parts are written as arguments are; its schema has the definitions that it refers to.

    Raises NotACall.
    """
    kinds, body = types_of(schema), text.strip()
    if kinds == frozenset(("string",)):
        return spell(text)
    parts: list[tuple[str, str]] = []
    at = 0
    while body.startswith(keyed.key_opening.strip(), at):
        at += len(keyed.key_opening.strip())
        key_end = body.find(keyed.value_opening, at)
        key = body[at:key_end]
        start = key_end + len(keyed.value_opening)
        ending = keyed.ending(key)
        stop = end_of(body, start, ending, keyed.key_opening + key + keyed.value_opening)
        if key_end < 0 or key == "" or stop < 0:
            raise NotACall
        parts.append((spell(key), body[start:stop]))
        at = len(body) - len(body[stop + len(ending) :].lstrip())
    if at < len(body) and parts:
        raise NotACall
    is_list = "object" not in kinds if "array" in kinds else not kinds
    if parts and is_list and all(key == keyed.item for key, _ in parts):
        return [read_nested(part, keyed, schema_of_part(schema, None), spell=spell) for _, part in parts]
    if parts:
        return {key: read_nested(part, keyed, schema_of_part(schema, key), spell=spell) for key, part in parts}
    if body == "" and kinds in (frozenset(("object",)), frozenset(("array",))):
        return {} if "object" in kinds else []
    return typed(spell(body), schema)


_BARE_KEY = re.compile(r"([{,])\s*([^{},:]+?)\s*:")


def read_native(text: str, *, quote: str) -> Any:
    """A value whose objects have bare keys and whose text stands between `quote`s; `UNREAD` if it is none."""
    parts = text.split(quote) if quote else [text]
    if len(parts) % 2 == 0:
        return UNREAD
    for index, part in enumerate(parts):
        # Python's syntax takes no lone surrogates, which stand for special tokens.
        quoted = json_text(part).encode(errors="backslashreplace").decode()
        parts[index] = quoted if index % 2 else _BARE_KEY.sub(_with_quotes, part)
    return read_literal("".join(parts))


def _with_quotes(key: re.Match[str]) -> str:
    return key[1] + json_text(key[2].strip("\"'")) + ":"


class _JsonWords(ast.NodeTransformer):
    """JSON's words in Python's syntax: templates write either."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words: dict[str, Any] = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(words[node.id]), node) if node.id in words else node


def read_literal(text: str) -> Any:
    """A value in JSON or in Python's syntax, or `UNREAD`."""
    value = json_or_none(text)
    if value is not None or text.strip() == "null":
        return value
    try:
        tree = _JsonWords().visit(ast.parse(text.strip(), mode="eval"))
        value = ast.literal_eval(tree.body)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return UNREAD
    return value


def json_or_none(text: str) -> Any:
    """The value of a JSON text, or None. A number beyond a float's range is the largest: infinity cannot be sent."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def spelled(value: Any, spell: Callable[[str], str]) -> Any:
    """The value with its special tokens written out."""
    match value:
        case str():
            return spell(value)
        case list():
            return [spelled(item, spell) for item in cast("list[Any]", value)]
        case dict():
            return {spell(key): spelled(item, spell) for key, item in cast("dict[str, Any]", value).items()}
        case _:
            return value

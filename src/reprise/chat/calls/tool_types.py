"""The types of a tool's arguments: which values are text, and what a text means for a type."""

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from reprise.chat.tools import function_of

_ANY = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))


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
    """The schema of an object's value of this key, or (None) of a list's items; empty if nothing is said of it."""
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
    """The JSON types that a value of this schema can have, as far as it says; empty if it says nothing."""
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
    value = _literal(text)
    if value is None and text not in ("null", "None"):
        return text
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


def _literal(text: str) -> Any:
    for read in (read_json, ast.literal_eval):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return {"true": True, "false": False}.get(text.lower())


def read_json(text: str) -> Any:
    """What a JSON text says. A number beyond a float's range is the largest one: infinity cannot be sent as JSON.

    Raises ValueError and RecursionError.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def _refuse(word: str) -> Any:
    raise ValueError(word)


def type_name(value: object) -> str:
    """The JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"

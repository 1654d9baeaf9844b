"""Python functions as tools that a model may call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function, or a tool in OpenAI's form (``{"type": "function", "function": {…}}``)."""


def tool_specs(tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """The tools in OpenAI's form. Raises TypeError for what cannot be described to a model."""
    return [_spec_of(tool) if callable(tool) else tool for tool in tools]


def _spec_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The function by its name, its docstring, and the JSON schema of its parameters."""
    name = cast(str | None, getattr(function, "__name__", None))
    if name is None or not name.isidentifier():
        raise TypeError(f"{function!r} has no name that a model could call it by: pass a function that has one.")
    try:
        schema = TypeAdapter(cast(Any, function)).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        raise TypeError(f"The parameters of {name}() have no JSON schema: {error}") from error
    if schema.get("type") != "object":
        raise TypeError(f"{name}() takes parameters by position only; a model gives them by name.")
    spec: dict[str, Any] = {"name": name, "parameters": _without_titles(schema)}
    description = inspect.getdoc(function)
    if description:
        spec["description"] = description
    return {"type": "function", "function": spec}


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the titles that pydantic makes of parameters' names: the model pays for every token."""
    properties = cast(dict[str, dict[str, Any]], schema.get("properties", {}))
    plain = {name: {key: value for key, value in inner.items() if key != "title"} for name, inner in properties.items()}
    return {**schema, "properties": plain}

"""The tools of a responses request as functions, which is what chat templates know.

A custom tool takes free text: to the model it is a function with that text as its one argument.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from reprise.api.responses.body import NamedTool, ResponsesBody, Tool
from reprise.core.errors import BadRequest

_INPUT = "input"


def own_tools(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """The client's own tools in the form of chat completions; the others are for `hosted_tools`."""
    return tuple(_function(tool, f"tools[{at}]") for at, tool in enumerate(tools) if _is_own(tool))


def hosted_tools(tools: Sequence[Tool]) -> tuple[str, ...]:
    """The kinds of the tools that the client expects the server to run."""
    return tuple(tool.type for tool in tools if not _is_own(tool))


def custom_names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.name for tool in tools if tool.type == "custom" and tool.name is not None)


def custom_arguments(text: str) -> dict[str, str]:
    """The arguments that stand for a custom tool's input."""
    return {_INPUT: text}


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments that the model wrote; the arguments themselves if there is none."""
    value = cast("dict[str, Any]", json.loads(arguments)).get(_INPUT)
    return value if isinstance(value, str) else arguments


def tool_choice_of(body: ResponsesBody, tools: Sequence[Mapping[str, Any]]) -> str | Mapping[str, Any]:
    """The choice in the form of chat completions."""
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice not in ("auto", "none") and not tools:
        raise BadRequest("`tool_choice` asks for a call, but there are no tools.", param="tool_choice")
    if not isinstance(choice, NamedTool):
        return choice
    if choice.type not in ("function", "custom") or choice.name is None:
        raise BadRequest(
            "`tool_choice` is 'auto', 'none', 'required', or names a tool of type 'function' or 'custom'.",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice.name}}


def _is_own(tool: Tool) -> bool:
    return tool.type in ("function", "custom")


def _function(tool: Tool, where: str) -> dict[str, Any]:
    if tool.name is None:
        raise BadRequest("A tool needs its `name`.", param=f"{where}.name")
    function: dict[str, Any] = {"name": tool.name}
    description = tool.description if tool.type == "function" else _custom_description(tool)
    if description is not None:
        function["description"] = description
    if tool.type == "custom":
        function["parameters"] = {
            "type": "object",
            "properties": {_INPUT: {"type": "string"}},
            "required": [_INPUT],
        }
    elif tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _custom_description(tool: Tool) -> str | None:
    definition = None if tool.format is None else tool.format.get("definition")
    if not isinstance(definition, str):
        return tool.description
    grammar = f"The input has to be of this grammar:\n{definition}"
    return grammar if tool.description is None else f"{tool.description}\n\n{grammar}"

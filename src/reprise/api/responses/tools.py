"""The tools of a responses request as functions, which is what chat templates know.

A custom tool takes free text: to the model it is a function with that text as its one argument. A tool in a namespace
is a function with both names in one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.api.openai.fields import allowed_choice
from reprise.api.responses.body import ResponsesBody, ResponseTool, ToolReference
from reprise.chat.grammars.tool_grammar import ALLOWED_TOOLS
from reprise.chat.tools import begun_object
from reprise.core.errors import BadRequest

_INPUT = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Callee:
    """What a call by the model's name for a tool is to the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def own_tools(tools: Sequence[ResponseTool]) -> tuple[Mapping[str, Any], ...]:
    """The client's own tools in the form of chat completions; the others are for `hosted_tools`."""
    return tuple(_function(tool, namespace, where) for tool, namespace, where in _places(tools) if _is_own(tool))


def hosted_tools(tools: Sequence[ResponseTool]) -> tuple[str, ...]:
    """The kinds of the tools that the client expects the server to run."""
    return tuple(tool.type for tool, _, _ in _places(tools) if not _is_own(tool))


def callees(tools: Sequence[ResponseTool]) -> dict[str, Callee]:
    """The client's own tools by the names that the model knows."""
    return {
        full_name(tool.name, namespace): Callee(name=tool.name, namespace=namespace, is_custom=tool.type == "custom")
        for tool, namespace, _ in _places(tools)
        if _is_own(tool) and tool.name is not None
    }


def full_name(name: str, namespace: str | None) -> str:
    """The name of a tool to the model, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> dict[str, str]:
    """The arguments that stand for a custom tool's input."""
    return {_INPUT: text}


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments that the model wrote; the arguments themselves if there is none."""
    value = begun_object(arguments).get(_INPUT)
    return value if isinstance(value, str) else arguments


def tool_choice_of(body: ResponsesBody, tools: Sequence[Mapping[str, Any]]) -> str | Mapping[str, Any]:
    """The choice in the form of chat completions."""
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice not in ("auto", "none") and not tools:
        raise BadRequest("`tool_choice` requires a call, but there are no tools. Send `tools`.", param="tool_choice")
    if not isinstance(choice, ToolReference):
        return choice
    if choice.type == ALLOWED_TOOLS:
        return allowed_choice(choice.mode or "auto", choice.tools or [])
    if choice.type not in ("function", "custom") or choice.name is None:
        raise BadRequest(
            "`tool_choice` is 'auto', 'none', 'required', or names tools of type 'function' or 'custom'.",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice.name}}


def _places(tools: Sequence[ResponseTool]) -> Iterator[tuple[ResponseTool, str | None, str]]:
    """All tools, those of namespaces too, with their namespace and where they stand in the body."""
    for at, tool in enumerate(tools):
        if tool.type != "namespace":
            yield tool, None, f"tools[{at}]"
            continue
        for inner_at, inner in enumerate(tool.tools or ()):
            yield inner, tool.name, f"tools[{at}].tools[{inner_at}]"


def _is_own(tool: ResponseTool) -> bool:
    return tool.type in ("function", "custom")


def _function(tool: ResponseTool, namespace: str | None, where: str) -> dict[str, Any]:
    if tool.name is None:
        raise BadRequest("A tool needs its `name`.", param=f"{where}.name")
    function: dict[str, Any] = {"name": full_name(tool.name, namespace)}
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


def _custom_description(tool: ResponseTool) -> str | None:
    definition = None if tool.format is None else tool.format.get("definition")
    if not isinstance(definition, str):
        return tool.description
    grammar = f"The input must follow this grammar:\n{definition}"
    return grammar if tool.description is None else f"{tool.description}\n\n{grammar}"

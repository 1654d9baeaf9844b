"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`. Other fields are refused by name, ignored, or noted."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from reprise.api.http.body import Body
from reprise.api.wire.controls import AnswerControls

IGNORED = frozenset(
    {
        "anthropic_version",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
    }
)
"""Fields of the API that have no effect on a local server."""

REFUSED = {
    "container": "This server does not run code.",
    "fallbacks": "This server has only one model.",
    "mcp_servers": "Connect to the MCP server yourself and pass its tools in `tools`.",
}


class CacheControl(Body):
    """Marks the end of a prefix to keep in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def _in_list(content: Any) -> Any:
    """Results of tools that Anthropic runs have one object where others have a list."""
    return [content] if isinstance(content, dict) else content


class Block(Body):
    """A content block of any type. The type decides which fields it needs."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "Annotated[str | list[Block] | None, BeforeValidator(_in_list)]" = None
    is_error: bool | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(Body):
    """A message. `system` may occur in the middle of the chat."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body):
    """A tool of the client's (`type` "custom" or none), or one that Anthropic hosts or knows."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Sets of tools that Anthropic hosts have none."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(AnswerControls):
    """What makes up a prompt."""

    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    """Refused, as Anthropic's API refuses what a thread cannot have."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    """A mark at the end of the last message."""


class MessagesBody(CountBody):
    """A chat to answer."""

    id_prefix = "msg_"
    max_tokens: Annotated[int, Field(ge=-1)]
    """0: the prompt is computed into the cache, and nothing is answered."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None

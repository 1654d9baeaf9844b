"""The body of `POST /v1/responses`. Every field that is not here is refused by name, ignored, or noted."""

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from reprise.api.http.body import AnswerBound, Body, Needs
from reprise.api.openai.fields import AllowedMode, CacheOptions, Penalty, Probability, Retention
from reprise.api.wire.controls import AnswerControls, ThinkingSwitch

IGNORED = frozenset(
    {
        "client_metadata",
        "context_management",
        "max_tool_calls",
        "moderation",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Fields of the API that have no effect on a local server."""

REFUSED = {
    "conversation": "Use `previous_response_id`, or send the whole chat in `input`.",
    "prompt": "This server stores no prompts. Send `instructions` and `input`.",
}


class ItemPart(Body):
    """A part of a message, a reasoning item or a tool's output. Text is what this server reads."""

    type: str
    text: str | None = None
    refusal: str | None = None


CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call", "computer_call"})
OUTPUTS = frozenset(f"{kind}_output" for kind in CALLS)
COMPACTIONS = frozenset({"compaction", "compaction_summary"})
READ = CALLS | OUTPUTS | COMPACTIONS | {"message", "reasoning", "item_reference"}
"""The types of items that have an effect; all others are left out."""


class Item(Body):
    """An input item of any type; which fields it needs depends on that."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ItemPart] | ItemPart | None = None
    action: dict[str, Any] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_it_is(cls, value: Any) -> Any:
        """An item that is left out may have anything in fields that others have."""
        if not isinstance(value, dict):
            return value
        item = cast("dict[str, Any]", value)
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind in READ:
            return item
        return {name: each for name, each in item.items() if name in ("type", "id") or name not in cls.model_fields}


class ResponseTool(Body):
    """A tool. Those of type `function` and `custom` are the client's own, and a `namespace` has such `tools`."""

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: "list[ResponseTool] | None" = None


class ToolReference(Body):
    """One tool, or with the type `allowed_tools` several."""

    type: str
    name: str | None = None
    mode: AllowedMode | None = None
    tools: list[dict[str, Any]] | None = None


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None
    """Without effect: nothing is obfuscated."""


class ResponsesBody(AnswerControls):
    """A chat to answer, as items."""

    id_prefix = "resp_"
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    thinking: ThinkingSwitch | bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolReference | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: Text | None = None
    generate: bool | None = None
    """false: what `prompt_cache_options.prewarm` asks for."""
    include: list[str] | None = None
    max_output_tokens: AnswerBound | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    """"auto" would drop items in the middle of the chat. Nothing is dropped here: what is too long is refused."""
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: CacheOptions | None = None
    metadata: dict[str, Any] | None = None


class InputTokensBody(ResponsesBody):
    """A chat whose tokens are counted."""

    needs = Needs.TOKENIZER

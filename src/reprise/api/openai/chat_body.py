"""The body of `POST /v1/chat/completions`. Every field that is not here is refused by name, ignored, or noted."""

from typing import Annotated, Any, Literal

from pydantic import Field

from reprise.api.http.body import AnswerBound, Body
from reprise.api.openai.fields import AllowedMode, CacheOptions, Retention, SamplingFields
from reprise.api.wire.controls import ThinkingSwitch

IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields of the API that have no effect on a local server."""

REFUSED = {
    "audio": "This server returns only text.",
    "function_call": "Use `tool_choice`.",
    "functions": "Use `tools`.",
    "web_search_options": "Give the model your own search tool.",
}


class ContentPart(Body):
    """A part of a message: text, an image for models that see, or what is left out."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: "str | list[ContentPart] | None" = None


class FunctionCall(Body):
    name: str
    arguments: Any = ""
    """Text of a JSON object, or what clients make of it: an object, nothing, text that was cut."""


class MessageToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: FunctionSpec


class ChatFields(Body):
    """A chat that is rendered, and not answered."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolSpec] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: AllowedMode
    tools: list[dict[str, Any]]


class AllowedChoice(Body):
    """Some of the tools; all of them stay in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class StreamOptions(Body):
    include_usage: bool | None = None


class Prediction(Body):
    """The expected answer: text to draft from."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class JsonSchemaFormat(Body):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """llama.cpp's, which has no `json_schema` around it."""


class ChatBody(SamplingFields):
    """A chat to answer."""

    id_prefix = "chatcmpl-"
    messages: list[ChatMessage]
    max_tokens: AnswerBound | None = None
    max_completion_tokens: AnswerBound | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    thinking: ThinkingSwitch | bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    """Only beside `continue_final_message`, whose opposite it is."""
    prediction: Prediction | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: CacheOptions | None = None

"""From the body of a chat completion to the internal request."""

from collections.abc import Mapping, Sequence
from typing import Any

from reprise.api.http.body import answer_bound, plain
from reprise.api.openai.chat_body import (
    IGNORED,
    REFUSED,
    AllowedChoice,
    ChatBody,
    ChatFields,
    ChatMessage,
    ContentPart,
    NamedTool,
    ResponseFormat,
    ToolSpec,
)
from reprise.api.openai.fields import (
    allowed_choice,
    allowed_notes,
    num_choices_of,
    prewarms,
    retained_for_s,
    sampling_of,
)
from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.served import Asked
from reprise.api.service.unread import Speaker, UnreadParts
from reprise.api.wire.controls import (
    ThinkingSwitch,
    check_stream_options,
    checked_notes,
    grammar_of,
    is_on,
    stop_tokens_of,
    thinking_options,
)
from reprise.chat.grammars.grammar import Grammar, json_object, json_schema
from reprise.chat.request import ChatRequest, Message
from reprise.core.errors import BadRequest
from reprise.core.prompt import BoundaryKind

PLACEHOLDER = ChatMessage(role="user", content="Hello")
"""Templates want a user message: where only what stands before it is computed, it may be any."""

_SPEAKERS: Mapping[str, Speaker] = {
    # To templates a developer is the system: the name is OpenAI's alone.
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of the parts of an assistant message that are its reasoning."""


def service_request_of(body: ChatBody, asked: Asked) -> ServiceRequest:
    """The request that a body asks for. Raises BadRequest naming the field, or UnknownModel."""
    notes = checked_notes(body, asked, ignored=IGNORED, refused=REFUSED)
    asked.served.check_adapter(body.adapters)
    check_stream_options(body.stream_options, stream=body.stream)
    grammar = grammar_of(body, (response_grammar(body.response_format),))
    asked.check_num(messages=len(body.messages), tools=len(body.tools or ()))
    sampling, origins = sampling_of(body, asked, logprobs=_num_logprobs(body, asked.limits.max_top_logprobs))
    is_prewarm = prewarms(body.prompt_cache_options)
    tool_choice = _tool_choice(body)
    bounds = (body.max_completion_tokens, body.max_tokens, body.n_predict)
    messages, until = body.messages, None
    if is_prewarm and messages and all(message.role in ("system", "developer") for message in messages):
        messages, until = [*messages, PLACEHOLDER], BoundaryKind.SYSTEM
    return ServiceRequest(
        id=body.request_id,
        api="chat",
        prompt=chat_of(
            messages,
            asked,
            tools=body.tools or [],
            documents=body.documents or [],
            template_options=_template_options(body),
            continue_final=_continues(body),
            is_asked=True,
        ),
        sampling=sampling,
        origins=origins,
        num_choices=1 if is_prewarm else num_choices_of(body, asked),
        generates=not is_prewarm,
        until=until,
        max_tokens=answer_bound(next((bound for bound in bounds if bound is not None), None)),
        min_tokens=body.min_tokens or 0,
        ignores_eos=body.ignore_eos is True,
        stop_tokens=stop_tokens_of(body, asked),
        stops=asked.stops(body.stop),
        thinking_budget=_thinking_budget(body),
        tool_choice=tool_choice,
        streams_calls=body.stream is True,
        allows_parallel_calls=body.parallel_tool_calls is not False,
        grammar=grammar,
        namespace=asked.namespace,
        prediction=body.prediction.text if body.prediction is not None else "",
        chat=body.prompt_cache_key,
        retain_for_s=retained_for_s(body.prompt_cache_retention, body.prompt_cache_options),
        notes=(*notes, *allowed_notes(tool_choice, body.tool_choice)),
    )


def chat_of(
    messages: Sequence[ChatMessage],
    asked: Asked,
    *,
    tools: Sequence[ToolSpec],
    template_options: Mapping[str, Any],
    continue_final: bool,
    documents: Sequence[Mapping[str, Any]] = (),
    is_asked: bool = False,
) -> ChatRequest:
    """The chat of a body. `is_asked`: see `Asked.unread`. Raises BadRequest naming the message at fault."""
    unread = asked.unread([(_SPEAKERS[message.role], message.content) for message in messages], is_asked=is_asked)
    return ChatRequest(
        messages=tuple(_message(message, at, unread) for at, message in enumerate(messages)),
        # Only the fields that the client sent: templates print tools whole.
        tools=tuple(tool.model_dump(exclude_unset=True) for tool in tools),
        documents=tuple(documents),
        template_options=template_options,
        continue_final=continue_final,
        notes=unread.notes,
    )


def rendered_chat(body: ChatFields, asked: Asked, *, continue_final: bool = False) -> ChatRequest:
    """The chat of a body that is not to be answered."""
    options = body.chat_template_kwargs or {}
    return chat_of(
        body.messages or [], asked, tools=body.tools or [], template_options=options, continue_final=continue_final
    )


def _message(message: ChatMessage, at: int, unread: UnreadParts) -> Message:
    role: str = _SPEAKERS[message.role]
    made: dict[str, Any] = {"role": role, "content": _content(message, at, unread)}
    if role == "assistant":
        made["reasoning_content"] = _reasoning(message)
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        elif made["content"] is None:
            made["content"] = ""
    elif role == "tool":
        made["tool_call_id"] = message.tool_call_id
        made["content"] = made["content"] or ""
    elif made["content"] is None:
        raise BadRequest(f"A {message.role} message needs content.", param=f"messages[{at}].content")
    made["name"] = message.name
    return plain(made) | {"content": made["content"]}


def _reasoning(message: ChatMessage) -> str | None:
    given = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if given is not None or not isinstance(message.content, list):
        return given
    thoughts = [_thought(part) for part in message.content if part.type in _THOUGHTS]
    return "\n".join(thought for thought in thoughts if thought) or None


def _thought(part: ContentPart) -> str:
    if isinstance(part.thinking, list):
        return "".join(inner.text or "" for inner in part.thinking)
    return part.thinking or part.text or ""


def _content(message: ChatMessage, at: int, unread: UnreadParts) -> str | list[dict[str, Any]] | None:
    content, where = message.content, f"messages[{at}].content"
    if not isinstance(content, list):
        return content
    parts = [
        _part(part, at, f"{where}[{number}]", unread)
        for number, part in enumerate(content)
        if message.role != "assistant" or part.type not in _THOUGHTS
    ]
    # One part is the same as its text, also to templates that would write parts in another way.
    if len(parts) <= 1 and all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: ContentPart, at: int, where: str, unread: UnreadParts) -> str | dict[str, Any]:
    match part.type:
        case "text" | "input_text" | "output_text" if part.text is not None:
            return part.text
        case "refusal" if part.refusal is not None:
            return part.refusal
        case "text" | "input_text" | "output_text" | "refusal":
            raise BadRequest(f"A part of type {part.type!r} needs `text`.", param=where)
        case _:
            return unread.part(part.type, part.model_extra or {}, message_at=at, where=f"{where}.type")


def _tool_choice(body: ChatBody) -> str | Mapping[str, Any]:
    if body.tool_choice is None:
        return "auto"
    if isinstance(body.tool_choice, AllowedChoice):
        allowed = body.tool_choice.allowed_tools
        return allowed_choice(allowed.mode, allowed.tools)
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.model_dump()
    return body.tool_choice


def _template_options(body: ChatBody) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    off = False if body.reasoning_effort == "none" else None
    options |= thinking_options(off, is_on(body.thinking), body.enable_thinking)
    return options | (body.chat_template_kwargs or {})


def _continues(body: ChatBody) -> bool:
    continues = body.continue_final_message is True
    if body.add_generation_prompt is not None and body.add_generation_prompt is continues:
        raise BadRequest(
            "Exactly one of `add_generation_prompt` and `continue_final_message` must be true.",
            param="add_generation_prompt",
        )
    return continues


def _num_logprobs(body: ChatBody, most: int) -> int | None:
    top = body.top_logprobs or 0
    if top > most:
        raise BadRequest(f"`top_logprobs` is {top}; at most {most} are returned.", param="top_logprobs")
    if body.logprobs is True:
        return top
    if top > 0:
        raise BadRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return None


def response_grammar(wanted: ResponseFormat | None) -> Grammar | None:
    """The grammar of a `response_format`; None: any text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_object() if wanted.schema_ is None else json_schema(wanted.schema_)
    if wanted.json_schema is None and wanted.schema_ is not None:
        return json_schema(wanted.schema_)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise BadRequest("`response_format` needs `json_schema.schema`.", param="response_format.json_schema")
    return json_schema(wanted.json_schema.schema_, is_strict=wanted.json_schema.strict is True)


def _thinking_budget(body: ChatBody) -> int | None:
    if body.thinking_budget is not None or not isinstance(body.thinking, ThinkingSwitch):
        return body.thinking_budget
    return body.thinking.budget_tokens

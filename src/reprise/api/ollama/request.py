"""From a body of Ollama's API to a body of chat completions, and so to the internal request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reprise.api.http.body import plain, unknown_fields
from reprise.api.ollama.body import (
    IGNORED,
    IGNORED_OPTIONS,
    REFUSED,
    AnswerBody,
    GenerateBody,
    OllamaChatBody,
    OllamaMessage,
    Options,
)
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_request import service_request_of
from reprise.api.openai.completions_body import CompletionsBody, service_requests_of
from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.image_parts import is_url
from reprise.api.service.served import Asked
from reprise.api.service.service import new_request_id
from reprise.core.errors import BadRequest

API = "ollama"
_TAG = ":latest"
_WHOLE_CONTEXT = 1_000_000

_REFUSED_OPTIONS = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0}
"""Samplers that this server does not have, with the value at which they do nothing."""


def model_name(name: str | None) -> str | None:
    """The model that a client means: Ollama's clients add a tag to names that have none."""
    return None if name is None or name == "" else name.removesuffix(_TAG)


def request_of(body: OllamaChatBody | GenerateBody, asked: Asked) -> ServiceRequest:
    """The request that a body asks for. Raises BadRequest naming the field, or UnknownModel."""
    if isinstance(body, OllamaChatBody):
        messages, tools = body.messages or [], [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
        request = _chat(body, messages, asked, tools=tools)
    else:
        request = _of_generate(body, asked)
    request_id, notes = new_request_id(API), (*_notes(body), *request.notes)
    return replace(request, id=request_id, response_id=None, api=API, notes=notes)


def _of_generate(body: GenerateBody, asked: Asked) -> ServiceRequest:
    if body.context:
        raise BadRequest("`context` is not supported. Send the whole chat to /api/chat.", param="context")
    if body.template:
        raise BadRequest("`template` is not supported. Start the server with --chat-template.", param="template")
    if body.suffix and body.system:
        raise BadRequest("`suffix` and `system` cannot be used together: a gap in a text has no chat.", param="system")
    if body.raw is True or body.suffix:
        return _raw(body, asked)
    system = [] if not body.system else [OllamaMessage(role="system", content=body.system)]
    user = OllamaMessage(role="user", content=body.prompt or "", images=body.images)
    return _chat(body, [*system, user], asked)


def _chat(
    body: AnswerBody, messages: Sequence[OllamaMessage], asked: Asked, *, tools: Sequence[dict[str, Any]] = ()
) -> ServiceRequest:
    fields = {**_fields(body), "messages": _messages(messages), **({"tools": list(tools)} if tools else {})}
    return service_request_of(ChatBody.model_validate(fields), asked)


def _raw(body: GenerateBody, asked: Asked) -> ServiceRequest:
    if body.format or body.images:
        field = "format" if body.format else "images"
        other = "suffix" if body.suffix else "raw"
        raise BadRequest(f"`{field}` and `{other}` cannot be used together.", param=field)
    fields = _fields(body)
    kept = {name: value for name, value in fields.items() if name in CompletionsBody.model_fields}
    kept |= {
        "prompt": body.prompt or "",
        "suffix": body.suffix or None,
        "logprobs": body.top_logprobs or 0 if body.logprobs is True else None,
    }
    (request,) = service_requests_of(CompletionsBody.model_validate(kept), asked)
    return request


def _fields(body: AnswerBody) -> dict[str, Any]:
    """What both APIs can say, in the words of chat completions."""
    fields: dict[str, Any] = _sampling(body.options or Options())
    fields["model"] = model_name(body.model)
    fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if isinstance(body.think, bool):
        fields["chat_template_kwargs"] = {"enable_thinking": body.think}
    elif body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
        fields["reasoning_effort"] = body.think
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return plain(fields)


def _sampling(options: Options) -> dict[str, Any]:
    for name, neutral in _REFUSED_OPTIONS.items():
        if getattr(options, name) not in (None, neutral):
            raise BadRequest(f"`options.{name}` is not supported. Leave it out.", param=f"options.{name}")
    fields: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
    }
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    if options.repeat_last_n != 0:
        fields["repetition_penalty"] = options.repeat_penalty
        if options.repeat_last_n is not None and options.repeat_penalty is not None:
            fields["repetition_context_size"] = options.repeat_last_n if options.repeat_last_n > 0 else _WHOLE_CONTEXT
    return plain(fields)


def _notes(body: AnswerBody) -> tuple[str, ...]:
    options = () if body.options is None else unknown_fields(body.options, ignored=IGNORED_OPTIONS, refused={})
    return (*unknown_fields(body, ignored=IGNORED, refused=REFUSED), *options)


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages of chat completions. Calls get ids, which Ollama's clients do not keep: by place, so they stay."""
    written: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    """Calls without a result yet: id and name."""
    for at, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.role == "assistant":
            made["reasoning_content"] = message.thinking
            calls = message.tool_calls or []
            waiting = [(call.id or f"call_{at}_{number}", call.function.name) for number, call in enumerate(calls)]
            made["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": call.function.arguments}}
                for (call_id, name), call in zip(waiting, calls, strict=True)
            ] or None
        elif message.role == "tool":
            made["name"] = message.tool_name
            made["tool_call_id"] = message.tool_call_id or _answered(waiting, message.tool_name)
        written.append(plain(made) | {"content": made["content"]})
    return written


def _answered(waiting: list[tuple[str, str]], name: str | None) -> str | None:
    """The id of the call that a result is of: the first one of that name that waits, else the first."""
    found = next((call for call in waiting if call[1] == name), waiting[0] if waiting else None)
    if found is None:
        return None
    waiting.remove(found)
    return found[0]


def _content(message: OllamaMessage) -> str | list[dict[str, Any]]:
    text = message.content or ""
    if not message.images:
        return text
    # Ollama's own are base64 alone; clients also send data URLs, and links.
    urls = [data if is_url(data) else f"data:image/png;base64,{data}" for data in message.images]
    return [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]

"""From the body of a messages request to the internal request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise.api.anthropic.body import IGNORED, REFUSED, AnthropicTool, CountBody, MessagesBody
from reprise.api.anthropic.transcript import Transcript, TranscriptWriter, speaker_of
from reprise.api.http.body import answer_bound
from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.served import Asked
from reprise.api.service.unread import UnreadParts
from reprise.api.wire.controls import checked_notes, grammar_of, stop_tokens_of, thinking_options
from reprise.chat.grammars.grammar import Grammar, json_schema
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnthropicPrompt:
    """The prompt that a body describes. `pin_for_s` is how long its marks keep their places in the cache."""

    chat: ChatRequest
    tool_choice: str | Mapping[str, Any]
    pin_for_s: float | None
    notes: tuple[str, ...]


def prompt_of(body: CountBody, asked: Asked) -> AnthropicPrompt:
    """The prompt of a body. Raises BadRequest naming the field, or UnknownModel."""
    notes = checked_notes(body, asked, ignored=IGNORED, refused=REFUSED)
    if body.thread is not None:
        # The SDK's tool runner reads these details, and continues with the whole history.
        raise BadRequest(
            "`thread` is not supported: this server keeps no threads. Send the whole conversation in `messages`.",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    if not body.messages:
        raise BadRequest("Send at least one message.", param="messages")
    given = body.tools or []
    asked.check_num(messages=len(body.messages), tools=len(given))
    hosted = [tool for tool in given if tool.type not in (None, "custom")]
    own = [tool for tool in given if tool.type in (None, "custom")]
    unread = asked.unread([(speaker_of(message), message.content) for message in body.messages], is_asked=True)
    transcript = _transcript(body, own, unread)
    tools = tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(given) if tool.type in (None, "custom"))
    last = transcript.messages[-1]
    return AnthropicPrompt(
        chat=ChatRequest(
            messages=transcript.messages,
            tools=tools,
            template_options=_template_options(body),
            # The model continues an assistant message at the end; one with calls waits for their results.
            continue_final=last["role"] == "assistant" and "tool_calls" not in last,
            breakpoints=transcript.breakpoints,
            cuts=transcript.cuts,
        ),
        tool_choice=_tool_choice(body, own),
        pin_for_s=transcript.pin_for_s,
        notes=(
            *notes,
            *transcript.notes,
            *(f"unsupported server tool left out: {tool.name or 'all'} ({tool.type})" for tool in hosted),
        ),
    )


def service_request_of(body: MessagesBody, asked: Asked) -> ServiceRequest:
    """The request that a body asks for. Raises BadRequest naming the field, or UnknownModel."""
    common = prompt_of(body, asked)
    last = common.chat.messages[-1]
    if "tool_calls" in last:
        raise BadRequest("The chat ends with a tool use. Send its tool result.", param="messages")
    grammar = grammar_of(body, (_grammar(body),))
    choice = body.tool_choice
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": asked.top_k(body.top_k)}
    sampling, origins = asked.served.sampling.sampling(given)
    return ServiceRequest(
        id=body.request_id,
        api="messages",
        prompt=common.chat,
        sampling=sampling,
        origins=origins,
        max_tokens=answer_bound(body.max_tokens),
        generates=body.max_tokens != 0,
        min_tokens=body.min_tokens or 0,
        ignores_eos=body.ignore_eos is True,
        stop_tokens=stop_tokens_of(body, asked),
        stops=asked.stops(body.stop_sequences, param="stop_sequences"),
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
        tool_choice=common.tool_choice,
        streams_calls=body.stream is True,
        allows_parallel_calls=choice is None or choice.disable_parallel_tool_use is not True,
        grammar=grammar,
        namespace=asked.namespace,
        pin_for_s=common.pin_for_s,
        notes=common.notes,
    )


def _transcript(body: CountBody, tools: list[AnthropicTool], unread: UnreadParts) -> Transcript:
    writer = TranscriptWriter(unread)
    writer.add_tool_marks([tool.cache_control for tool in tools])
    if body.system is not None and len(body.system) > 0:
        writer.add_system(body.system)
    for at, message in enumerate(body.messages):
        writer.add_message(message, at)
    return writer.finish(body.cache_control)


def _tool(tool: AnthropicTool, where: str) -> dict[str, Any]:
    if tool.name is None:
        raise BadRequest("A tool needs its `name`.", param=f"{where}.name")
    if tool.input_schema is None:
        raise BadRequest(f"The tool {tool.name!r} needs an `input_schema`.", param=f"{where}.input_schema")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(body: CountBody, tools: list[AnthropicTool]) -> str | Mapping[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice.type in ("any", "tool") and not tools:
        raise BadRequest("`tool_choice` requires a call, but there are no tools. Send `tools`.", param="tool_choice")
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise BadRequest("`tool_choice` of type 'tool' needs a `name`.", param="tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}


def _template_options(body: CountBody) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort
    by_config = None if body.thinking is None else body.thinking.type != "disabled"
    options |= thinking_options(by_config, body.enable_thinking)
    return options | (body.chat_template_kwargs or {})


def _grammar(body: MessagesBody) -> Grammar | None:
    if body.output_config is not None and body.output_config.format is not None:
        return json_schema(body.output_config.format.schema_, param="output_config.format")
    if body.output_format is not None:
        return json_schema(body.output_format.schema_, param="output_format")
    return None

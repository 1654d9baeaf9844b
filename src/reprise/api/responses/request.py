"""From the body of a responses request to the internal request."""

from collections.abc import Sequence
from typing import Any

from reprise.api.http.body import answer_bound
from reprise.api.openai.fields import allowed_notes, prewarms, retained_for_s
from reprise.api.responses.body import IGNORED, REFUSED, Item, ResponsesBody
from reprise.api.responses.items import MessageWriter, speaker_of
from reprise.api.responses.store import Stored
from reprise.api.responses.tools import hosted_tools, own_tools, tool_choice_of
from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.served import Asked
from reprise.api.wire.context import RouteCall
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
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest

_LOGPROBS = "message.output_text.logprobs"
_TRUNCATION = "`truncation` has no effect: prompts that are too long are refused"


def service_request_of(body: ResponsesBody, earlier: Sequence[Item], asked: Asked) -> ServiceRequest:
    """The request that a body asks for, after the `earlier` items. Raises BadRequest naming the field, or UnknownModel.

    `instructions` are those of this request alone, as in OpenAI's API.
    """
    notes = checked_notes(body, asked, ignored=IGNORED, refused=REFUSED)
    check_stream_options(body.stream_options, stream=body.stream)
    _check(body)
    given_tools = body.tools or []
    tools = own_tools(given_tools)
    asked.check_num(tools=max(len(given_tools), len(tools)))
    tool_choice = tool_choice_of(body, tools)
    grammar = grammar_of(body, (_grammar(body),))
    items = (*earlier, *input_items(body))
    unread = asked.unread([(speaker_of(item), item.content) for item in items], is_asked=True)
    writer = MessageWriter(body.instructions, unread)
    for item in earlier:
        writer.add(item, "previous_response_id")
    for at, item in enumerate(input_items(body)):
        writer.add(item, f"input[{at}]")
    asked.check_num(messages=len(writer.messages), param="input")
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")}
    sampling, origins = asked.served.sampling.sampling(given)
    return ServiceRequest(
        id=body.request_id,
        api="responses",
        prompt=ChatRequest(messages=writer.messages, tools=tools, template_options=_template_options(body)),
        sampling=sampling,
        origins=origins,
        max_tokens=answer_bound(body.max_output_tokens),
        generates=body.generate is not False and not prewarms(body.prompt_cache_options),
        min_tokens=body.min_tokens or 0,
        ignores_eos=body.ignore_eos is True,
        stop_tokens=stop_tokens_of(body, asked),
        thinking_budget=body.thinking.budget_tokens if isinstance(body.thinking, ThinkingSwitch) else None,
        tool_choice=tool_choice,
        streams_calls=body.stream is True,
        allows_parallel_calls=body.parallel_tool_calls is not False,
        grammar=grammar,
        namespace=asked.namespace,
        chat=body.prompt_cache_key,
        retain_for_s=retained_for_s(body.prompt_cache_retention, body.prompt_cache_options),
        notes=(
            *notes,
            *allowed_notes(tool_choice, body.tool_choice),
            *([_TRUNCATION] if body.truncation == "auto" else []),
            *writer.notes,
            *(f"unsupported server tool left out: {kind[:64]}" for kind in hosted_tools(given_tools)),
        ),
    )


def input_items(body: ResponsesBody) -> list[Item]:
    """The input as items."""
    if isinstance(body.input, str):
        return [Item(type="message", role="user", content=body.input)]
    return body.input


def previous_of(response_id: str | None, call: RouteCall) -> Stored | None:
    """The response of the caller's with this id; None without an id. Raises NotFound."""
    return None if response_id is None else call.context.responses.get(response_id, namespace=call.namespace)


def earlier_items(previous: Stored | None) -> list[Item]:
    """The items that a response after this one continues."""
    return [] if previous is None else [Item.model_validate(item) for item in previous.chat]


def with_referenced_items(body: ResponsesBody, call: RouteCall) -> ResponsesBody:
    """The body with the items that it refers to, which this server has kept, in the places of the references.

    Raises BadRequest.
    """
    if isinstance(body.input, str) or all(item.type != "item_reference" for item in body.input):
        return body
    items: list[Item] = []
    for at, item in enumerate(body.input):
        if item.type != "item_reference":
            items.append(item)
            continue
        found = None if item.id is None else call.context.responses.item(item.id, namespace=call.namespace)
        if found is None:
            raise BadRequest(
                f"Item with id {(item.id or '')[:80]!r} not found. Items of responses are kept in memory, unless "
                "`store` is false, and the oldest are dropped: send the item itself.",
                param=f"input[{at}]",
            )
        items.append(Item.model_validate(found))
    return body.model_copy(update={"input": items})


def _check(body: ResponsesBody) -> None:
    if len(body.input) == 0:
        raise BadRequest("Send at least one input item.", param="input")
    if _LOGPROBS in (body.include or ()) or (body.top_logprobs or 0) > 0:
        field = "include" if _LOGPROBS in (body.include or ()) else "top_logprobs"
        raise BadRequest("Only /v1/chat/completions returns log-probabilities.", param=field)


def _template_options(body: ResponsesBody) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    options |= thinking_options(False if effort == "none" else None, is_on(body.thinking), body.enable_thinking)
    return options | (body.chat_template_kwargs or {})


def _grammar(body: ResponsesBody) -> Grammar | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_object()
    if wanted.schema_ is None:
        raise BadRequest("`text.format` of type 'json_schema' needs its `schema`.", param="text.format.schema")
    return json_schema(wanted.schema_, is_strict=wanted.strict is True, param="text.format")

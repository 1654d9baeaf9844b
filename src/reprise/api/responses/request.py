"""From the body of a responses request to the internal request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reprise.api.http.body import answer_bound, unknown_fields
from reprise.api.http.limits import Limits
from reprise.api.openai.fields import prewarms, retained_for_s
from reprise.api.responses.body import IGNORED, REFUSED, Item, ResponsesBody
from reprise.api.responses.items import MessageWriter, speaker_of
from reprise.api.responses.tools import hosted_tools, own_tools, tool_choice_of
from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.served import Served
from reprise.api.service.unread import NO_QUESTION, Speaker, UnreadParts, newest_question_at, question_of
from reprise.api.wire.controls import (
    ThinkingSwitch,
    check_stream_options,
    grammar_of,
    is_on,
    refuse_foreign,
    stop_tokens_of,
    thinking_options,
)
from reprise.chat.grammars.grammar import Grammar, json_object, json_schema
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest

_LOGPROBS = "message.output_text.logprobs"


def service_request_of(
    body: ResponsesBody,
    earlier: Sequence[Item],
    *,
    request_id: str,
    namespace: str,
    served: Served,
    limits: Limits,
) -> ServiceRequest:
    """The request that a body asks for, after the `earlier` items. Raises BadRequest naming the field, or UnknownModel.

    `instructions` are those of this request alone, as in OpenAI's API.
    """
    served.check_name(body.model)
    notes = unknown_fields(body, ignored=IGNORED, refused=REFUSED)
    refuse_foreign(body)
    check_stream_options(body.stream_options, stream=body.stream)
    _check(body, limits)
    given = body.tools or []
    tools = own_tools(given)
    if max(len(given), len(tools)) > limits.max_tools:
        raise BadRequest(f"Too many tools: at most {limits.max_tools} are accepted. Send fewer.", param="tools")
    tool_choice = tool_choice_of(body, tools)
    grammar = grammar_of(body, (_grammar(body),))
    items = (*earlier, *input_items(body))
    speakers: list[Speaker] = [speaker_of(item) for item in items]
    question_at = newest_question_at(speakers)
    question = NO_QUESTION if question_at is None else question_of(items[question_at].content)
    unread = UnreadParts(
        question_at, question, refused=served.refused_questions, namespace=namespace, images=served.image_parts
    )
    writer = MessageWriter(body.instructions, unread)
    for item in earlier:
        writer.add(item, "previous_response_id")
    for at, item in enumerate(input_items(body)):
        writer.add(item, f"input[{at}]")
    if len(writer.messages) > limits.max_messages:
        raise BadRequest(f"Too many messages: at most {limits.max_messages} are accepted. Send fewer.", param="input")
    sampling, origins = served.sampling.sampling({"temperature": body.temperature, "top_p": body.top_p})
    return ServiceRequest(
        id=request_id,
        api="responses",
        prompt=ChatRequest(messages=writer.messages, tools=tools, template_options=_template_options(body)),
        sampling=sampling,
        origins=origins,
        max_tokens=answer_bound(body.max_output_tokens),
        generates=body.generate is not False and not prewarms(body.prompt_cache_options),
        min_tokens=body.min_tokens or 0,
        ignores_eos=body.ignore_eos is True,
        stop_tokens=stop_tokens_of(body, served),
        thinking_budget=body.thinking.budget_tokens if isinstance(body.thinking, ThinkingSwitch) else None,
        tool_choice=tool_choice,
        streams_calls=body.stream is True,
        allows_parallel_calls=body.parallel_tool_calls is not False,
        grammar=grammar,
        namespace=namespace,
        chat=body.prompt_cache_key,
        retain_for_s=retained_for_s(body.prompt_cache_retention, body.prompt_cache_options),
        notes=(
            *notes,
            *(
                ("`truncation` has no effect: prompts that are too long are refused",)
                if body.truncation == "auto"
                else ()
            ),
            *writer.notes,
            *(f"unsupported server tool left out: {kind[:64]}" for kind in hosted_tools(given)),
        ),
    )


def input_items(body: ResponsesBody) -> list[Item]:
    """The input as items."""
    if isinstance(body.input, str):
        return [Item(type="message", role="user", content=body.input)]
    return body.input


def with_referenced_items(body: ResponsesBody, find: Callable[[str], Mapping[str, Any] | None]) -> ResponsesBody:
    """The body with the items that it refers to in the places of the references. Raises BadRequest.

    `find` gives an item that this server wrote before and has kept, by its id.
    """
    if isinstance(body.input, str) or all(item.type != "item_reference" for item in body.input):
        return body
    items: list[Item] = []
    for at, item in enumerate(body.input):
        if item.type != "item_reference":
            items.append(item)
            continue
        found = None if item.id is None else find(item.id)
        if found is None:
            raise BadRequest(
                f"Item with id {(item.id or '')[:80]!r} not found. Items of responses are kept in memory, unless "
                "`store` is false, and the oldest are dropped: send the item itself.",
                param=f"input[{at}]",
            )
        items.append(Item.model_validate(found))
    return body.model_copy(update={"input": items})


def _check(body: ResponsesBody, limits: Limits) -> None:
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

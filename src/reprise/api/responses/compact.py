"""`POST /v1/responses/compact`: a chat is made shorter by a summary that the model writes.

The client continues from what it gets: the messages that were not the model's, as they were, and one item in place of
all the rest. The item holds the summary in a word that nobody but a Reprise server reads.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from reprise.api.http.encoding import JsonResponse
from reprise.api.responses.body import Item, ResponsesBody, ResponseTool
from reprise.api.responses.items import as_listed
from reprise.api.responses.reply import usage_body
from reprise.api.responses.request import (
    earlier_items,
    input_items,
    previous_of,
    service_request_of,
    with_referenced_items,
)
from reprise.api.responses.store import Stored
from reprise.api.service.exchange import ServiceRequest
from reprise.api.service.reasoning_signature import encode_reasoning
from reprise.api.wire.background import refuse_unstreamed
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import RouteCall, ToAnswer
from reprise.chat.answer import Answer
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest, EngineFailed

router = api_router("OpenAI")

INSTRUCTION = """\
Summarise this chat for yourself: from now on you will have only the user's messages and your summary. Write down what
was decided, done and found out, with all names, numbers, paths and quotations that are still needed, what is left to
do, and what you were about to do. Write only the summary, and call no tools."""
"""The user's last message in the request for a summary."""


class CompactBody(ResponsesBody):
    """The chat to summarise: what a request to `/v1/responses` would answer."""

    input: str | list[Item] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


@router.post("/v1/responses/compact", response_model=None)
async def compact(body: CompactBody, call: ToAnswer) -> JsonResponse:
    """Summarise a chat. The next turn is prefilled while idle, up to the user's next words."""
    refuse_unstreamed(is_background=call.is_background)
    made = await call.while_connected(_compacted(body, call))
    return JsonResponse(made, headers={"x-request-id": made["id"]})


async def _compacted(body: CompactBody, call: RouteCall) -> dict[str, Any]:
    previous = previous_of(body.previous_response_id, call)
    asking = with_referenced_items(_asking(body, previous), call)
    kept = [_kept_message(item) for item in (*earlier_items(previous), *input_items(asking)) if _is_kept(item)]
    request = await call.service.off_loop(lambda: _summary_request(asking, previous, kept, call))
    reply = await call.service.start(request)
    async with reply:
        async for _ in reply.events():
            pass
    (ended,) = reply.ended
    return {
        "id": request.id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": _output(kept, _summary(ended.answer)),
        "usage": usage_body(reply.usage),
    }


def _asking(body: CompactBody, previous: Stored | None) -> ResponsesBody:
    """The chat as a body to answer, without what would give the answer another form than a summary has.

    What was before the chat's messages in the previous response is before them here too, unless the body gives its own:
    all of the chat would be computed again without it.
    """
    if body.model is None:
        raise BadRequest("Send `model`, the name of the model that summarises the chat.", param="model")
    if not body.input and previous is None:
        raise BadRequest("Send the chat in `input`, or its last response as `previous_response_id`.", param="input")
    formless = dict.fromkeys(("background", "generate", "include", "stream", "stream_options", "text"))
    update: dict[str, Any] = {**formless, "input": body.input or [], "tool_choice": "none"}
    if previous is not None and body.instructions is None:
        update["instructions"] = previous.body["instructions"]
    if previous is not None and body.tools is None:
        update["tools"] = [ResponseTool.model_validate(tool) for tool in previous.body["tools"]]
    return body.model_copy(update=update)


def _summary_request(
    body: ResponsesBody, previous: Stored | None, kept: Sequence[dict[str, Any]], call: RouteCall
) -> ServiceRequest:
    """The request for a summary of the chat, which continues from the summary after the `kept` messages."""

    def request_of(earlier: Sequence[Item], *items: Item) -> ServiceRequest:
        return service_request_of(body.model_copy(update={"input": list(items)}), earlier, call.asked)

    def next_chat(answer: Answer) -> ChatRequest:
        items = (Item.model_validate(item) for item in _output(kept, _summary(answer)))
        chat = request_of((), *items, Item(role="user", content="")).prompt
        assert isinstance(chat, ChatRequest)
        # Messages after the summary need not be the user's words.
        return replace(chat, breakpoints=(len(chat.messages) - 1,))

    request = request_of(earlier_items(previous), *input_items(body), Item(role="user", content=INSTRUCTION))
    return replace(request, next_chat=next_chat)


def _summary(answer: Answer) -> str:
    """Raises EngineFailed where the model wrote none."""
    summary = (answer.content or "").strip()
    if summary == "":
        raise EngineFailed("The model wrote no summary. Try again, with more `max_output_tokens` if you set it.")
    return summary


def _output(kept: Sequence[dict[str, Any]], summary: str) -> list[dict[str, Any]]:
    item = {"id": f"cmp_{uuid4().hex}", "type": "compaction", "encrypted_content": encode_reasoning(summary)}
    return [*kept, item]


def _is_kept(item: Item) -> bool:
    return item.type == "message" and item.role != "assistant"


def _kept_message(item: Item) -> dict[str, Any]:
    """A message of the user's or of the system's as an output item."""
    item_id = item.id or f"msg_{uuid4().hex}"
    listed = as_listed(item.model_dump(exclude_unset=True), item_id=item_id)
    return {**listed, "id": item_id, "status": "completed"}

"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from reprise.api.anthropic.body import CountBody, MessagesBody
from reprise.api.anthropic.reply import PING, ContentBlocks, Event, usage_body
from reprise.api.anthropic.request import prompt_of, service_request_of
from reprise.api.http.errors import Problem
from reprise.api.http.sse import event_lines
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, EndReason, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import OfModel, RouteCall, ToAnswer
from reprise.api.wire.wire import Wire, respond, start_reply

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_shape(problem: Problem) -> dict[str, Any]:
    """Anthropic's error body, which is also the `error` event of a stream."""
    kind = _TYPES.get(problem.status, "api_error" if problem.status >= 499 else "invalid_request_error")
    details = {} if problem.details is None else {"details": dict(problem.details)}
    return {"type": "error", "error": {"type": kind, "message": problem.message, **details}}


PREFIX = "/v1/messages"


class AnthropicErrorDetail(BaseModel):
    """What went wrong, in a sentence that says what to do."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every answer of this API that is an error."""

    type: str
    error: AnthropicErrorDetail


router = api_router("Anthropic", errors=AnthropicErrorBody)


@router.post(PREFIX, response_model=None)
async def create_message(body: MessagesBody, call: ToAnswer) -> Response:
    """Answer a chat."""

    async def start() -> MessagesWire:
        metadata = (body.model_extra or {}).get("metadata")
        return MessagesWire(
            call, await start_reply(call, lambda: service_request_of(body, call.asked), metadata=metadata)
        )

    return await respond(call, start, is_streamed=body.stream is True)


@router.post(f"{PREFIX}/count_tokens")
async def count_tokens(body: CountBody, call: OfModel) -> dict[str, Any]:
    """How many tokens the prompt of such a request has."""

    async def count() -> int:
        chat = (await call.service.off_loop(lambda: prompt_of(body, call.asked))).chat
        return len((await call.service.render(chat, namespace=call.namespace, is_final=False)).prompt)

    return {"input_tokens": await call.while_connected(count())}


class MessagesWire(Wire[Reply]):
    """An answer as a message of content blocks."""

    error_format = staticmethod(anthropic_shape)

    def __init__(self, call: RouteCall, reply: Reply) -> None:
        request_id = reply.request.id
        super().__init__(call, reply, request_id=request_id, headers={"request-id": request_id})
        self._has_prefix_cache = call.context.settings.has_prefix_cache
        self._blocks = ContentBlocks()
        self._has_begun = False

    def began(self, event: Began) -> Iterator[str]:
        return self._start()

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        yield from self._start()
        yield _lines(PING)

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        yield from self._start()
        yield from map(_lines, self._blocks.take(event.deltas))

    def end(self, event: AnswerEnd) -> Iterator[str]:
        yield from self._start()
        yield from map(_lines, self._blocks.finish())
        yield _lines({"type": "message_delta", "delta": _stopped(event), "usage": self._usage()})
        yield _lines({"type": "message_stop"})

    def error(self, problem: Problem) -> str:
        return _lines(anthropic_shape(problem))

    def take(self, event: AnswerDelta) -> None:
        self._blocks.take(event.deltas)

    def whole(self) -> dict[str, Any]:
        self._blocks.finish()
        (ended,) = self.ended
        return self._message(self._usage()) | {"content": self._blocks.content, **_stopped(ended)}

    def _start(self) -> Iterator[str]:
        """With the first event: a request that waits in the queue begins too, with counts that its end corrects."""
        if self._has_begun:
            return
        self._has_begun = True
        # What is computed is stored, as far as possible: how much of it was is known at the end.
        usage = self._usage(num_stored=self.reply.num_prompt if self._has_prefix_cache else 0)
        yield _lines({"type": "message_start", "message": self._message(usage)})

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The message as it begins."""
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.served.id,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": usage,
        }

    def _usage(self, *, num_stored: int | None = None) -> dict[str, Any]:
        usage = self.reply.usage
        stored = usage.num_stored if num_stored is None else num_stored
        return usage_body(usage, num_stored=stored, pin_for_s=self.reply.request.pin_for_s)


def _stopped(ended: AnswerEnd) -> dict[str, Any]:
    reasons = {EndReason.TOOL_CALLS: "tool_use", EndReason.LENGTH: "max_tokens"}
    at_stop = "end_turn" if ended.stop is None else "stop_sequence"
    return {"stop_reason": reasons.get(ended.reason, at_stop), "stop_sequence": ended.stop}


def _lines(event: Event) -> str:
    return event_lines(event["type"], event)

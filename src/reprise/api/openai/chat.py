"""`POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from reprise.api.http.sse import DONE, comment_line, data_line
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_reply import logprobs_body, message_of, usage_body
from reprise.api.openai.chat_request import service_request_of
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import RouteCall, ToAnswer
from reprise.api.wire.wire import Wire, respond, start_reply
from reprise.chat.answer import ContentDelta, Delta, ReasoningDelta, ToolCallDelta

router = api_router("OpenAI")


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatBody, call: ToAnswer) -> Response:
    """Answer a chat."""

    async def start() -> ChatWire:
        reply = await start_reply(call, lambda: service_request_of(body, call.asked))
        options = body.stream_options
        return ChatWire(call, reply, includes_usage=options is not None and options.include_usage is True)

    return await respond(call, start, is_streamed=body.stream is True)


class ChatWire(Wire[Reply]):
    """An answer as chat completions."""

    def __init__(self, call: RouteCall, reply: Reply, *, includes_usage: bool) -> None:
        super().__init__(call, reply, request_id=reply.request.id)
        self._includes_usage = includes_usage
        self._without_role = set(range(len(reply.choices)))

    def began(self, event: Began) -> Iterator[str]:
        if event.choice in self._without_role:
            self._without_role.remove(event.choice)
            yield self._chunk(event.choice, _ROLE)

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        # Clients that give up on a silent stream count chunks, and not comments.
        for choice in sorted(self._without_role):
            yield self._chunk(choice, _ROLE)
        self._without_role.clear()
        yield comment_line(event.text) + self._chunk(0, {})

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        logprobs = logprobs_body(event.tokens, self.decode)
        for delta in [_delta(delta) for delta in event.deltas] or [{}]:
            yield self._chunk(event.choice, delta, logprobs=logprobs)
            # They go with the first.
            logprobs = None

    def end(self, event: AnswerEnd) -> Iterator[str]:
        yield self._chunk(event.choice, {}, finish_reason=str(event.reason))

    def done(self) -> Iterator[str]:
        if self._includes_usage:
            yield data_line(self._object("chat.completion.chunk", []) | {"usage": usage_body(self.reply.usage)})
        yield DONE

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": end.choice,
                "message": {**message_of(end.answer), "annotations": []},
                "logprobs": logprobs_body(self.tokens[end.choice], self.decode),
                "finish_reason": str(end.reason),
            }
            for end in sorted(self.ended, key=lambda end: end.choice)
        ]
        return self._object("chat.completion", choices) | {"usage": usage_body(self.reply.usage)}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return data_line(self._object("chat.completion.chunk", [choice]))

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        created, model = int(self.reply.created), self.served.id
        return {"id": self.request_id, "object": kind, "created": created, "model": model, "choices": choices}


_ROLE = {"role": "assistant", "content": ""}
"""The delta of a choice's first chunk."""


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case ReasoningDelta():
            return {"reasoning_content": delta.text}
        case ContentDelta():
            return {"content": delta.text}
        case ToolCallDelta():
            call: dict[str, Any] = {"index": delta.index}
            function: dict[str, Any] = {"arguments": delta.arguments}
            if delta.id is not None:
                call |= {"id": delta.id, "type": "function"}
            if delta.name is not None:
                function = {"name": delta.name, **function}
            return {"tool_calls": [call | {"function": function}]}

"""`POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from reprise.api.http.sse import DONE, comment_line, data_line
from reprise.api.openai.chat_body import ChatBody
from reprise.api.openai.chat_reply import (
    ChunkHead,
    completion,
    end_chunk,
    piece_chunks,
    role_chunk,
    usage_chunk,
    waiting_chunk,
)
from reprise.api.openai.chat_request import service_request_of
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.body_reading import api_router
from reprise.api.wire.context import RouteCall, ToAnswer
from reprise.api.wire.wire import Wire, respond, start_reply

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
        self._head = ChunkHead(id=reply.request.id, created=int(reply.created), model=self.served.id)
        self._includes_usage = includes_usage
        self._without_role = set(range(len(reply.running)))

    def began(self, event: Began) -> Iterator[str]:
        if event.choice in self._without_role:
            self._without_role.remove(event.choice)
            yield data_line(role_chunk(self._head, event.choice))

    def waiting(self, event: StillWaiting) -> Iterator[str]:
        # Clients that give up on a silent stream count chunks, and not comments.
        for choice in sorted(self._without_role):
            yield data_line(role_chunk(self._head, choice))
        self._without_role.clear()
        yield comment_line(event.text) + data_line(waiting_chunk(self._head))

    def delta(self, event: AnswerDelta) -> Iterator[str]:
        for chunk in piece_chunks(self._head, event, self.decode):
            yield data_line(chunk)

    def end(self, event: AnswerEnd) -> Iterator[str]:
        yield data_line(end_chunk(self._head, event))

    def done(self) -> Iterator[str]:
        if self._includes_usage:
            yield data_line(usage_chunk(self._head, self.reply.usage))
        yield DONE

    def whole(self) -> dict[str, Any]:
        return completion(self._head, self.ended, self.tokens, self.reply.usage, self.decode)

"""One answer in the form of an API: the table that each API fills in, and the route that writes all of them."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from starlette.responses import Response

from reprise.api.http.encoding import JsonResponse
from reprise.api.http.errors import Problem, openai_shape
from reprise.api.http.sse import EventStream, StreamSource, data_line
from reprise.api.service.batch import Batch
from reprise.api.service.caller import with_body
from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Began, ServiceRequest, StillWaiting
from reprise.api.service.reply import Reply
from reprise.api.wire.background import refuse_unstreamed
from reprise.api.wire.context import RouteCall
from reprise.core.events import Sampled

R = TypeVar("R", bound=Reply | Batch)


class Wire(Generic[R]):
    """One answer as an API writes it: a stream by the methods up to `error`, or one body by `take` and `whole`.

    An API overrides what it has a form for. Each text that a method yields is sent by itself.
    """

    stream_headers: ClassVar[Mapping[str, str]] = {}
    """Headers of streams that are not server-sent events."""

    def __init__(self, call: RouteCall, reply: R, *, request_id: str, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: those of the API, of streams and of whole answers."""
        self.served = call.service.served
        self.decode = self.served.text.decode
        self.reply = reply
        self.request_id = request_id
        self.headers = {"x-request-id": request_id, **(headers or {})}
        self.state: Callable[[], dict[str, Any]] | None = None
        """The answer as it is now, for APIs that can be asked for it."""
        self.tokens: defaultdict[int, list[Sampled]] = defaultdict(list)
        """Of a whole answer: the tokens with log-probabilities, by choice."""
        self.ended: list[AnswerEnd] = []
        """Of a whole answer: its choices."""

    @staticmethod
    def error_format(problem: Problem) -> dict[str, Any]:
        """The API's error body."""
        return openai_shape(problem)

    def begin(self) -> Iterable[str]:
        """Before the first event."""
        return ()

    def began(self, event: Began) -> Iterable[str]:
        return ()

    def waiting(self, event: StillWaiting) -> Iterable[str]:
        return ()

    def delta(self, event: AnswerDelta) -> Iterable[str]:
        return ()

    def end(self, event: AnswerEnd) -> Iterable[str]:
        return ()

    def done(self) -> Iterable[str]:
        """After the last event."""
        return ()

    def error(self, problem: Problem) -> str:
        """The last text of a stream that broke off."""
        return data_line(self.error_format(problem))

    def take(self, event: AnswerDelta) -> None:
        """Keep what `whole` needs of a piece."""
        self.tokens[event.choice].extend(event.tokens)

    def whole(self) -> dict[str, Any]:
        """The body of the whole answer, when `ended` is complete."""
        raise NotImplementedError


AnyWire = Wire[Reply] | Wire[Batch]


async def start_reply(call: RouteCall, make: Callable[[], ServiceRequest], *, metadata: object = None) -> Reply:
    """Read a request on another thread and start its answer. `metadata`: see `with_body`."""
    request = await call.service.off_loop(make)
    return await call.service.start(replace(request, caller=with_body(call.caller, metadata)))


async def write_events(wire: AnyWire) -> AsyncGenerator[str, None]:
    """The texts of an answer's stream."""
    for text in wire.begin():
        yield text
    async for event in wire.reply.events():
        match event:
            case Began():
                texts = wire.began(event)
            case StillWaiting():
                texts = wire.waiting(event)
            case AnswerDelta():
                texts = wire.delta(event)
            case AnswerEnd():
                texts = wire.end(event)
        for text in texts:
            yield text
    for text in wire.done():
        yield text


async def respond(
    call: RouteCall, start: Callable[[], Awaitable[AnyWire]], *, is_streamed: bool, has_state: bool = False
) -> Response:
    """The response of every API: one body, or a stream, which continues without its client if the call says so.

    `has_state`: the wire has one, so that an answer in the background need not be streamed.
    """
    if not is_streamed and not has_state:
        refuse_unstreamed(is_background=call.is_background)
    if not is_streamed and not call.is_background:
        wire, body = await call.while_connected(_whole(start))
        return JsonResponse(body, headers=wire.headers)
    wire = await call.while_connected(start())
    source = StreamSource(
        reply=wire.reply,
        texts=write_events(wire),
        request_id=wire.request_id,
        on_error=wire.error,
        headers={**wire.headers, **wire.stream_headers},
    )
    if not call.is_background:
        return EventStream(source)
    answer = await call.context.background.begin(source, namespace=call.namespace, state=wire.state)
    if is_streamed:
        return answer.stream()
    assert wire.state is not None, "it `has_state`"
    return JsonResponse(wire.state(), headers=wire.headers)


async def _whole(start: Callable[[], Awaitable[AnyWire]]) -> tuple[AnyWire, dict[str, Any]]:
    wire = await start()
    async with wire.reply:
        async for event in wire.reply.events():
            match event:
                case AnswerDelta():
                    wire.take(event)
                case AnswerEnd():
                    wire.ended.append(event)
                case _:
                    pass
    return wire, wire.whole()

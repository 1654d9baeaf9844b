"""One replica: the engines of `reprise serve` with its HTTP application, and what the cluster asks it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from fastapi import FastAPI
from starlette.types import Message

from reprise.api.app import create_app
from reprise.api.http.ending import Ending
from reprise.api.native.server_routes import Health, health_of, load_of
from reprise.api.service.service import ChatService
from reprise.cli.engines import ServingEngines
from reprise.cli.log import configure_logging
from reprise.cluster.replicas.forwarded import (
    LOOKUP_PATH,
    REPLICA_HEADER,
    AsgiCall,
    ForwardedRequest,
    json_object,
    whole_response,
)
from reprise.cluster.replicas.routing import Offer
from reprise.cluster.replicas.scaling import MEMORY
from reprise.core.errors import EngineFailed
from reprise.core.settings import Settings

log = logging.getLogger(__name__)


def _first_lookup(settings: Settings) -> ForwardedRequest:
    keys = [(b"authorization", b"Bearer " + key.encode()) for key in settings.api_keys[:1]]
    return ForwardedRequest(
        method="POST",
        path=LOOKUP_PATH,
        query=b"",
        headers=((b"content-type", b"application/json"), *keys),
        body=b'{"messages": [{"role": "user", "content": "Hello."}]}',
    )


class ReplicaServer:
    """A server without a socket. All methods but `start` belong to the event loop that `start` was awaited on."""

    def __init__(self, settings: Settings, *, name: str) -> None:
        self._settings = settings
        self._name = name
        self._ending = Ending(settings.grace_s)
        self._engines: ServingEngines | None = None
        self._service: ChatService | None = None
        self._app: FastAPI | None = None
        self._living = AsyncExitStack()
        self._running: set[AsgiCall] = set()
        self._cutting: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Load the model. Raises LoadFailed."""
        configure_logging(self._settings)
        self._engines = await asyncio.to_thread(ServingEngines, self._settings)
        try:
            service = await asyncio.to_thread(self._engines.load)
            await self.serve(service)
            # The first one takes longer than a router waits.
            await self.lookup(_first_lookup(self._settings))
        except BaseException:
            await asyncio.to_thread(self._engines.close)
            raise

    async def serve(self, service: ChatService) -> None:
        """Answer with what is loaded already."""
        app = create_app(service, self._settings)
        await self._living.enter_async_context(app.router.lifespan_context(app))
        self._service, self._app = service, app

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        """The ASGI messages of the response. Raises CutOff where the replica has to stop before its end."""
        # The cluster sends nothing to a replica that stops: this one is to stay.
        self._stay()
        call = AsgiCall(self._loaded_app, request)
        self._running.add(call)
        try:
            async with contextlib.aclosing(call.messages()) as batches:
                async for batch in batches:
                    yield [self._signed(message) for message in batch]
        finally:
            self._running.discard(call)

    async def lookup(self, request: ForwardedRequest) -> Offer | None:
        """The offer for this request's prompt now. None: it has none, as with a bad body."""
        status, text = await whole_response(self._loaded_app, request.as_lookup())
        if status != 200:
            return None
        found = json_object(text)
        load = load_of(self._loaded_service.status())
        ttft_s, queue_s = float(found["est_ttft_s"]), float(found["queue_s"])
        return Offer(
            ttft_s=ttft_s,
            prefill_s=max(0.0, ttft_s - queue_s),
            num_computed=int(found["to_compute"]),
            num_requests=int(load["num_total_reqs"]),
        )

    def load(self) -> dict[str, float]:
        """By what replicas are added and removed, beside the number of requests."""
        return {MEMORY: load_of(self._loaded_service.status())["token_usage"]}

    def check(self) -> None:
        """Raises EngineFailed where only a restart helps."""
        health = health_of(self._loaded_service.status(), stall_after_s=self._settings.stall_after_s)
        if health in (Health.STALLED, Health.DEAD):
            raise EngineFailed(f"The engine is {health}.")

    def leave(self) -> None:
        """The cluster takes this replica away: write to the disk, and end the responses under way within `--grace`.

        A third of the time, ten seconds at most, is for the disk. If requests come nevertheless, it is to stay.
        """
        if self._cutting is not None:
            return
        for service in self._loaded_service.beside:
            service.backend.hurry()
        log.info("%s: draining", self._name)
        self._cutting = asyncio.get_running_loop().call_later(self._ending.answers_s, self._cut_off)

    async def stop(self) -> None:
        """End: what was computed is written to the disk, as far as there is time."""
        self._stay()
        self._cut_off()
        await self._living.aclose()
        engines, left_s = self._engines, self._settings.grace_s - self._ending.answers_s
        if engines is not None:
            self._engines = None
            await asyncio.to_thread(engines.stop, timeout_s=left_s)
            await asyncio.to_thread(engines.close)

    def _stay(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None

    def _cut_off(self) -> None:
        for call in tuple(self._running):
            call.cut_off()

    def _signed(self, message: Message) -> Message:
        if message["type"] != "http.response.start":
            return message
        return {**message, "headers": [*message["headers"], (REPLICA_HEADER.encode(), self._name.encode())]}

    @property
    def _loaded_app(self) -> FastAPI:
        assert self._app is not None, "start() comes first"
        return self._app

    @property
    def _loaded_service(self) -> ChatService:
        assert self._service is not None, "start() comes first"
        return self._service

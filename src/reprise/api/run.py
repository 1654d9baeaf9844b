"""Runs the API: listening, and Ctrl-C."""

import asyncio
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from reprise.api.http.connections import ConnectionLimits, end_overdue, protocol_with, raise_descriptor_limit
from reprise.api.http.ending import Ending
from reprise.api.http.listening import FirstAnswers, url_of
from reprise.api.loading import LoadingApp, LoadingProgress
from reprise.api.service.service import ChatService
from reprise.core.settings import Settings

log = logging.getLogger(__name__)


def run_while_loading(
    load: Callable[[], ChatService],
    settings: Settings,
    *,
    listener: socket.socket,
    ending: Ending,
    progress: Callable[[], LoadingProgress],
    first: FirstAnswers | None = None,
    holds: bool = False,
) -> bool:
    """Serve until a signal ends it, from the first moment on: `load` runs on another thread. Raises what it raises.

    The first signal (Ctrl-C, SIGTERM, SIGHUP) takes no more requests and finishes the responses under way, for a
    bounded time; the second cuts them off. `first` has answered on the listener until now. With `holds`, requests wait
    for the model instead of being refused. False: the end came before `load` had returned, and it is still at work.
    """
    app = LoadingApp(
        load,
        settings,
        progress=progress,
        on_loaded=lambda service: _say_where(service, listener),
        holds=holds,
    )
    server = Server(app, settings, app, answers_s=ending.answers_s)
    app.on_failed = server.finish
    if first is not None:
        first.stop()
    _run(server, settings, listener, ending)
    if app.failure is not None:
        raise app.failure
    return app.service is not None


def _run(server: "Server", settings: Settings, listener: socket.socket, ending: Ending) -> None:
    if not settings.api_keys and not _is_loopback(listener):
        log.warning("Anyone who can reach %s can use this server. Set a key with --api-key.", settings.host)
    ending.on_first, ending.on_second = server.finish, server.cut_off
    server.run(sockets=[listener])


def _say_where(service: ChatService, listener: socket.socket) -> None:
    """For programs that started the server, too: from this line on it serves."""
    names = [service.served.id] if service.models is None else [model.id for model in service.models.all]
    sys.stdout.write(f"Serving {', '.join(names)} at {url_of(listener)} (Ctrl-C to stop)\n")
    sys.stdout.flush()


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


KEEP_ALIVE_S = 30
"""Seconds that an idle connection is kept: longer than clients keep theirs (httpx 5, aiohttp 15).

A request may be lost that is sent on a connection while the server closes it.
"""
_BACKLOG = 128
"""Connections that are accepted in one go, before any of them can be refused."""


_LAST_EVENTS_S = 1.0
"""The time that clients have to read that their answers were cut off."""


class Server(uvicorn.Server):
    """uvicorn's server with our end, and our connections."""

    def __init__(self, app: ASGIApp, settings: Settings, served: LoadingApp | ChatService, *, answers_s: float) -> None:
        """`served`: what ends the answers. `answers_s`: how long the responses under way may take after `finish`."""
        limits = ConnectionLimits(
            max_connections=raise_descriptor_limit(settings.max_connections),
            arrive_s=settings.request_timeout_s,
            unread_s=settings.read_timeout_s,
        )
        config = uvicorn.Config(
            app,
            http=protocol_with(limits),
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            log_config=None,
            log_level="warning" if settings.log_level == "info" else settings.log_level,
            access_log=settings.log_level == "debug",
            lifespan="on",
        )
        super().__init__(config)
        self._served = served
        self._limits = limits
        self._answers_s = answers_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # Not uvicorn's own: they raise the signal again at the end, and the exit status would not be 0.
        yield

    def finish(self) -> None:
        """Take no more requests, and end when the responses under way have, or their time is over."""
        self._served.begin_close()
        self.should_exit = True
        last_events_s = min(_LAST_EVENTS_S, self._answers_s / 4)
        self._on_loop(lambda loop: loop.call_later(self._answers_s - last_events_s, self._served.cut_off))
        self._on_loop(lambda loop: loop.call_later(self._answers_s, self._abort_connections))

    def cut_off(self) -> None:
        """End the responses under way."""
        self._on_loop(lambda loop: self._abort_connections())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            due_s = time.monotonic() + self._limits.tick_s
            await asyncio.sleep(self._limits.tick_s)
            end_overdue(self.server_state.connections, late_s=time.monotonic() - due_s)

    def _on_loop(self, action: Callable[[asyncio.AbstractEventLoop], object]) -> None:
        # Signals come between any two instructions: the loop does the work when it is its turn.
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(action, loop)

    def _abort_connections(self) -> None:
        # To the requests it is as if all clients had hung up: each ends itself, and its work is kept.
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

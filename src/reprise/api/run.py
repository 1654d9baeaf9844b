"""Runs the API: listening, Ctrl-C, and a server on a thread for those who want it beside other work."""

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import sys
import threading
from types import FrameType

import uvicorn

from reprise.api.app import create_app
from reprise.api.service import ChatService
from reprise.core.errors import RepriseError
from reprise.core.settings import Settings

log = logging.getLogger(__name__)


class CannotListen(RepriseError):
    """The address cannot be listened on; the sentence says why."""

    code = "cannot_listen"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: on any free port. Raises CannotListen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CannotListen(f"{host} is no address of this machine: {error.strerror}.") from error
    listener = socket.socket(family, kind, protocol)
    # A port whose last connections have not timed out yet is free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            sentence = f"Port {port} is in use. Choose another with --port, or 0 for any free one."
        else:
            sentence = f"Cannot listen on {host}, port {port}: {error.strerror}."
        raise CannotListen(sentence) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the server is reached from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if listener.family is socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(service: ChatService, settings: Settings, *, listener: socket.socket | None = None) -> None:
    """Serve until the user ends it, and return. Raises CannotListen.

    The first Ctrl-C (or SIGTERM) takes no more requests and finishes the responses under way; the second cuts them off.
    """
    open_listener = listen(settings.host, settings.port) if listener is None else listener
    if not settings.api_keys and not _is_loopback(open_listener):
        log.warning("Everybody who reaches %s may use this server. Give it a key with --api-key.", settings.host)
    server = _Server(service, settings)
    sys.stdout.write(f"Serving {service.served.id} at {url_of(open_listener)} (Ctrl-C to stop)\n")
    sys.stdout.flush()
    server.run(sockets=[open_listener])


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class _Server(uvicorn.Server):
    """uvicorn's server with our Ctrl-C."""

    def __init__(self, service: ChatService, settings: Settings) -> None:
        config = uvicorn.Config(
            create_app(service, settings),
            log_level="warning" if settings.log_level == "info" else settings.log_level,
            access_log=settings.log_level == "debug",
            lifespan="on",
        )
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own: it raises the signal again at the end, and the exit status would not be 0.
        if not self.should_exit:
            self._service.is_closing = True
            self.should_exit = True
        elif sig == signal.SIGINT:
            self._cut_off()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def _cut_off(self) -> None:
        # Signals come between any two instructions: the loop does the work when it is its turn.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort_connections)

    def _abort_connections(self) -> None:
        # To the requests it is as if all clients had hung up: each ends itself, and its work is kept.
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


class ServerThread:
    """A server on a thread of its own, on a free port of this machine: for tests and notebooks."""

    def __init__(self, service: ChatService, settings: Settings) -> None:
        self._listener = listen("127.0.0.1", 0)
        self.url = url_of(self._listener)
        self._server = _Server(service, settings)
        self._thread = threading.Thread(target=self._run, name="reprise-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Finish the responses under way and return."""
        self._server.should_exit = True
        self._thread.join()

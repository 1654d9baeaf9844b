"""The socket that the server listens on, and the responses before the server is up.

The modules of a server (MLX, FastAPI, tokenizers) take seconds to import. The socket is there before them, and a thread
answers that the model is being loaded. So nothing here imports more than the standard library and the settings.
"""

import asyncio
import errno
import json
import socket
import threading
import time
from contextlib import suppress

from reprise.api.http.web_access import WebAccess, WrongHost
from reprise.core.errors import RepriseError

_RETRY_S = 2
_MAX_HEAD = 64 * 1024
_MAX_CONNECTIONS = 200
_LINGER_S = 5.0
"""How long a connection may take to be read, once it is answered or nobody listens here any more."""


class CannotListen(RepriseError):
    """The address cannot be listened on; the sentence says why."""

    code = "cannot_listen"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: on any free port. Raises CannotListen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CannotListen(f"{host} is not an address of this machine: {error.strerror}.") from error
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


class FirstAnswers:
    """Answers every request on a socket with a 503 that says when to come again, on a thread, until `stop`.

    `/health/live` is a 200: a supervisor need not start the server again. Each connection is closed after its answer.
    """

    def __init__(self, listener: socket.socket, access: WebAccess) -> None:
        self._access = access
        self._begun_s = time.monotonic()
        self._listener = listener
        self._listener.setblocking(False)
        self._visits: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._has_left = threading.Event()
        threading.Thread(target=self._run, name="reprise-first-answers", daemon=True).start()

    def stop(self) -> None:
        """Leave the socket to another. Connections that were taken are still answered."""
        if not self._has_left.is_set():
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._has_left.wait()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._answer_all())
        finally:
            self._has_left.set()
            self._loop.close()

    async def _answer_all(self) -> None:
        self._loop.add_reader(self._listener, self._welcome)
        await self._is_over.wait()
        self._loop.remove_reader(self._listener)
        self._has_left.set()
        await asyncio.gather(*self._visits)

    def _welcome(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._visits) >= _MAX_CONNECTIONS:
                connection.close()
                return
            visit = self._loop.create_task(self._attend(connection))
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)

    async def _attend(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            async with asyncio.timeout(_LINGER_S):
                head = b""
                while b"\r\n\r\n" not in head and len(head) <= _MAX_HEAD:
                    received = await self._loop.sock_recv(connection, 1 << 16)
                    if received == b"":
                        return
                    head += received
            async with asyncio.timeout(_LINGER_S):
                await self._loop.sock_sendall(connection, self._answer_to(head))
                # What follows is read and dropped: a connection that is closed before has its answer lost.
                connection.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(connection, 1 << 16):
                    pass

    def _answer_to(self, head: bytes) -> bytes:
        lines = (line.partition(b":") for line in head.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:])
        try:
            self._access.check_host([(name.strip().lower(), value.strip()) for name, _, value in lines])
        except WrongHost as error:
            return first_answer(head, refusal=error)
        return first_answer(head, seconds=time.monotonic() - self._begun_s)


def first_answer(head: bytes, *, seconds: float = 0.0, refusal: WrongHost | None = None) -> bytes:
    """The response to a request with this head: a refusal, or how long ago (`seconds`) the server began to start."""
    parts = head.split(b" ", 2)
    path = parts[1].partition(b"?")[0].decode("latin-1") if len(parts) > 1 else ""
    if refusal is not None:
        status, body = "421 Misdirected Request", _error(path, str(refusal), status=421, code=refusal.code)
    else:
        status = "200 OK" if path == "/health/live" else "503 Service Unavailable"
        body = _body(path, seconds)
    content = json.dumps(body).encode()
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *([f"Retry-After: {_RETRY_S}"] if refusal is None else []),
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + (b"" if parts[0] == b"HEAD" else content)


def _body(path: str, seconds: float) -> dict[str, object]:
    if path.startswith("/health"):
        return {"status": "loading", "loading": {"seconds": round(seconds, 3), "bytes_read": 0, "bytes_total": 0}}
    return _error(path, f"The server is starting. Try again in {_RETRY_S} s.", status=503, code="model_loading")


def _error(path: str, message: str, *, status: int, code: str) -> dict[str, object]:
    """An error in the shape of the API that the path belongs to."""
    if path.startswith("/api/"):
        return {"error": message}
    if path.rstrip("/").endswith(("/messages", "/count_tokens")):
        kind = "overloaded_error" if status == 503 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = "server_error" if status == 503 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

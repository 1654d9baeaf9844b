"""The socket that the server listens on, and the responses before the server is up.

The modules of a server (MLX, FastAPI, tokenizers) take seconds to import. The socket is there before them, and a thread
answers that the model is being loaded. So nothing here imports more than the standard library and the settings.
"""

import errno
import json
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Visitor:
    """A connection: what has come of its request's head, and when it is given up."""

    connection: socket.socket
    due_s: float
    head: bytearray = field(default_factory=bytearray)
    is_answered: bool = False


class FirstAnswers:
    """Answers every request on a socket with a 503 that says when to come again, on a thread, until `stop`.

    `/health/live` is a 200: a supervisor need not start the server again. Each connection is closed after its answer.
    """

    def __init__(self, listener: socket.socket, access: WebAccess) -> None:
        self._access = access
        self._begun_s = time.monotonic()
        self._listener = listener
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reprise-first-answers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the socket to another. Connections that were taken are still answered."""
        self._wake.close()
        self._has_left.wait()

    def _run(self) -> None:
        try:
            while not self._has_left.is_set() or self._visitors:
                for key, _ in self._selector.select(timeout=0.5):
                    self._attend(key.fileobj)
                now = time.monotonic()
                for visitor in [each for each in self._visitors.values() if each.due_s < now]:
                    self._leave(visitor)
        finally:
            self._has_left.set()
            self._selector.close()
            self._woken.close()

    def _attend(self, ready: object) -> None:
        if ready is self._woken:
            self._selector.unregister(self._woken)
            self._selector.unregister(self._listener)
            self._has_left.set()
        elif ready is self._listener:
            self._welcome()
        elif isinstance(ready, socket.socket) and ready in self._visitors:
            self._read(self._visitors[ready])

    def _welcome(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._visitors) >= _MAX_CONNECTIONS:
                connection.close()
                return
            self._visitors[connection] = _Visitor(connection, due_s=time.monotonic() + _LINGER_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, visitor: _Visitor) -> None:
        try:
            received = visitor.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if received == b"":
            self._leave(visitor)
        elif not visitor.is_answered:
            visitor.head += received
            if b"\r\n\r\n" in visitor.head or len(visitor.head) > _MAX_HEAD:
                self._answer(visitor)

    def _answer(self, visitor: _Visitor) -> None:
        visitor.is_answered = True
        visitor.due_s = time.monotonic() + _LINGER_S
        with suppress(OSError):
            visitor.connection.sendall(self._answer_to(bytes(visitor.head)))
            # What follows is read and dropped: a connection that is closed before has its answer lost.
            visitor.connection.shutdown(socket.SHUT_WR)
        visitor.head.clear()

    def _answer_to(self, head: bytes) -> bytes:
        lines = (line.partition(b":") for line in head.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:])
        try:
            self._access.check_host([(name.strip().lower(), value.strip()) for name, _, value in lines])
        except WrongHost as error:
            return first_answer(head, refusal=error)
        return first_answer(head, seconds=time.monotonic() - self._begun_s)

    def _leave(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        del self._visitors[visitor.connection]
        visitor.connection.close()


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

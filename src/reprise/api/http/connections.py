"""Closes connections that are not used: silent ones, incomplete requests, and clients that do not read.

uvicorn's HTTP/1.1 protocol on h11, which bounds what a header may take, with what it lacks: a time for a request to
arrive, a time for an answer to be taken, and a bound on connections that leaves file descriptors for everything else.
"""

import asyncio
import fcntl
import logging
import resource
import socket
import struct
import termios
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

_MIN_BYTES_PER_S = 4096
"""A body that arrives faster than this has as long as it takes."""

_SEND_BUFFER = 1 << 17
"""Bytes of an answer that the system holds for a client that does not read, beside the server's own 64 KiB."""

_REFUSED_S = 5.0
"""How long a client that is refused may take to read why."""
_MOST_REFUSED = 64
"""So many at the same time: their descriptors are not among those of `max_connections`."""

_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_FULL_BODY = (
    b'{"error":{"message":"The server has as many connections as it may. Try again in a moment.",'
    b'"type":"server_error","param":null,"code":"too_many_connections"}}'
)
_ENDING_BODY = (
    b'{"error":{"message":"The server is shutting down. Try again in a moment.",'
    b'"type":"server_error","param":null,"code":"shutting_down"}}'
)
_ENDING_S = 0.5
"""As `_REFUSED_S`, where the end of the server waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`max_connections` at the same time. `arrive_s`: for a request to arrive, from the connection or the last answer
    on. `unread_s`: for a client to read something of what waits for it."""

    max_connections: int
    arrive_s: float
    unread_s: float

    def __post_init__(self) -> None:
        assert self.max_connections > 0 and self.arrive_s > 0 and self.unread_s > 0, self

    @property
    def tick_s(self) -> float:
        """How often the connections are looked at."""
        return min(1.0, self.arrive_s / 4, self.unread_s / 4)


class Unread:
    """How long a client has read nothing of what waits for it."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._nbytes = 0

    def forgive(self, late_s: float, now_s: float) -> None:
        """So much of the time was the server's own."""
        if self._since_s is not None:
            self._since_s = min(now_s, self._since_s + late_s)

    def waited_s(self, nbytes: int, now_s: float) -> float:
        """The same question at `now_s`, when `nbytes` wait to be sent. Any that were sent count as read."""
        if nbytes == 0:
            self._since_s = None
        elif self._since_s is None or nbytes < self._nbytes:
            self._since_s = now_s
        self._nbytes = nbytes
        return 0.0 if self._since_s is None else now_s - self._since_s


class Connection(H11Protocol):
    """One connection, which can tell what its client keeps waiting, and for how long."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._quiet_since_s = time.monotonic()
        self._num_received = 0
        self._unread = Unread()
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        given = transport.get_extra_info("socket")
        if given is not None:
            given.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._quiet_since_s, self._num_received = time.monotonic(), 0
        super().on_response_complete()

    @property
    def is_between_requests(self) -> bool:
        """Whether no request has arrived that is not answered."""
        # Before the first request there is no cycle.
        return self.scope is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    @property
    def has_sent(self) -> bool:
        """Whether something that the client sent waits to be read here: then it is the server who is late."""
        given = self.transport.get_extra_info("socket")
        if given is None or given.fileno() < 0:
            return False
        (num,) = struct.unpack("i", fcntl.ioctl(given.fileno(), termios.FIONREAD, bytes(4)))
        return num > 0

    @property
    def quiet_since_s(self) -> float:
        return self._quiet_since_s

    def why_overdue(self, now_s: float) -> str | None:
        """Why this connection should end now, or None. To be asked regularly."""
        limits = self._limits
        if self._unread.waited_s(self.transport.get_write_buffer_size(), now_s) > limits.unread_s:
            return "the client does not read its answer"
        if self.is_between_requests:
            reason, allowed_s = "no request arrived", limits.arrive_s
        elif self.cycle.more_body:
            reason, allowed_s = (
                "the request did not arrive in time",
                limits.arrive_s + self._num_received / _MIN_BYTES_PER_S,
            )
        else:
            return None
        return reason if now_s - self._quiet_since_s > allowed_s and not self.has_sent else None

    def forgive(self, late_s: float, now_s: float) -> None:
        """Do not count against the client what the server was late to look at its connections."""
        self._quiet_since_s = min(now_s, self._quiet_since_s + late_s)
        self._unread.forgive(late_s, now_s)

    def _make_room(self) -> None:
        """End the connection that has waited longest without a request; this one where all others are at work."""
        others: list[Connection] = [each for each in self.connections if isinstance(each, Connection)]
        refused = [each for each in others if each._is_refused]
        if len(others) - len(refused) <= self._limits.max_connections:
            return
        waiting = [
            each
            for each in others
            if each not in (self, *refused) and each.is_between_requests and not each.transport.is_closing()
        ]
        # Its request may have come while the server was busy.
        waiting = [each for each in waiting if not each.has_sent]
        if waiting:
            # Without their number: a sentence that changes would be logged each time, and not once a second.
            log.warning("all connections (--max-connections) are in use: closing idle ones")
            min(waiting, key=lambda each: each.quiet_since_s).transport.abort()
            return
        log.warning("all connections (--max-connections) are busy: refusing a new one")
        if len(refused) >= _MOST_REFUSED:
            min(refused, key=lambda each: each.quiet_since_s).transport.abort()
        self._refuse(_FULL_BODY, _REFUSED_S)

    def shutdown(self) -> None:
        """The server stops: answer a request that has not arrived as a whole, which nobody waits for."""
        if self.is_between_requests:
            is_partial = self._num_received > 0
        else:
            is_partial = self.cycle.more_body and not self.cycle.response_started
        if self._is_refused or not is_partial:
            super().shutdown()
            return
        if not self.is_between_requests:
            # To the application its client has hung up.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self._refuse(_ENDING_BODY, _ENDING_S)

    def _refuse(self, body: bytes, seconds: float) -> None:
        """Answer with a 503 and close after `seconds`: a client that is cut off while it sends does not read it."""
        self._is_refused = True
        self.transport.write(_UNAVAILABLE % (len(body), body))
        self.transport.write_eof()
        self.loop.call_later(seconds, self.transport.abort)


def end_overdue(connections: Iterable[object], *, late_s: float = 0.0) -> None:
    """End the connections whose clients have kept the server waiting too long. `late_s`: how much later than it should
    the server asks: it did not read either meanwhile, and what a client sent may still wait to be read."""
    now_s = time.monotonic()
    for each in tuple(connections):
        if not isinstance(each, Connection):
            continue
        each.forgive(late_s, now_s)
        reason = each.why_overdue(now_s)
        if reason is not None:
            # To a request it is as if the client had hung up: it ends, and its work is kept.
            log.info("closed a connection: %s", reason)
            each.transport.abort()


def protocol_with(limits: ConnectionLimits) -> Any:
    """The protocol class for uvicorn's configuration."""
    return partial(Connection, limits=limits)


_RESERVED = 384
"""For listeners, pipes, files of the model and of the disk cache, and connections that are accepted in one go."""


def raise_descriptor_limit(num_connections: int) -> int:
    """Ask the system for as many descriptors as these connections need; gives how many connections there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (ValueError, OSError):
            target = soft
        soft = target
    if soft == resource.RLIM_INFINITY:
        return num_connections
    return connections_within(soft, num_connections)


def connections_within(num_descriptors: int, num_connections: int) -> int:
    """How many of the connections fit, where a part of the descriptors is for everything else."""
    return max(1, min(num_connections, num_descriptors - min(_RESERVED, num_descriptors // 2)))

"""The connections between rank 0 and the other ranks, besides those of MLX.

A collective operation of MLX hangs forever if one rank does not take part. A connection shows when the process at the
other end exits, and pings show when it hangs.

A message is its length in four bytes, then JSON. Rank 0 sends operations and pings; the others answer pings, and report
errors before they exit.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reprise.core.errors import EngineFailed, LoadFailed

log = logging.getLogger("reprise.engine")

Message = Any
"""Any JSON value."""

_LENGTH = struct.Struct("<I")
_MOST_NBYTES = 1 << 28
_HELLO_NBYTES = 4096
"""The longest first message of a rank. Before it has shown the secret, a rank may not send more."""
_HELLO_S = 2.0
"""A connection that has not shown the secret after this long is closed."""
_MOST_STRANGERS = 64
"""Connections that have not shown it yet; beyond, the oldest is closed."""
_PING_S = 1.0
"""At most: a third of the time after which a rank counts as hung is less."""


class RanksFailed(EngineFailed):
    """Another rank exited, hangs or failed: nothing can run any more, and the server must be restarted."""

    status = 503
    code = "ranks_failed"
    is_explained = True


def is_lost_peer(error: Exception) -> bool:
    """Whether MLX raised this because the process of another rank has ended."""
    return str(error).startswith("[ring]")


def send_message(connection: socket.socket, message: Message) -> int:
    """Send one message; returns its size in bytes. Raises OSError if the other end is gone or does not read."""
    body = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)
    return len(body)


def receive_message(connection: socket.socket) -> Message:
    """The next message. Raises OSError (including ConnectionError and TimeoutError) if there is none."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > _MOST_NBYTES:
        raise ConnectionError("received an invalid message")
    try:
        return json.loads(_receive(connection, length))
    except (ValueError, RecursionError) as error:
        raise ConnectionError("received an invalid message") from error


def _receive(connection: socket.socket, num: int) -> bytes:
    parts = bytearray()
    while len(parts) < num:
        part = connection.recv(num - len(parts))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        parts += part
    return bytes(parts)


class Address:
    """The address at which rank 0 listens, with a secret that only the other ranks know."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self.host, self.port, self.secret = host, port, secret

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.secret}"

    @classmethod
    def parse(cls, text: str) -> Address:
        host, port, secret = text.split(" ")
        return cls(host, int(port), secret)


class Door:
    """The listener of rank 0 while the group forms. It reads all connections at once: no rank waits for a stranger."""

    def __init__(self, listener: socket.socket, secret: str, *, hello_s: float) -> None:
        self._secret = secret
        self._hello_s = hello_s
        self._listener = listener
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(listener, self._let_in)
        self._strangers: list[asyncio.Task[None]] = []
        """Those who read what connections send that have not shown the secret yet, the oldest first."""
        self._found: asyncio.Queue[tuple[int, socket.socket, dict[str, str]]] = asyncio.Queue()

    def next_rank(self, due_s: float) -> tuple[int, socket.socket, dict[str, str]]:
        """The next connection that shows the secret, with the number and facts of its rank. Raises TimeoutError."""
        return self._loop.run_until_complete(asyncio.wait_for(self._found.get(), due_s - time.monotonic()))

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._loop.run_until_complete(self._send_away())
        self._loop.close()

    async def _send_away(self) -> None:
        # Who has just come in is heard first: a task that has not begun closes nothing.
        await asyncio.sleep(0)
        strangers = tuple(self._strangers)
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers)
        while not self._found.empty():
            self._found.get_nowait()[1].close()

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # It has gone already.
        connection.setblocking(False)
        stranger = self._loop.create_task(self._hear(connection))
        self._strangers.append(stranger)
        stranger.add_done_callback(self._strangers.remove)
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers[0].cancel()

    async def _hear(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._hello_s):
                (length,) = _LENGTH.unpack(await self._read(connection, _LENGTH.size))
                if length > _HELLO_NBYTES:
                    raise ConnectionError("received an invalid message")
                hello = json.loads(await self._read(connection, length))
            if not hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()):
                raise ConnectionError("received a wrong secret")
            self._found.put_nowait((int(hello["rank"]), connection, dict(hello["facts"])))
        except (Exception, asyncio.CancelledError) as error:
            # Of any kind: this is not a rank.
            log.debug("a connection to the port of rank 0 was closed: %r", error)
            connection.close()

    async def _read(self, connection: socket.socket, num: int) -> bytes:
        parts = bytearray()
        while len(parts) < num:
            part = await self._loop.sock_recv(connection, num - len(parts))
            if not part:
                raise ConnectionError("the other end has closed the connection")
            parts += part
        return bytes(parts)


class LinksToFollowers:
    """The connections of rank 0 to all other ranks."""

    def __init__(self, host: str, num_ranks: int, *, silent_s: float) -> None:
        """`host`: the address by which the others reach this rank. One that is silent for `silent_s` counts as hung."""
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._num_ranks = num_ranks
        self._silent_s = silent_s
        self._connections: dict[int, socket.socket] = {}
        self._sending = threading.Lock()
        self._failing = threading.Lock()
        self._reports: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._heard_s: dict[int, float] = {}
        self._is_closed = threading.Event()
        self.pongs: dict[int, list[Message]] = {}
        """The last memory reading of each of the others."""
        self.failure: RanksFailed | None = None
        """Why the group has failed; None while it works."""
        self.on_failure: Callable[[RanksFailed], None] = lambda failure: None
        """Called once, on a thread of these links."""
        self.on_answer: Callable[[int, int, Message], None] = lambda rank, number, answer: None
        """Called, on a thread of these links, with what a rank answers to what was asked under a number."""

    def accept(self, facts: Message, *, within_s: float) -> None:
        """Wait until all others are connected and have the same facts. Raises LoadFailed."""
        due_s = time.monotonic() + within_s
        door = Door(self._listener, self.address.secret, hello_s=min(_HELLO_S, self._silent_s))
        try:
            while len(self._connections) < self._num_ranks - 1:
                rank, connection, theirs = door.next_rank(due_s)
                if not 0 < rank < self._num_ranks:
                    connection.close()
                    continue
                connection.settimeout(self._silent_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[rank] = connection
                if theirs != facts:
                    differing = sorted(key for key in facts if theirs.get(key) != facts[key])
                    raise LoadFailed(
                        f"Rank {rank} and rank 0 differ in {' and '.join(differing)}. All ranks need the same model, "
                        "options and versions."
                    )
        except TimeoutError as error:
            missing = sorted(set(range(1, self._num_ranks)) - set(self._connections))
            raise LoadFailed(
                f"Rank {', '.join(map(str, missing))} did not connect to {self.address.host}:{self.address.port} "
                f"within {within_s:.0f} s. Can it reach that address?"
            ) from error
        finally:
            door.close()
        for rank, connection in self._connections.items():
            self._heard_s[rank] = time.monotonic()
            name = f"reprise-rank-{rank}"
            threading.Thread(target=self._hear, args=(rank, connection), name=name, daemon=True).start()

    def begin_watch(self) -> None:
        """Start to ping the others."""
        for rank in self._heard_s:
            self._heard_s[rank] = time.monotonic()
        threading.Thread(target=self._watch, name="reprise-ranks", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to all others. Raises RanksFailed."""
        if self.failure is not None:
            raise self.failure
        body = json.dumps(message, separators=(",", ":")).encode()
        framed = _LENGTH.pack(len(body)) + body
        with self._sending:
            for rank, connection in self._connections.items():
                try:
                    connection.sendall(framed)
                except OSError as error:
                    raise self.fail(f"rank {rank} no longer accepts messages ({error})") from error

    def next_reports(self, *, within_s: float) -> dict[int, Message]:
        """The next report of each of the others, by rank. Raises RanksFailed."""
        reports: dict[int, Message] = {}
        due_s = time.monotonic() + within_s
        while len(reports) < self._num_ranks - 1:
            if self.failure is not None:
                raise self.failure
            with suppress(queue.Empty):
                rank, report = self._reports.get(timeout=0.1)
                reports[rank] = report
            if time.monotonic() > due_s:
                missing = sorted(set(range(1, self._num_ranks)) - set(reports))
                raise self.fail(f"rank {', '.join(map(str, missing))} did not report within {within_s:.0f} s")
        return reports

    def fail(self, why: str) -> RanksFailed:
        """Mark the group as failed; returns the error to raise for every later use."""
        with self._failing:
            if self.failure is not None:
                return self.failure
            self.failure = failure = RanksFailed(f"{why[:1].upper()}{why[1:]}. Restart the server.")
        if not self._is_closed.is_set():
            log.critical("%s", failure)
            self.on_failure(failure)
        return failure

    def close(self) -> None:
        """Stop the other ranks."""
        self._is_closed.set()
        self._listener.close()
        for connection in self._connections.values():
            with suppress(OSError):
                send_message(connection, ["end"])
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _hear(self, rank: int, connection: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                message = receive_message(connection)
            except TimeoutError:
                continue  # `_watch` decides when that is too long.
            except OSError:
                if not self._is_closed.is_set():
                    self.fail(f"rank {rank} has ended")
                return
            self._heard_s[rank] = time.monotonic()
            match message:
                case ["pong", *report]:
                    self.pongs[rank] = report
                case ["failed", why]:
                    self.fail(f"rank {rank}: {why}")
                    return
                case ["answer", number, answer]:
                    self.on_answer(rank, number, answer)
                case _:
                    self._reports.put((rank, message))

    def _watch(self) -> None:
        while not self._is_closed.wait(min(_PING_S, self._silent_s / 3)) and self.failure is None:
            for rank, heard_s in self._heard_s.items():
                if time.monotonic() - heard_s >= self._silent_s:
                    self.fail(f"rank {rank} has not answered for {self._silent_s:.0f} s")
                    return
            # If another thread is sending, that will notice a dead connection.
            if self._sending.acquire(blocking=False):
                self._sending.release()
                with suppress(RanksFailed):
                    self.send(["ping"])


class LinkToLeader:
    """The connection of another rank to rank 0, read on a thread so that the end of rank 0 is noticed at any time."""

    def __init__(
        self, address: Address, rank: int, facts: Message, *, silent_s: float, on_end: Callable[[], None]
    ) -> None:
        """`on_end` is called on that thread when rank 0 exits or is silent for `silent_s`. Raises LoadFailed."""
        try:
            self._connection = socket.create_connection((address.host, address.port), timeout=silent_s)
        except OSError as error:
            raise LoadFailed(f"Rank {rank} cannot reach rank 0 at {address.host}:{address.port}: {error}.") from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Rank 0 is silent while weights are loaded, and pings afterwards.
        self._connection.settimeout(None)
        self._silent_s = silent_s
        self._on_end = on_end
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        send_message(self._connection, {"rank": rank, "secret": address.secret, "facts": facts})
        threading.Thread(target=self._read, name="reprise-rank-0", daemon=True).start()

    def receive(self) -> Message:
        """Wait for the next message of rank 0."""
        return self._messages.get()

    def send(self, message: Message) -> None:
        """Tell rank 0. Thread-safe."""
        with self._sending, suppress(OSError):
            send_message(self._connection, message)

    def _read(self) -> None:
        try:
            while True:
                message = receive_message(self._connection)
                self._messages.put(message)
                if message == ["end"]:
                    return
                if message == ["ping"]:
                    self._connection.settimeout(self._silent_s)
        except OSError:
            self._on_end()
        finally:
            self._connection.close()

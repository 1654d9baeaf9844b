"""`--record FILE`: what came in, a JSON line a request, in the form that `reprise simulate` and `bench --replay` read.

The event loop only hands over what it has anyway. A thread hashes and writes; when it cannot keep up, lines are
dropped, counted and reported, and never waited for.
"""

import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise.api.service.exchange import Record
from reprise.api.service.replay import BLOCK
from reprise.core.errors import LoadFailed

log = logging.getLogger(__name__)

_MAX_WAITING = 4096
_MAX_WAITING_NBYTES = 64 << 20
_CLOSE_S = 5.0
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True, eq=False)
class _HttpCall:
    """One HTTP request, which may become several requests of the engine. `body`: None where text is not kept."""

    number: int
    arrived_s: float
    path: str
    body: bytearray | None


_CALL: ContextVar[_HttpCall | None] = ContextVar("reprise_recorded_call", default=None)
"""The HTTP request that the current task, and what follows its answer, belong to."""


class Recorder:
    """Hears of every request that ends, and writes it to a file that only its owner can read."""

    def __init__(
        self,
        path: Path,
        *,
        with_text: bool,
        about: Callable[[str], Mapping[str, Any]] | None = None,
        max_waiting: int = _MAX_WAITING,
        max_waiting_nbytes: int = _MAX_WAITING_NBYTES,
    ) -> None:
        """`about`: fields about a model, by its name in records, for simulations. Called once a model, on the writer's
        thread.

        Raises LoadFailed if the file cannot be written.
        """
        self._path = path
        self._with_text = with_text
        self._about: dict[str, Mapping[str, Any]] = {}
        self._find_about = about
        self._max_waiting, self._max_waiting_nbytes = max_waiting, max_waiting_nbytes
        self._file, self._is_regular = _open(path)
        self._waiting: deque[tuple[Record, _HttpCall | None]] = deque()
        self._waiting_nbytes = 0
        self._change = threading.Condition()
        self._is_closing = False
        self._num_calls = 0
        self._num_unsaid = 0
        self.num_written = 0
        self.num_dropped = 0
        self._has_warned_full = self._has_warned_slow = False
        self._writer = threading.Thread(target=self._write_all, name="reprise-record", daemon=True)
        self._writer.start()

    def request_ended(self, record: Record) -> None:
        """Queue the line of this request. Never waits."""
        if record.blocks is None:
            return
        call = _CALL.get()
        with self._change:
            nbytes = _body_nbytes(call)
            is_full = len(self._waiting) >= self._max_waiting or (
                self._waiting and self._waiting_nbytes + nbytes > self._max_waiting_nbytes
            )
            if self._is_closing or is_full:
                self._drop()
            else:
                self._waiting.append((record, call))
                self._waiting_nbytes += nbytes
                self._change.notify()
                return
        if not self._has_warned_slow:
            self._has_warned_slow = True
            log.warning("--record: writing to %s is too slow; lines are dropped and counted", self._path)

    def token_came(self, gap_s: float, model: str) -> None:
        """Nothing of it is recorded."""

    def begin_call(self, path: str) -> _HttpCall:
        """An HTTP request has arrived; what its task does from now on belongs to it."""
        self._num_calls += 1
        body = bytearray() if self._with_text else None
        call = _HttpCall(number=self._num_calls, arrived_s=time.time(), path=path, body=body)
        _CALL.set(call)
        return call

    def close(self) -> None:
        """Write what waits, for a bounded time, and say how much it was."""
        with self._change:
            self._is_closing = True
            self._change.notify()
        self._writer.join(_CLOSE_S)
        with self._change:
            for _ in self._waiting:
                self._drop()
            self._waiting.clear()
        dropped = "" if self.num_dropped == 0 else f"; {self.num_dropped} dropped"
        log.info("--record: %d requests written to %s%s", self.num_written, self._path, dropped)

    def _drop(self) -> None:
        self.num_dropped += 1
        self._num_unsaid += 1

    def _write_all(self) -> None:
        try:
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._waiting or self._is_closing)
                    if not self._waiting:
                        return
                    record, call = self._waiting.popleft()
                    self._waiting_nbytes -= _body_nbytes(call)
                    num_dropped, self._num_unsaid = self._num_unsaid, 0
                self._write(record, call, num_dropped)
        finally:
            os.close(self._file)

    def _write(self, record: Record, call: _HttpCall | None, num_dropped: int) -> None:
        if record.model not in self._about:
            self._about[record.model] = {} if self._find_about is None else self._find_about(record.model)
        line = _line(record, call, about=self._about[record.model], num_dropped=num_dropped)
        try:
            _write_whole(self._file, line, can_undo=self._is_regular)
        except OSError as error:
            with self._change:
                self._drop()
                self._num_unsaid += num_dropped
            if not self._has_warned_full:
                self._has_warned_full = True
                log.warning("--record: cannot write %s: %s. Lines are dropped until it is writable", self._path, error)
        else:
            self.num_written += 1
            self._has_warned_full = False


class RecordedCalls:
    """A layer around the application that gives each HTTP request its number and, where text is kept, its body."""

    def __init__(self, app: ASGIApp, *, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = self._recorder.begin_call(scope["path"]).body

        async def keep() -> Message:
            message = await receive()
            if body is not None and message["type"] == "http.request":
                body.extend(message.get("body", b""))
            return message

        await self._app(scope, receive if body is None else keep, send)


def _line(record: Record, call: _HttpCall | None, *, about: Mapping[str, Any], num_dropped: int) -> bytes:
    blocks = record.blocks
    assert blocks is not None
    arrived_s = record.created - record.render_s if call is None else call.arrived_s
    # When the engine was done: the client's next request may arrive before the record is written.
    ended_s = record.created + max((outcome.total_s for outcome in record.outcomes), default=0.0)
    fields: dict[str, Any] = {
        "arrived_s": round(arrived_s, 4),
        "took_s": round(ended_s - arrived_s, 4),
        "api": record.api,
        "model": record.model,
        "call": None if call is None else call.number,
        "input_length": blocks.num_tokens,
        "output_length": sum(outcome.num_generated for outcome in record.outcomes),
        "block_tokens": BLOCK,
        "hash_ids": blocks.prompt.tokens.tolist(),
        "boundaries": [[boundary.position * BLOCK, str(boundary.kind)] for boundary in blocks.prompt.boundaries],
        "choices": max(1, len(record.outcomes)),
        "ended": record.ended,
        "reused": min((outcome.num_reused for outcome in record.outcomes), default=0),
        "prefilled": sum(outcome.num_prefilled for outcome in record.outcomes),
        **about,
    }
    if num_dropped > 0:
        # Lines that are missing in front of this one.
        fields["dropped"] = num_dropped
    line = json.dumps(fields, separators=(",", ":")).encode()
    if call is None or call.body is None:
        return line + b"\n"
    # The body is JSON that was read: its line breaks stand between values, where a space does as well.
    body = bytes(call.body).removeprefix(_BOM).translate(bytes.maketrans(b"\r\n", b"  "))
    path = json.dumps(call.path).encode()
    return b'%b,"path":%b,"body":%b}\n' % (line[:-1], path, body)


def _body_nbytes(call: _HttpCall | None) -> int:
    return 0 if call is None or call.body is None else len(call.body)


def _open(path: Path) -> tuple[int, bool]:
    """The file, made or appended to, and whether it is a regular one, which is then its owner's alone."""
    path = path.expanduser()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        is_regular = stat.S_ISREG(os.fstat(file).st_mode)
        if is_regular:
            os.fchmod(file, 0o600)
    except OSError as error:
        raise LoadFailed(f"Cannot write the --record file {path}: {error.strerror}.") from error
    return file, is_regular


def _write_whole(file: int, line: bytes, *, can_undo: bool) -> None:
    """The line, or none of it where that can be undone."""
    before = os.fstat(file).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        if can_undo:
            os.ftruncate(file, before)
        raise

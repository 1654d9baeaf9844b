"""What clients send, recorded and trimmed for the replays of `tests/api/test_bodies.py`.

With `REPRISE_RECORD=DIRECTORY` the tests of this folder write each client's requests there, as `NAME.json`: long texts
are cut, most tools left out, and what the server made (ids, sealed reasoning) is a place to be filled in.
"""

import json
import os
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from uuid import UUID

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tests.api.server_thread as serving
from tests.workloads.made import places

VARIABLE = "REPRISE_RECORD"
_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
_NUM_CHARS = 120
_KEPT_TOOLS = 2


@dataclass(eq=False)
class ExchangeRecorder:
    """Requests and their answers, as they come to a server that was made within `recording`."""

    pairs: list[tuple[str, dict[str, Any], str]] = field(default_factory=list[tuple[str, dict[str, Any], str]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def around(self, app: ASGIApp) -> ASGIApp:
        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] not in _PATHS:
                await app(scope, receive, send)
                return
            asked, told = bytearray(), bytearray()
            statuses: list[int] = []

            async def received() -> Message:
                message = await receive()
                asked.extend(message.get("body", b""))
                return message

            async def sent(message: Message) -> None:
                if "status" in message:
                    statuses.append(message["status"])
                told.extend(message.get("body", b""))
                await send(message)

            await app(scope, received, sent)
            if statuses == [200]:
                with self.lock:
                    self.pairs.append((scope["path"], json.loads(bytes(asked)), told.decode()))

        return recorded

    def take(self) -> list[tuple[str, dict[str, Any], str]]:
        """What came since the last time."""
        with self.lock:
            pairs, self.pairs = self.pairs, []
        return pairs


@contextmanager
def recording() -> Generator[ExchangeRecorder | None]:
    """A recorder of the servers that are made within; None if nothing is to be recorded."""
    if VARIABLE not in os.environ:
        yield None
        return
    recorder = ExchangeRecorder()
    make = serving.create_app

    def made(*arguments: Any) -> FastAPI:
        app = make(*arguments)
        build = app.build_middleware_stack
        app.build_middleware_stack = lambda: recorder.around(build())
        return app

    with patch.object(serving, "create_app", made):
        yield recorder


def write(
    recorder: ExchangeRecorder | None,
    name: str,
    *,
    source: str,
    answers: list[Mapping[str, Any]],
    tool: str | None = None,
    num_chars: int = _NUM_CHARS,
) -> None:
    """Keep the loop that came since the last time: a request for each answer, all with the tool `tool`, if any.

    `num_chars`: of each text of a message.
    """
    if recorder is None:
        return
    came = recorder.take()
    pairs = [pair for pair in came if tool is None or tool in {_name(one) for one in pair[1].get("tools") or ()}]
    path = pairs[0][0]
    told = [text for _, _, text in pairs[: len(answers)]]
    requests = [trimmed(request, tool=tool, num_chars=num_chars) for _, request, _ in pairs[: len(answers)]]
    texts = [json.dumps(request, ensure_ascii=False) for request in requests]
    for number, text in enumerate(told):
        for place, value in places(number, text).items():
            texts = [one.replace(json.dumps(value)[1:-1], place) for one in texts]
    kept = {"source": source, "path": path, "answers": list(answers), "notes": []}
    target = Path(os.environ[VARIABLE]) / f"{name}.json"
    target.write_text(json.dumps(kept | {"requests": [json.loads(text) for text in texts]}, indent=1) + "\n")


def trimmed(request: Mapping[str, Any], *, tool: str | None, num_chars: int = _NUM_CHARS) -> dict[str, Any]:
    """The request with short texts, and few tools: `tool` among them."""
    kept = {
        key: _short(value, num_chars if key in ("messages", "input") else _NUM_CHARS)
        for key, value in request.items()
        if key != "tools"
    }
    tools = cast("list[dict[str, Any]]", request.get("tools") or [])
    called = [one for one in tools if _name(one) == tool]
    others = [one for one in tools if _name(one) != tool][: _KEPT_TOOLS - 1]
    return kept | ({"tools": [_short(one, _NUM_CHARS) for one in (*called, *others)]} if tools else {})


def _name(tool: Mapping[str, Any]) -> str:
    return tool.get("name") or tool.get("function", {}).get("name") or ""


def _short(value: Any, num_chars: int) -> Any:
    match value:
        case str():
            is_whole = len(value) <= num_chars or _is_sealed(value) or _is_image(value)
            return _anonymous(value if is_whole else value[:num_chars])
        case list():
            return [_short(one, num_chars) for one in cast("list[Any]", value)]
        case dict():
            return {key: _short(one, num_chars) for key, one in cast("dict[str, Any]", value).items()}
        case _:
            return value


def _is_sealed(value: str) -> bool:
    return value.startswith("reprise1.")


def _is_image(value: str) -> bool:
    """Whether it is an image, as a data URL or in base64 alone (of a PNG, a JPEG or a WebP)."""
    return value.startswith(("data:image/", "iVBORw0KGgo", "/9j/", "UklGR"))


def _anonymous(text: str) -> str:
    """Without paths, hosts and ids of the machine where it was recorded."""
    text = re.sub(r"(?<![\w/])/(?:tmp|home|root|work|var)(?:/[\w.@+-]+)*(?=/a\.txt)", "/project", text)
    text = re.sub(r"(?<![\w/])/(?:tmp|home|root|work|var)(?:/[\w.@+-]+)*", "/project", text)
    text = re.sub(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", str(UUID(int=0)), text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "0" * 64, text)
    return re.sub(r"[\w.+-]+@[\w-]+\.[\w.]+", "someone at example.com", text)

"""One chat turn over HTTP, as any client would do it, with a clock."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from reprise.lab.bench.client import Post, Refused, Unreachable, send, texts_in
from reprise.lab.bench.server_process import RestartableServer, server
from reprise.lab.demo.turns import TOOLS, ClientAnswer, History, request_body

_TRIES, _PAUSE_S = 40, 0.025


class DemoFailed(Exception):
    """The demonstration cannot go on; the sentence says why."""


@contextmanager
def two_servers(name: str) -> Generator[tuple[Path, RestartableServer, httpx.Client]]:
    """The demo's model of this name, a server of it that reuses, with a disk, and a client of one that does not.

    Raises ServerFailed.
    """
    with ExitStack() as stack:
        model = stack.enter_context(as_file(files("reprise.lab.demo") / name))
        folder = stack.enter_context(TemporaryDirectory(prefix="reprise-demo-"))
        # Without settling, or the counts would depend on how long the server was idle between two turns.
        warm = RestartableServer(model, "--no-settle", "--disk-cache", folder)
        stack.callback(warm.stop)
        yield model, warm, stack.enter_context(server(model, "--no-settle", "--no-prefix-cache"))


Hear = Callable[[str, str], None]
"""Called with what streams in: `reasoning`, `content` or `call`, and the new words."""


def ask(
    client: httpx.Client,
    history: History,
    *,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
    hear: Hear = lambda _kind, _text: None,
) -> ClientAnswer:
    """Send the chat and read the streamed answer to its end. Raises DemoFailed if the server does otherwise."""
    tokens: list[str] = []

    def take(event: Mapping[str, Any]) -> None:
        for kind, text in texts_in(event):
            if text:
                hear(kind, text)
        for choice in event["choices"]:
            sampled: list[dict[str, Any]] = (choice.get("logprobs") or {"content": None})["content"] or []
            tokens.extend(entry["token"] for entry in sampled)

    try:
        reply = send(client, Post(body=request_body(history, tools=tools)), hear=take)
    except (Refused, Unreachable) as error:
        raise DemoFailed(f"The server's answer was incomplete: {error}") from error
    if reply.num_prompt is None or reply.num_cached is None or not tokens:
        raise DemoFailed("The server's response has no answer or no usage.")
    record = _record(client, reply.id)
    return ClientAnswer(
        content=reply.content,
        reasoning=reply.reasoning,
        tokens=tuple(tokens),
        num_prompt=reply.num_prompt,
        num_cached=reply.num_cached,
        ttft_s=reply.ttft_s,
        calls=reply.calls,
        why=str(record.get("reason", "")),
        num_encoded=int(record.get("images_encoded", 0)),
    )


def _record(client: httpx.Client, request_id: str) -> Mapping[str, Any]:
    """The server's record of a request: why tokens were computed, and images encoded."""
    for _ in range(_TRIES):
        response = client.get(f"/v1/cache/requests/{request_id}")
        if response.is_success:
            return response.json()
        # The record is written when the stream has been closed, which this client has just done.
        time.sleep(_PAUSE_S)
    return {}

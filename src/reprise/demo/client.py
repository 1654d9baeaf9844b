"""One chat turn over HTTP, as any client would do it, with a clock."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx

from reprise.demo.turns import ClientAnswer, History, request_body

_TRIES, _PAUSE_S = 40, 0.025


class DemoFailed(Exception):
    """The demonstration cannot go on; the sentence says why."""


Hear = Callable[[str, str], None]
"""Called with what streams in: `reasoning`, `content` or `call`, and the new words."""


def ask(client: httpx.Client, history: History, *, hear: Hear = lambda _kind, _text: None) -> ClientAnswer:
    """Send the chat and read the streamed answer to its end. Raises DemoFailed if the server does otherwise."""
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=request_body(history)) as response:
        if not response.is_success:
            raise DemoFailed(f"The server answered {response.status_code}: {response.read().decode()}")
        reply, request_id = _gather(_events(response.iter_lines()), started, hear)
    return replace(reply, why=_why(client, request_id))


def _why(client: httpx.Client, request_id: str) -> str:
    """What the server's record gives as the reason why tokens were computed."""
    for _ in range(_TRIES):
        response = client.get(f"/v1/cache/requests/{request_id}")
        if response.is_success:
            return str(response.json().get("reason", ""))
        # The record is written when the stream has been closed, which this client has just done.
        time.sleep(_PAUSE_S)
    return ""


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    for line in lines:
        text = line.removeprefix("data: ")
        if text == line:
            continue
        if text == "[DONE]":
            return
        event: dict[str, Any] = json.loads(text)
        if "error" in event:
            raise DemoFailed(f"The server broke off: {event['error']}")
        yield event
    raise DemoFailed("The server's stream ended in the middle of the answer.")


def _gather(events: Iterable[dict[str, Any]], started: float, hear: Hear) -> tuple[ClientAnswer, str]:
    """The answer, and the id that the server gave it."""
    request_id = ""
    content: list[str] = []
    reasoning: list[str] = []
    tokens: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    ttft_s: float | None = None
    usage: dict[str, Any] | None = None
    for event in events:
        request_id = event.get("id", request_id)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            heard = {"content": delta.get("content") or "", "reasoning": delta.get("reasoning_content") or ""}
            content.append(heard["content"])
            reasoning.append(heard["reasoning"])
            heard["call"] = "".join(_take_call(calls, part) for part in delta.get("tool_calls") or ())
            sampled: list[dict[str, Any]] = (choice.get("logprobs") or {"content": None})["content"] or []
            tokens.extend(entry["token"] for entry in sampled)
            if ttft_s is None and (any(heard.values()) or sampled):
                ttft_s = time.perf_counter() - started
            for kind, text in heard.items():
                if text:
                    hear(kind, text)
    if usage is None or ttft_s is None:
        raise DemoFailed("The server gave no answer or no usage.")
    reply = ClientAnswer(
        content="".join(content),
        reasoning="".join(reasoning),
        tokens=tuple(tokens),
        num_prompt=usage["prompt_tokens"],
        num_cached=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s=ttft_s,
        calls=tuple(calls[index] for index in sorted(calls)),
    )
    return reply, request_id


def _take_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> str:
    """Add a piece of a call to the calls so far; gives what is new of it, to be shown."""
    function = delta["function"]
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    empty: dict[str, Any] = {"id": delta.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(delta["index"], empty)
    call["function"]["name"] += name
    call["function"]["arguments"] += arguments
    return f"{name} {arguments}" if name else arguments

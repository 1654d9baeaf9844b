"""One request as a client makes it, with a clock: what came back, what the server counted, and when."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx
from httpx_sse import EventSource

from reprise.core.errors import RepriseError

_SHOWN = 300
"""The most characters of an error's body that are shown."""

Body = Mapping[str, Any]
Message = Mapping[str, Any]


class Refused(RepriseError):
    """A server refuses a request or breaks off; the sentence has its words."""

    code = "refused"


class Unreachable(RepriseError):
    """Nothing answers."""

    code = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A request: its path and its body."""

    body: Body
    path: str = "/v1/chat/completions"

    @property
    def num_chars(self) -> int:
        """How long the prompt is in characters, as far as it is text."""
        tools, messages = self.body.get("tools"), _objects(self.body.get("messages"))
        texts = [str(message.get("content") or "") for message in messages]
        calls = [json.dumps(message["tool_calls"]) for message in messages if "tool_calls" in message]
        return sum(map(len, (*texts, *calls))) + (len(json.dumps(tools)) if tools else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReply:
    """An answer, as the client saw it. Times in seconds of `time.perf_counter`; None: the server did not say."""

    id: str
    content: str
    reasoning: str
    calls: tuple[Mapping[str, Any], ...]
    num_prompt: int | None
    num_cached: int | None
    num_generated: int | None
    sent_s: float
    first_s: float
    ended_s: float

    def __post_init__(self) -> None:
        assert self.sent_s <= self.first_s <= self.ended_s, self

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def total_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def num_computed(self) -> int | None:
        """Prompt tokens that the server computed for this answer."""
        if self.num_prompt is None or self.num_cached is None:
            return None
        return self.num_prompt - self.num_cached


def send(client: httpx.Client, post: Post, *, hear: Callable[[Body], None] = lambda _event: None) -> ClientReply:
    """Send the request and read its answer to the end; `hear` gets the events of a stream as they come.

    Raises Refused and Unreachable.
    """
    sent_s = time.perf_counter()
    try:
        with client.stream("POST", post.path, json=post.body) as response:
            if not response.is_success:
                raise Refused(f"status {response.status_code}: {_error_of(response.read())}")
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                return _whole(response.read(), sent_s)
            return _gather(_events(response), sent_s, hear)
    except httpx.TimeoutException as error:
        raise Unreachable("timed out") from error
    except httpx.TransportError as error:
        raise Unreachable(str(error) or type(error).__name__) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"its answer does not follow the OpenAI API: {error!r}") from error


def _object(value: object) -> dict[str, Any]:
    """A JSON object, or an empty one in place of anything else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    """The objects of a JSON list."""
    return [_object(item) for item in cast(list[object], value)] if isinstance(value, list) else []


def _error_of(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    try:
        error: object = json.loads(text)["error"]
        text = str(_object(error).get("message", error))
    except (ValueError, KeyError, TypeError):
        pass
    return text[:_SHOWN]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, to its end."""
    for sent in EventSource(response).iter_sse():
        if sent.data == "[DONE]":
            return
        if sent.data == "":
            continue  # A comment, or nothing but an id.
        event: dict[str, Any] = json.loads(sent.data)
        if (error := event.get("error")) is not None:
            raise Refused(f"the stream failed: {str(_object(error).get('message', error))[:_SHOWN]}")
        yield {"type": sent.event, **event}


def _gather(events: Iterator[dict[str, Any]], sent_s: float, hear: Callable[[Body], None]) -> ClientReply:
    request_id, usage = "", None
    first_s: float | None = None
    said: dict[str, list[str]] = {"content": [], "reasoning": [], "call": []}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        now_s = time.perf_counter()
        request_id = str(event.get("id") or request_id)
        usage = _usage_in(event) or usage
        for kind, text in texts_in(event):
            said[kind].append(text)
            if text and first_s is None:
                first_s = now_s
        for choice in _objects(event.get("choices")):
            for delta in _objects(_object(choice.get("delta")).get("tool_calls")):
                _take_call(calls, delta)
        hear(event)
    ended_s = time.perf_counter()
    return ClientReply(
        id=request_id,
        content="".join(said["content"]),
        reasoning="".join(said["reasoning"]),
        calls=tuple(calls[index] for index in sorted(calls)),
        sent_s=sent_s,
        # An answer of no visible token was there when it ended.
        first_s=ended_s if first_s is None else first_s,
        ended_s=ended_s,
        **_counts(usage or {}),
    )


def texts_in(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What an event of any of the APIs has of the answer: `content`, `reasoning` or `call`, and the new text."""
    for choice in _objects(event.get("choices")):
        delta = _object(choice.get("delta"))
        yield "content", delta.get("content") or choice.get("text") or ""
        yield "reasoning", delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in _objects(delta.get("tool_calls")):
            function = _object(call.get("function"))
            yield "call", " ".join(filter(None, (function.get("name"), function.get("arguments"))))
    said: object = event.get("delta")
    if isinstance(said, str):
        # OpenAI's responses.
        yield "reasoning" if "reasoning" in str(event.get("type")) else "content", said
    # Anthropic's messages.
    delta = _object(said)
    yield "content", str(delta.get("text") or delta.get("partial_json") or "")
    yield "reasoning", str(delta.get("thinking") or "")


def _usage_in(event: Mapping[str, Any]) -> dict[str, Any]:
    """The usage in an event, by the names of OpenAI's chat completions."""
    outer = _object(event.get("response")) or _object(event.get("message"))
    return _named_usage(_object(event.get("usage")) or _object(outer.get("usage")))


def _named_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    if "input_tokens" not in usage:
        return dict(usage)
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"] or 0
        created = usage.get("cache_creation_input_tokens") or 0
        prompt: object = usage["input_tokens"] + cached + created
    else:
        cached = _object(usage.get("input_tokens_details")).get("cached_tokens")
        prompt = usage["input_tokens"]
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": usage.get("output_tokens"),
    }


def _take_call(calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    function = _object(delta.get("function"))
    empty: dict[str, Any] = {"id": delta.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(int(delta.get("index") or 0), empty)
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _whole(raw: bytes, sent_s: float) -> ClientReply:
    """An answer that was not streamed, or in lines of JSON (Ollama), whose last one has the counts."""
    now_s = time.perf_counter()
    try:
        answer = _object(json.loads(raw))
    except ValueError:
        answer = _object(json.loads(raw.strip().splitlines()[-1]))
    usage = _named_usage(_object(answer.get("usage")))
    if "prompt_eval_count" in answer:
        # Ollama's.
        usage = {"prompt_tokens": answer["prompt_eval_count"], "completion_tokens": answer.get("eval_count")}
    messages = [_object(c.get("message")) or {"content": c.get("text")} for c in _objects(answer.get("choices"))]
    content = "".join(str(message.get("content") or "") for message in messages)
    return ClientReply(
        id=str(answer.get("id") or ""),
        content=content,
        reasoning="",
        calls=(),
        sent_s=sent_s,
        first_s=now_s,
        ended_s=now_s,
        **_counts(usage),
    )


def _counts(usage: Mapping[str, Any]) -> dict[str, int | None]:
    """The counts of a usage, as fields of `ClientReply`."""
    return {
        "num_prompt": usage.get("prompt_tokens"),
        "num_cached": _object(usage.get("prompt_tokens_details")).get("cached_tokens"),
        "num_generated": usage.get("completion_tokens"),
    }

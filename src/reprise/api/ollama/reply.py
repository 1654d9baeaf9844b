"""From the internal events to the objects of Ollama's API: one per piece, and a last one with counts and durations."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel

from reprise.api.http.errors import Problem
from reprise.api.openai.chat_reply import Decode, logprobs_body
from reprise.api.service.exchange import AnswerEnd, EndReason
from reprise.api.service.reply import Reply
from reprise.chat.answer import ToolCall
from reprise.core.events import Sampled

Kind = Literal["chat", "generate"]
NDJSON = {"content-type": "application/x-ndjson"}
"""The headers of JSON lines."""
_NS = 1_000_000_000


class OllamaErrorBody(BaseModel):
    """The body of every answer of this API that is an error."""

    error: str


def piece(
    kind: Kind, model: str, *, content: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()
) -> dict[str, Any]:
    """A line of a stream, or the beginning of the only object."""
    thought = {"thinking": thinking} if thinking != "" else {}
    said: dict[str, Any] = {"response": content, **thought}
    if kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": content, **thought}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"index": at, "name": call.name, "arguments": _arguments(call)}}
                for at, call in enumerate(calls)
            ]
        said = {"message": message}
    return {"model": model, "created_at": now_text(), **said, "done": False}


def counts(ended: AnswerEnd, reply: Reply) -> dict[str, Any]:
    """What the last line has besides: why it ended, the counts in tokens, the durations in nanoseconds.

    `load_duration` is what passed before the engine had the request. `prompt_eval_count` is the whole prompt,
    `prompt_cached_count` (our own) what of it was not computed.
    """
    outcome, usage, load_s = ended.outcome, reply.usage, reply.render_s
    decode_s = 0.0 if outcome.ttft_s is None else outcome.total_s - outcome.ttft_s
    return {
        "done": True,
        # A call is a stop to Ollama's clients.
        "done_reason": "length" if ended.reason is EndReason.LENGTH else "stop",
        "total_duration": int((load_s + outcome.total_s) * _NS),
        "load_duration": int(load_s * _NS),
        "prompt_eval_count": usage.num_prompt,
        "prompt_eval_duration": int(outcome.prefill_s * _NS),
        "prompt_cached_count": usage.num_cached,
        "eval_count": usage.num_completion,
        "eval_duration": int(decode_s * _NS),
    }


def with_logprobs(body: dict[str, Any], tokens: Sequence[Sampled], decode: Decode) -> dict[str, Any]:
    """The object with the log-probabilities of these tokens, if there are any."""
    logprobs = logprobs_body(tokens, decode)
    return body if logprobs is None else body | {"logprobs": logprobs["content"]}


def ollama_shape(problem: Problem) -> dict[str, Any]:
    """Ollama's error body."""
    return {"error": problem.message}


def line(body: object) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def now_text() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The call's arguments as an object, which is what this API has."""
    try:
        value: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}  # pyright: ignore[reportUnknownVariableType]

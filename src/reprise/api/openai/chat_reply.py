"""From the internal events to chat completions: whole ones and chunks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise.api.service.exchange import AnswerDelta, AnswerEnd, Usage
from reprise.chat.answer import Answer, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from reprise.core.events import Sampled

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """What all chunks of a response have in common. `created` in Unix seconds."""

    id: str
    created: int
    model: str


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_total,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning,
            "accepted_prediction_tokens": usage.num_accepted,
            "rejected_prediction_tokens": usage.num_rejected,
        },
    }


def logprobs_body(tokens: Sequence[Sampled], decode: Decode) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of all sampled tokens, those of reasoning included; None if there are none."""
    if not tokens:
        return None
    return {"content": [_logprob(token, decode) for token in tokens], "refusal": None}


def _logprob(token: Sampled, decode: Decode) -> dict[str, Any]:
    return {
        **_entry(token.token, token.logprob, decode),
        "top_logprobs": [_entry(top, logprob, decode) for top, logprob in token.top],
    }


def _entry(token: int, logprob: float | None, decode: Decode) -> dict[str, Any]:
    text = decode([token])
    # A token that is part of a character has no text, so its bytes cannot be derived from the text.
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None, "token_id": token}


def role_chunk(head: ChunkHead, choice: int) -> dict[str, Any]:
    """A choice's first chunk."""
    return chunk(head, [_choice_chunk(choice, {"role": "assistant", "content": ""})])


def waiting_chunk(head: ChunkHead) -> dict[str, Any]:
    """A chunk that says that the answer is not ready yet."""
    return chunk(head, [_choice_chunk(0, {})])


def piece_chunks(head: ChunkHead, piece: AnswerDelta, decode: Decode) -> list[dict[str, Any]]:
    """A piece of an answer, one chunk for each delta; its log-probabilities go with the first."""
    logprobs = logprobs_body(piece.tokens, decode)
    deltas = [_delta(delta) for delta in piece.deltas] or [{}]
    rest = [None] * (len(deltas) - 1)
    return [
        chunk(head, [_choice_chunk(piece.choice, delta, logprobs=given)])
        for delta, given in zip(deltas, [logprobs, *rest], strict=True)
    ]


def end_chunk(head: ChunkHead, ended: AnswerEnd) -> dict[str, Any]:
    """A choice's last chunk."""
    return chunk(head, [_choice_chunk(ended.choice, {}, finish_reason=str(ended.reason))])


def usage_chunk(head: ChunkHead, usage: Usage) -> dict[str, Any]:
    """The stream's last chunk, where it was asked for."""
    return chunk(head, []) | {"usage": usage_body(usage)}


def chunk(head: ChunkHead, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }


def _choice_chunk(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case ReasoningDelta():
            return {"reasoning_content": delta.text}
        case ContentDelta():
            return {"content": delta.text}
        case ToolCallDelta():
            call: dict[str, Any] = {"index": delta.index}
            function: dict[str, Any] = {"arguments": delta.arguments}
            if delta.id is not None:
                call |= {"id": delta.id, "type": "function"}
            if delta.name is not None:
                function = {"name": delta.name, **function}
            return {"tool_calls": [call | {"function": function}]}


def completion(
    head: ChunkHead, ended: Sequence[AnswerEnd], tokens: Mapping[int, Sequence[Sampled]], usage: Usage, decode: Decode
) -> dict[str, Any]:
    """A whole chat completion; `tokens` has the tokens of each choice for its log-probabilities, by index."""
    choices: list[dict[str, Any]] = [
        {
            "index": end.choice,
            "message": {**message_of(end.answer), "annotations": []},
            "logprobs": logprobs_body(tokens.get(end.choice, ()), decode),
            "finish_reason": str(end.reason),
        }
        for end in sorted(ended, key=lambda end: end.choice)
    ]
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage_body(usage),
    }


def message_of(answer: Answer) -> dict[str, Any]:
    """The answer as the message that a client sends back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message

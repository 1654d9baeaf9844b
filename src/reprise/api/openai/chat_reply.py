"""What answers have in all of OpenAI's APIs: counts, log-probabilities, and the message that a client sends back."""

from collections.abc import Callable, Sequence
from typing import Any

from reprise.api.service.exchange import Usage
from reprise.chat.answer import Answer
from reprise.core.events import Sampled

Decode = Callable[[Sequence[int]], str]


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

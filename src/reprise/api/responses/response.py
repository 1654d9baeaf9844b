"""The response object, as it stands at any time: begun, whole, cut short or failed."""

from collections.abc import Sequence
from typing import Any

from reprise.api.body import plain
from reprise.api.errors import Problem
from reprise.api.exchange import AnswerEnd, EndReason, Usage
from reprise.api.responses.body import ResponsesBody
from reprise.core.errors import ContextTooLong

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "temperature",
    "top_p",
)


def response_body(
    body: ResponsesBody,
    *,
    response_id: str,
    created: int,
    model: str,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    problem: Problem | None = None,
) -> dict[str, Any]:
    """The response to a request. `created` in Unix seconds; `status` is OpenAI's."""
    given = body.model_dump(by_alias=True, exclude_unset=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": body.background is True,
        "error": None if problem is None else error_body(problem),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": [dict(item) for item in output],
        **{name: given.get(name) for name in _ECHOED},
        "metadata": given.get("metadata") or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
        "store": body.store is not False,
        "text": {"format": {"type": "text"}, **plain(given.get("text") or {})},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "truncation": "disabled",
        "usage": None if usage is None else usage_body(usage),
        "user": given.get("user"),
    }


def status_of(ended: AnswerEnd) -> str:
    return "incomplete" if ended.reason is EndReason.LENGTH else "completed"


def usage_body(usage: Usage) -> dict[str, Any]:
    written = max(0, min(usage.num_stored, usage.num_prompt - usage.num_cached))
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": written},
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_total,
    }


def error_body(problem: Problem) -> dict[str, Any]:
    """The error of a response that failed, in the codes that OpenAI's clients know."""
    code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
    if problem.code == ContextTooLong.code:
        code = ContextTooLong.code
    return {"code": code, "message": problem.message}

"""Errors in the form of Anthropic's API."""

from typing import Any

from reprise.api.errors import Problem

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_shape(problem: Problem) -> dict[str, Any]:
    """Anthropic's error body, which is also the `error` event of a stream."""
    kind = _TYPES.get(problem.status, "api_error" if problem.status >= 499 else "invalid_request_error")
    details = {} if problem.details is None else {"details": dict(problem.details)}
    return {"type": "error", "error": {"type": kind, "message": problem.message, **details}}

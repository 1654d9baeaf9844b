"""From the internal events to a response and its output items, and the stream events that tell of their growing."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from reprise.api.http.body import plain
from reprise.api.http.errors import Problem
from reprise.api.responses.body import ResponsesBody
from reprise.api.responses.tools import Callee, custom_input
from reprise.api.service.exchange import AnswerEnd, EndReason, Usage
from reprise.api.service.reasoning_signature import encode_reasoning
from reprise.chat.answer import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from reprise.core.errors import ContextTooLong
from reprise.core.job import Sampling

Event = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]

_CLOSED = ""


class OutputItems:
    """The output items of one answer as they grow. A whole answer has the same items, in the order in which they came.

    `callees` are the client's tools by the model's names. With `has_summary` reasoning is sent as its summary, which is
    the whole of it; else as its text. With `has_seals` reasoning items carry `encrypted_content`.
    """

    def __init__(self, *, callees: Mapping[str, Callee], has_summary: bool, has_seals: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._callees = callees
        self._has_summary = has_summary
        self._has_seals = has_seals
        self._key = _CLOSED
        """What the open item holds."""
        self._text = ""
        """The text of the open item so far."""

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta():
                    events += self._open("reasoning", {"type": "reasoning", "summary": []}, prefix="rs")
                    events += self._grow(delta.text)
                case ContentDelta():
                    message = {"type": "message", "role": "assistant", "content": list[Any]()}
                    events += self._open("message", message, prefix="msg")
                    events += self._grow(delta.text)
                case ToolCallDelta():
                    events += self._open(f"call {delta.index}", *self._call(delta))
                    events += self._grow(delta.arguments)
        return events

    def finish(self, *, status: ItemStatus) -> list[Event]:
        """The events at the end of the answer; the item that was being written has this status."""
        return self._close(status=status)

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self.items) - 1}

    def _call(self, delta: ToolCallDelta) -> tuple[dict[str, Any], str]:
        name = delta.name or ""
        callee = self._callees.get(name, Callee(name=name))
        called: dict[str, Any] = {"call_id": delta.id, "name": callee.name}
        if callee.namespace is not None:
            called["namespace"] = callee.namespace
        if callee.is_custom:
            return {"type": "custom_tool_call", **called, "input": ""}, "ctc"
        return {"type": "function_call", **called, "arguments": ""}, "fc"

    def _open(self, key: str, item: dict[str, Any], prefix: str) -> list[Event]:
        if key == self._key:
            return []
        events = self._close(status="completed")
        self._key, self._text = key, ""
        self.items.append({"id": f"{prefix}_{uuid4().hex}", "status": "in_progress", **item})
        # A copy: the item grows, and the event is the item as it was.
        events.append(self._item_event("response.output_item.added", {"item": dict(self._item)}))
        match self._item["type"]:
            case "message":
                events.append(self._part("response.content_part.added"))
            case "reasoning" if self._has_summary:
                events.append(self._part("response.reasoning_summary_part.added"))
            case "reasoning":
                events.append(self._part("response.content_part.added"))
            case _:
                pass
        return events

    def _grow(self, text: str) -> list[Event]:
        self._text += text
        if text == "":
            return []
        match self._item["type"]:
            case "message":
                fields: Event = {**self._place, "content_index": 0, "delta": text, "logprobs": []}
                return [{"type": "response.output_text.delta", **fields}]
            case "reasoning" if self._has_summary:
                fields = {**self._place, "summary_index": 0, "delta": text}
                return [{"type": "response.reasoning_summary_text.delta", **fields}]
            case "reasoning":
                return [{"type": "response.reasoning_text.delta", **self._place, "content_index": 0, "delta": text}]
            case "function_call":
                return [{"type": "response.function_call_arguments.delta", **self._place, "delta": text}]
            case _:
                # The arguments are JSON text around the input: it is sent when it is complete.
                return []

    def _close(self, *, status: ItemStatus) -> list[Event]:
        if self._key == _CLOSED:
            return []
        item, text = self._item, self._text
        item["status"] = status
        events: list[Event] = []
        match item["type"]:
            case "message":
                fields: Event = {**self._place, "content_index": 0, "text": text, "logprobs": []}
                events = [
                    {"type": "response.output_text.done", **fields},
                    self._part("response.content_part.done"),
                ]
                item["content"] = [self._part_body()]
            case "reasoning":
                events = self._close_reasoning(item, text)
            case "function_call":
                item["arguments"] = text
                fields = {**self._place, "name": item["name"], "arguments": text}
                events = [{"type": "response.function_call_arguments.done", **fields}]
            case _:
                item["input"] = custom_input(text)
                events = [
                    {"type": "response.custom_tool_call_input.delta", **self._place, "delta": item["input"]},
                    {"type": "response.custom_tool_call_input.done", **self._place, "input": item["input"]},
                ]
        events.append(self._item_event("response.output_item.done", {"item": dict(item)}))
        self._key = _CLOSED
        return events

    def _close_reasoning(self, item: dict[str, Any], text: str) -> list[Event]:
        if self._has_seals:
            item["encrypted_content"] = encode_reasoning(text)
        if self._has_summary:
            item["summary"] = [self._part_body()]
            return [
                {"type": "response.reasoning_summary_text.done", **self._place, "summary_index": 0, "text": text},
                self._part("response.reasoning_summary_part.done"),
            ]
        item["content"] = [self._part_body()]
        return [
            {"type": "response.reasoning_text.done", **self._place, "content_index": 0, "text": text},
            self._part("response.content_part.done"),
        ]

    def _part_body(self) -> dict[str, Any]:
        if self._item["type"] == "message":
            return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._has_summary else "reasoning_text", "text": self._text}

    def _part(self, kind: str) -> Event:
        index = "summary_index" if "summary" in kind else "content_index"
        return {"type": kind, **self._place, index: 0, "part": self._part_body()}

    def _item_event(self, kind: str, fields: dict[str, Any]) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}


_ECHOED = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safety_identifier",
    "user",
)
_TOOL_FIELDS = {"description": None, "parameters": None, "strict": None}
"""What each function of a response has, with or without a value."""


def response_body(
    body: ResponsesBody,
    *,
    response_id: str,
    created: int,
    model: str,
    sampling: Sampling,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    problem: Problem | None = None,
) -> dict[str, Any]:
    """The response to a request, with every field that Open Responses requires. `created` in Unix seconds; `status` is
    OpenAI's. `sampling` is what the answer was sampled with, given or not.
    """
    given = body.model_dump(by_alias=True, exclude_unset=True)
    tools: list[dict[str, Any]] = given.get("tools") or []
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": body.background is True,
        "error": None if problem is None else error_body(problem),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": [dict(item) for item in output],
        **{name: given.get(name) for name in _ECHOED},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": 0,
        "max_tool_calls": None,
        "service_tier": "default",
        "metadata": given.get("metadata") or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
        "store": body.store is not False,
        "text": {"format": {"type": "text"}, **plain(given.get("text") or {})},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": [(_TOOL_FIELDS if tool["type"] == "function" else {}) | tool for tool in tools],
        "truncation": "disabled",
        "usage": None if usage is None else usage_body(usage),
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

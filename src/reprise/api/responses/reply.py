"""From the internal events to a response and its output items, and the stream events that tell of their growing."""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import uuid4

from reprise.api.http.body import plain
from reprise.api.http.errors import Problem
from reprise.api.responses.body import ResponsesBody
from reprise.api.responses.request import input_items
from reprise.api.responses.store import Stored, stored
from reprise.api.responses.tools import Callee, custom_input
from reprise.api.service.exchange import AnswerEnd, EndReason, ServiceRequest, Usage
from reprise.api.service.reasoning_signature import encode_reasoning
from reprise.api.wire.context import RouteCall
from reprise.chat.answer import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from reprise.core.errors import ContextTooLong, RequestCancelled

Event = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]

_CLOSED = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ItemKind:
    """An item whose text grows in the events `response.TEXT.delta` up to `response.TEXT.done`."""

    prefix: str
    """Of its id."""
    type: str
    text: str
    holds: str
    """The field with the text when it is whole."""
    part: str | None = None
    """The type of the part that it is in; None: it is the field itself."""
    index: str = "content_index"
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the item has at first."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the text's events have besides."""


_MESSAGE = _ItemKind(
    prefix="msg",
    type="message",
    text="output_text",
    holds="content",
    part="output_text",
    fields={"role": "assistant", "content": []},
    more={"logprobs": []},
)
_REASONING = _ItemKind(
    prefix="rs",
    type="reasoning",
    text="reasoning_text",
    holds="content",
    part="reasoning_text",
    fields={"summary": []},
)
_SUMMARY = replace(
    _REASONING, text="reasoning_summary_text", holds="summary", part="summary_text", index="summary_index"
)
_FUNCTION_CALL = _ItemKind(prefix="fc", type="function_call", text="function_call_arguments", holds="arguments")
_CUSTOM_CALL = _ItemKind(prefix="ctc", type="custom_tool_call", text="custom_tool_call_input", holds="input")


class OutputItems:
    """The output items of one answer as they grow. A whole answer has the same items, in the order in which they came.

    `callees` are the client's tools by the model's names. With `has_summary` reasoning is sent as its summary, which is
    the whole of it; else as its text. With `has_seals` reasoning items carry `encrypted_content`.
    """

    def __init__(self, *, callees: Mapping[str, Callee], has_summary: bool, has_seals: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._callees = callees
        self._reasoning = _SUMMARY if has_summary else _REASONING
        self._has_seals = has_seals
        self._kind = _MESSAGE
        self._key = _CLOSED
        """What the open item holds, which is of `_kind`."""
        self._text = ""
        """The text of the open item so far."""

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text=text):
                    events += self._open("reasoning", self._reasoning)
                case ContentDelta(text=text):
                    events += self._open("message", _MESSAGE)
                case ToolCallDelta(arguments=text):
                    callee = self._callees.get(delta.name or "", Callee(name=delta.name or ""))
                    space = {} if callee.namespace is None else {"namespace": callee.namespace}
                    called = {"call_id": delta.id, "name": callee.name, **space}
                    events += self._open(
                        f"call {delta.index}", _CUSTOM_CALL if callee.is_custom else _FUNCTION_CALL, called
                    )
            self._text += text
            # A custom call's arguments are JSON text around the input: it is sent when it is complete.
            if text != "" and self._kind is not _CUSTOM_CALL:
                events.append(self._text_event("delta", {"delta": text}))
        return events

    def finish(self, *, status: ItemStatus) -> list[Event]:
        """The events at the end of the answer; the item that was being written has this status."""
        if self._key == _CLOSED:
            return []
        item, kind, text = self.items[-1], self._kind, self._text
        events: list[Event] = []
        if kind is _CUSTOM_CALL:
            text = custom_input(text)
            events = [self._text_event("delta", {"delta": text})]
        if kind.type == "reasoning" and self._has_seals:
            item["encrypted_content"] = encode_reasoning(text)
        named = {"name": item["name"]} if kind is _FUNCTION_CALL else {}
        events.append(self._text_event("done", {"text" if kind.part is not None else kind.holds: text, **named}))
        events += self._part_events("done")
        item |= {"status": status, kind.holds: text if kind.part is None else [self._part()]}
        events.append(self._item_event("done"))
        self._key = _CLOSED
        return events

    def _open(self, key: str, kind: _ItemKind, called: Mapping[str, Any] | None = None) -> list[Event]:
        if key == self._key:
            return []
        events = self.finish(status="completed")
        self._key, self._kind, self._text = key, kind, ""
        own = {} if kind.part is not None else {kind.holds: ""}
        fields = {**deepcopy(dict(kind.fields)), **(called or {}), **own}
        item_id = f"{kind.prefix}_{uuid4().hex}"
        self.items.append({"id": item_id, "status": "in_progress", "type": kind.type, **fields})
        return [*events, self._item_event("added"), *self._part_events("added")]

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self._kind.part is None else {**place, self._kind.index: 0}

    def _text_event(self, ending: str, fields: Mapping[str, Any]) -> Event:
        return {"type": f"response.{self._kind.text}.{ending}", **self._place, **fields, **self._kind.more}

    def _part(self) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self._kind is _MESSAGE else {}
        return {"type": self._kind.part, "text": self._text, **more}

    def _part_events(self, ending: str) -> list[Event]:
        if self._kind.part is None:
            return []
        name = "reasoning_summary_part" if self._kind is _SUMMARY else "content_part"
        return [{"type": f"response.{name}.{ending}", **self._place, "part": self._part()}]

    def _item_event(self, ending: str) -> Event:
        # A copy: the item grows, and the event is the item as it was.
        place = len(self.items) - 1
        return {"type": f"response.output_item.{ending}", "output_index": place, "item": dict(self.items[-1])}


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseExchange:
    """One request: what was asked, after which response, and the output so far. `created` in Unix seconds."""

    call: RouteCall
    body: ResponsesBody
    request: ServiceRequest
    previous: Stored | None
    output: OutputItems
    created: int

    def response(self, status: str, *, usage: Usage | None = None, problem: Problem | None = None) -> dict[str, Any]:
        """The response as it is now, with every field that Open Responses requires. `status` is OpenAI's."""
        body, sampling = self.body, self.request.sampling
        given = body.model_dump(by_alias=True, exclude_unset=True)
        tools: list[dict[str, Any]] = given.get("tools") or []
        return {
            "id": self.request.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": body.background is True,
            "error": None if problem is None else error_body(problem),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.call.service.served.id,
            "output": [dict(item) for item in self.output.items],
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

    def end(self, usage: Usage, ended: AnswerEnd) -> dict[str, Any]:
        """The response that is over; from now on others can follow it."""
        made = self.response(status_of(ended), usage=usage)
        if self.body.store is not False:
            items = [item.model_dump(exclude_unset=True) for item in input_items(self.body)]
            self.call.context.responses.add(stored(made, self.previous, items, namespace=self.request.namespace))
        return made

    def failed(self, problem: Problem) -> dict[str, Any]:
        """The response that broke off."""
        self.output.finish(status="incomplete")
        if problem.code == RequestCancelled.code:
            return self.response("cancelled")  # Which is no error, in OpenAI's API.
        return self.response("failed", problem=problem)


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

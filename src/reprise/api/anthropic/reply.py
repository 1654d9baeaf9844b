"""From the internal events to Anthropic's content blocks and stream events."""

from collections.abc import Sequence
from typing import Any

from reprise.api.service.exchange import Usage
from reprise.api.service.reasoning_signature import signature_of
from reprise.chat.answer import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from reprise.chat.tools import begun_object

Event = dict[str, Any]

PING: Event = {"type": "ping"}
_SHORT_S = 300.0
"""The shorter of the two times that a mark may ask for."""


class ContentBlocks:
    """The content blocks of one answer as they grow, and the stream events that tell of it.

    A whole answer is made of the same blocks, in the order in which they came.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._key: str | None = None
        """What the open block holds; None: no block is open."""
        self._arguments = ""

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta():
                    events += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    self.content[-1]["thinking"] += delta.text
                    events.append(self._delta({"type": "thinking_delta", "thinking": delta.text}))
                case ContentDelta():
                    # Null is as good by the specification, but older clients take a list or nothing.
                    events += self._open("text", {"type": "text", "text": "", "citations": []})
                    self.content[-1]["text"] += delta.text
                    events.append(self._delta({"type": "text_delta", "text": delta.text}))
                case ToolCallDelta():
                    events += self._take_call(delta)
        return events

    def finish(self) -> list[Event]:
        """The events at the end of the answer."""
        return self._close()

    def _take_call(self, delta: ToolCallDelta) -> list[Event]:
        called: dict[str, Any] = {"id": delta.id, "name": delta.name, "input": {}}
        block = {"type": "tool_use", **called, "caller": {"type": "direct"}}
        events = self._open(f"call {delta.index}", block)
        if delta.arguments != "":
            self._arguments += delta.arguments
            events.append(self._delta({"type": "input_json_delta", "partial_json": delta.arguments}))
        return events

    def _open(self, key: str, block: dict[str, Any]) -> list[Event]:
        if key == self._key:
            return []
        events = self._close()
        self._key = key
        self.content.append(block)
        # A copy: the block grows, and the event is the block as it was.
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": {**block}}]

    def _close(self) -> list[Event]:
        if self._key is None:
            return []
        events: list[Event] = []
        block = self.content[-1]
        if block["type"] == "thinking":
            block["signature"] = signature_of(block["thinking"])
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        if block["type"] == "tool_use" and self._arguments != "":
            block["input"] = begun_object(self._arguments)
        self._key, self._arguments = None, ""
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def usage_body(usage: Usage, *, num_stored: int, pin_for_s: float | None) -> dict[str, Any]:
    """Anthropic's counts: what was read from the cache, what was put into it, and the rest add up to the prompt.

    The prompt's last token is always computed, so it never comes from the cache and counts as neither. `pin_for_s` as
    in `ServiceRequest`.
    """
    created = max(0, min(num_stored, usage.num_prompt - usage.num_cached - 1))
    kept_long = created if pin_for_s is not None and pin_for_s > _SHORT_S else 0
    return {
        "input_tokens": usage.num_prompt - usage.num_cached - created,
        "cache_creation_input_tokens": created,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - kept_long,
            "ephemeral_1h_input_tokens": kept_long,
        },
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }

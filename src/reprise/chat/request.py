"""A chat request in one form, whatever API it came through."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One message in the form that chat templates take.

Keys: `role`; `content` (text, or None beside tool calls, or a list of parts where the template takes parts; an image is
the part ``{"type": "image", "image": Image}``);
`reasoning_content` (text) on an assistant message that thought; `tool_calls` as a list of
`{"id", "type": "function", "function": {"name", "arguments"}}`; `tool_call_id` and `name` on a tool message. Calls may
lack ids and their arguments may be text: the renderer mends them (`chat/messages/history.py`).
"""


def call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """One of the `tool_calls` of a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_of(call_id: str, name: str, content: str) -> Message:
    """The message with a tool's result."""
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """The place in message number `message` after `num_chars` characters of its text and `num_images` images."""

    message: int
    num_chars: int
    num_images: int = 0

    def plus(self, cut: "Cut") -> "Cut":
        """The place of a cut in a text that begins at this place."""
        return Cut(self.message, self.num_chars + cut.num_chars, self.num_images + cut.num_images)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What is rendered.

    `tools` in OpenAI form (`{"type": "function", "function": {...}}`). `template_options` go to the chat template by
    name (`enable_thinking`, `reasoning_effort`, …). `continue_final`: the last message is an assistant
    message whose text the model continues. `breakpoints` are explicit checkpoints (`cache_control`): the number of
    messages before each (0: after the tools and before any message). `cuts` are explicit checkpoints within a message.
    `notes` say what was done to the client's messages, for the record. `agent` is which agent of its client sends it,
    where it says so: it is not rendered.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    continue_final: bool = False
    breakpoints: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()
    notes: tuple[str, ...] = ()
    agent: tuple[str, str] | None = None

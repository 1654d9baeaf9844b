"""From input items to the messages that chat templates take.

Reasoning, text and calls that follow each other are one assistant message. Parts are lines of their own, except in
assistant messages, whose text has to be what it was.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reprise.api.responses.body import CALLS, COMPACTIONS, OUTPUTS, Item, ItemPart
from reprise.api.responses.tools import custom_arguments, full_name
from reprise.api.service.reasoning_signature import decode_reasoning
from reprise.api.service.unread import Speaker, UnreadParts
from reprise.chat.message_format import content_of, joined_lines, joined_text, text_runs
from reprise.chat.request import Message
from reprise.core.errors import BadRequest

LOCAL_SHELL = "local_shell"
_OWN_NAMES = {"local_shell_call": LOCAL_SHELL, "computer_call": "computer"}
"""Of tools that OpenAI's API knows, by the type of their calls."""
_SUMMARISED = """\
The rest of this chat was replaced by your own summary of it. Go on from there.

<summary>
{}
</summary>"""


class MessageWriter:
    """Writes the messages of a chat, item by item. Raises BadRequest for what a text model cannot read."""

    def __init__(self, instructions: str | None, unread: UnreadParts) -> None:
        self._messages: list[dict[str, Any]] = []
        self._tool_names: dict[str, str] = {}
        self._skipped: Counter[str] = Counter()
        self._unread = unread
        self._num_items = 0
        if instructions:
            self._messages.append({"role": "system", "content": instructions})

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        skipped = (f"items of type {kind} left out: {count}" for kind, count in self._skipped.items())
        return (*skipped, *self._unread.notes)

    def add(self, item: Item, where: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case kind if kind in CALLS:
                self._add_call(item, where)
            case kind if kind in OUTPUTS:
                self._add_output(item, where)
            case kind if kind in COMPACTIONS:
                self._add_compaction(item, where)
            case "item_reference":
                raise BadRequest("Items are not stored by id. Send the item itself.", param=where)
            case kind:
                self._skipped[kind[:40]] += 1
        self._num_items += 1

    def _add_message(self, item: Item, where: str) -> None:
        if item.role is None:
            raise BadRequest("A message needs its `role`.", param=f"{where}.role")
        if item.content is None:
            raise BadRequest("A message needs content.", param=f"{where}.content")
        if item.role == "assistant":
            message = self._assistant(lacks=())
            content = self._content(item.content, f"{where}.content", joiner="")
            message["content"] = content_of([*text_runs(message["content"]), *text_runs(content)])
            return
        # To templates a developer is the system: the name is OpenAI's alone.
        role = "system" if item.role == "developer" else item.role
        self._messages.append({"role": role, "content": self._content(item.content, f"{where}.content", joiner="\n")})

    def _add_reasoning(self, item: Item, where: str) -> None:
        reasoning = self._reasoning(item, where)
        if reasoning is None:
            self._skipped["reasoning without readable text"] += 1
            return
        message = self._assistant(lacks=("tool_calls", "content"))
        before = message.get("reasoning_content")
        message["reasoning_content"] = reasoning if before is None else f"{before}\n{reasoning}"

    def _add_compaction(self, item: Item, where: str) -> None:
        summary = None if item.encrypted_content is None else decode_reasoning(item.encrypted_content)
        if summary is None:
            raise BadRequest(
                "This compaction was made by another server, and only that can read it. Send the items it stands for.",
                param=f"{where}.encrypted_content",
            )
        # The user's: a model that finds it at the end continues its work.
        self._messages.append({"role": "user", "content": _SUMMARISED.format(summary)})

    def _add_call(self, item: Item, where: str) -> None:
        own_name = _OWN_NAMES.get(item.type, item.name)
        if item.call_id is None or own_name is None:
            raise BadRequest("A tool call needs its `call_id` and `name`.", param=where)
        name = full_name(own_name, item.namespace)
        match item.type:
            case "function_call":
                arguments = item.arguments
            case "custom_tool_call":
                arguments = custom_arguments(item.input or "")
            case _:
                arguments = item.action or {}
        self._tool_names[item.call_id] = name
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(lacks=()).setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Item, where: str) -> None:
        # The shell's own items name the call by `id`.
        call_id = item.call_id or item.id
        if call_id is None:
            raise BadRequest("A tool output needs the `call_id` of its call.", param=f"{where}.call_id")
        if item.output is None:
            raise BadRequest("A tool output needs `output`.", param=f"{where}.output")
        # A screenshot is a part alone.
        output = [item.output] if isinstance(item.output, ItemPart) else item.output
        content = self._content(output, f"{where}.output", joiner="\n")
        result = {"role": "tool", "tool_call_id": call_id, "content": content}
        name = self._tool_names.get(call_id)
        self._messages.append(result if name is None else {**result, "name": name})

    def _assistant(self, *, lacks: Sequence[str]) -> dict[str, Any]:
        """The assistant message that is being written, if it has none of these yet; else a new one."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or any(last.get(key) is not None for key in lacks):
            self._messages.append({"role": "assistant", "content": None})
        return self._messages[-1]

    def _reasoning(self, item: Item, where: str) -> str | None:
        """The text of a reasoning item: its own, the sealed one, or else the summary."""
        if item.content:
            return self._text(item.content, f"{where}.content", joiner="\n")
        decoded = None if item.encrypted_content is None else decode_reasoning(item.encrypted_content)
        if decoded is not None:
            return decoded
        return self._text(item.summary, f"{where}.summary", joiner="\n") if item.summary else None

    def _text(self, content: str | Sequence[ItemPart], where: str, *, joiner: str) -> str:
        """Content without its images, which are in no reasoning."""
        return joined_text(self._content(content, where, joiner=joiner))

    def _content(self, content: str | Sequence[ItemPart], where: str, *, joiner: str) -> str | list[Any]:
        if isinstance(content, str):
            return content
        return joined_lines([self._part(part, f"{where}[{at}]") for at, part in enumerate(content)], joiner)

    def _part(self, part: ItemPart, where: str) -> str | dict[str, Any]:
        match part.type:
            case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text" if part.text is not None:
                return part.text
            case "refusal" if part.refusal is not None:
                return part.refusal
            case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text" | "refusal":
                raise BadRequest(f"A part of type {part.type!r} needs `text`.", param=where)
            case _:
                fields = part.model_extra or {}
                return self._unread.part(part.type, fields, message_at=self._num_items, where=f"{where}.type")


def speaker_of(item: Item) -> Speaker:
    """Who says an item."""
    if item.type == "message":
        return "user" if item.role is None else "system" if item.role == "developer" else item.role
    if item.type.startswith("compaction"):
        return "user"
    return "tool" if item.type.endswith("_output") else "assistant"


def as_listed(item: Mapping[str, Any], *, item_id: str) -> dict[str, Any]:
    """An input item as it is listed: a message's text is a part."""
    listed = {"id": item_id, "type": "message", **item}
    content = listed.get("content")
    if listed["type"] != "message" or not isinstance(content, str):
        return listed
    kind = "output_text" if listed.get("role") == "assistant" else "input_text"
    return {**listed, "status": "completed", "content": [{"type": kind, "text": content}]}


def item_nbytes(item: dict[str, Any]) -> int:
    """About how much memory an item takes."""
    return 2 * len(json.dumps(item, ensure_ascii=False))

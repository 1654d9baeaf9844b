"""Putting back reasoning: many clients drop the reasoning of earlier answers, and many templates want it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reprise.chat.answer import Answer
from reprise.chat.memo import Memo
from reprise.chat.message_format import joined_text, parsed_arguments
from reprise.chat.request import Message

_ENTRY_NBYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Messages, and how many of them got their reasoning back."""

    messages: tuple[Message, ...]
    num_restored: int


class ReasoningMemory:
    """The reasoning of the answers that this server wrote, at most `nbytes` bytes of it.

    An answer is known again by the chat before it, its content and its tool calls; ids and surrounding space do not
    count, since clients change them.
    """

    def __init__(self, *, nbytes: int = 16 << 20) -> None:
        self._memo: Memo[int, str] = Memo(nbytes=nbytes, size=lambda _, text: _ENTRY_NBYTES + 2 * len(text))

    def remember(self, messages: Sequence[Message], answer: Message) -> None:
        """The chat `messages` was answered with `answer`."""
        reasoning = answer.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning != "":
            *_, key = _keys((*messages, answer))
            self._memo.put(key, reasoning)

    def restored(self, messages: Sequence[Message]) -> Restored:
        """The messages, with reasoning where an assistant message has none and it is known. O(text)."""
        out: list[Message] = []
        num_restored = 0
        for message, key in zip(messages, _keys(messages), strict=True):
            lacks = message.get("role") == "assistant" and message.get("reasoning_content") is None
            reasoning = self._memo.get(key) if lacks else None
            if reasoning is None:
                out.append(message)
            else:
                out.append({**message, "reasoning_content": reasoning})
                num_restored += 1
        return Restored(messages=tuple(out), num_restored=num_restored)


def as_message(answer: Answer, *, has_reasoning: bool = True) -> Message:
    """The answer in the form in which a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if has_reasoning and answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
            }
            for call in answer.tool_calls
        ]
    elif answer.content is None:
        message["content"] = ""
    return message


def _keys(messages: Sequence[Message]) -> Iterator[int]:
    """For each message a hash of it and all before it, without reasoning."""
    chain = 0
    for message in messages:
        calls = [_called(call) for call in cast(Sequence[Any], message.get("tool_calls") or ())]
        said = joined_text(message.get("content")).strip()
        chain = hash((chain, message.get("role"), said, *calls))
        yield chain


def _called(call: Any) -> tuple[str, str]:
    function: Any = cast(Mapping[str, Any], call).get("function", {}) if isinstance(call, Mapping) else {}
    arguments = parsed_arguments(function.get("arguments"))
    return str(function.get("name")), json.dumps(arguments, sort_keys=True, default=str)

"""Histories as clients send them, made whole: broken tool calls and their results, and reasoning that was dropped.

What is done to tool calls depends on the messages alone and not on the template, and each message only on those before
it, so a chat that grows keeps its prefix. Many clients drop the reasoning of earlier answers, and many templates want
it: it is put back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from reprise.chat.answer import Answer
from reprise.chat.images import images_in
from reprise.chat.memo import Memo
from reprise.chat.message_format import (
    calls_in,
    function_in,
    joined_text,
    parsed_arguments,
    shortened_id,
    unquoted_arguments,
)
from reprise.chat.request import Message, call_of
from reprise.core.errors import BadRequest
from reprise.core.json_shape import json_shape

_NUM_MADE_LETTERS = 24
"""Letters of an id that is made for a call without one."""

_MAX_CONTAINERS = 65_536
_MAX_COMMAS = 200_000
"""Lists and objects, and commas between values, that the texts of all arguments together may have."""

_MAX_UNCOUNTED = 2 * _MAX_CONTAINERS
"""Characters that cannot hold too many of them."""


def completed(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """As many messages, with whole tool calls and results, and notes on what was done to them. O(messages).

    Raises BadRequest where the arguments of the calls hold more values than are read.
    """
    completion = _HistoryCompletion()
    out = tuple(completion.complete(index, message) for index, message in enumerate(messages))
    return out, completion.notes()


def argument_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Every text in the arguments of the calls of completed messages: a prompt has all of each."""
    for message in messages:
        for call in calls_in(message):
            yield from _texts_in(function_in(call).get("arguments"))


def _texts_in(value: object) -> Iterator[str]:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            left += cast(Mapping[str, Any], part).values()
        elif isinstance(part, list):
            left += cast(list[Any], part)


class _HistoryCompletion:
    """Goes through a chat and remembers which calls still want their result."""

    def __init__(self) -> None:
        self._open: dict[str, str | None] = {}
        """The calls of the last message with calls that have no result yet: name by id."""
        self._names: dict[str, str] = {}
        self._broken: list[int] = []
        self._nameless: list[int] = []
        self._orphans: list[int] = []
        self._num_characters = self._num_containers = self._num_commas = 0

    def complete(self, index: int, message: Message) -> Message:
        match message.get("role"):
            case "assistant" if message.get("tool_calls"):
                return self._called(index, message)
            case "tool":
                return self._told(index, message)
            case _:
                return message

    def notes(self) -> tuple[str, ...]:
        notes: list[str] = []
        if self._broken:
            notes.append(f"tool arguments that are not a JSON object, passed as text: message {_listed(self._broken)}")
        if self._nameless:
            notes.append(f"tool calls or results without an id, numbered in order: {_listed(self._nameless)}")
        if self._orphans:
            notes.append(f"tool results without a call before them: message {_listed(self._orphans)}")
        return tuple(notes)

    def _count(self, arguments: object) -> None:
        """Bound what arguments that are text become: to the counts of a body they are one value."""
        if not isinstance(arguments, str):
            return
        self._num_characters += len(arguments)
        if self._num_characters <= _MAX_UNCOUNTED:
            return
        shape = json_shape(unquoted_arguments(arguments).encode("utf-8", "replace"))
        self._num_containers += shape.num_containers
        self._num_commas += shape.num_commas
        if self._num_containers > _MAX_CONTAINERS or self._num_commas > _MAX_COMMAS:
            raise BadRequest(
                f"The arguments of the tool calls hold too many values: at most {_MAX_CONTAINERS} lists and objects "
                f"and {_MAX_COMMAS} values are accepted. Send fewer tool calls.",
                param="messages",
            )

    def _called(self, index: int, message: Message) -> Message:
        calls: list[Any] = []
        self._open = {}
        for number, given in enumerate(cast(Sequence[Any], message["tool_calls"])):
            if not isinstance(given, Mapping) or not isinstance(cast(Any, given).get("function"), Mapping):
                calls.append(cast(Any, given))
                continue
            call = cast(Mapping[str, Any], given)
            function = cast(Mapping[str, Any], call["function"])
            self._count(function.get("arguments"))
            arguments = parsed_arguments(function.get("arguments"))
            if isinstance(arguments, str):
                self._broken.append(index)
            call_id, name = call.get("id"), function.get("name")
            if not isinstance(call_id, str) or call_id == "":
                call_id = f"call_{shortened_id(f'{index}.{number}', _NUM_MADE_LETTERS)}"
                self._nameless.append(index)
            self._open[call_id] = name if isinstance(name, str) else None
            if isinstance(name, str):
                self._names[call_id] = name
            calls.append({**call, "id": call_id, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": calls}

    def _told(self, index: int, message: Message) -> Message:
        call_id, name = message.get("tool_call_id"), message.get("name")
        if not isinstance(call_id, str) or call_id == "":
            fitting = [known for known, called in self._open.items() if name is None or called == name]
            call_id = next(iter(fitting), None) or next(iter(self._open), None)
            if call_id is None:
                call_id = f"call_{shortened_id(str(index), _NUM_MADE_LETTERS)}"
            self._nameless.append(index)
        if call_id not in self._names:
            self._orphans.append(index)
        self._open.pop(call_id, None)
        named = {"name": self._names[call_id]} if name is None and call_id in self._names else {}
        return {**message, **named, "tool_call_id": call_id}


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(str(index) for index in sorted(set(indices)))


_ENTRY_NBYTES = 200


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

    def restored(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], int]:
        """The messages, and how many got reasoning: assistant messages that have none, where it is known. O(text)."""
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
        return tuple(out), num_restored


def as_message(answer: Answer, *, has_reasoning: bool = True) -> Message:
    """The answer in the form in which a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if has_reasoning and answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            call_of(call.id, call.name, parsed_arguments(call.arguments)) for call in answer.tool_calls
        ]
    elif answer.content is None:
        message["content"] = ""
    return message


def _keys(messages: Sequence[Message]) -> Iterator[int]:
    """For each message a hash of it and all before it, without reasoning."""
    chain = 0
    for message in messages:
        calls = map(_called, calls_in(message))
        words = joined_text(message.get("content")).strip()
        chain = hash((chain, message.get("role"), words, *images_in([message]), *calls))
        yield chain


def _called(call: Mapping[str, Any]) -> tuple[str, str]:
    function = function_in(call)
    arguments = parsed_arguments(function.get("arguments"))
    return str(function.get("name")), json.dumps(arguments, sort_keys=True, default=str)

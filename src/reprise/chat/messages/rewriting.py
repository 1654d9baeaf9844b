"""Rewrites messages into shapes that more templates accept: pure functions from a chat to the closest other one.

Each changes the messages of its shape alone, and each message only by those beside it, so that a chat that grows is
rewritten in the same way and keeps its prefix. The marks in a chat (breakpoints and cuts) move with its messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reprise.chat.message_format import calls_in, content_of, function_in, joined_text, parsed_arguments, text_runs
from reprise.chat.request import ChatRequest, Cut, Message
from reprise.chat.templates.probe_turns import HEAD_ROLES, head_length

_JOINER = "\n\n"
_SILENCE: Message = {"role": "user", "content": ""}
_BRIDGE: Message = {"role": "assistant", "content": "OK."}
_PLAIN_KEYS = frozenset(("role", "content", "name"))

Rewrite = Callable[[ChatRequest], ChatRequest]
"""The same request where nothing has the shape."""

CallWriter = Callable[[Sequence[tuple[str, Any]]], str]
"""The text of calls that were made together: of each the function's name and the arguments."""

_NOBODY: Message = {}


class _RewrittenChat:
    """The messages of another chat, and where each of the request's messages begins in it."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._begins: dict[int, Cut] = {}
        self.messages: list[Message] = []

    def keep(self, index: int, message: Message) -> None:
        """The message with this index is this one now."""
        self._begins[index] = Cut(len(self.messages), 0)
        self.messages.append(message)

    def join(self, index: int, message: Message) -> None:
        """The change is appended to the last message."""
        last = self.messages[-1]
        before, after = text_runs(last.get("content")), text_runs(message.get("content"))
        joiner = [_JOINER] if joined_text(last.get("content")) and joined_text(message.get("content")) else []
        num_chars = len(joined_text(last.get("content"))) + len("".join(joiner))
        self._begins[index] = Cut(len(self.messages) - 1, num_chars, sum(not isinstance(run, str) for run in before))
        joined: dict[str, Any] = {**last, **message, "content": content_of([*before, *joiner, *after])}
        reasons = [m["reasoning_content"] for m in (last, message) if m.get("reasoning_content")]
        if reasons:
            joined["reasoning_content"] = "\n".join(reasons)
        self.messages[-1] = joined

    def add(self, message: Message) -> None:
        """A message that the chat did not have."""
        self.messages.append(message)

    def drop(self, index: int) -> None:
        self._begins[index] = Cut(len(self.messages), 0)

    def finish(self) -> ChatRequest:
        if self.messages == list(self._request.messages):
            return self._request
        cuts = [self._begins[cut.message].plus(cut) for cut in self._request.cuts]
        breakpoints: list[int] = []
        for num_before in self._request.breakpoints:
            begin = self._begins.get(num_before, Cut(len(self.messages), 0))
            if begin.num_chars == begin.num_images == 0:
                breakpoints.append(begin.message)
            else:
                cuts.append(replace(begin, num_chars=max(0, begin.num_chars - len(_JOINER))))
        return replace(self._request, messages=tuple(self.messages), breakpoints=tuple(breakpoints), cuts=tuple(cuts))


def _each(request: ChatRequest, change: Callable[[int, Message], Message]) -> ChatRequest:
    """Each message is what `change` makes of it."""
    draft = _RewrittenChat(request)
    for index, message in enumerate(request.messages):
        draft.keep(index, change(index, message))
    return draft.finish()


def _joined(request: ChatRequest, is_joined: Callable[[int, Message, Message], bool]) -> ChatRequest:
    """Messages become part of the last one before them where `is_joined` says so of the two."""
    draft = _RewrittenChat(request)
    for index, message in enumerate(request.messages):
        last = draft.messages[-1] if draft.messages else _NOBODY
        (draft.join if is_joined(index, last, message) else draft.keep)(index, message)
    return draft.finish()


def images_to_users(*roles: str) -> Rewrite:
    """Images in messages of these roles are shown by the user behind them."""
    return lambda request: _with_images_moved(request, lambda message: message.get("role") in roles)


def images_of_lone_results_to_users(request: ChatRequest) -> ChatRequest:
    """Images in tool results whose call is not right before them are shown by the user behind them."""
    lone = {id(request.messages[index]) for index in _lone_results(request.messages)}
    return _with_images_moved(request, lambda message: id(message) in lone)


def _with_images_moved(request: ChatRequest, is_of: Callable[[Message], bool]) -> ChatRequest:
    """Images in some messages go to the front of the next user message, or into one behind them.

    Behind tool results all images of a run of them are shown together: the template may want the run whole.
    """
    draft, left = _RewrittenChat(request), list[Mapping[str, Any]]()
    for index, message in enumerate(request.messages):
        role, runs = message.get("role"), text_runs(message.get("content"))
        if left and role == "assistant":
            draft.add({"role": "user", "content": content_of(left)})
            left = []
        if left and role == "user":
            draft.keep(index, {**message, "content": content_of([*left, *runs])})
            left = []
        elif is_of(message) and any(not isinstance(run, str) for run in runs):
            left += [run for run in runs if not isinstance(run, str)]
            draft.keep(index, {**message, "content": joined_text(message.get("content"))})
        else:
            draft.keep(index, message)
    if left:
        draft.add({"role": "user", "content": content_of(left)})
    return draft.finish()


def late_systems_as_users(request: ChatRequest) -> ChatRequest:
    """System messages behind the beginning become user messages where they stand.

    Moved to the head, they would cost the whole chat.
    """
    head = head_length(request.messages)
    return _each(
        request,
        lambda index, message: _as_user(message) if index >= head and message.get("role") in HEAD_ROLES else message,
    )


def joined_systems(request: ChatRequest) -> ChatRequest:
    """The system messages at the beginning become one."""
    head = head_length(request.messages)
    return _joined(request, lambda index, last, message: 0 < index < head)


def system_in_question(request: ChatRequest) -> ChatRequest:
    """The system prompt begins the first user message. Its end stays a place for a checkpoint."""
    messages, head = request.messages, head_length(request.messages)
    if head == 0:
        return request
    draft = _RewrittenChat(request)
    draft.keep(0, _as_user(messages[0]))
    for index in range(1, len(messages)):
        is_joined = index < head or (index == head and messages[index].get("role") == "user")
        (draft.join if is_joined else draft.keep)(index, messages[index])
        if index < head:
            draft.messages[0] = {**draft.messages[0], "role": "user"}
    rewritten = draft.finish()
    length = len(_JOINER.join(joined_text(message.get("content")) for message in messages[:head]))
    return replace(rewritten, cuts=(*rewritten.cuts, Cut(0, length))) if length > 0 else rewritten


def lone_results_as_users(request: ChatRequest) -> ChatRequest:
    """Tool results whose call is not right before them become user messages."""
    lone = _lone_results(request.messages)
    return _each(request, lambda index, message: _as_user(message) if index in lone else message)


def _lone_results(messages: Sequence[Message]) -> frozenset[int]:
    """The indices of tool results whose call is not right before them."""
    lone: set[int] = set()
    open_ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.get("role") != "tool":
            open_ids = {str(call.get("id")) for call in calls_in(message)}
        elif message.get("tool_call_id") not in open_ids:
            lone.add(index)
    return frozenset(lone)


def results_in_order(request: ChatRequest) -> ChatRequest:
    """Results of calls that were made together follow each other as their calls do."""
    draft, messages = _RewrittenChat(request), request.messages
    index = 0
    while index < len(messages):
        draft.keep(index, messages[index])
        ids = [call.get("id") for call in calls_in(messages[index])]
        index = first = index + 1
        while ids and index < len(messages) and messages[index].get("role") == "tool":
            index += 1
        places = {call_id: place for place, call_id in enumerate(ids)}
        for at in sorted(
            range(first, index), key=lambda at: places.get(messages[at].get("tool_call_id"), len(messages))
        ):
            draft.keep(at, messages[at])
    return draft.finish()


def calls_as_text(request: ChatRequest, write: CallWriter) -> ChatRequest:
    """Tool calls become words of the assistant."""

    def spoken(_: int, message: Message) -> Message:
        if not calls_in(message):
            return message
        written = write([(str(function_in(call).get("name")), _arguments(call)) for call in calls_in(message)])
        joiner = "\n" if joined_text(message.get("content")) else ""
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**said, "content": content_of([*text_runs(message.get("content")), joiner + written])}

    return _each(request, spoken)


def one_call_at_a_time(request: ChatRequest) -> ChatRequest:
    """Calls that were made together become turns of one call and its result each."""
    draft, messages = _RewrittenChat(request), request.messages
    index = 0
    while index < len(messages):
        message, calls = messages[index], calls_in(messages[index])
        end = index + 1
        if len(calls) > 1:
            while end < len(messages) and messages[end].get("role") == "tool":
                end += 1
            _keep_apart(draft, index, end, messages)
        else:
            draft.keep(index, message)
        index = end
    return draft.finish()


def _keep_apart(draft: _RewrittenChat, index: int, end: int, messages: Sequence[Message]) -> None:
    """Message `index` with its calls, and the results in ``[index + 1, end)``, call by call."""
    message, kept = messages[index], set[int]()
    for number, call in enumerate(calls_in(message)):
        if number == 0:
            draft.keep(index, {**message, "tool_calls": [call]})
        else:
            draft.add({"role": "assistant", "content": "", "tool_calls": [call]})
        for at in range(index + 1, end):
            if at not in kept and messages[at].get("tool_call_id") == call.get("id"):
                draft.keep(at, messages[at])
                kept.add(at)
    for at in range(index + 1, end):
        if at not in kept:
            draft.keep(at, messages[at])


def text_in_mapping(request: ChatRequest) -> ChatRequest:
    """Arguments of a call that are no JSON object become one, with the text in it."""

    def wrapped(_: int, message: Message) -> Message:
        calls = calls_in(message)
        is_text = any(isinstance(_arguments(call), str) for call in calls)
        return {**message, "tool_calls": [_with_mapping(call) for call in calls]} if is_text else message

    return _each(request, wrapped)


def without_empty_answers(request: ChatRequest) -> ChatRequest:
    """Assistant messages without words and calls are left out."""
    draft, messages = _RewrittenChat(request), request.messages
    for index, message in enumerate(messages):
        is_begun = request.continue_final and index == len(messages) - 1
        if is_empty_answer(message) and not is_begun:
            draft.drop(index)
        else:
            draft.keep(index, message)
    return draft.finish()


def is_empty_answer(message: Message) -> bool:
    is_silent = not any(text_runs(message.get("content"))) and not calls_in(message)
    return message.get("role") == "assistant" and is_silent


def with_a_user(request: ChatRequest) -> ChatRequest:
    """A chat without a user message before its first answer gets an empty one, also where it has no answer yet."""
    if not request.messages:
        return request  # refused as empty: a client that sent no message at all made a mistake
    head = head_length(request.messages)
    rest = request.messages[head:]
    if rest and rest[0].get("role") != "assistant":
        return request
    draft = _RewrittenChat(request)
    for index, message in enumerate(request.messages):
        if index == head:
            draft.add(_SILENCE)
        draft.keep(index, message)
    if not rest:
        draft.add(_SILENCE)
    return draft.finish()


def user_first(request: ChatRequest) -> ChatRequest:
    """A chat that begins with the assistant gets an empty user message before it."""
    return with_a_user(request) if head_length(request.messages) < len(request.messages) else request


def joined_users(request: ChatRequest) -> ChatRequest:
    """User messages in a row become one, unless they are of two people."""

    def is_one(_: int, last: Message, message: Message) -> bool:
        is_plain = all(m.get("role") == "user" and m.keys() <= _PLAIN_KEYS for m in (last, message))
        return is_plain and len({m["name"] for m in (last, message) if "name" in m}) <= 1

    return _joined(request, is_one)


def joined_answers(request: ChatRequest) -> ChatRequest:
    """Assistant messages in a row become one, unless a call stands between."""
    return _joined(
        request,
        lambda _, last, message: last.get("role") == message.get("role") == "assistant" and not calls_in(last),
    )


def bridged(request: ChatRequest) -> ChatRequest:
    """Put a short answer between a tool loop without an answer and the next user message."""
    draft = _RewrittenChat(request)
    has_answer = True
    for index, message in enumerate(request.messages):
        is_user = message.get("role") == "user"
        if is_user and not has_answer and draft.messages[-1].get("role") != "user":
            draft.add(_BRIDGE)
        if is_user or (message.get("role") == "assistant" and not calls_in(message)):
            has_answer = not is_user
        draft.keep(index, message)
    return draft.finish()


def _arguments(call: Mapping[str, Any]) -> Any:
    return parsed_arguments(function_in(call).get("arguments"))


def _with_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = _arguments(call)
    if not isinstance(arguments, str):
        return call
    return {**call, "function": {**function_in(call), "arguments": {"arguments": arguments}}}


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": content_of(text_runs(message.get("content")))}

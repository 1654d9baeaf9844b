"""What an agent goes on with when it has had its chat summarised.

An agent whose chat grows too long asks for a summary, and goes on from its system prompt, the summary and what it keeps
of the chat. Where all of that stands is learnt from what it sent the last time: when the next summary is written, the
next prompt is known up to the user's words. Nothing here knows an agent by name.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal, cast

from reprise.chat.message_format import joined_text
from reprise.chat.probe_turns import HEAD_ROLES, last_user_at
from reprise.chat.request import ChatRequest, Cut, Message

_LEAST_CHARS = 40
"""A shorter text is too common to be a summary that is found again."""
_NUM_ANSWERS = 8
_NUM_SHAPES = 64
_KEY_CHARS = 200
"""Of the instruction to summarise: what people add stands at its end."""

_Kind = Literal["context", "turn", "answer"]
_TAGGED = re.compile(r"\s*<(?P<tag>[A-Za-z][\w-]*)[^<>]*>.*</(?P=tag)>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Messages of the summarised chat that stay: a slice of those of one kind."""

    kind: _Kind
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A message with the same words every time."""

    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """The message that has the summary: between two texts, whole or what one tag of it holds."""

    message: Message
    before: str
    after: str
    tag: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionShape:
    """How a chat goes on after a summary: its messages up to the user's next words."""

    places: tuple[_Kept | _Given | _Told, ...]
    has_own_tools: bool
    """The tools are those of the request for the summary; else those of the chat's request before it."""

    @property
    def ends_with_summary(self) -> bool:
        """Nothing of the user's comes behind it: the whole prompt is known."""
        return isinstance(self.places[-1], _Told)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """A request as the client sent it, the chat's request before it, and the answer."""

    request: ChatRequest
    previous: ChatRequest | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """The request that is expected. Unless it is whole, the user's words follow in its last message."""

    request: ChatRequest
    is_whole: bool


class Compactions:
    """The latest answers, and the shapes that were seen. Bounded; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._answers: OrderedDict[int, Answered] = OrderedDict()
        self._shapes: OrderedDict[str, CompactionShape] = OrderedDict()

    def note(self, answered: Answered) -> None:
        """An answer that may turn out to be a summary."""
        if len(answered.text) < _LEAST_CHARS:
            return
        with self._lock:
            self._answers[id(answered)] = answered
            while len(self._answers) > _NUM_ANSWERS:
                self._answers.popitem(last=False)

    def observe(self, request: ChatRequest) -> None:
        """A request came: if it goes on from a summary, learn how."""
        with self._lock:
            answers = tuple(self._answers.values())
        for answered in reversed(answers):
            shape = shape_of(answered, request)
            key = _key(answered.request)
            if shape is None or key is None:
                continue
            with self._lock:
                self._answers.pop(id(answered), None)
                self._shapes[key] = shape
                self._shapes.move_to_end(key)
                while len(self._shapes) > _NUM_SHAPES:
                    self._shapes.popitem(last=False)
            return

    def predict(self, answered: Answered) -> Predicted | None:
        """What the next request will be; None if that is not known."""
        key = _key(answered.request)
        with self._lock:
            shape = self._shapes.get(key) if key is not None else None
        request = None if shape is None else next_request(shape, answered)
        if shape is None or request is None:
            return None
        return Predicted(request=request, is_whole=shape.ends_with_summary)


def shape_of(answered: Answered, request: ChatRequest) -> CompactionShape | None:
    """How `request` goes on from the summary in `answered`; None if it does not. O(messages)."""
    before, now = answered.request.messages, request.messages
    if now[: len(before)] == before:
        return None
    last = last_user_at(now)
    found = _find(answered.text, now)
    if last is None or found is None or found[0] > last:
        return None
    at, told = found
    # A chat that goes on with the answer as an answer is no news, however its history was rewritten.
    if told.message.get("role") == "assistant" and len(now) >= len(before):
        return None
    kept = _by_kind(before, told)
    places: list[_Kept | _Given | _Told] = []
    for index, message in enumerate(now[: last + 1]):
        if index == at:
            places.append(told)
        elif index == last:
            places.append(_Given(message=_begun(message)))
        else:
            _add(places, _place(message, kept), kept)
    previous_tools = answered.previous.tools if answered.previous is not None else ()
    if request.tools not in (answered.request.tools, previous_tools):
        return None
    return CompactionShape(places=tuple(places), has_own_tools=request.tools == answered.request.tools)


def next_request(shape: CompactionShape, answered: Answered) -> ChatRequest | None:
    """The request that follows this answer if it is like the last time, up to the user's words."""
    told = next(place for place in shape.places if isinstance(place, _Told))
    kept = _by_kind(answered.request.messages, told)
    piece = dict(_pieces(answered.text)).get(told.tag)
    base = answered.request if shape.has_own_tools else answered.previous
    if piece is None or base is None:
        return None
    messages: list[Message] = []
    breakpoints, cut = list[int](), None
    for place in shape.places:
        match place:
            case _Given(message=message):
                messages.append(message)
            case _Kept(kind=kind, start=start, stop=stop):
                messages += kept[kind][start:stop]
            case _Told(message=message, before=before, after=after):
                # Checkpoints around it: what stands behind may be different this time.
                cut = Cut(len(messages), len(before + piece))
                breakpoints = [len(messages), len(messages) + 1]
                messages.append({**message, "content": before + piece + after})
    inner = tuple(at for at in breakpoints if 0 < at < len(messages))
    return replace(
        base,
        messages=tuple(messages),
        breakpoints=inner,
        cuts=() if cut is None else (cut,),
        continue_final=False,
        notes=(),
    )


def _key(request: ChatRequest) -> str | None:
    """The instruction by which a request for a summary is known again."""
    at = last_user_at(request.messages)
    return None if at is None else joined_text(request.messages[at].get("content")).strip()[:_KEY_CHARS]


def _pieces(text: str) -> Iterator[tuple[str | None, str]]:
    """What of an answer may be handed on: what a tag holds, by its name, and all of it (None)."""
    yield None, text.strip()
    for tag in dict.fromkeys(re.findall(r"<([A-Za-z][\w-]*)>", text)):
        start, end = text.find(f"<{tag}>") + len(tag) + 2, text.rfind(f"</{tag}>")
        if end > start:
            yield tag, text[start:end].strip()


def _find(text: str, messages: Sequence[Message]) -> tuple[int, _Told] | None:
    """Where the summary stands, and what stands around it; the whole of it before a part."""
    for tag, piece in _pieces(text):
        if len(piece) < _LEAST_CHARS:
            continue
        for index, message in enumerate(messages):
            content = joined_text(message.get("content"))
            at = content.find(piece)
            if at >= 0 and message.get("role") != "tool":
                after = content[at + len(piece) :]
                return index, _Told(message=_bare(message), before=content[:at], after=after, tag=tag)
    return None


def _by_kind(messages: Sequence[Message], told: _Told) -> Mapping[_Kind, list[Message]]:
    """The messages of a summarised chat, without the instruction at its end and without an older summary."""
    kept: dict[_Kind, list[Message]] = {"context": [], "turn": [], "answer": []}
    for message in messages[: last_user_at(messages)]:
        text = joined_text(message.get("content"))
        role = message.get("role")
        if len(told.before) >= _LEAST_CHARS and text.startswith(told.before[:_KEY_CHARS]):
            continue
        if role in HEAD_ROLES or _TAGGED.fullmatch(text):
            kept["context"].append(message)
        elif role == "user":
            kept["turn"].append(message)
        elif role == "assistant":
            kept["answer"].append(message)
    return kept


def _place(message: Message, kept: Mapping[_Kind, list[Message]]) -> _Kept | _Given:
    """Where a message comes from: contexts are counted from the chat's beginning, all else from its end."""
    for kind, messages in kept.items():
        for index in range(len(messages) - 1, -1, -1):
            if messages[index] == message:
                at = index if kind == "context" else index - len(messages)
                return _Kept(kind=kind, start=at, stop=at + 1 if at != -1 else None)
    return _Given(message=message)


def _add(places: list[_Kept | _Given | _Told], place: _Kept | _Given, kept: Mapping[_Kind, list[Message]]) -> None:
    """Add a place; turns that follow each other from the chat's first on are as many as there are the next time."""
    if not isinstance(place, _Kept) or place.kind != "turn" or place.start is None:
        places.append(place)
        return
    last = places[-1] if places else None
    is_first = place.start == -len(kept["turn"])
    goes_on = isinstance(last, _Kept) and last.kind == "turn" and last.start == 0 and last.stop == place.start
    if goes_on:
        places[-1] = replace(cast(_Kept, last), stop=place.stop)
    else:
        places.append(replace(place, start=0) if is_first else place)


def _begun(message: Message) -> Message:
    """The user's next message as far as it is the client's own: the lines before the last, or the parts."""
    content: Any = message.get("content")
    if isinstance(content, list):
        *parts, last = cast(list[Any], content)
        return {**message, "content": [*parts, {**last, "text": ""}] if parts else ""}
    text = joined_text(content).rstrip()
    return {**message, "content": text[: text.rfind("\n") + 1]}


def _bare(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "content"}

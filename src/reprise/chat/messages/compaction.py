"""How an agent continues after it has had its chat summarised.

An agent whose chat grows too long asks for a summary, and continues from its system prompt, the summary and what it
keeps of the chat. Where all of that stands is learnt from what it sent the last time: when the next summary is written,
the next prompt is known up to the user's words. Nothing here knows an agent by name.

Some agents ask at the chat's end. Others ask apart: another system prompt, and the chat as text in the instruction.
"""

import json
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Literal, cast

from cachetools import FIFOCache

from reprise.chat.images import images_in
from reprise.chat.message_format import joined_text
from reprise.chat.request import ChatRequest, Cut, Message
from reprise.chat.templates.probe_turns import HEAD_ROLES, head_length, last_user_at

log = logging.getLogger(__name__)

_LEAST_CHARS = 40
"""A shorter text is too common to be a summary that is found again."""
_NUM_ANSWERS = 8
_NUM_SHAPES = 64
_NUM_REQUESTS = 16
"""The latest requests, among which the chat is found that a request for a summary tells as text."""
_SAVED_CHARS = 1 << 18
"""Of what is kept over a restart; the shapes used last come first."""
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
    """The form of a chat after a summary: its messages up to the user's next words."""

    places: tuple[_Kept | _Given | _Told, ...]
    has_own_tools: bool
    """The tools are those of the request for the summary; else those of the chat's request before it."""

    @property
    def ends_with_summary(self) -> bool:
        """No user message follows it: the whole prompt is known."""
        return isinstance(self.places[-1], _Told)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """A request as the client sent it, the chat's request before it, and the answer."""

    request: ChatRequest
    previous: ChatRequest | None
    text: str
    is_apart: bool = False
    """The chat is that of `previous`, and `request` tells it as text."""

    @property
    def chat(self) -> Sequence[Message]:
        """The messages that were summarised, without the instruction."""
        if self.is_apart and self.previous is not None:
            return self.previous.messages
        return self.request.messages[: last_user_at(self.request.messages)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predicted:
    """The request that is expected. Unless it is whole, the user's words follow in its last message."""

    request: ChatRequest
    is_whole: bool


class Compactions:
    """The latest answers, and the shapes that were seen. Bounded; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._answers = FIFOCache[int, Answered](_NUM_ANSWERS)
        self._shapes: OrderedDict[str, CompactionShape] = OrderedDict()
        self._requests: deque[ChatRequest] = deque(maxlen=_NUM_REQUESTS)
        self._is_saved = True

    def note(self, answered: Answered) -> None:
        """An answer that may turn out to be a summary."""
        if len(answered.text) < _LEAST_CHARS:
            return
        with self._lock:
            self._answers[id(answered)] = answered

    def observe(self, request: ChatRequest) -> bool:
        """Learn from a request how it continues from a summary. Returns whether it seems to: it quotes an answer."""
        with self._lock:
            answers = tuple(self._answers.values())
        follows = False
        for answered in reversed(answers):
            found = self._shape_of(answered, request)
            if found is None:
                continue
            follows = True
            key, shape = found
            if any(isinstance(place, _Given) and images_in([place.message]) for place in shape.places):
                # An image is of this chat alone, and no shape of others.
                continue
            with self._lock:
                self._answers.pop(id(answered), None)
                self._is_saved = self._is_saved and self._shapes.get(key) == shape
                self._shapes[key] = shape
                self._shapes.move_to_end(key)
                while len(self._shapes) > _NUM_SHAPES:
                    self._shapes.popitem(last=False)
            break
        with self._lock:
            self._requests.append(request)
        return follows

    def predict(self, answered: Answered) -> Predicted | None:
        """What the next request will be; None if that is not known."""
        for key, is_apart in ((_key(answered.request), False), (_head_key(answered.request), True)):
            with self._lock:
                shape = self._shapes.get(key) if key is not None else None
            if shape is None:
                continue
            told = self._with_its_chat(answered) if is_apart else answered
            request = None if told is None else next_request(shape, told)
            if request is not None:
                return Predicted(request=request, is_whole=shape.ends_with_summary)
        return None

    @property
    def is_saved(self) -> bool:
        """Whether `save` would give nothing."""
        with self._lock:
            return self._is_saved

    def save(self) -> str | None:
        """The shapes as JSON, if there are others than at the last time."""
        with self._lock:
            if self._is_saved:
                return None
            self._is_saved = True
            shapes = list(self._shapes.items())
        saved: list[str] = []
        num_left = _SAVED_CHARS
        for key, shape in reversed(shapes):
            text = json.dumps([key, shape.has_own_tools, [_place_body(place) for place in shape.places]])
            num_left -= len(text)
            if num_left < 0:
                break
            saved.append(text)
        return f"[{', '.join(reversed(saved))}]"

    def restore(self, text: str) -> None:
        """Learn what `save` gave, here or elsewhere; what is known already stays as it is.

        What cannot be read is left out, and logged.
        """
        try:
            shapes = {
                str(key): CompactionShape(places=tuple(map(_place_of, places)), has_own_tools=bool(has_own_tools))
                for key, has_own_tools, places in json.loads(text)
            }
        except (ValueError, TypeError, KeyError) as error:
            log.warning("cannot read what was learnt about summaries; it will be learnt again: %s", error)
            return
        with self._lock:
            self._shapes = OrderedDict(
                {key: shape for key, shape in shapes.items() if key not in self._shapes} | self._shapes
            )
            while len(self._shapes) > _NUM_SHAPES:
                self._shapes.popitem(last=False)

    def _shape_of(self, answered: Answered, request: ChatRequest) -> tuple[str, CompactionShape] | None:
        """The shape learnt from a request that continues this answer, and the key of its instruction."""
        shape, key = shape_of(answered, request), _key(answered.request)
        if shape is not None and key is not None:
            return key, shape
        key = _head_key(answered.request)
        if (
            key is None
            or _find(answered.text, request.messages) is None
            or (told := self._with_its_chat(answered)) is None
        ):
            return None
        with self._lock:
            known = self._shapes.get(key)
        if known is not None and _is_as_expected(next_request(known, told), request):
            # Of two shapes that fit, the one that was right before stays.
            return key, known
        shape = shape_of(told, request)
        return None if shape is None else (key, shape)

    def _with_its_chat(self, answered: Answered) -> Answered | None:
        """The same after the latest chat that the request tells as text; None if it tells none."""
        with self._lock:
            requests = tuple(self._requests)
        chat = next((one for one in reversed(requests) if _tells(answered.request, one)), None)
        return None if chat is None else replace(answered, previous=chat, is_apart=True)


def shape_of(answered: Answered, request: ChatRequest) -> CompactionShape | None:
    """The shape in which `request` continues from the summary in `answered`; None if it does not. O(messages)."""
    before, now = answered.request.messages, request.messages
    if now[: len(before)] == before:
        return None
    last = last_user_at(now)
    found = _find(answered.text, now)
    if last is None or found is None or found[0] > last:
        return None
    at, told = found
    # A chat that keeps the answer as an answer is no news, however its history was rewritten.
    if not answered.is_apart and told.message.get("role") == "assistant" and len(now) >= len(before):
        return None
    kept = _by_kind(answered.chat, told)
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
    kept = _by_kind(answered.chat, told)
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


def _head_key(request: ChatRequest) -> str | None:
    """The system prompt by which a request for a summary is known again that stands apart from its chat."""
    head = _head_text(request)
    return None if head == "" else f"system: {head[:_KEY_CHARS]}"


def _head_text(request: ChatRequest) -> str:
    return "\n".join(joined_text(m.get("content")) for m in request.messages[: head_length(request.messages)])


def _tells(request: ChatRequest, chat: ChatRequest) -> bool:
    """Whether a request with another system prompt has most of a chat's words within its last message."""
    at = last_user_at(request.messages)
    if at is None or _head_text(request) == _head_text(chat):
        return False
    told = joined_text(request.messages[at].get("content"))
    said = [joined_text(m.get("content")) for m in chat.messages if m.get("role") in ("user", "assistant")]
    if sum(map(len, said)) > 2 * len(told):
        # It cannot tell most of it: nothing needs to be looked for, which takes long in long chats.
        return False
    return sum(len(text) for text in said if text in told) * 2 > sum(map(len, said))


def _is_as_expected(expected: ChatRequest | None, request: ChatRequest) -> bool:
    """Whether the request begins as was expected, up to the user's words in its last user message."""
    if expected is None or expected.tools != request.tools or len(request.messages) < len(expected.messages):
        return False
    *before, last = expected.messages
    came = request.messages[len(before)]
    words = joined_text(came.get("content")).startswith(joined_text(last.get("content")))
    return list(request.messages[: len(before)]) == before and words and came.get("role") == last.get("role")


def _place_body(place: _Kept | _Given | _Told) -> dict[str, Any]:
    match place:
        case _Kept():
            return {"kept": place.kind, "start": place.start, "stop": place.stop}
        case _Given():
            return {"given": place.message}
        case _Told():
            return {"told": place.message, "before": place.before, "after": place.after, "tag": place.tag}


def _place_of(body: Mapping[str, Any]) -> _Kept | _Given | _Told:
    if "kept" in body:
        return _Kept(kind=body["kept"], start=body["start"], stop=body["stop"])
    if "given" in body:
        return _Given(message=dict(body["given"]))
    return _Told(message=dict(body["told"]), before=body["before"], after=body["after"], tag=body["tag"])


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
    """The messages of a summarised chat, without an older summary."""
    kept: dict[_Kind, list[Message]] = {"context": [], "turn": [], "answer": []}
    for message in messages:
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
    """The place of a message in the chat: contexts are counted from the chat's beginning, all else from its end."""
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
        if "text" not in last:
            return message
        return {**message, "content": [*parts, {**last, "text": ""}] if parts else ""}
    text = joined_text(content).rstrip()
    return {**message, "content": text[: text.rfind("\n") + 1]}


def _bare(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "content"}

"""Images, files and sounds in a chat: what a model reads of them, and what becomes of those that it does not read.

Some it cannot read, and some images are damaged, or beyond a limit.

In a tool result or an older message such a part becomes a short text in its place, and the chat goes on: it would be
refused with every later request otherwise. In the newest user message it is what the user asks about, and is refused,
once: clients keep a refused message and join what the user writes next to it, and then the chat continues as well.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal, Protocol, cast

from reprise.api.service.image_parts import IMAGE_TYPES, ImageLimits, ImageParts, link_of
from reprise.chat.images import image_of
from reprise.chat.message_format import joined_text
from reprise.chat.request import ChatRequest
from reprise.core.errors import BadRequest, UnreadableImage
from reprise.core.image_files import INSTALL

Speaker = Literal["system", "user", "assistant", "tool"]
"""Who says a message; a user's message that carries tool results is the tool's."""

_KINDS = {
    "image": ("image", "image_url", "input_image", "image_file", "computer_screenshot"),
    "audio": ("audio", "input_audio", "audio_url"),
    "video": ("video", "video_url", "input_video"),
    "file": ("file", "input_file", "document", "container_upload"),
}
_NAMES = {kind: name for name, kinds in _KINDS.items() for kind in kinds}


def newest_question_at(speakers: Sequence[Speaker]) -> int | None:
    """The index of the user's newest message, if the model is to answer it; None if it is to answer a tool's result.

    What follows a tool's result in a user's message belongs to it: many clients hand on a tool's image like that.
    """
    newest: int | None = None
    # An assistant message at the end is the beginning of the answer.
    end = len(speakers) - 1 if speakers and speakers[-1] == "assistant" else len(speakers)
    for index in range(end - 1, -1, -1):
        match speakers[index]:
            case "user" if newest is None:
                newest = index
            case "tool":
                return None
            case "assistant":
                return newest
            case _:
                continue
    return newest


class ReadablePart(Protocol):
    """A part of a message, in any API."""

    @property
    def type(self) -> str: ...
    @property
    def text(self) -> str | None: ...
    def model_dump_json(self, *, exclude: set[str], exclude_unset: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a user asks: the text without its white space, and the digests of what is not text."""

    text: str
    parts: frozenset[str]


NO_QUESTION = Question(text="", parts=frozenset())


def question_of(content: str | Sequence[ReadablePart] | None) -> Question:
    """The question in a message's content; its text only where something is not text. O(content)."""
    if content is None or isinstance(content, str):
        return NO_QUESTION
    # A client moves its marks for the cache from request to request.
    others = frozenset(
        _digest(part.model_dump_json(exclude={"cache_control"}, exclude_unset=True))
        for part in content
        if part.text is None
    )
    text = "".join(part.text or "" for part in content) if others else ""
    # Not `split`: a list of the words takes ten times as much as the text.
    return Question(text=text.translate(_WHITE_SPACE), parts=others)


_WHITE_SPACE = {number: None for number in range(0x3001) if chr(number).isspace()}


class RefusedQuestions:
    """Remembers the questions that were refused for a part that cannot be read. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[tuple[str, str], tuple[int, str]] = OrderedDict()
        """Length and digest of the text that was refused with a part, by namespace and part; oldest first."""

    def add(self, question: Question, *, namespace: str) -> None:
        """This question is being refused."""
        with self._lock:
            for part in question.parts:
                self._texts[namespace, part] = (len(question.text), _digest(question.text))
                self._texts.move_to_end((namespace, part))
            while len(self._texts) > _MAX_REFUSED:
                self._texts.popitem(last=False)

    def goes_on(self, question: Question, *, namespace: str) -> bool:
        """Whether it is a refused question with more text behind it. A new part is a new question."""
        with self._lock:
            refused = [self._texts.get((namespace, part)) for part in question.parts]
        return len(refused) > 0 and all(
            known is not None and len(question.text) > known[0] and _digest(question.text[: known[0]]) == known[1]
            for known in refused
        )


_MAX_REFUSED = 1000
"""Parts that are remembered."""


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class UnreadParts:
    """Writes the texts that stand for parts that cannot be read, and counts them.

    `question_at` is the place of the newest question, and `question` what it asks; `refused` remembers those of this
    `namespace` that were refused. `images`: how many are read, and how large; None: the model sees none. The texts say
    nothing but the kind, so they are the same in every later request.
    """

    def __init__(
        self,
        question_at: int | None,
        question: Question = NO_QUESTION,
        *,
        refused: RefusedQuestions | None = None,
        namespace: str = "",
        images: ImageLimits | None = None,
    ) -> None:
        self._images = None if images is None else ImageParts(images)
        self._refused = RefusedQuestions() if refused is None else refused
        goes_on = self._refused.goes_on(question, namespace=namespace)
        self._question_at = None if goes_on else question_at
        self._question = question
        self._namespace = namespace
        self._counts: Counter[str] = Counter()
        self._num_unreadable = 0

    def part(self, kind: str, fields: Mapping[str, Any], *, message_at: int | None, where: str) -> str | dict[str, Any]:
        """A part of this type as it stands in a chat: an image, or a text in its place.

        Raises BadRequest for what cannot be read in the newest question, and for too many images.
        """
        if self._images is not None and kind in IMAGE_TYPES:
            try:
                return self._images.read(fields, where)
            except UnreadableImage:
                if self._is_refused(message_at):
                    raise
                self._num_unreadable += 1
                return UNREADABLE
        return self.text(kind, message_at=message_at, where=where)

    def _is_refused(self, message_at: int | None) -> bool:
        """Whether this is the newest question, which is refused for a part that cannot be read; remembers it if so."""
        is_question = message_at is not None and message_at == self._question_at
        if is_question:
            self._refused.add(self._question, namespace=self._namespace)
        return is_question

    def text(self, kind: str, *, message_at: int | None, where: str) -> str:
        """What stands for a part of this type. Raises BadRequest if it is in the newest question."""
        name = _NAMES.get(kind, kind[:40])
        if self._is_refused(message_at):
            raise BadRequest(
                f"{self._reads} and does not accept a part of type {kind[:40]!r} in a new user message. Send the "
                f"message without it; in older messages and in tool results it is left out.{self._hint(name)}",
                param=where,
            )
        self._counts[name] += 1
        return f"[{name} omitted: {self._reads[0].lower()}{self._reads[1:]}]"

    @property
    def _reads(self) -> str:
        return "This model reads text only" if self._images is None else "This model reads text and images only"

    def _hint(self, name: str) -> str:
        """What would help."""
        if name != "image" or self._images is not None:
            return ""
        return f" To have images read, serve a model that sees (`reprise inspect` says so) with {INSTALL}."

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        unread = tuple(
            f"left out, since {self._reads[0].lower()}{self._reads[1:]}: parts of kind {name}: {count}"
            for name, count in sorted(self._counts.items())
        )
        return (*unread, *_unreadable_notes(self._num_unreadable))


UNREADABLE = "[image omitted: it cannot be read]"


def _unreadable_notes(num: int) -> tuple[str, ...]:
    return (f"left out, since they cannot be read: images: {num}",) if num > 0 else ()


def with_read_images(
    chat: ChatRequest, read: Callable[[Any], Any], *, refused: RefusedQuestions, namespace: str, is_asked: bool
) -> ChatRequest:
    """The chat with what `read` makes of its images and links, and a text for each on which it raises UnreadableImage.

    Files are decoded here that had good headers, and links fetched. Raises UnreadableImage for one in the newest
    question, which `refused` remembers if it is asked: counting its tokens, or typing on, refuses nothing.
    """
    question_at = newest_question_at([message["role"] for message in chat.messages])
    messages = list(chat.messages)
    left_out: list[int] = []
    for at, message in enumerate(messages):
        content = message.get("content")
        given = cast(Sequence[Any], content) if isinstance(content, list) else ()
        if all(_name_of(part) is None for part in given):
            continue
        parts = list(given)
        question = _question_with_images(given) if at == question_at else NO_QUESTION
        for index, part in enumerate(given):
            if _name_of(part) is None:
                continue
            try:
                parts[index] = read(part)
            except UnreadableImage:
                if at == question_at and not refused.goes_on(question, namespace=namespace):
                    if is_asked:
                        refused.add(question, namespace=namespace)
                    raise
                parts[index] = {"type": "text", "text": UNREADABLE}
                left_out.append(at)
        messages[at] = {**message, "content": parts}
    return replace(
        chat,
        messages=tuple(messages),
        # They count images.
        cuts=tuple(cut for cut in chat.cuts if cut.message not in left_out),
        notes=(*chat.notes, *_unreadable_notes(len(left_out))),
    )


def _question_with_images(parts: Sequence[Any]) -> Question:
    """The question in a message's parts, whatever API it came by. O(content)."""
    text = joined_text(list(parts)).translate(_WHITE_SPACE)
    return Question(text=text, parts=frozenset(name for part in parts if (name := _name_of(part)) is not None))


def _name_of(part: Any) -> str | None:
    """What distinguishes an image or a link from others; None: the part is something else."""
    image, link = image_of(part), link_of(part)
    if image is not None:
        return f"image {image.digest.hex()}"
    return None if link is None else _digest(f"link {link.detail} {link.url}")

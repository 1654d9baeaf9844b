"""Images in a chat: in its messages, in its text, and in the words of people who look at its tokens.

A message has a part ``{"type": "image", "image": ImageFile}``, and the template writes the model's marker for it. In
the text the marker is followed by a tag with the image's digest, so whoever compares texts compares images; the
tokenizer puts the image's run of tokens in the place of both. A marker in somebody's words is no image: it is cut in
two, and the tokenizer joins the tokens of its halves.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from threading import Lock
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np

from reprise.chat.memo import Memo
from reprise.chat.request import Message
from reprise.core.abandon import stop_if_abandoned
from reprise.core.images import ImageExpansion, ImageFile, ImageReader, PromptImage, path_tokens
from reprise.core.tokens import Span, Tokens, as_tokens

# Code points that Unicode reserves for a program's own use.
_OPENING, _CLOSING, _CUT = "\ufdd1", "\ufdd2", "\ufdd0"
_NUM_DIGITS = 32


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SeenImage:
    """An image, and what stands for it in a prompt of one model."""

    image: ImageFile
    expansion: ImageExpansion

    def __repr__(self) -> str:
        """The same for the same image: the text of messages distinguishes chats, too."""
        return f"SeenImage({self.image.digest.hex()})"

    @cached_property
    def run(self) -> Tokens:
        """Its tokens in the token path."""
        return path_tokens(self.expansion, self.image.digest)

    @property
    def tag(self) -> str:
        """What follows its marker in a text."""
        return f"{_OPENING}{self.image.digest.hex():.{_NUM_DIGITS}}{_CLOSING}"

    def at(self, start: int) -> PromptImage:
        """The image where it begins at this position of a prompt."""
        rows, columns = self.expansion.rows, self.expansion.columns
        return PromptImage(span=Span(start, start + len(self.run)), image=self.image, rows=rows, columns=columns)


PROBE = SeenImage(
    image=ImageFile(content=b"", digest=bytes(16), width=1, height=1),
    expansion=ImageExpansion(tokens=as_tokens([0]), placeholder=0, rows=1, columns=1),
)
"""An image for trying a template: nothing reads it."""


class SeenImages:
    """The images in the chats of one model, as long as somebody has them. Safe to use from several threads."""

    def __init__(self, reader: ImageReader) -> None:
        self.marker = reader.marker
        self.names = ImageNames()
        self._reader = reader
        self._by_tag: WeakValueDictionary[str, SeenImage] = WeakValueDictionary()
        self._lock = Lock()
        self.pattern = re.compile(f"{re.escape(self.marker)}({_OPENING}[0-9a-f]{{1,{_NUM_DIGITS}}}{_CLOSING})")
        """A marker with the tag of an image."""
        half = len(self.marker) // 2
        self.halves = (self.marker[:half], self.marker[half:])
        self.cut_marker = _CUT.join(self.halves)
        """What stands for a marker in somebody's words."""

    @property
    def longest(self) -> int:
        """The most characters of a marker with its tag."""
        return len(self.marker) + _NUM_DIGITS + 2

    def see(self, image: ImageFile) -> SeenImage:
        """The image as it stands in a prompt. Raises BadRequest for a file that cannot be decoded, and Abandoned."""
        stop_if_abandoned()
        seen = SeenImage(image=image, expansion=self._reader.expand(image))
        self.names.add(seen)
        with self._lock:
            return self._by_tag.setdefault(seen.tag, seen)

    def tagged(self, tag: str) -> SeenImage:
        """The image with this tag, which somebody has."""
        return self._by_tag[tag]

    def written(self, text: str, images: Sequence[SeenImage]) -> str | None:
        """The text with these images in the places of its markers; None: it has more or fewer of them."""
        parts = text.split(self.marker)
        if len(parts) != len(images) + 1:
            return None
        out = [parts[0]]
        for index, (seen, part) in enumerate(zip(images, parts[1:], strict=True)):
            out += [seen.expansion.before(index), self.marker, seen.tag, seen.expansion.text_after, part]
        return "".join(out)

    def without_tags(self, text: str) -> str:
        """The text as the model has it, but for the images: of each its marker."""
        return self.pattern.sub(self.marker.replace("\\", r"\\"), text).replace(self.cut_marker, self.marker)

    def without_markers(self, value: Any) -> Any:
        """A JSON value in whose texts every marker is cut. The same object where there is none."""
        if isinstance(value, str):
            return value.replace(self.marker, self.cut_marker) if self.marker in value else value
        if isinstance(value, list | tuple):
            listed = cast(Sequence[Any], value)
            items = [self.without_markers(item) for item in listed]
            is_same = all(one is other for one, other in zip(items, listed, strict=True))
            return cast(Any, value) if is_same else items
        if isinstance(value, Mapping):
            given = cast(Mapping[str, Any], value)
            fields = {self.without_markers(key): self.without_markers(item) for key, item in given.items()}
            is_same = all(key in given and item is given[key] for key, item in fields.items())
            return cast(Any, value) if is_same else fields
        return value

    def without_split_markers(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with texts that spell a marker together as one text, in which it is cut. The same if none do."""
        joined = [self._joined(_parts(message)) for message in messages]
        if all(len(parts) == len(_parts(message)) for parts, message in zip(joined, messages, strict=True)):
            return messages
        return [{**m, "content": parts} if _parts(m) else m for parts, m in zip(joined, messages, strict=True)]

    def _joined(self, parts: list[Any]) -> list[Any]:
        out: list[Any] = []
        for is_text, run in groupby(parts, lambda part: _text_in(part) is not None):
            texts = list(run)
            whole = "".join(_text_in(part) or "" for part in texts) if is_text else ""
            out += [{"type": "text", "text": self.without_markers(whole)}] if self.marker in whole else texts
        return out


def _text_in(part: Any) -> str | None:
    """The text of a part of a message; None: it is something else."""
    text: object = cast(Mapping[str, Any], part).get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def image_part(image: ImageFile | SeenImage) -> dict[str, Any]:
    """The part of a message that is this image."""
    return {"type": "image", "image": image}


def image_of(part: Any) -> ImageFile | None:
    """The image that a part of a message is; None: it is something else."""
    found = _seen_in(part)
    return found.image if isinstance(found, SeenImage) else found


def images_in(messages: Sequence[Message]) -> list[ImageFile]:
    """The images of a chat, in its order. O(parts)."""
    return [found for message in messages for part in _parts(message) if (found := image_of(part)) is not None]


def seen_in(messages: Sequence[Message]) -> list[SeenImage]:
    """The same once they were seen."""
    return [seen for message in messages for part in _parts(message) if (seen := seen_part(part)) is not None]


def with_images(
    messages: Sequence[Message], change: Callable[[ImageFile], ImageFile | SeenImage]
) -> tuple[Message, ...]:
    """The messages with what `change` makes of their images. Raises what it raises."""
    return tuple(
        {**message, "content": [_changed(part, change) for part in _parts(message)]}
        if images_in([message])
        else message
        for message in messages
    )


def _changed(part: Any, change: Callable[[ImageFile], ImageFile | SeenImage]) -> Any:
    found = image_of(part)
    return part if found is None else image_part(change(found))


def seen_part(part: Any) -> SeenImage | None:
    """The image that a part of a message is, once it was seen; None: it is something else."""
    found = _seen_in(part)
    return found if isinstance(found, SeenImage) else None


def _seen_in(part: Any) -> ImageFile | SeenImage | None:
    found: object = cast(Mapping[str, Any], part).get("image") if isinstance(part, Mapping) else None
    return found if isinstance(found, ImageFile | SeenImage) else None


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return cast(list[Any], content) if isinstance(content, list) else []


# For people.


def named(image: ImageFile | PromptImage) -> str:
    """What an image is called where a text shows its place: ``[image 1024 x 768]``."""
    pixels = image.image if isinstance(image, PromptImage) else image
    return f"[image {pixels.width} x {pixels.height}]"


def image_at(images: Sequence[PromptImage], position: int) -> PromptImage | None:
    """The image that this position of a prompt is in, or begins; None: it is text."""
    return next((image for image in images if image.span.start <= position < image.span.stop), None)


class ImageNames(Memo[int, tuple[str, int]]):
    """Of the images seen last, by their first ids: the name, and the tokens from the first placeholder to the end."""

    def __init__(self) -> None:
        super().__init__(nbytes=_MOST_NAMES, size=lambda first, name: 1)

    def add(self, seen: SeenImage) -> None:
        places = np.flatnonzero(seen.run < 0)
        if len(places) > 0:
            first = int(places[0])
            self.put(int(seen.run[first]), (named(seen.image), len(seen.run) - first))


_MOST_NAMES = 4096
SOME_IMAGE = "[image]"
"""An image of which only the ids are known."""


def shown(
    tokens: Tokens,
    decode: Callable[[Sequence[int]], str],
    *,
    start: int = 0,
    images: Sequence[PromptImage] = (),
    names: ImageNames | None = None,
) -> str:
    """The text of tokens that begin at position `start` of a prompt with these images, which stand by their names.

    `names`: of other images that may be in it.
    """
    out: list[str] = []
    at, stop = start, start + len(tokens)
    for image in images:
        span = image.span.clip(at, stop)
        if span is not None:
            out += [*_shown(tokens[at - start : span.start - start], decode, names), named(image)]
            at = span.stop
    return "".join([*out, *_shown(tokens[at - start :], decode, names)])


def _shown(tokens: Tokens, decode: Callable[[Sequence[int]], str], names: ImageNames | None) -> Iterator[str]:
    """The texts of tokens, and the names of images of which nothing is known but their ids."""
    places = np.flatnonzero(tokens < 0).tolist()
    at, is_open = 0, False
    for place in places:
        if place < at:
            continue
        if place > at:
            yield decode(tokens[at:place].tolist())
            is_open = False
        name, length = (names.get(int(tokens[place])) if names is not None else None) or (SOME_IMAGE, 1)
        # What is left of an image that begins elsewhere is one.
        if name != SOME_IMAGE or not is_open:
            yield name
        at, is_open = place + length, name == SOME_IMAGE
    if at < len(tokens):
        yield decode(tokens[at:].tolist())

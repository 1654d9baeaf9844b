"""Images in a prompt.

An image stands in the token path as its content: placeholder k of an image is a negative id, derived from the image's
digest and k. Two images differ at their first placeholder, the same image is the same run everywhere, and the prefix
cache, disk records, lookups and routing need to know nothing more. Negative ids never reach a model or a client.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, shake_128
from typing import Protocol

import numpy as np
import numpy.typing as npt

from reprise.core.tokens import Span, Tokens, as_tokens


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False, repr=False)
class ImageFile:
    """An image file as a client sent it, of `width` x `height` pixels as its header says.

    `digest`: of the file's bytes and of whatever option changes the pixels that the model sees (`detail`). Images are
    equal if their digests are.
    """

    content: bytes
    digest: bytes
    width: int
    height: int
    detail: str = "auto"

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, ImageFile) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Image({self.width} x {self.height}, {self.digest.hex()[:8]})"


def digest_of(content: bytes, *, detail: str = "auto") -> bytes:
    """The digest of an image: 16 bytes of BLAKE2b over the option and the file."""
    hashed = blake2b(digest_size=16)
    hashed.update(detail.encode() + b"\0")
    hashed.update(content)
    return hashed.digest()


def of_namespace(image: ImageFile, namespace: str) -> ImageFile:
    """The image as callers of a namespace have it: with a digest of their own, so that none finds another's work.

    What is kept of an image is found by its digest alone. The namespace "", which callers share, has the file's own.
    """
    if namespace == "":
        return image
    hashed = blake2b(image.digest, digest_size=16)
    hashed.update(namespace.encode())
    return replace(image, digest=hashed.digest())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageExpansion:
    """What a model's processor writes for one image.

    `text_before` and `text_after` are plain text (a blank line, perhaps). `tokens`: the run between them, shape
    ``(n,)``, from its first special token to its last; the positions where it has `placeholder` get the image's rows.
    `rows` x `columns`: the grid of placeholders, for positions with several axes. `counts_from`: the number of a
    prompt's first image, where images are numbered; it follows `text_before`.
    """

    tokens: Tokens
    placeholder: int
    rows: int
    columns: int
    text_before: str = ""
    text_after: str = ""
    counts_from: int | None = None

    def before(self, index: int) -> str:
        """The text before the image if it is number `index` of its prompt, from 0."""
        return self.text_before + ("" if self.counts_from is None else str(self.counts_from + index))


class ImageReader(Protocol):
    """The image side of a model, as `chat` sees it. Safe to use from several threads; may take 0.3 s an image."""

    @property
    def marker(self) -> str:
        """The special token that the chat template writes for an image, and that is one in nobody's words."""
        ...

    def expand(self, image: ImageFile) -> ImageExpansion:
        """What stands in a prompt for this image. Raises BadRequest for a file that cannot be decoded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptImage:
    """An image of a prompt: `span` holds its placeholders and the separators between them."""

    span: Span
    image: ImageFile
    rows: int
    columns: int

    @property
    def shift(self) -> int:
        """How much further the text behind it stands, in models whose positions have several axes, than its index."""
        return max(self.rows, self.columns) - len(self.span)


def path_tokens(expansion: ImageExpansion, digest: bytes) -> Tokens:
    """The run of an image in the token path: its separators, and an id below zero for each placeholder.

    Placeholder k is ``-1 - (w[k] >> 1)`` with w the little-endian 32-bit words of SHAKE-128 over the digest.
    """
    run = expansion.tokens.copy()
    places = np.flatnonzero(run == expansion.placeholder)
    words = np.frombuffer(shake_128(digest).digest(4 * len(places)), dtype="<u4").astype(np.int64)
    run[places] = -1 - (words >> 1)
    return as_tokens(run)


def outside(position: int, spans: Iterable[Span]) -> int:
    """The largest position up to this one that is not inside a span: images are resumed before or behind, never in."""
    return next((span.start for span in spans if span.start < position < span.stop), position)


def grid_positions(start: int, stop: int, images: Sequence[PromptImage]) -> npt.NDArray[np.int32]:
    """The positions of the indices ``[start, stop)`` of a prompt and its answer in three axes, shape ``(3, n)``.

    Text has one number in all three. An image of r x c placeholders that begins at p has ``p``, ``p + row`` and
    ``p + column``, and what is behind it continues at ``p + max(r, c)``. A function of the images alone: nothing is
    remembered with a position. O(images + n).
    """
    found = np.empty((3, stop - start), dtype=np.int32)
    at, shift = start, 0
    for each in images:
        span = each.span
        if span.stop <= start:
            shift += each.shift
            continue
        if span.start >= stop:
            break
        assert len(span) == each.rows * each.columns, "an image with axes is a grid without separators"
        if at < span.start:
            found[:, at - start : span.start - start] = np.arange(at, span.start) + shift
        at = max(at, span.start)
        end = min(stop, span.stop)
        row, column = np.divmod(np.arange(at - span.start, end - span.start), each.columns)
        first = span.start + shift
        found[:, at - start : end - start] = first + np.stack([np.zeros_like(row), row, column])
        at, shift = end, shift + each.shift
    found[:, at - start :] = np.arange(at, stop) + shift
    return found

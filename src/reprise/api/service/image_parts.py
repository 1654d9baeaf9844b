"""Images in a request's messages, in whatever form an API has them: data, or a link that may have to be fetched."""

import base64
import binascii
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote_to_bytes, urlsplit

from reprise.api.service.image_fetching import FETCH_TIMEOUT_S, ImageFetcher
from reprise.chat.images import image_part
from reprise.chat.request import Message
from reprise.core.abandon import stop_if_abandoned
from reprise.core.errors import BadRequest, UnreadableImage
from reprise.core.image_files import image_of
from reprise.core.images import ImageFile
from reprise.core.settings import Settings

IMAGE_TYPES = frozenset(("image", "image_url", "input_image", "computer_screenshot"))
"""Types of parts that are images, in all APIs."""

_HOW = "send the image itself, as a data URL: `data:image/png;base64,...`"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What one request may bring, and the hosts from which images are fetched."""

    num: int
    nbytes: int
    pixels: int
    hosts: frozenset[str] = frozenset()


def image_limits(settings: Settings) -> ImageLimits:
    """The limits of a server with these settings."""
    return ImageLimits(
        num=settings.max_images,
        nbytes=settings.max_image_bytes,
        pixels=settings.max_image_pixels,
        hosts=frozenset(host.lower() for host in settings.image_hosts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLink:
    """An image that is still to be fetched. It stands in a part as `link`, and `where` in the body."""

    url: str
    detail: str | None
    where: str


class ImageParts:
    """Reads the images of one request, within the server's limits."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._num = 0

    def read(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The part of a chat for a part of a body. Raises BadRequest, and UnreadableImage, naming the field."""
        self._num += 1
        if self._num > self._limits.num:
            raise BadRequest(
                f"Too many images: at most {self._limits.num} are accepted in a chat. Send fewer, or start the server "
                "with --max-images.",
                param=where,
            )
        source, detail = _source_of(fields), _detail_of(fields)
        if source is None:
            raise UnreadableImage(f"An image needs its data: {_HOW}.", param=where)
        text, sent_as_url = source
        if not sent_as_url:
            return self._image(text, detail, where)
        scheme, _, rest = text.partition(":")
        if scheme.lower() == "data":
            head, comma, content = rest.partition(",")
            if comma == "" or re.search(r"; *base64\s*$", head, re.IGNORECASE) is None:
                raise UnreadableImage(
                    "A data URL of an image must be in base64: `data:image/png;base64,...`.", param=where
                )
            # As browsers read it: `+` and `=` may be percent-encoded in a URL.
            return self._image(
                unquote_to_bytes(content).decode("latin-1") if "%" in content else content, detail, where
            )
        if scheme.lower() in ("http", "https") and _host_of(text) in self._limits.hosts:
            return {"type": "image", "link": ImageLink(url=text, detail=detail, where=where)}
        if scheme.lower() in ("http", "https"):
            raise UnreadableImage(
                f"This server fetches no images from {_host_of(text) or 'there'}: {_HOW}, or start the server "
                "with --allow-image-urls and the host's name.",
                param=where,
            )
        raise UnreadableImage(f"Images are read from no such URL: {_HOW}.", param=where)

    def _image(self, text: str, detail: str | None, where: str) -> dict[str, Any]:
        # Before it is decoded: three bytes are four characters.
        if len(text) // 4 * 3 > self._limits.nbytes + 3:
            raise UnreadableImage(too_large(self._limits.nbytes), param=where)
        return image_part(image_of(_decoded(text, where), detail=detail, max_pixels=self._limits.pixels, where=where))


def too_large(nbytes: int) -> str:
    """The sentence about an image file that is longer than this."""
    return f"An image is longer than {nbytes:,} bytes. Send it smaller, or start the server with --max-image-bytes."


def _source_of(fields: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Where the image is, in the words of any API, and whether that is a URL; None: nowhere."""
    given: Any = fields.get("image_url", fields.get("source", fields.get("image")))
    if isinstance(given, Mapping):
        inner = cast(Mapping[str, Any], given)
        if inner.get("type") == "base64" and isinstance(inner.get("data"), str):
            return inner["data"], False
        given = inner.get("url")
    if not isinstance(given, str) or (text := given.strip()) == "":
        return None
    return text, is_url(text)


def is_url(text: str) -> bool:
    """Whether this is a URL, and not an image in base64, which has no colon."""
    return ":" in text[:16]


def _detail_of(fields: Mapping[str, Any]) -> str | None:
    inner: Any = fields.get("image_url")
    detail: Any = cast(Mapping[str, Any], inner).get("detail") if isinstance(inner, Mapping) else fields.get("detail")
    return detail if isinstance(detail, str) else None


def has_links(messages: Sequence[Message]) -> bool:
    """Whether images of these messages have still to be fetched."""
    return any(link_of(part) is not None for message in messages for part in _parts(message))


FETCH_ALL_S = 30.0
"""For all links of a chat together."""
_FETCHED_NBYTES = 64 << 20
"""Of a chat's links together, or as much as one image of the largest size takes: as data has it."""


class FetchedImages:
    """What the links of a chat lead to: each is fetched once, in bounded time, and what is not fetched is an error."""

    def __init__(self, messages: Sequence[Message], limits: ImageLimits, *, all_s: float = FETCH_ALL_S) -> None:
        """Takes as long as the network does, `all_s` at most. Raises Abandoned."""
        self._limits = limits
        self._found: dict[str, bytes | UnreadableImage] = {}
        self._left_nbytes = max(_FETCHED_NBYTES, limits.nbytes)
        until_s = time.monotonic() + all_s
        for link in (link_of(part) for message in messages for part in _parts(message)):
            if link is None or link.url in self._found:
                continue
            stop_if_abandoned()
            try:
                content = self._fetch(link, left_s=until_s - time.monotonic())
                self._left_nbytes -= len(content)
                self._found[link.url] = content
            except UnreadableImage as error:
                self._found[link.url] = error

    def _fetch(self, link: ImageLink, *, left_s: float) -> bytes:
        if left_s <= 0 or self._left_nbytes <= 0:
            raise UnreadableImage(
                "The images at the URLs of a chat take too long to fetch, or are too long together. Send them as data "
                "URLs.",
                param=link.where,
            )
        fetcher = ImageFetcher(
            hosts=self._limits.hosts,
            max_nbytes=min(self._limits.nbytes, self._left_nbytes),
            timeout_s=min(FETCH_TIMEOUT_S, left_s),
        )
        return fetcher.fetch(link.url, where=link.where)

    def image(self, link: ImageLink) -> ImageFile:
        """The image at a link of these messages. Raises UnreadableImage, and BadRequest."""
        found = self._found[link.url]
        if isinstance(found, UnreadableImage):
            raise found
        return image_of(found, detail=link.detail, max_pixels=self._limits.pixels, where=link.where)


def link_of(part: Any) -> ImageLink | None:
    """The link that a part of a message is; None: it is something else."""
    link: object = cast(Mapping[str, Any], part).get("link") if isinstance(part, Mapping) else None
    return link if isinstance(link, ImageLink) else None


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return cast(list[Any], content) if isinstance(content, list) else []


_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n")


def _decoded(text: str, where: str) -> bytes:
    try:
        plain = text.translate(_URL_SAFE)
        content = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableImage(f"The data of an image is not base64: {_HOW}.", param=where) from error
    if not content:
        raise UnreadableImage("The data of an image is empty.", param=where)
    return content


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""

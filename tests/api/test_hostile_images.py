"""Many images, and images made to cost much: others are answered meanwhile, and memory stays bounded."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest

from reprise.core.images import ImageExpansion, ImageFile
from reprise.core.job import Purpose
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api
from tests.api.test_images import asks, words
from tests.api.test_seen_images import post, shows
from tests.chat.seeing import SizeReader, seeing
from tests.pictures import png

pytestmark = pytest.mark.anyio


class SlowReader:
    """Expands images like another reader, each for so long, and notes how many at once."""

    def __init__(self, inner: SizeReader, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self.marker = inner.marker
        self.known: dict[bytes, ImageExpansion] = {}
        self.num_now = self.most = 0
        self._lock = threading.Lock()

    def expand(self, image: ImageFile) -> ImageExpansion:
        if image.digest in self.known:
            return self.known[image.digest]
        with self._lock:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
        time.sleep(self._seconds)
        with self._lock:
            self.num_now -= 1
        return self.known.setdefault(image.digest, self._inner.expand(image))


async def test_a_text_is_answered_while_images_are_decoded() -> None:
    text = seeing()
    reader = SlowReader(cast(SizeReader, text.images), 0.1)
    async with api(text=replace(text, images=reader), settings=Settings(model=MODEL)) as a:
        chats = [
            asks("chat", *(shows("chat", png(16, 16, (number, at, 0))) for at in range(6)), words("chat", "?"))
            for number in range(6)
        ]
        many = [asyncio.create_task(post(a, "chat", chat)) for chat in chats]
        await asyncio.sleep(0.05)
        for _ in range(3):
            began_s = time.monotonic()
            assert (await a.client.get("/health")).status_code == 200
            assert (await post(a, "chat", asks("chat", words("chat", "Hello")))).status_code == 200
            assert time.monotonic() - began_s < 1
        assert not any(task.done() for task in many[3:]), "the images take longer than the texts did"
        assert all(response.status_code == 200 for response in await asyncio.gather(*many))
    assert reader.most <= 2


async def test_a_thousand_tiny_images_are_one_request_and_the_same_one_a_thousand_times_is_one_image() -> None:
    text = seeing()
    async with api(text=text, settings=Settings(model=MODEL, max_images=1000), context=100_000) as a:
        different = [shows("chat", png(1, 1, (number % 256, number // 256, 0))) for number in range(1000)]
        assert (await post(a, "chat", asks("chat", *different, words("chat", "?")))).status_code == 200
        job = a.backend.of(Purpose.GENERATE)[-1]
        assert len({image.image.digest for image in job.prompt.images}) == 1000
        same = asks("chat", *[different[0]] * 1000, words("chat", "?"))
        assert (await post(a, "chat", same)).status_code == 200
        images = a.backend.of(Purpose.GENERATE)[-1].prompt.images
        assert len(images) == 1000 and len({id(image.image) for image in images}) == 1
        assert (await post(a, "chat", asks("chat", *different, different[0]))).status_code == 400


async def test_who_hangs_up_has_no_more_images_decoded() -> None:
    text = seeing()
    reader = SlowReader(cast(SizeReader, text.images), 0.05)
    async with api(text=replace(text, images=reader), settings=Settings(model=MODEL)) as a:
        parts: list[dict[str, Any]] = [shows("chat", png(16, 16, (9, at, 9))) for at in range(40)]
        asking = asyncio.create_task(post(a, "chat", asks("chat", *parts, words("chat", "?"))))
        await asyncio.sleep(0.2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await a.until_idle()
    assert 0 < len(reader.known) < 30

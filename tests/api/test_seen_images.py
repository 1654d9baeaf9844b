"""Images with a model that sees: every API has them in the prompt, in the same place, or says what is wrong."""

import asyncio
import http.server
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest

from reprise.api.service.image_fetching import ImageFetcher, is_public
from reprise.api.service.image_parts import FetchedImages, ImageLimits, ImageLink
from reprise.core.errors import UnreadableImage
from reprise.core.job import Job, Purpose
from reprise.core.settings import Settings
from reprise.core.tokens import common_prefix
from tests.api.servers import MODEL, Api, api
from tests.api.test_images import IMAGES as OTHER_IMAGES
from tests.api.test_images import answers, asks, looks, words
from tests.chat.seeing import seeing
from tests.pictures import base64_of, bomb, data_url, png

pytestmark = pytest.mark.anyio

CAT, DOG = png(48, 32), png(64, 16, (10, 10, 200))
APIS = ("chat", "responses", "messages")
URLS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def shows(name: str, content: bytes) -> dict[str, Any]:
    match name:
        case "chat":
            return {"type": "image_url", "image_url": {"url": data_url(content)}}
        case "responses":
            return {"type": "input_image", "image_url": data_url(content)}
        case _:
            return {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": base64_of(content)},
            }


def body_of(name: str, chat: list[dict[str, Any]]) -> dict[str, Any]:
    body: dict[str, Any] = {"input": chat} if name == "responses" else {"messages": chat}
    return {**body, "max_tokens": 8} if name == "messages" else body


async def post(a: Api, name: str, chat: list[dict[str, Any]]) -> httpx.Response:
    return await a.client.post(URLS[name], json=body_of(name, chat))


async def answered(a: Api, name: str, chat: list[dict[str, Any]]) -> Job:
    response = await post(a, name, chat)
    assert response.status_code == 200, response.text
    await a.until_idle()
    return a.backend.of(Purpose.GENERATE)[-1]


def sees(**options: Any) -> Any:
    return api(text=seeing(), settings=Settings(model=MODEL, **options))


def sizes(job: Job) -> list[tuple[int, int]]:
    return [(image.image.width, image.image.height) for image in job.prompt.images]


@pytest.mark.parametrize("name", APIS)
async def test_an_image_is_in_the_prompt_and_stays_there(name: str) -> None:
    asked = asks(name, words(name, "What is this?"), shows(name, CAT), words(name, "Say."))
    async with sees() as a:
        first = await answered(a, name, asked)
        assert sizes(first) == [(48, 32)]
        assert (first.prompt.tokens < 0).sum() == 6
        later = [*asked, *answers("Hello there."), *asks(name, words(name, "And?"), shows(name, DOG))]
        second = await answered(a, name, later)
        assert sizes(second) == [(48, 32), (64, 16)]
        assert common_prefix(first.prompt.tokens, second.prompt.tokens) >= first.prompt.images[0].span.stop
        other = await answered(a, name, asks(name, words(name, "What is this?"), shows(name, DOG), words(name, "Say.")))
        # Up to the mark that all images begin with.
        assert common_prefix(first.prompt.tokens, other.prompt.tokens) == first.prompt.images[0].span.start + 1


@pytest.mark.parametrize("name", APIS)
async def test_an_image_in_a_tools_result_is_in_the_prompt(name: str) -> None:
    async with sees() as a:
        chat = [*asks(name, words(name, "Look.")), *looks(name, words(name, "a.png:"), shows(name, CAT))]
        assert sizes(await answered(a, name, chat)) == [(48, 32)]


async def test_all_apis_make_the_same_prompt() -> None:
    async with sees() as a:
        made = [await answered(a, name, asks(name, shows(name, CAT), words(name, "What?"))) for name in APIS]
        message = {"role": "user", "content": "What?", "images": [base64_of(CAT)]}
        response = await a.client.post("/api/chat", json={"model": MODEL, "messages": [message], "stream": False})
        assert response.status_code == 200
        await a.until_idle()
        ollama = a.backend.of(Purpose.GENERATE)[-1]
    assert len({job.prompt.tokens.tobytes() for job in made}) == 1
    # Ollama's images have no place in the text: they stand behind it.
    assert sizes(ollama) == [(48, 32)]


async def test_ollama_generates_about_an_image() -> None:
    async with sees() as a:
        body = {"model": MODEL, "prompt": "What?", "images": [base64_of(CAT)], "stream": False}
        assert (await a.client.post("/api/generate", json=body)).status_code == 200
        await a.until_idle()
        assert sizes(a.backend.of(Purpose.GENERATE)[-1]) == [(48, 32)]


async def test_ollamas_clients_may_send_a_data_url_and_are_told_how_to_send_a_link() -> None:
    async with sees() as a:

        async def ask(image: str) -> httpx.Response:
            body = {"model": MODEL, "prompt": "What?", "images": [image], "stream": False}
            return await a.client.post("/api/generate", json=body)

        assert (await ask(data_url(CAT))).status_code == 200
        await a.until_idle()
        assert sizes(a.backend.of(Purpose.GENERATE)[-1]) == [(48, 32)]
        for image, sentence in (
            ("https://example.com/a.png", "fetches no images from example.com"),
            ("file:///etc/passwd", "from no such URL"),
            ("a.png", "is not base64: send the image itself"),
        ):
            told = await ask(image)
            assert told.status_code == 400 and sentence in told.json()["error"], told.text


async def test_a_computers_screenshot_is_in_the_prompt() -> None:
    async with sees() as a:
        items = [
            {"role": "user", "content": "Look."},
            {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
            {
                "type": "computer_call_output",
                "call_id": "c",
                "output": {"type": "computer_screenshot", "image_url": data_url(CAT)},
            },
        ]
        assert sizes(await answered(a, "responses", items)) == [(48, 32)]


async def test_a_chat_is_written_with_the_models_marker_for_an_image() -> None:
    async with sees() as a:
        marker = seeing().images.marker  # type: ignore[union-attr]
        chat = asks("chat", words("chat", f"What is {marker}?"), shows("chat", CAT))
        text = (await a.client.post("/apply-template", json={"messages": chat})).json()["prompt"]
        assert f"What is {marker}?" in text and text.count(marker) == 2
        assert "omitted" not in text and text.isascii()


async def test_counts_lookups_and_prefills_have_the_image() -> None:
    async with sees() as a:
        chat = asks("chat", words("chat", "What?"), shows("chat", CAT))
        job = await answered(a, "chat", chat)
        prompt = len(job.prompt)
        lookup = await a.client.post("/v1/cache/lookup", json={"messages": chat})
        assert lookup.json()["prompt_tokens"] == prompt
        prefill = await a.client.post("/v1/prefill", json={"messages": chat})
        assert prefill.status_code == 200
        assert sizes(a.backend.of(Purpose.PREFILL)[-1]) == [(48, 32)]
        block = asks("messages", words("messages", "What?"), shows("messages", CAT))
        counted = await a.client.post("/v1/messages/count_tokens", json={"messages": block})
        assert counted.json()["input_tokens"] == prompt
        items = asks("responses", words("responses", "What?"), shows("responses", CAT))
        counted = await a.client.post("/v1/responses/input_tokens", json={"input": items})
        assert counted.json()["input_tokens"] == prompt
        told = (await a.client.post("/tokenize", json={"messages": chat})).json()["tokens"]
        assert len(told) == prompt and min(told) >= 0


async def test_ids_below_zero_stay_refused() -> None:
    async with sees() as a:
        for url, body in (
            ("/v1/completions", {"prompt": [5, -7], "max_tokens": 1}),
            ("/detokenize", {"tokens": [-7]}),
            ("/v1/prefill", {"prompt": [5, -7]}),
        ):
            assert (await a.client.post(url, json=body)).status_code == 400


@pytest.mark.parametrize(
    "url",
    [
        f" {data_url(CAT)}\n",
        data_url(CAT).replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        data_url(CAT).replace(";base64,", "; BASE64 ,").replace("data:", "DATA:"),
        data_url(CAT)[:60] + "\n " + data_url(CAT)[60:],
    ],
    ids=["spaces around", "percent-encoded", "other case", "spaces within"],
)
async def test_a_data_url_is_read_as_browsers_read_it(url: str) -> None:
    async with sees() as a:
        part = {"type": "image_url", "image_url": {"url": url}}
        job = await answered(a, "chat", asks("chat", words("chat", "What?"), part))
        plain = await answered(a, "chat", asks("chat", words("chat", "What?"), shows("chat", CAT)))
        assert job.prompt.images[0].image == plain.prompt.images[0].image


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ({"url": "https://example.com/a.png"}, "fetches no images from example.com"),
        ({"url": "file:///etc/passwd"}, "from no such URL"),
        ({"url": "ftp://example.com/a.png"}, "from no such URL"),
        ({"url": "data:image/png,abc"}, "must be in base64"),
        ({"url": "data:image/png;base64,%%%"}, "is not base64"),
        ({"url": "data:image/png;base64,"}, "is empty"),
        ({"url": data_url(b"<svg/>", "image/svg+xml")}, "PNG, JPEG, WebP, GIF or BMP"),
        ({"url": data_url(bomb(60_000, 60_000))}, "60000 x 60000"),
        ({"url": data_url(b"GIF89a" + bytes(2_000))}, "An image"),
        ({}, "needs its data"),
    ],
)
async def test_what_is_no_image_is_a_sentence(image: dict[str, Any], sentence: str) -> None:
    async with sees(max_image_bytes=1_500) as a:
        part = {"type": "image_url", "image_url": image}
        response = await post(a, "chat", asks("chat", words("chat", "What?"), part))
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith("messages[0].content[1]"), error
        assert sentence in error["message"]


async def test_too_many_and_too_large_are_refused_with_the_option() -> None:
    async with sees(max_images=3, max_image_bytes=1_000, max_image_pixels=5_000) as a:
        many = asks("chat", *[shows("chat", CAT)] * 4)
        assert "--max-images" in (await post(a, "chat", many)).text
        assert (
            await post(a, "chat", [*asks("chat", *[shows("chat", CAT)] * 3, words("chat", "?"))])
        ).status_code == 200
        noise = png(16, 16) + bytes(2_000)
        assert "--max-image-bytes" in (await post(a, "chat", asks("chat", shows("chat", noise)))).text
        assert "--max-image-pixels" in (await post(a, "chat", asks("chat", shows("chat", png(100, 100))))).text


async def test_one_image_a_hundred_times_is_read_once() -> None:
    model = seeing()
    async with api(text=model) as a:
        job = await answered(a, "chat", asks("chat", *[shows("chat", CAT)] * 100, words("chat", "?")))
        assert len(job.prompt.images) == 100
        assert len({id(image.image) for image in job.prompt.images}) == 1


async def test_sound_is_left_out_and_the_sentence_says_that_images_are_read() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    async with sees() as a:
        refused = await post(a, "chat", asks("chat", words("chat", "What?"), sound))
        assert refused.status_code == 400 and "reads text and images only" in refused.json()["error"]["message"]


async def test_a_model_that_sees_nothing_says_what_would_help() -> None:
    async with api() as a:
        refused = await post(a, "chat", asks("chat", words("chat", "What?"), OTHER_IMAGES["chat"]))
        assert refused.status_code == 400 and "extra `vision`" in refused.json()["error"]["message"]


async def test_the_record_has_the_images() -> None:
    async with sees() as a:
        chat = asks("chat", words("chat", "What?"), shows("chat", CAT))
        job = await answered(a, "chat", chat)
        later = [*chat, *answers("Hello there."), *asks("chat", words("chat", "And?"), shows("chat", DOG))]
        await answered(a, "chat", later)
        newest, oldest = (await a.client.get("/v1/cache/requests")).json()["data"]
        (cat,) = oldest["images"]
        span = job.prompt.images[0].span
        assert (cat["width"], cat["height"], cat["tokens"], cat["start"]) == (48, 32, len(span), span.start)
        assert job.prompt.images[0].image.digest.hex().startswith(cat["digest"])
        assert [image["width"] for image in newest["images"]] == [48, 64]
        assert newest["images"][0]["digest"] == cat["digest"]


async def test_a_prompt_that_ends_with_an_image_is_not_answered() -> None:
    model = seeing("marks")
    assert model.images is not None
    marker = model.images.marker

    def render(messages: list[dict[str, Any]], **_: Any) -> str:
        """A template with nothing behind the last message."""
        parts = [part for message in messages for part in message["content"] if not isinstance(part, str)]
        return "Look: " + "".join(marker if part["type"] == "image" else part["text"] for part in parts)

    async with api(text=replace(model, render=render, template_source="")) as a:
        ends = asks("chat", words("chat", "What?"), shows("chat", CAT))
        refused = await post(a, "chat", ends)
        assert refused.status_code == 400 and "ends with an image" in refused.json()["error"]["message"]
        assert (await a.client.post("/v1/prefill", json={"messages": ends})).status_code == 200
        assert (await post(a, "chat", asks("chat", shows("chat", CAT), words("chat", "?")))).status_code == 200


# Links.


class _Files(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CAT)
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(100_000))
        elif self.path.startswith("/slow"):
            # A byte now and then, in a header or behind the headers.
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"A: " if self.path == "/slow/header" else b"\r\n"))
            until_s = time.monotonic() + 20
            with suppress(OSError):
                while time.monotonic() < until_s:
                    self.wfile.write(b"a")
                    time.sleep(0.05)
        elif self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        else:
            self.send_response(404)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _file_server(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("reprise.api.service.image_fetching._PORTS", {"http": server.server_port})
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _fetcher(*hosts: str, max_nbytes: int = 10_000) -> ImageFetcher:
    return ImageFetcher(
        hosts=frozenset(hosts),
        max_nbytes=max_nbytes,
        timeout_s=5,
        resolve=lambda host, port: ["127.0.0.1"],
        is_allowed=lambda address: True,
    )


def test_an_image_is_fetched_from_a_host_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with _file_server(monkeypatch):
        fetcher = _fetcher("pictures.example")
        assert fetcher.fetch("http://pictures.example/a.png", where="x") == CAT
        assert fetcher.fetch("http://pictures.example/to//a.png", where="x") == CAT
        for url, sentence in (
            ("http://other.example/a.png", "leads to other.example"),
            ("http://pictures.example/to/http://other.example/a.png", "leads to other.example"),
            ("http://pictures.example:1/a.png", "does not name"),
            ("http://me@pictures.example/a.png", "does not name"),
            ("http://pictures.example/large", "longer than"),
            ("http://pictures.example/none", "answered 404"),
            ("http://pictures.example/to/to/to/to/a.png", "too often|answered 404"),
        ):
            with pytest.raises(UnreadableImage, match=sentence):
                fetcher.fetch(url, where="x")


@pytest.mark.parametrize("place", ["header", "content"])
def test_who_sends_an_image_byte_by_byte_has_no_more_time(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with _file_server(monkeypatch):
        fetcher = replace(_fetcher("pictures.example"), timeout_s=0.5)
        started_s = time.monotonic()
        with pytest.raises(UnreadableImage, match="could not be fetched"):
            fetcher.fetch(f"http://pictures.example/slow/{place}", where="x")
        assert time.monotonic() - started_s < 10


def test_another_address_is_tried_where_the_first_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without IPv6 is told the IPv6 addresses of a host, too."""
    with _file_server(monkeypatch):
        fetcher = replace(_fetcher("pictures.example"), resolve=lambda host, port: ["::1", "127.0.0.1"])
        assert fetcher.fetch("http://pictures.example/a.png", where="x") == CAT


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "100.64.0.1",
        # An IPv4 address in another one.
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::10.0.0.1",
        "2002:7f00:1::",
        "fec0::1",
    ],
)
def test_no_address_of_a_house_is_public(address: str) -> None:
    assert not is_public(address)
    fetcher = ImageFetcher(
        hosts=frozenset({"pictures.example"}), max_nbytes=1, resolve=lambda host, port: ["93.184.216.34", address]
    )
    with pytest.raises(UnreadableImage, match="no public address"):
        fetcher.fetch("https://pictures.example/a.png", where="x")


def test_addresses_of_the_internet_are_public() -> None:
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert is_public("64:ff9b::93.184.216.34"), "where there is no IPv4, names have such addresses"


async def test_a_link_to_a_host_that_is_allowed_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFetcher, "fetch", lambda self, url, *, where: CAT)
    async with sees(image_hosts=("pictures.example",)) as a:
        part = {"type": "image_url", "image_url": {"url": "https://pictures.example/a.png"}}
        assert sizes(await answered(a, "chat", asks("chat", words("chat", "?"), part))) == [(48, 32)]
        other = {"type": "image_url", "image_url": {"url": "https://pictures.example.org/a.png"}}
        assert (await post(a, "chat", asks("chat", words("chat", "?"), other))).status_code == 400


def _link(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_a_chat_goes_on_behind_a_link_that_leads_nowhere_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = True

    def fetch(self: ImageFetcher, url: str, *, where: str) -> bytes:
        if not is_there:
            raise UnreadableImage("The host pictures.example answered 404 for an image.", param=where)
        return CAT

    monkeypatch.setattr(ImageFetcher, "fetch", fetch)
    link = _link("https://pictures.example/a.png")
    asked = asks("chat", words("chat", "What?"), link, link)
    later = [*asked, *answers("A cat."), *asks("chat", words("chat", "Why?"), shows("chat", DOG))]
    async with sees(image_hosts=("pictures.example",)) as a:
        assert sizes(await answered(a, "chat", asked)) == [(48, 32)] * 2
        assert sizes(await answered(a, "chat", later)) == [(48, 32), (48, 32), (64, 16)]
        is_there = False
        job = await answered(a, "chat", later)
        assert sizes(job) == [(64, 16)]
        notes = (await a.client.get("/v1/cache/requests")).json()["data"][0]["notes"]
        assert "left out, since they cannot be read: images: 2" in notes
        # In a new question it is refused, once.
        refused = await post(a, "chat", asked)
        assert refused.status_code == 400 and "answered 404" in refused.json()["error"]["message"]
        joined = asks("chat", words("chat", "What?"), link, link, words("chat", "Never mind."))
        assert sizes(await answered(a, "chat", joined)) == []


def test_links_of_a_chat_have_one_time_and_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, float, int]] = []

    def fetch(self: ImageFetcher, url: str, *, where: str) -> bytes:
        fetched.append((url, self.timeout_s, self.max_nbytes))
        time.sleep(0.2)
        return bytes(40 << 20)

    monkeypatch.setattr(ImageFetcher, "fetch", fetch)
    links = [ImageLink(url=f"https://pictures.example/{number}", detail=None, where="x") for number in (1, 2, 2, 3, 4)]
    messages = [{"role": "user", "content": [{"type": "image", "link": link} for link in links]}]
    limits = ImageLimits(num=9, nbytes=50 << 20, pixels=9, hosts=frozenset({"pictures.example"}))
    found = FetchedImages(messages, limits)
    assert [url[-1] for url, _, _ in fetched] == ["1", "2"], "twice 40 MiB is more than a chat has"
    assert fetched[1][2] == 24 << 20
    with pytest.raises(UnreadableImage, match="too long together"):
        found.image(links[-1])
    fetched.clear()
    found = FetchedImages(messages[:1], limits, all_s=0.1)
    assert len(fetched) == 1 and fetched[0][1] <= 0.1
    with pytest.raises(UnreadableImage, match="too long to fetch"):
        found.image(links[1])


async def test_who_waits_for_a_link_keeps_nobody_from_having_images_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()

    def fetch(self: ImageFetcher, url: str, *, where: str) -> bytes:
        assert may_go.wait(60)
        return CAT

    monkeypatch.setattr(ImageFetcher, "fetch", fetch)
    async with sees(image_hosts=("pictures.example",)) as a:
        links = [asks("chat", words("chat", "?"), _link(f"https://pictures.example/{number}")) for number in range(4)]
        waiting = [asyncio.create_task(post(a, "chat", chat)) for chat in links]
        await asyncio.sleep(0.2)
        try:
            told = await asyncio.wait_for(post(a, "chat", asks("chat", words("chat", "?"), shows("chat", DOG))), 30)
            assert told.status_code == 200
        finally:
            may_go.set()
        assert [(await each).status_code for each in waiting] == [200] * 4

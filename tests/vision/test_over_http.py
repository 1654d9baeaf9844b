"""Tiny models that see behind a whole server: what of an image is computed or encoded a second time, in every API."""

import gc
import json
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import reprise
from reprise.api.service.records import record_lines
from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.cli.main import app
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.engine.states.seeing import PreparedImage
from reprise.loop import EngineClient
from tests.api.server_thread import ServerThread
from tests.pictures import base64_of, data_url
from tests.vision.chats import picture, seeing
from tests.vision.tiny import FAMILIES, seeing_model

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

ONE, OTHER = picture(1).content, picture(2, 64, 128).content
EACH = pytest.mark.parametrize("family", FAMILIES)


@contextmanager
def seeing_server(family: str, **settings: Any) -> Generator[httpx.Client]:
    """A client of a server of this tiny model."""
    chosen = Settings(model=str(seeing_model(family)), **{"settles": False, **settings})
    loop = EngineClient(chosen, load=partial(seeing, family))
    loaded = loop.start()
    server = ServerThread(ChatService(served=served_model(loaded, chosen), backend=loop, settings=chosen), chosen)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield client
    finally:
        server.stop()
        loop.close(timeout_s=120)


def shows(*parts: str | bytes) -> dict[str, Any]:
    """A user message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def answer(client: httpx.Client, chat: Sequence[dict[str, Any]]) -> str:
    response = client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 6, "temperature": 0})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def latest(client: httpx.Client) -> dict[str, Any]:
    until_idle(client)
    return client.get("/v1/cache/requests").json()["data"][0]


def until_idle(client: httpx.Client) -> None:
    until_s = time.monotonic() + 20
    while not client.get("/health").json()["idle"] and time.monotonic() < until_s:
        time.sleep(0.05)


@EACH
def test_the_next_turn_computes_what_is_new_and_encodes_what_is_new(family: str) -> None:
    with seeing_server(family) as client, seeing_server(family, has_prefix_cache=False) as cold:
        chat = [shows("Look: ", ONE, "What is on it?")]
        num_known = 0
        for image, num_encoded in ((OTHER, 1), (None, 1), (ONE, 0), (None, 0)):
            said = answer(client, chat)
            assert said == answer(cold, chat)
            record = latest(client)
            assert record["reused"] >= num_known, record
            num_known = record["prompt_tokens"]
            chat += [says(said), shows("And this? ", image, "Say.") if image is not None else shows("Go on.")]
            assert record["images_encoded"] == (1 if image is OTHER else num_encoded)
            # Of the first image nothing is known.
            assert (record["images_foreseen_s"] > 0) == (record["spans"]["images"] > 0 and image is not OTHER)
        said = answer(client, chat)
        assert said == answer(cold, chat)
        record = latest(client)
        assert [image["reused"] for image in record["images"]] == [True, True, True]
        assert record["images_encoded"] == 0 and record["reused"] >= num_known
        health = client.get("/health").json()
        assert (health["images_encoded"], health["images_reused"]) == (2, 9), health


@EACH
def test_an_exact_repeat_computes_nothing(family: str) -> None:
    with seeing_server(family) as client:
        chat = [shows(ONE, "What is on it?")]
        said = answer(client, chat)
        assert answer(client, chat) == said
        record = latest(client)
        assert (record["prefilled"], record["images_encoded"]) == (0, 0)


def test_no_key_learns_what_image_another_has_sent() -> None:
    with seeing_server("qwen3_5", api_keys=("one", "two"), separates_keys=True) as client:
        for key in ("one", "two"):
            client.headers["Authorization"] = f"Bearer {key}"
            answer(client, [shows(ONE, "What is on it?")])
            assert (latest(client)["matched"], latest(client)["images_encoded"]) == (0, 1)
            answer(client, [shows(ONE, "What is on it, in other words?")])
            assert latest(client)["images_encoded"] == 0


@EACH
def test_another_image_is_another_prompt_from_its_place_on(family: str) -> None:
    with seeing_server(family) as client, seeing_server(family, has_prefix_cache=False) as cold:
        words = "A long introduction that both have in common, before the picture. "
        answer(client, [shows(words, ONE, "What is on it?"), says("Noise."), shows("Go on.")])
        chat = [shows(words, OTHER, "What is on it?"), says("Noise."), shows("Go on.")]
        assert answer(client, chat) == answer(cold, chat)
        record = latest(client)
        (image,) = record["images"]
        assert image["start"] - 1 <= record["matched"] <= image["start"] + 1
        assert record["reason"] == "image changed"
        assert record["explanation"]["expected_text"].startswith("[image 96 x 64]")
        assert record["explanation"]["actual_text"].startswith("[image 64 x 128]")
        assert record["images_encoded"] == 1


def test_every_api_continues_what_another_began() -> None:
    with seeing_server("qwen3_5") as client:
        words = "What is on it?"
        answer(client, [shows(ONE, words)])
        num_prompt = latest(client)["prompt_tokens"]
        source = {"type": "base64", "media_type": "image/png", "data": base64_of(ONE)}
        block = [{"type": "image", "source": source}, {"type": "text", "text": words}]
        items = [{"type": "input_image", "image_url": data_url(ONE)}, {"type": "input_text", "text": words}]
        asked: dict[str, dict[str, Any]] = {
            "/v1/messages": {"messages": [{"role": "user", "content": block}], "max_tokens": 3},
            "/v1/responses": {"input": [{"role": "user", "content": items}], "max_output_tokens": 3},
        }
        for url, body in asked.items():
            assert client.post(url, json=body).status_code == 200
            record = latest(client)
            assert (record["prompt_tokens"], record["images_encoded"]) == (num_prompt, 0)
            assert record["prefilled"] <= 1
        message = {"role": "user", "content": words, "images": [base64_of(ONE)]}
        body = {"model": "any", "messages": [message], "stream": False, "options": {"num_predict": 3}}
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        assert client.post("/api/chat", json=body).status_code == 200
        # Ollama's images stand behind the words: other tokens, and the same features.
        assert latest(client)["images_encoded"] == 0
        looked = client.post("/v1/cache/lookup", json={"messages": [shows(ONE, words)]}).json()
        assert looked["prompt_tokens"] == num_prompt and looked["to_compute"] <= 1


@EACH
def test_an_image_outlives_the_server_on_disk(family: str, tmp_path: Path) -> None:
    words = "What is on it? " * 40
    chat = [shows("Look: ", ONE, words)]
    # Settled: an answer of random bytes is not spelled again as it was sampled.
    on_disk: dict[str, Any] = {"disk_directory": str(tmp_path), "disk_bytes": Bytes(1 << 28), "settles": True}
    with seeing_server(family, **on_disk) as client:
        chat += [says(answer(client, chat)), shows("Go on.")]
        first = latest(client)
        until_idle(client)
    with seeing_server(family, **on_disk) as client:
        answer(client, chat)
        record = latest(client)
        assert record["loaded"] >= first["images"][0]["start"] + first["images"][0]["tokens"]
        assert record["images_encoded"] == 0 and record["images"][0]["reused"]


def test_what_follows_an_image_is_settled() -> None:
    with seeing_server("qwen3_5", settles=True) as client:
        chat = [shows("Look: ", ONE, "What is on it?")]
        chat += [says(answer(client, chat)), shows("Go on.")]
        until_idle(client)
        answer(client, chat)
        record = latest(client)
        assert record["images_encoded"] == 0
        # The question, and what the template writes around it.
        assert record["prompt_tokens"] - record["reused"] <= 16


def test_images_are_shown_in_the_tree_and_a_damaged_one_is_a_sentence() -> None:
    with seeing_server("gemma3") as client:
        answer(client, [shows("Look: ", ONE, "What is on it?")])
        edges = client.get("/v1/cache/tree").json()["data"]
        text = "".join(client.get(f"/v1/cache/tree/{edge['id']}").json()["text"] for edge in edges)
        assert text.count("[image 96 x 64]") == 1
        damaged = client.post("/v1/chat/completions", json={"messages": [shows("Look: ", ONE[:200])]})
        assert damaged.status_code == 400 and "decoded" in damaged.text


def test_a_cleared_cache_keeps_nothing_of_an_image() -> None:
    with seeing_server("qwen3_vl") as client:
        answer(client, [shows("Look: ", ONE, "What is on it?")])
        until_idle(client)
        assert client.delete("/v1/cache").status_code == 200
        answer(client, [shows("Look: ", ONE, "What is on it?")])
        record = latest(client)
        assert (record["reused"], record["images_encoded"]) == (0, 1)


def test_no_pixels_of_an_image_are_kept_behind_its_encoding_or_a_cleared_cache() -> None:
    def pixels() -> list[PreparedImage]:
        return [each for each in gc.get_objects() if isinstance(each, PreparedImage)]

    with seeing_server("qwen3_vl") as client:
        before = len(pixels())
        chat = [shows("Look: ", picture(77).content, "What is on it?")]
        assert client.post("/v1/cache/lookup", json={"messages": chat}).status_code == 200
        assert len(pixels()) == before + 1, "what was read is handed to the tower"
        answer(client, chat)
        until_idle(client)
        gc.collect()
        assert len(pixels()) == before
        assert client.post("/tokenize", json={"messages": [shows(picture(78).content, "?")]}).status_code == 200
        counted = len(pixels())
        assert client.delete("/v1/cache").status_code == 200
        gc.collect()
        assert len(pixels()) < counted


def test_explain_names_the_images_and_what_encoding_took() -> None:
    with seeing_server("qwen3_vl") as client:
        answer(client, [shows("Look: ", ONE, "What is on it?")])
        first = latest(client)
        answer(client, [shows("Look here: ", ONE, "What is on it?")])
        told = ["\n".join(record_lines(record)) for record in (first, latest(client))]
        for text, num_encoded in zip(told, (1, 0), strict=True):
            assert f"image 96 x 64 ({first['images'][0]['digest']}) at token " in text
            assert f"images encoded: {num_encoded}, in " in text


def test_the_library_shows_images() -> None:
    with reprise.Engine(seeing_model("qwen3_5"), settles=False) as engine:
        chat = engine.chat(max_tokens=6, temperature=0)
        chat.send(["Look: ", reprise.Image(ONE), "What is on it?"])
        known = chat.last.usage.prompt_tokens
        chat.prefill(["And ", reprise.Image(OTHER), "what "]).result(60)
        answer = chat.send(["And ", reprise.Image(OTHER), "what is this?"])
        record = answer.record.result()
        assert [(image.width, image.height) for image in record.images] == [(96, 64), (64, 128)]
        assert answer.usage.cached_tokens > known
        assert sum(outcome.num_images_encoded for outcome in record.outcomes) == 0, "encoded while it was typed"


@EACH
def test_requests_at_once_about_one_image_encode_it_once(family: str) -> None:
    with seeing_server(family) as client, ThreadPoolExecutor(4) as threads:
        chats = [[shows("Look: ", ONE, f"{question} is on it?")] for question in ("What", "Who", "Which", "Where")]
        answers = list(threads.map(partial(answer, client), chats))
        until_idle(client)
        records = client.get("/v1/cache/requests").json()["data"]
        assert sum(record["images_encoded"] for record in records) == 1
        assert [answer(client, chat) for chat in chats] == answers


@EACH
def test_an_agent_that_drops_old_screenshots_is_told_what_that_costs(family: str) -> None:
    shots = [picture(10 + number).content for number in range(3)]
    steps = [[shows(f"Step {number}: ", shot), says("Done.")] for number, shot in enumerate(shots)]
    with seeing_server(family) as client:
        answer(client, [*steps[0], *steps[1], shows("Go on.")])
        first = latest(client)["images"][0]
        # It keeps the last two.
        answer(client, [shows("Step 0: "), says("Done."), *steps[1], *steps[2], shows("Go on.")])
        record = latest(client)
        assert record["reason"] == "earlier image left out"
        assert "keeps only its latest images" in record["explanation"]["advice"]
        assert record["matched"] <= first["start"]
        # What was seen before is not encoded again, only prefilled.
        assert record["images_encoded"] == 1


@pytest.mark.matrix
def test_an_answer_that_is_cut_off_in_an_image_leaves_what_is_before_it() -> None:
    large = picture(7, 1024, 1024).content
    words = "A long introduction before the picture. " * 8
    with seeing_server("qwen3_5", prefill_chunk=128) as client:
        body = {"messages": [shows(words, large, "What is on it?")], "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            # Until it has begun, and then no longer.
            time.sleep(0.3)
        until_idle(client)
        said = answer(client, [shows(words, large, "What is on it?")])
        record = latest(client)
        image = record["images"][0]
        assert not image["start"] < record["reused"] < image["start"] + image["tokens"]
    with seeing_server("qwen3_5", has_prefix_cache=False) as cold:
        assert said == answer(cold, [shows(words, large, "What is on it?")])


def test_two_bodies_with_images_are_compared_without_a_server(tmp_path: Path) -> None:
    for name, image in (("one", ONE), ("other", picture(3, 128, 64).content)):
        body = {"messages": [shows("Look: ", image, "What is on it?")]}
        (tmp_path / f"{name}.json").write_text(json.dumps(body), encoding="utf-8")
    files = [str(tmp_path / f"{name}.json") for name in ("one", "other")]
    told = CliRunner().invoke(app, ["explain", *files, "--model", str(seeing_model("qwen3_5"))])
    assert told.exit_code == 0, told.output
    assert "reason: image changed" in told.output
    assert "Another image (128 x 64) stands where 96 x 64 stood" in told.output

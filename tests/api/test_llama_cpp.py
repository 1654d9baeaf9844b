"""What clients of llama.cpp's server ask, and the page about the API."""

import re

import pytest

from reprise.core.settings import Settings
from tests.api.servers import MODEL, api

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]


async def test_the_server_is_described_as_llama_cpp_does() -> None:
    async with api(settings=Settings(model=MODEL, max_batch=3)) as a:
        props = (await a.client.get("/props")).json()
        slots = (await a.client.get("/slots")).json()
        text = a.service.served.text
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (4096, 3)
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert (props["model_path"], props["chat_template"]) == (MODEL, text.template_source)
    assert props["eos_token"] == "<|im_end|>"
    assert props["chat_template_caps"]["supports_tools"] is True
    assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in slots] == [
        (number, 4096, False) for number in range(3)
    ]


async def test_a_busy_slot_is_shown() -> None:
    async with api(settings=Settings(model=MODEL, max_batch=2)) as a:
        a.backend.num_decoding = 1
        busy = [slot["is_processing"] for slot in (await a.client.get("/slots")).json()]
    assert busy == [True, False]


async def test_a_chat_is_written_as_the_model_reads_it() -> None:
    async with api() as a:
        told = (await a.client.post("/apply-template", json={"messages": HI})).json()
        tokens = (await a.client.post("/tokenize", json={"messages": HI})).json()["tokens"]
        assert told == {"prompt": a.service.served.text.decode(tokens)}
        assert told["prompt"].endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
        half = [*HI, {"role": "assistant", "content": "Hello"}]
        going_on = {"messages": half, "continue_final_message": True}
        assert (await a.client.post("/apply-template", json=going_on)).json()["prompt"].endswith("Hello")
        refused = await a.client.post("/apply-template", json={"messages": HI, "model": "other"})
        assert refused.status_code == 404
        assert a.backend.jobs == []


async def test_the_page_about_the_api_needs_no_key_and_nothing_from_elsewhere() -> None:
    async with api(settings=Settings(model=MODEL, api_keys=("a key",))) as a:
        page = await a.client.get("/docs")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for address in re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text):
            assert (await a.client.get(address)).status_code == 200, address
        assert "http" not in page.text.replace("<!doctype html>", "")
        # What it shows is the key's.
        assert (await a.client.get("/openapi.json")).status_code == 401

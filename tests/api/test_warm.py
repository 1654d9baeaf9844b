"""`--warm FILE`: what the file may hold, and that the first chat finds what was computed."""

import time
from pathlib import Path

import httpx
import pytest

from reprise.api.native.prefill import read_warm_file
from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.core.errors import LoadFailed
from reprise.core.settings import Settings
from reprise.loop import EngineClient
from tests.api.server_thread import ServerThread
from tests.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("You are brief.\nVery.", ["system"]),
        ('{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}', ["system", "user"]),
        ('{"messages": [{"role": "system", "content": "a"}]}\n{"messages": []}\n', ["system"]),
    ],
)
def test_what_a_file_may_hold(tmp_path: Path, text: str, roles: list[str]) -> None:
    file = tmp_path / "warm"
    file.write_text(text)
    first = read_warm_file(file)[0]
    assert [message.role for message in first.messages or []] == roles


@pytest.mark.parametrize("text", ["", '{"messages": 5}', '{"messages": ['])
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "warm"
    file.write_text(text)
    with pytest.raises(LoadFailed, match=str(file)):
        read_warm_file(file)


def test_the_first_chat_finds_the_system_prompt(tmp_path: Path) -> None:
    system = "You are a patient adviser. Answer in plain words, and name what you are not sure of. " * 5
    file = tmp_path / "warm"
    file.write_text(system)
    settings = Settings(model=str(tiny_model("qwen3_5")), warm_file=str(file), settles=False)
    loop = EngineClient(settings)
    server = ServerThread(
        ChatService(served=served_model(loop.start(), settings), backend=loop, settings=settings), settings
    )
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            deadline = time.monotonic() + 120
            while client.get("/health").json()["prefilled"] == 0 or not client.get("/health").json()["idle"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            messages = [{"role": "system", "content": system.strip()}, {"role": "user", "content": "Why?"}]
            usage = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}).json()["usage"]
    finally:
        server.stop()
        loop.close(now=True, timeout_s=120)
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]

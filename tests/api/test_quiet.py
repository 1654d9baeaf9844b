"""A machine that is left alone: nothing is settled, audited or written, and it is told why."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.quiet import MACHINE
from tests.api.real_server import real_server
from tests.loop.driving import PATIENCE_S

CHAT = [{"role": "user", "content": "Write a few words about the sea, the wind and the harbour, please."}]


def answered(client: httpx.Client) -> dict[str, Any]:
    """The server's health once it is idle behind an answer."""
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 12, "thinking_budget": 3}
    client.post("/v1/chat/completions", json=body).raise_for_status()
    deadline_s = time.monotonic() + PATIENCE_S
    while not (health := client.get("/health").json())["idle"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return health


def written(client: httpx.Client) -> int:
    return client.get("/health").json()["disk"]["bytes_written"]


def until_written(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while written(client) == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("mode", ["auto", "never", "always"])
def test_nothing_is_done_that_nobody_waits_for(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MACHINE, "reason", "hot")
    settings: dict[str, Any] = {"audit_rate": 1.0, "disk_directory": str(tmp_path), "background": mode}
    with real_server("qwen3_5", **settings) as client:
        health = answered(client)
        quiet = {"auto": "The machine is hot", "never": "--background is never"}.get(mode)
        if quiet is None:
            assert health["quiet"] is None
            until_written(client)
            return
        assert quiet in health["quiet"]
        assert quiet in client.get("/v1/cache/overview").json()["load"]["quiet"]
        after = client.get("/health").json()
        assert quiet in after["disk"]["spared"]
        assert (after["settled"], after["audit"]["checked"], after["disk"]["bytes_written"]) == (0, 0, 0)
        if mode == "auto":
            # It has cooled down.
            monkeypatch.setattr(MACHINE, "reason", None)
            after = answered(client)
            assert after["quiet"] is after["disk"]["spared"] is None
            until_written(client)

"""`/health` and `/metrics` say of memory what the cache's own books say, after requests that had to evict."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from reprise.loop.worker import Worker
from tests.api.test_pins import CHAT, HEAD, PIN, flood
from tests.loop.test_budget import needed
from tests.soak.house import SoakServer, house


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_5"])
def server(request: pytest.FixtureRequest) -> Iterator[SoakServer]:
    with house(request.param, cache_bytes=4 * needed(request.param, 200), settles=False) as made:
        yield made


def books(worker: Worker) -> dict[str, Any]:
    """What the trees hold, counted anew, and what the sequences hold."""
    cache = worker.cache
    worker.check()
    return {
        "bytes_budget": cache.memory.budget,
        "bytes_held": cache.nbytes,
        "bytes_kv": cache.stats.kv_nbytes,
        "bytes_snapshots": cache.stats.snapshot_nbytes,
        "bytes_pinned": cache.pins.total().nbytes,
        "bytes_live": worker.runner.live_nbytes,
        "tokens_held": cache.stats.num_tokens,
        "pins": cache.pins.total().num,
        "evictions": cache.stats.num_evictions,
        "evictions_by_reason": cache.stats.evictions,
    }


def told(client: httpx.Client) -> dict[str, float]:
    """The samples of `/metrics`, by name and labels."""
    samples = (line.rpartition(" ") for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_what_is_told_of_memory_is_what_the_books_say(server: SoakServer) -> None:
    of = f'model="{server.service.served.id}"'
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert told(client)[f'reprise_evictions_total{{{of},reason="budget"}}'] == 0
        assert client.post(PIN, json=HEAD).status_code == 200
        flood(client)
        messages = [*HEAD["messages"], {"role": "user", "content": "Why is the sky blue?"}]
        for _ in range(2):
            body = {**HEAD, "messages": messages, "max_tokens": 5, "prompt_cache_retention": "24h"}
            assert client.post(CHAT, json=body).status_code == 200
        for is_cleared in (False, True):
            if is_cleared:
                assert client.delete("/v1/cache").status_code == 200
            known = server.engine.ask(books)
            health = client.get("/health").json()
            assert {name: health[name] for name in known} == known
            assert health["bytes_held"] == health["bytes_kv"] + health["bytes_snapshots"]
            assert health["bytes_held"] + health["bytes_live"] <= health["bytes_budget"]
            most = health["bytes_live_most"]
            assert health["bytes_live"] < most < health["bytes_budget"], "a request ran, and has ended"
            shown = client.get("/v1/cache/overview").json()["memory"]
            assert shown["running_most"] == most == told(client)[f"reprise_live_bytes_most{{{of}}}"]
            samples = told(client)
            assert {
                "reprise_budget_bytes": known["bytes_budget"],
                f'reprise_state_bytes{{{of},use="kv"}}': known["bytes_kv"],
                f'reprise_state_bytes{{{of},use="snapshots"}}': known["bytes_snapshots"],
                f'reprise_state_bytes{{{of},use="live"}}': known["bytes_live"],
                f"reprise_pinned_bytes{{{of}}}": known["bytes_pinned"],
                f"reprise_pins{{{of}}}": known["pins"],
                f"reprise_cached_tokens{{{of}}}": known["tokens_held"],
            }.items() <= samples.items()
            for reason in ("budget", "cleared"):
                name = f'reprise_evictions_total{{{of},reason="{reason}"}}'
                assert samples[name] == known["evictions_by_reason"].get(reason, 0)
            assert known["evictions_by_reason"]["budget"] > 0
            assert ("cleared" in known["evictions_by_reason"]) is is_cleared
            assert (known["pins"] > 0) is (known["bytes_pinned"] > 0) is not is_cleared

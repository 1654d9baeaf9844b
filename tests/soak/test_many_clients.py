"""Many clients with mixed workloads against one server: no wrong token, nobody stuck, nothing left behind."""

import threading
import time
from urllib.parse import urlsplit

import pytest

from reprise.core.events import FinishReason
from reprise.core.job import Purpose
from tests.holding import active_memory, settled_memory
from tests.soak.clients import ClientReport, SoakClient
from tests.soak.house import Alone, SoakServer, house
from tests.soak.lengths import times

_IDLE_S = 120.0


def load(server: SoakServer, *, num_clients: int, num_each: int, seed: int) -> ClientReport:
    """Let the clients loose, and come back when each has done so many things."""
    report = ClientReport()
    port = urlsplit(server.url).port
    assert port is not None
    clients = [SoakClient(port, number, seed, report) for number in range(num_clients)]
    threads = [threading.Thread(target=client.run, args=(num_each,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(num_each * _IDLE_S)
    assert not any(thread.is_alive() for thread in threads), "a request is stuck"
    return report


def wait_until_idle(server: SoakServer) -> None:
    deadline = time.monotonic() + _IDLE_S
    while not server.service.is_idle:
        assert time.monotonic() < deadline, server.engine.loop.status()
        time.sleep(0.02)


def check_what_is_left(server: SoakServer, before: int) -> None:
    """Nothing is leased or inside, MLX holds what the books say, and nothing once the store is empty."""
    engine = server.engine
    engine.check()
    assert engine.num_leases() == 0
    shown = engine.inspect()
    assert (shown.num_inside, shown.num_sequences) == (0, len(shown.idle))
    held = engine.loop.status().held
    active = engine.ask(lambda worker: settled_memory()) - before
    assert held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes <= held.budget_nbytes
    # The allocator gives an array a freed buffer that is up to two pages too large, and these arrays are small.
    assert active == pytest.approx(held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes, rel=0.2)
    engine.loop.clear()
    assert engine.ask(lambda worker: settled_memory()) - before < 50_000


def soak(architecture: str, *, num_clients: int, num_each: int, seed: int) -> None:
    alone = Alone(architecture)
    # A budget that a fraction of the chats fits in, and a queue that is too short for all clients.
    with house(architecture, cache_bytes=6_000_000, max_queue=num_clients // 3, prefill_chunk=256) as server:
        before = server.engine.ask(lambda worker: active_memory())
        report = load(server, num_clients=num_clients, num_each=num_each, seed=seed)
        wait_until_idle(server)
        assert report.failures == []
        check_what_is_left(server, before)
        answers = server.recorder.of(Purpose.GENERATE)
        counts = server.engine.loop.status().counts
    num_tokens = sum(len(kept.tokens) for kept in answers)
    print(f"{architecture}: {dict(report.seen)}, {len(answers)} jobs, {num_tokens} tokens\n{counts}", flush=True)
    assert all(kept.end is not None and kept.end.reason is not FinishReason.FAILED for kept in answers)
    for kept in answers:
        alone.check(kept)
    alone.close()
    assert alone.num_ties <= 1 + num_tokens // 10_000


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_sixty_four_clients(architecture: str) -> None:
    soak(architecture, num_clients=64, num_each=times(4), seed=0)

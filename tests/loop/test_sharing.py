"""Two engines on one directory: a chat that moves from one to the other computes what is new there."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.sizes import Bytes
from reprise.disk.store import watcher
from reprise.loop import read_ahead, write_behind
from reprise.loop.worker import Worker
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import BLOCK, bound_steps_of_reading, disk_cache, disk_of, words


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DrivenEngine]]:
    """Two, which write when they are told to and look when they are asked."""
    monkeypatch.setattr(write_behind, "SOON_S", 3600.0)
    monkeypatch.setattr(watcher, "SCAN_EVERY_S", 3600.0)
    monkeypatch.setattr(read_ahead, "SCAN_TIMEOUT_S", PATIENCE_S)
    on_disk: dict[str, Any] = {"disk_bytes": Bytes(1 << 30), "disk_directory": str(tmp_path), "disk_block": BLOCK}
    engines = [DrivenEngine("qwen3_5", prefill_chunk=256, **on_disk) for _ in range(2)]
    # The first was there before the second, and has not seen it yet.
    engines[0].ask(lambda worker: disk_cache(worker).scan())
    yield engines
    for engine in engines:
        engine.close()


def write_all(worker: Worker) -> None:
    while worker.disk.write(is_closing=True):
        assert disk_cache(worker).flush(PATIENCE_S)


def test_a_chat_that_moves_computes_what_is_new(servers: list[DrivenEngine]) -> None:
    prompt = words(1, 200)
    for turn in range(3):
        engine = servers[turn % 2]
        answer = engine.run(prompt)
        assert answer.computed == (200 if turn == 0 else 101), turn
        assert answer.tokens == engine.cold(prompt)
        engine.ask(write_all)
        prompt = [*prompt, *answer.tokens, *words(20 + turn, 100)]
    assert all(disk_of(engine).num_errors == disk_of(engine).num_quarantined == 0 for engine in servers)


def test_a_chat_that_stays_waits_for_no_look(servers: list[DrivenEngine]) -> None:
    engine = servers[1]
    prompt = words(1, 200)
    answer = engine.run(prompt)
    looks: list[bool] = []
    ACTIONS[Failpoint.DISK_SCAN] = looks.append
    assert engine.run([*prompt, *answer.tokens, 1, 2]).computed == 3
    assert engine.run([*prompt, *answer.tokens, *words(5, 30)]).computed == 31
    assert looks == []
    engine.run(words(9, 200))
    assert looks == [True], "one that nobody here knows may be another's"


def test_a_look_that_hangs_is_not_waited_for(servers: list[DrivenEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    ACTIONS[Failpoint.DISK_SCAN] = lambda is_asked: goes_on.wait(PATIENCE_S)
    monkeypatch.setattr(read_ahead, "SCAN_TIMEOUT_S", 0.0)
    bound_steps_of_reading()
    assert servers[1].run(words(1, 200)).computed == 200
    goes_on.set()


@pytest.mark.matrix
def test_a_chat_moves_through_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(write_behind, "SOON_S", 3600.0)
    monkeypatch.setattr(watcher, "REMOTE_EVERY_S", 3600.0)
    monkeypatch.setattr(watcher, "REMOTE_AGAIN_S", 0.0)
    monkeypatch.setattr(watcher, "MAX_SCAN_SHARE", 1e9)
    monkeypatch.setattr(read_ahead, "SCAN_TIMEOUT_S", PATIENCE_S)
    place = f"file://{tmp_path}/store"
    on_disk: dict[str, Any] = {"disk_bytes": Bytes(1 << 30), "disk_directory": place, "disk_block": BLOCK}
    engines = [DrivenEngine("qwen3_5", prefill_chunk=256, **on_disk) for _ in range(2)]
    try:
        for engine in (*engines, *engines):
            engine.ask(lambda worker: disk_cache(worker).scan()).result(PATIENCE_S)
        prompt = words(1, 200)
        for turn in range(3):
            engine = engines[turn % 2]
            answer = engine.run(prompt)
            assert answer.computed == (200 if turn == 0 else 101), turn
            assert answer.tokens == engine.cold(prompt)
            engine.ask(write_all)
            prompt = [*prompt, *answer.tokens, *words(20 + turn, 100)]
        engines[0].loop.clear().result(PATIENCE_S)
        assert not list(tmp_path.rglob("*.kv"))
        assert all(disk_of(engine).trouble is None for engine in engines)
    finally:
        for engine in engines:
            engine.close()

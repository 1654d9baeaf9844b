"""Servers that come and go change no answer, and what was computed once is not computed again after a restart."""

from pathlib import Path
from typing import Any

import pytest

from bench.tiny.build import build_model
from reprise.core.sizes import Bytes
from reprise.loop import read_ahead, write_behind
from tests.loop.driving import DrivenEngine
from tests.loop.random_restarts import RandomRestarts, SteadyTwin
from tests.loop.restarts import Restarts
from tests.models.tiny import CONFIGS
from tests.soak.lengths import times
from tests.zoo.load import of_zoo

_KINDS = ("llama", "gemma3_text", "qwen3_5", "mamba2", "quantised")
_ZOO = ("llama4", "qwen3, kept beginning", "recurrent_gemma", "baichuan_m1")
"""Chunks, windows with a kept beginning, windows and states, and composites."""


@pytest.fixture(autouse=True)
def nothing_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens are read as well, however slow the disk is beside other tests; what is stored is written at once or
    much later."""
    monkeypatch.setattr(read_ahead, "MIN_TOKENS", 1)
    monkeypatch.setattr(read_ahead, "LEAST_READ_S", float("inf"))


def _given(name: str, folder: Path) -> tuple[str | Path, dict[str, Any]]:
    """The model, and what it is started with."""
    if name in _ZOO:
        return "llama", {"load": of_zoo(name)}
    if name == "quantised":
        build_model(folder / "wide", {**CONFIGS["llama"], "head_dim": 32}, vocab_size=512)
        return folder / "wide", {"kv_bits": 8, "kv_group_size": 32}
    return name, {}


def _random_restarts(start: Restarts, folder: Path, name: str, *, seed: int, num_bursts: int, **options: Any) -> int:
    """A run of chats on servers that come and go. Returns the tokens that were read from disk."""
    model, given = _given(name, folder)
    oracle = DrivenEngine(model, has_prefix_cache=False, **given)
    small = {"max_batch": 3, "prefill_chunk": 32, "disk_block": 16}
    run = RandomRestarts(
        begin=lambda: start(model, **small, **given, **options), oracle=oracle, restarts=start, seed=seed
    )
    try:
        run.run(num_bursts)
        assert run.num_restarts > 0
        return run.num_loaded
    finally:
        oracle.close()


_SMALL = {"cache_bytes": 2_000_000, "disk_bytes": Bytes(2_000_000), "max_queue": 9}


def test_answers_are_those_of_cold_runs(start: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "SOON_S", 0.0)
    assert _random_restarts(start, tmp_path, "qwen3_5", seed=1, num_bursts=5, shares_from=40, **_SMALL) > 0


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, _SMALL, {**_SMALL, "disk_bytes": Bytes(300_000)}], ids=str)
@pytest.mark.parametrize("name", [*_KINDS, *_ZOO])
def test_long_runs(
    start: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Every kind of layers with room on disk, with little and with next to none; what is stored is written, or not."""
    num_loaded = 0
    for seed in range(times(2)):
        monkeypatch.setattr(write_behind, "SOON_S", (0.0, 60.0)[seed % 2])
        shares_from = (40, 10**6)[seed % 3 % 2]
        num_loaded += _random_restarts(
            start, tmp_path, name, seed=seed, num_bursts=9, shares_from=shares_from, **options
        )
    # With next to no room and all of it written at the end, little of a run is left for the next server.
    assert num_loaded > 0


@pytest.mark.soak
@pytest.mark.parametrize("shares_from", [60, 10**6])
@pytest.mark.parametrize("name", [*_KINDS, *_ZOO])
def test_long_chats_cost_no_token_after_restarts(start: Restarts, tmp_path: Path, name: str, shares_from: int) -> None:
    """Every kind of layers, with sequences that lend their buffers and with copies."""
    model, given = _given(name, tmp_path)
    for seed in range(times(1)):
        folder = Restarts(tmp_path / f"disk-{seed}")
        steady = DrivenEngine(model, shares_from=shares_from, **given)
        twin = SteadyTwin(
            begin=lambda folder=folder: folder(model, disk_block=16, shares_from=shares_from, **given),
            steady=steady,
            seed=seed,
        )
        try:
            twin.run(30)
        finally:
            folder.end()
            steady.close()

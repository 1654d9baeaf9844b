"""Two ranks that are stopped, cut off, and lose or damage files of either: no answer changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.core.sizes import Bytes
from reprise.loop import read_ahead, sequences, write_behind
from tests.loop.driving import DrivenEngine
from tests.loop.random_restarts import RandomRestarts
from tests.loop.rank_restarts import RankRestarts
from tests.soak.lengths import times

ARCHITECTURES = ["llama", "gpt_oss", "qwen3_5"]


@pytest.fixture(autouse=True)
def nothing_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens are read as well, however slow the disk is beside other tests."""
    monkeypatch.setattr(read_ahead, "MIN_TOKENS", 1)
    monkeypatch.setattr(read_ahead, "LEAST_READ_S", float("inf"))


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[RankRestarts]:
    restarts = RankRestarts(tmp_path)
    yield restarts
    restarts.end()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("architecture", "seed"),
    [("qwen3_5", 1), *((name, 2) for name in ARCHITECTURES)],
)
def test_ranks_that_come_and_go_change_no_answer(
    restarts: RankRestarts, monkeypatch: pytest.MonkeyPatch, architecture: str, seed: int
) -> None:
    if seed % 2 == 1:
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
        monkeypatch.setattr(write_behind, "SOON_S", 0.0)
    _random_restarts(restarts, architecture, seed=seed, num_bursts=8 if seed == 1 else 12)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_come_and_go_for_long(restarts: RankRestarts, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    monkeypatch.setattr(sequences, "LARGE_NBYTES", 10_000)
    _random_restarts(restarts, architecture, seed=5, num_bursts=times(20))


def _random_restarts(restarts: RankRestarts, architecture: str, *, seed: int, num_bursts: int) -> None:
    oracle = DrivenEngine(architecture, has_prefix_cache=False)
    small = {"max_batch": 3, "prefill_chunk": 32, "disk_block": 16, "cache_bytes": 2_000_000}

    def begin() -> DrivenEngine:
        if restarts.following is not None:
            assert restarts.following.failures == []
        return restarts(architecture, **small, disk_bytes=Bytes(2_000_000), max_queue=9)

    run = RandomRestarts(begin=begin, oracle=oracle, restarts=restarts, seed=seed)
    try:
        run.run(num_bursts)
        assert min(run.num_restarts, run.num_loaded) > 0
    finally:
        oracle.close()

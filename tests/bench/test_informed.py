"""What is known of returns cannot be less than a policy that learns it, nor more than the trace holds."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.informed import reused, waits_of
from reprise.lab.simulate import Granularity
from reprise.lab.simulate.run import run_simulation
from reprise.lab.simulate.traces import read_trace
from reprise.replay.payloads import Sizes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Chats of which half come back after some ten prompts, again and again."""
    numbers, ids = np.random.default_rng(0), iter(range(1, 1 << 30))
    chats: list[list[int]] = []
    lines: list[str] = []
    for at in range(400):
        if at < 10 or at % 2 == 0:
            chat = [0, *(next(ids) for _ in range(6))]
        else:
            chat = [*chats.pop(int(numbers.integers(len(chats) - 8, len(chats)))), next(ids)]
        chats.append(chat)
        lines.append(json.dumps({"input_length": 512 * len(chat), "hash_ids": chat}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_with_room_for_all_everything_is_reused(trace: Path) -> None:
    requests = read_trace(trace, granularity=Granularity.BLOCK)
    (infinite,) = run_simulation("t", requests, budgets=(), policies=("infinite",), sizes=Sizes())
    waits = waits_of(trace)
    assert reused(waits, 10**9, is_fitted=True) == pytest.approx(infinite.reused, rel=0.01)
    assert reused(waits, 10**9, is_fitted=False) <= reused(waits, 10**9, is_fitted=True)


@pytest.mark.matrix
def test_no_policy_beats_who_is_fitted(trace: Path) -> None:
    budget = 40_000
    requests = read_trace(trace, granularity=Granularity.BLOCK)
    results = run_simulation("t", requests, budgets=(budget,), policies=("lru", "greedy-dual", "cost"), sizes=Sizes())
    assert max(result.reused for result in results) <= reused(waits_of(trace), budget, is_fitted=True)

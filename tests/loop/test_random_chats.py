"""Reuse never changes an answer, and what was computed is reused: random trees, bursts, cancels and failures."""

from typing import Any

import pytest

from tests.loop.driving import DrivenEngine
from tests.loop.random_chats import RandomChats, Seen
from tests.soak.lengths import times
from tests.zoo.load import of_zoo

_TINY = ("llama", "gemma3_text", "qwen3_5", "qwen3", "gpt_oss", "mamba2")
_ZOO = (
    "llama4",
    "qwen3, kept beginning",
    "qwen3, quantised",
    "recurrent_gemma",
    "gear",
    "longcat_flash_ngram",
    "deepseek_v41",
    "baichuan_m1",
    "minimax_m3_vl",
    "rwkv7",
)
"""Chunks, windows with a kept beginning, quantised entries, composites, and a cache class that is not known."""

_SMALL = {"cache_bytes": 2_000_000, "max_batch": 8, "max_queue": 9}


def _run(name: str, *, seed: int, num_bursts: int, **options: Any) -> Seen:
    load = of_zoo(name) if name in _ZOO else None
    architecture = "llama" if load is not None else name
    # Short sequences lend as well, and chunks are far shorter than prompts.
    engine = DrivenEngine(
        architecture, load=load, **{"max_batch": 3, "prefill_chunk": 32, "shares_from": 40, **options}
    )
    kept = {key: options[key] for key in ("kv_bits", "kv_group_size") if key in options}
    oracle = DrivenEngine(architecture, load=load, has_prefix_cache=False, **kept)
    try:
        has_room = "cache_bytes" not in options
        return RandomChats(engine=engine, oracle=oracle, seed=seed, has_room=has_room).run(num_bursts)
    finally:
        engine.close()
        oracle.close()


def test_answers_are_those_of_cold_runs() -> None:
    seen = _run("qwen3_5", seed=1, num_bursts=5, **_SMALL)
    assert min(seen.compared, seen.reused, seen.cancelled) > 0


@pytest.mark.matrix
def test_states_that_grow_in_the_first_tokens() -> None:
    # Of an n-gram, one that has just begun has fewer tokens than the others.
    engine = DrivenEngine("llama", load=of_zoo("longcat_flash_ngram"))
    try:
        prompts = [[1, 2], [3, 4, 5], list(range(40)), list(range(50, 90))]
        alone = [engine.run(prompt, num=20).tokens for prompt in prompts]
        # All at once, and with nothing left to prefill.
        together = engine.submit_all(prompts, num=20)
        assert [running.wait().tokens for running in together] == alone
    finally:
        engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, _SMALL, {"cache_bytes": 1_000_000}], ids=["room", "small", "tiny"])
@pytest.mark.parametrize("name", [*_TINY, *_ZOO])
def test_long_runs(name: str, options: dict[str, Any]) -> None:
    """Every kind of layers with room for all, with little, and with so little that running requests take turns."""
    for seed in range(times(1)):
        _run(name, seed=seed, num_bursts=14, **options)


@pytest.mark.soak
def test_long_runs_on_quantised_entries() -> None:
    for seed in range(times(1)):
        _run("qwen3_5", seed=seed, num_bursts=14, kv_bits=8, kv_group_size=32)

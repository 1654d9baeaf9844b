"""No step copies more of a restore than a part: counted in bytes, for every kind of layers, from disk and memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from reprise.core import allowance
from reprise.demo.tiny.build import build_model
from reprise.demo.tiny.tokenizer import MARKUP
from reprise.disk import read_ahead, write_behind
from reprise.disk.tier import DiskTier
from reprise.engine import records
from reprise.loop import sequences
from reprise.loop.sequences import SequencePool
from reprise.loop.worker import Worker
from tests.loop.restarts import Restarts, words
from tests.matrix import rows_now_and_later
from tests.models.tiny import CONFIGS
from tests.zoo.windows import WINDOWS

_LAYERS = 12
_WINDOW = 256
_SMALL = 4096
"""Bytes of a section of a record."""

_QWEN = CONFIGS["qwen3_5"]
_LLAMA4: Mapping[str, Any] = cast(Any, WINDOWS["llama4"])
CONFIGS_OF_KINDS: Mapping[str, Mapping[str, Any]] = {
    "full": {**CONFIGS["llama"], "num_hidden_layers": _LAYERS},
    "full + state": {
        **_QWEN,
        "text_config": {**_QWEN["text_config"], "num_hidden_layers": _LAYERS, "full_attention_interval": 4},
    },
    "full + window": {
        **CONFIGS["gemma3_text"],
        "num_hidden_layers": _LAYERS,
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 4,
    },
    "full + chunk": {
        **_LLAMA4,
        "text_config": {**_LLAMA4["text_config"], "num_hidden_layers": _LAYERS, "attention_chunk_size": 2 * _WINDOW},
    },
    "state": {**CONFIGS["mamba2"], "num_hidden_layers": _LAYERS},
}


def count_bytes_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: the bytes that each step of the engine holds more at its worst while it takes over or restores."""
    steps: list[int] = []

    def counted(owner: type, name: str) -> None:
        work: Callable[..., object] = getattr(owner, name)

        def working(*given: Any, **named: Any) -> object:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            try:
                return work(*given, **named)
            finally:
                steps[-1] += max(0, mx.get_peak_memory() - before)

        monkeypatch.setattr(owner, name, working)

    for owner, name in ((DiskTier, "advance"), (SequencePool, "start"), (SequencePool, "restore")):
        counted(owner, name)
    step = Worker.step

    def stepping(worker: Worker) -> None:
        steps.append(0)
        step(worker)

    monkeypatch.setattr(Worker, "step", stepping)
    return steps


@pytest.mark.parametrize(
    ("kinds", "num_held", "is_large"),
    rows_now_and_later(
        [("full", 40, False), ("full + state", 40, False), ("full + window", 0, True), ("full + chunk", 40, False)],
        [
            *((kinds, 0, is_large) for kinds in CONFIGS_OF_KINDS for is_large in (True, False)),
            *((kinds, 40, True) for kinds in CONFIGS_OF_KINDS),
            ("full + window", 40, False),
        ],
    ),
)
def test_a_step_takes_over_one_part_whatever_the_kind_of_layers(
    start: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kinds: str, num_held: int, is_large: bool
) -> None:
    build_model(tmp_path / "model", CONFIGS_OF_KINDS[kinds], markup=MARKUP, vocab_size=512)
    monkeypatch.setattr(sequences, "LARGE_NBYTES", 0 if is_large else 10**12)
    monkeypatch.setattr(write_behind, "SECTION_NBYTES", _SMALL)
    engine = start(tmp_path / "model")
    shared = words(12, 150)
    prompt = [*shared, *words(11, 600)]
    turn = [*prompt, *engine.run(prompt).tokens, 1, 2]
    engine = start(tmp_path / "model")
    if num_held > 0:
        engine.run([*shared[:num_held], 1])
    for module, name in (
        (allowance, "TAKEN_AT_ONCE"),
        (records, "COPIED_TOGETHER"),
        (sequences, "RESTORED_TOGETHER"),
        (read_ahead, "COMMITTED_AT_ONCE"),
    ):
        monkeypatch.setattr(module, name, 1)
    footprint = engine.ask(lambda worker: worker.runner.footprint)
    steps = count_bytes_of_steps(monkeypatch)
    answer = engine.run(turn)
    assert (answer.computed, answer.end.outcome.num_reused) == (3, len(turn) - 3)
    # One layer's entries with its room to grow, its recurrent state, or the stored segment that is cut where the paths
    # part; beside it a few sections.
    layer = max((nbytes * (len(turn) + 2 * 256) for nbytes in footprint.each.values()), default=0)
    cut = num_held * sum(footprint.by_kind.values())
    part = max(layer, footprint.snapshot // _LAYERS, cut) + 8 * _SMALL
    assert max(steps) <= part
    assert part < footprint.at(len(turn) - 3) <= sum(steps), "a path is far more than a part of it"
    assert answer.tokens == engine.cold(turn)
    engine.check()

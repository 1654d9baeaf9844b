"""No step copies more of a restore than a part: counted in bytes, for every kind of layers, from disk and memory."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from bench.tiny.build import build_model
from bench.tiny.tokenizer import MARKUP
from reprise.core import allowance
from reprise.core.allowance import StepAllowance
from reprise.core.events import FinishReason
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Purpose
from reprise.core.kinds import Footprint
from reprise.engine.running import records
from reprise.engine.running.live_sequence import LiveSequence
from reprise.loop import read_ahead, sequences, write_behind
from reprise.loop.sequences import SequencePool
from reprise.loop.tier import DiskTier
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.restarts import Restarts, words
from tests.matrix import now_and_later, rows_now_and_later
from tests.models.tiny import CONFIGS
from tests.zoo.windows import WINDOWS

_LAYERS = 8
_WINDOW = 256
_SMALL = 8192
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
    "quantised": {**CONFIGS["llama"], "num_hidden_layers": _LAYERS, "head_dim": 32},
}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {"quantised": {"kv_bits": 4, "kv_group_size": 32}}


def count_bytes_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: the bytes that each step of the engine holds more at its worst while it takes over or restores."""
    steps: list[int] = []
    device: Any = mx

    def counted(owner: type, name: str) -> None:
        work: Callable[..., object] = getattr(owner, name)

        def working(*given: Any, **named: Any) -> object:
            before = device.get_active_memory()
            device.reset_peak_memory()
            try:
                return work(*given, **named)
            finally:
                steps[-1] += max(0, device.get_peak_memory() - before)

        monkeypatch.setattr(owner, name, working)

    for owner, name in ((DiskTier, "advance"), (SequencePool, "start"), (SequencePool, "restore")):
        counted(owner, name)
    at_step(lambda worker: steps.append(0))
    return steps


def at_step(action: Callable[[Worker], object]) -> None:
    """From now on do this at the beginning of each step as well."""
    others = ACTIONS.get(Failpoint.STEP, lambda worker: None)
    ACTIONS[Failpoint.STEP] = lambda worker: (others(worker), action(worker))


def take_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a step takes over one part, and that is a small one."""
    monkeypatch.setattr(allowance, "TAKEN_AT_ONCE", 1)
    monkeypatch.setattr(allowance, "LEAST_NBYTES", 8 * _SMALL)


def plane_nbytes(footprint: Footprint, position: int) -> int:
    """The largest plane of a sequence that stands there, with its room to grow."""
    return max((nbytes * (position + 2 * 256) // 2 for nbytes in footprint.each.values()), default=0)


@pytest.mark.parametrize(
    ("kinds", "num_held", "is_large"),
    rows_now_and_later(
        [("full + state", 40, False)],
        [
            ("full + window", 0, True),
            ("full + chunk", 40, False),
            ("full", 40, False),
            ("full", 0, True),
            ("full + state", 0, True),
            ("full + window", 0, False),
            ("full + window", 40, True),
            ("full + chunk", 0, True),
            ("state", 0, False),
            ("state", 40, True),
            ("quantised", 0, False),
            ("quantised", 0, True),
        ],
    ),
)
def test_a_step_takes_over_one_part_whatever_the_kind_of_layers(
    start: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kinds: str, num_held: int, is_large: bool
) -> None:
    build_model(tmp_path / "model", CONFIGS_OF_KINDS[kinds], markup=MARKUP, vocab_size=512)
    monkeypatch.setattr(sequences, "LARGE_NBYTES", 0 if is_large else 10**12)
    monkeypatch.setattr(write_behind, "SECTION_NBYTES", _SMALL)
    options = _SETTINGS.get(kinds, {})
    engine = start(tmp_path / "model", **options)
    shared = words(12, 150)
    prompt = [*shared, *words(11, 300)]
    turn = [*prompt, *engine.run(prompt).tokens, 1, 2]
    engine = start(tmp_path / "model", **options)
    if num_held > 0:
        engine.run([*shared[:num_held], 1])
    for module, name in ((records, "COPIED_TOGETHER"), (read_ahead, "COMMITTED_AT_ONCE")):
        monkeypatch.setattr(module, name, 1)
    take_little(monkeypatch)
    footprint = engine.ask(lambda worker: worker.runner.footprint)
    steps = count_bytes_of_steps(monkeypatch)
    answer = engine.run(turn)
    assert (answer.computed, answer.end.outcome.num_reused) == (3, len(turn) - 3)
    # One plane with its room to grow, a layer's recurrent state, or the stored segment that is cut where the paths
    # part; beside it a few sections.
    cut = num_held * sum(footprint.by_kind.values())
    part = max(plane_nbytes(footprint, len(turn)), footprint.snapshot // _LAYERS, cut) + 8 * _SMALL
    assert max(steps) <= part
    assert part < footprint.at(len(turn) - 3) <= sum(steps), "a path is far more than a part of it"
    assert answer.tokens == engine.cold(turn)
    engine.check()


class Moving:
    """Notes, step by step, the sequences that are taking over entries of the cache, and what is read of them then."""

    def __init__(self, engine: DrivenEngine) -> None:
        """From now on there is no room for a second copy of a path as `stored` has it."""
        least = engine.ask(lambda worker: worker.runner.most_live_nbytes(500, chunk=256))
        self.num_steps = 0
        self.on_step: dict[int, Callable[[Worker], object]] = {}
        """What is done before which of these steps."""
        ACTIONS[Failpoint.FITS] = lambda nbytes: nbytes < least

        def stepping(worker: Worker) -> None:
            worker.cache.check()
            if any(live.moving is not None for live in self._lives(worker)):
                self.num_steps += 1
                self.on_step.get(self.num_steps, lambda worker: None)(worker)

        at_step(stepping)

    @staticmethod
    def _lives(worker: Worker) -> list[LiveSequence]:
        return [request.live for request in worker.requests.values() if request.live is not None]


MOVED = now_and_later(["full"], ["full + state", "full + window", "full + chunk", "quantised"])


@pytest.fixture
def stored(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[DrivenEngine, list[int]]]:
    """An engine whose cache alone has a prompt with its answer, and the next turn."""
    build_model(tmp_path / "model", CONFIGS_OF_KINDS[request.param], markup=MARKUP, vocab_size=512)
    engine = DrivenEngine(tmp_path / "model", shares_from=64, prefill_chunk=256, **_SETTINGS.get(request.param, {}))
    prompt = words(13, 600)
    turn = [*prompt, *engine.run(prompt).tokens, 1, 2]
    engine.ask(lambda worker: worker.sequences.close_idle())
    yield engine, turn
    engine.close()


@pytest.mark.matrix
@pytest.mark.parametrize("stored", MOVED, indirect=True)
def test_without_room_for_two_copies_entries_are_taken_over_in_steps(
    stored: tuple[DrivenEngine, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, turn = stored
    cold = engine.cold(turn)
    footprint = engine.ask(lambda worker: worker.runner.footprint)
    with monkeypatch.context() as patch:
        take_little(patch)
        moving = Moving(engine)
        steps = count_bytes_of_steps(patch)
        answer = engine.run(turn)
    ACTIONS.clear()
    assert answer.tokens == cold and answer.computed == 3
    least = _LAYERS if footprint.snapshot == 0 else _LAYERS // 4
    assert moving.num_steps > 2 * least, "a plane at a time, twice"
    # What is given up does not show: one plane with its room to grow, and small parts.
    assert max(steps) <= plane_nbytes(footprint, len(turn)) + 4 * _SMALL
    again = engine.run([*turn, *answer.tokens, 5])
    assert again.tokens == engine.cold([*turn, *answer.tokens, 5])


@pytest.mark.matrix
@pytest.mark.parametrize("stored", MOVED, indirect=True)
def test_what_is_being_taken_over_is_there_for_others(
    stored: tuple[DrivenEngine, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, turn = stored
    branch = [*turn[:500], 7, 8, 9]
    cold, cold_branch = engine.cold(turn), engine.cold(branch)
    others: list[SubmittedJob] = []
    with monkeypatch.context() as patch:
        take_little(patch)
        moving = Moving(engine)
        for at in (2, 15):
            moving.on_step[at] = lambda worker: others.extend((engine.submit(branch), engine.submit(turn)))
        first = engine.submit(turn)
        assert first.wait().tokens == cold
        assert len(others) == 4
        assert [other.wait().tokens for other in others] == 2 * [cold_branch, cold]
    engine.check()


@pytest.mark.matrix
@pytest.mark.parametrize("num_steps", now_and_later([15], [1]))
@pytest.mark.parametrize("stored", now_and_later(["full"], ["full + state"]), indirect=True)
def test_a_client_that_leaves_while_entries_are_taken_over_loses_none(
    stored: tuple[DrivenEngine, list[int]], monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    engine, turn = stored
    with monkeypatch.context() as patch:
        take_little(patch)
        moving = Moving(engine)
        leaving: list[SubmittedJob] = []
        moving.on_step[num_steps] = lambda worker: worker.cancel(leaving[0].job.id)
        engine.ask(lambda worker: leaving.append(engine.submit(turn)))
        assert leaving[0].wait().end.reason is FinishReason.CANCELLED
    ACTIONS.clear()
    answer = engine.run(turn)
    assert answer.computed == 3 and answer.tokens == engine.cold(turn)


def test_a_step_is_told_how_long_the_streams_beside_it_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    renew = StepAllowance.renew

    def renewing(allowance: StepAllowance, *, decode_s: float, **named: int) -> None:
        told.append(decode_s)
        renew(allowance, decode_s=decode_s, **named)

    monkeypatch.setattr(StepAllowance, "renew", renewing)
    engine = DrivenEngine("llama")
    engine.run(words(14, 20), num=20)
    engine.run(words(15, 20), purpose=Purpose.PREFILL)
    engine.close()
    assert max(told) > 0
    assert told[0] == told[-1] == 0, "nobody decodes yet, and not any more"

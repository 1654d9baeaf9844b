"""Quantised KV (`--kv-bits`): warm = cold in memory and on restore, alone and together; or one sentence at load."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench.tiny.build import build_model
from reprise.core.errors import LoadFailed
from reprise.core.kinds import Full
from reprise.engine.models.load import load_model
from reprise.engine.running.live_sequence import LiveSequence
from tests.loop.driving import DrivenEngine
from tests.loop.test_reuse import words
from tests.models.tiny import CONFIGS, tiny_model

_WIDE = {"head_dim": 32}
"""Entries have to be as wide as a group of quantisation."""


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrivenEngine]:
    """Full attention alone, with windows (which stay as they are), and with recurrent layers."""
    directory = tmp_path_factory.mktemp("quantised") / request.param
    config = CONFIGS[request.param]
    build_model(directory, config if "text_config" in config else {**config, **_WIDE}, vocab_size=512)
    engine = DrivenEngine(directory, kv_bits=4, kv_group_size=32, prefill_chunk=64, shares_from=250)
    yield engine
    engine.close()


def test_turns_branches_and_repeats(engine: DrivenEngine) -> None:
    prompt = words(500, 150)
    for turn in range(3):
        answer = engine.run(prompt)
        assert answer.tokens == engine.cold(prompt)
        assert answer.computed == (150 if turn == 0 else 11)
        again = engine.run(prompt)
        assert again.tokens == answer.tokens
        assert again.computed == 0
        branch = [*prompt, *words(501 + turn, 7)]
        assert engine.run(branch).tokens == engine.cold(branch)
        prompt = [*prompt, *answer.tokens, *words(510 + turn, 10)]


@pytest.mark.matrix
def test_sequences_of_different_lengths_together(engine: DrivenEngine) -> None:
    prompts = [words(520 + i, length) for i, length in enumerate((30, 90, 210))]
    cold = [engine.cold(prompt, num=16) for prompt in prompts]
    for _ in range(2):
        running = [engine.submit(prompt, num=16) for prompt in prompts]
        assert [r.wait().tokens for r in running] == cold
    engine.check()


@pytest.mark.matrix
def test_sequences_that_lend(engine: DrivenEngine) -> None:
    prompt = words(530, 300)
    for turn in range(3):
        answer = engine.run(prompt)
        assert answer.tokens == engine.cold(prompt)
        prompt = [*prompt, *answer.tokens, *words(531 + turn, 20)]


def test_entries_are_copied_to_be_read_by_rows_that_decode_on_a_cpu(engine: DrivenEngine) -> None:
    """For each of the heads that share them: two in these models."""
    lives = [cast(LiveSequence, SimpleNamespace(position=at, unfed=())) for at in (1000, 4000)]
    executor, each = engine.ask(lambda worker: (worker.executor, worker.runner.footprint.each[Full()]))
    copied = executor.price_to_decode(lives) - executor.price.of(2, 4000, num_outputs=2)
    assert copied == 2 * 4000 * 2 * each
    plain = DrivenEngine(Path(engine.settings.model))
    assert plain.ask(lambda worker: worker.executor.price.per_entry) == 0
    plain.close()


def test_entries_take_a_share_of_the_bytes(engine: DrivenEngine) -> None:
    plain = DrivenEngine(Path(engine.settings.model))
    try:
        full = plain.ask(lambda worker: worker.runner.footprint.full)
    finally:
        plain.close()
    # 32 float32 against 32 times 4 bits, a scale and a bias.
    assert engine.ask(lambda worker: worker.runner.footprint.full) * 128 == full * 24


def test_attention_with_sinks_is_refused(tmp_path: Path) -> None:
    build_model(tmp_path, {**CONFIGS["gpt_oss"], **_WIDE}, vocab_size=512)
    with pytest.raises(LoadFailed, match=r"attention sinks.*without --kv-bits") as failed:
        load_model(str(tmp_path), kv_bits=4, kv_group_size=32)
    assert "\n" not in str(failed.value)


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LoadFailed, match=r"16 values wide .* groups of 64\. Start it without --kv-bits\."):
        load_model(str(tiny_model("llama")), kv_bits=8)
    with pytest.raises(LoadFailed, match=r"32 values wide .* groups of 64\. Start it with --kv-group-size 32\."):
        load_model(str(tiny_model("qwen3_5")), kv_bits=8)


def test_a_model_without_full_attention_says_that_nothing_is_quantised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert load_model(str(tiny_model("mamba2")), kv_bits=8).blueprint.layout.kinds == ()
    assert "no full-attention layer" in caplog.text

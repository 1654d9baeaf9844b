"""KV belongs to the weights that made it: other weights under the same name find nothing, in memory or on disk."""

import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from tests.loop.restarts import Restarts, disk_of, words
from tests.models.adapters import write_adapter
from tests.models.tiny import tiny_model


@pytest.fixture
def adapters(tmp_path: Path) -> list[str]:
    base = str(tiny_model("qwen3_5"))
    return [
        str(write_adapter(tmp_path / kind, mlx_lm.load(base)[0], kind=kind, seed=seed))
        for seed, kind in enumerate(("lora", "dora"))
    ]


def test_adapters_and_their_base_never_find_each_others_prefixes(start: Restarts, adapters: list[str]) -> None:
    prompt = words(1, 200)
    answers: list[list[int]] = []
    for adapter in (None, *adapters):
        engine = start(adapter_path=adapter)
        first = engine.run(prompt)
        assert first.computed == 200 and first.end.outcome.num_loaded == 0
        assert first.tokens == engine.cold(prompt)
        answers.append(first.tokens)
    assert len({tuple(answer) for answer in answers}) == 3
    for adapter, answer in zip((None, *adapters), answers, strict=True):
        engine = start(adapter_path=adapter)
        again = engine.run([*prompt, *answer, 5])
        assert again.computed == 2 and again.end.outcome.num_loaded == 207
        assert again.tokens == engine.cold([*prompt, *answer, 5])


def test_weights_that_were_changed_in_place_find_nothing_of_the_old_ones(start: Restarts, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("qwen3_5"), tmp_path / "model")
    prompt = words(2, 200)
    engine = start(directory)
    before = engine.run(prompt).tokens
    start.end()
    file = directory / "model.safetensors"
    weights = dict(mx.load(str(file)))
    name = next(name for name in sorted(weights) if name.endswith("mlp.down_proj.weight"))
    # One number, which a sample of the weights would not have.
    weights[name][17, 31] = 40.0
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    engine = start(directory)
    after = engine.run(prompt)
    assert after.computed == 200 and after.end.outcome.num_loaded == 0
    assert after.tokens == engine.cold(prompt) != before


def test_another_template_or_tokenizer_finds_the_same_tokens(start: Restarts, tmp_path: Path) -> None:
    """What was computed depends on tokens alone, whatever wrote them."""
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    prompt = words(3, 200)
    engine = start(directory)
    answer = engine.run(prompt).tokens
    engine = start(directory, chat_template="Say: {{ messages[0].content }}")
    again = engine.run([*prompt, *answer, 5])
    assert again.computed == 2
    assert again.tokens == engine.cold([*prompt, *answer, 5])
    assert disk_of(engine).nbytes > 0

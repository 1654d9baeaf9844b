"""Heads guess what mlx-vlm's drafters guess, where it has one for the architecture. Skipped without mlx-vlm."""

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reprise.engine.models.headed import HeadedModel
from reprise.engine.states.sequence_batch import SequenceBatch
from tests.models.headed import checkpoint_names, head_tensors, headed_model, loaded_with_head

drafter: Any = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp")

TOKENS = np.random.default_rng(3).integers(0, 500, 40).astype(np.int32)


@pytest.mark.every_model
@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_head_of_qwen_guesses_as_the_drafter_of_mlx_vlm(architecture: str) -> None:
    loaded = loaded_with_head(architecture)
    model = loaded.model
    assert isinstance(model, HeadedModel)
    config = json.loads((headed_model(architecture) / "config.json").read_text())
    text = dict(config.get("text_config", config))
    rotated = int(text["head_dim"] * text.get("partial_rotary_factor", 0.25))
    text.setdefault("rope_parameters", {})
    text["rope_parameters"] = {
        "type": "default",
        "rope_theta": text.get("rope_theta", 10000.0),
        "partial_rotary_factor": text.get("partial_rotary_factor", 0.25),
        "mrope_section": [rotated // 2, 0, 0],
        **text["rope_parameters"],
    }
    theirs = drafter.Model(drafter.ModelConfig.from_dict({"text_config": text}))
    theirs.load_weights(list(theirs.sanitize(head_tensors(config)).items()))
    theirs.reset(getattr(model.model, "language_model", model.model))
    rows = SequenceBatch(loaded.blueprint)
    rows.forward(model, mx.array(TOKENS[None, :-1]))
    mx.eval(rows.arrays())
    assert rows.hidden is not None and rows.hidden.recent is not None
    theirs.prefill_from_target_hidden(
        mx.array(TOKENS[None, :-1]), rows.hidden.recent, int(TOKENS[-1]), None, greedy=True
    )
    assert float(mx.abs(_ours(model, rows) - theirs._seed_hidden).max()) < 1e-5


def _ours(model: HeadedModel, rows: SequenceBatch) -> mx.array:
    """The head's output behind the last token, which is not fed."""
    assert rows.hidden is not None
    last = rows.hidden.last(mx.zeros((1, 1, 1)))
    return model.head.output(model.embed_tokens(mx.array(TOKENS[None, -1:])), last, rows.caches[-2:-1])


def test_a_head_of_nemotron_guesses_as_the_drafter_of_mlx_vlm() -> None:
    """Without its check of the model's class, which is mlx-vlm's own."""
    nemotron: Any = pytest.importorskip("mlx_vlm.speculative.drafters.nemotron_h_mtp.nemotron_h_mtp")
    configs: Any = pytest.importorskip("mlx_vlm.speculative.drafters.nemotron_h_mtp.config")
    loaded = loaded_with_head("nemotron_h")
    model: Any = loaded.model
    config = json.loads((headed_model("nemotron_h") / "config.json").read_text())
    theirs = nemotron.NemotronHMTPDraftModel(configs.NemotronHMTPConfig.from_dict({"text_config": config}))
    stored = checkpoint_names(config, head_tensors(config))
    weights = {name.removeprefix("mtp."): array for name, array in stored.items()}
    theirs.load_weights(list(theirs.sanitize(weights).items()))
    rows = SequenceBatch(loaded.blueprint)
    rows.forward(model, mx.array(TOKENS[None, :-1]))
    mx.eval(rows.arrays())
    assert rows.hidden is not None and rows.hidden.recent is not None
    embeddings = model.embed_tokens(mx.array(TOKENS[None, 1:]))
    found, _ = theirs._forward_hidden(embeddings, rows.hidden.recent, None, theirs.make_cache())
    assert float(mx.abs(_ours(model, rows) - found[:, -1:]).max()) < 1e-5

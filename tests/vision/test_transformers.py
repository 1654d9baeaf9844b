"""What we compute for models that see is what transformers computes, cold and behind a resumed prefix.

Its logits were recorded (`tools/transformers_logits.py`), since PyTorch is no dependency.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.vision.chats import SeenWalk, as_vlm_reads_it, cold, seeing
from tests.vision.families import FAMILIES
from tests.vision.tiny import digest_of_weights

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")

RECORDED = Path(__file__).parent / "transformers"
BOUNDS = {
    "qwen3_5": 5e-6,
    "qwen3_5_moe": 5e-6,
    "qwen3_vl": 5e-6,
    "qwen2_5_vl": 5e-6,
    "lfm2_vl": 1e-5,
    "gemma3": 5e-6,
    # Their towers and projections agree to 3e-6. Of rows that differ by 1e-6 these random models make 2e-4 to 4e-4 of
    # the largest logit, and those that share entries 2e-3.
    "gemma4": 5e-4,
    "gemma4_shared": 2e-3,
    "qwen3_vl_moe": 5e-6,
    "pixtral": 1e-5,
    "mistral3": 1e-5,
    "internvl_chat": 2e-5,
    "glm4v": 5e-6,
    "glm4v_moe": 5e-6,
    "minicpmv4_6": 5e-6,
    # Its successor in transformers, with the same parts.
    "kimi_vl": 5e-6,
    "kimi_k25": 5e-6,
    "llama4": 5e-6,
}
"""Of the difference, relative to the largest logit."""


@pytest.mark.every_model
@pytest.mark.parametrize(
    "family", [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.matrix) for name in BOUNDS]
)
def test_logits_are_those_of_transformers_cold_and_warm(family: str) -> None:
    recorded = np.load(RECORDED / f"{family}.npz")
    prompt, _, _ = as_vlm_reads_it(family)
    is_same = str(recorded["weights"]) == digest_of_weights(family)
    assert is_same and np.array_equal(recorded["tokens"], prompt.tokens), "another model: record again"
    at, expected, largest = recorded["at"], recorded["logits"], float(recorded["largest"])
    loaded = seeing(family)

    def distance(logits: mx.array, start: int) -> float:
        is_there = at >= start
        return float(np.abs(np.array(logits)[at[is_there] - start] - expected[is_there]).max() / largest)

    assert distance(cold(loaded, prompt), 0) < BOUNDS[family]
    walk = SeenWalk(loaded)
    walk.logits(prompt)
    start, warm = walk.logits(prompt)
    assert start > prompt.images[0].span.stop
    assert distance(warm, start) < BOUNDS[family]


def test_llama4_cuts_pictures_as_transformers_does() -> None:
    from PIL import Image as Pictures  # noqa: PLC0415 (an extra)

    from reprise.engine.models.vlm_corrections import Tiles  # noqa: PLC0415 (the same)

    recorded = np.load(RECORDED / "llama4_tiles.npz")
    kinds = [Tiles({"size": {"height": 8, "width": 8}, "resize_to_max_canvas": fills}) for fills in (False, True)]
    level, shares = 2 / 255, list[float]()
    for number, (width, height) in enumerate(recorded["sizes"].tolist()):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        made = kinds[number % 3 == 2]([Pictures.fromarray(pixels)])
        assert made["aspect_ratios"] == [tuple(recorded["canvases"][number])], (width, height)
        if f"tiles{number}" in recorded:
            theirs = (recorded[f"tiles{number}"].astype(np.uint32) << 16).view(np.float32)
            assert made["pixel_values"].shape == theirs.shape
            # Pillow and torchvision round a resized level to neighbours now and then; else they agree in every bit.
            assert np.abs(made["pixel_values"] - theirs).max() < 2 * level
            shares.append(float((made["pixel_values"] == theirs).mean()))
    assert len(shares) == 15
    assert np.mean(shares) > 0.95

"""The same tiny model as other servers want it described."""

import json

import pytest

from bench.rivals import for_mlx_vlm, model


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_mlx_vlm_is_given_the_same_weights_and_a_description_of_text_alone(name: str) -> None:
    with model(name) as path, for_mlx_vlm(path) as other:
        assert (other / "model.safetensors").samefile(path / "model.safetensors")
        config = json.loads((other / "config.json").read_text())
        assert "text_config" not in config and config["eos_token_id"] is not None
        rope = config.get("rope_parameters")
        if rope is not None:
            rotated = config["head_dim"] * rope["partial_rotary_factor"]
            assert 2 * sum(rope["mrope_section"]) == rotated, "each rotation has an axis"

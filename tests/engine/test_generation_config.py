"""What stands beside the weights: how the makers sample, and another chat template in the place of the model's."""

import json
import shutil
from pathlib import Path

import pytest

from reprise.engine.models.load import load_model
from tests.models.tiny import tiny_model


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def test_the_makers_sampling_and_end_tokens_are_read(copied: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [2, 7]}
    (copied / "generation_config.json").write_text(json.dumps(config))
    loaded = load_model(str(copied))
    assert loaded.sampling == {"temperature": 0.6, "top_k": 20}
    assert loaded.text.eos == {2, 7}
    assert loaded.text.extent is not None


@pytest.mark.parametrize("content", ["{", None])
def test_without_it_nothing_is_chosen(copied: Path, content: str | None) -> None:
    if content is not None:
        (copied / "generation_config.json").write_text(content)
    loaded = load_model(str(copied), chat_template="Say: {{ messages[0].content }}")
    assert loaded.sampling == {}
    assert loaded.text.render is not None
    assert loaded.text.render([{"role": "user", "content": "hi"}]) == "Say: hi"
    assert loaded.text.template_source == "Say: {{ messages[0].content }}"

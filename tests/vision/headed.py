"""Tiny models that see, with a head in their files or an assistant beside them."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

from reprise.engine.models.load import LoadedModel, load_model
from tests.models.headed import assistant_for, checkpoint_names, head_tensors, read_weights, write_weights
from tests.vision.tiny import seeing_model

HEADED = ("qwen3_5", "gemma4")
"""With a head of its own entries, which are told where tokens stand, and with an assistant."""


@functools.cache
def seeing_headed(family: str) -> tuple[Path, str]:
    """The directory of a tiny model that sees, and the value of `mtp` for its head."""
    directory = Path(_folder().name) / family
    shutil.copytree(seeing_model(family), directory)
    config = json.loads((directory / "config.json").read_text())
    if family == "gemma4":
        return directory, str(assistant_for(config, Path(_folder().name) / "assistant", "tied"))
    # The layers of mlx-lm's model of the same name, which is that without the tower.
    text = {"model_type": family, "text_config": config["text_config"], "vocab_size": config["vocab_size"]}
    weights = read_weights(directory / "model.safetensors") | checkpoint_names(text, head_tensors(text))
    write_weights(directory / "model.safetensors", weights)
    return directory, "auto"


@functools.cache
def loaded_headed(family: str) -> LoadedModel:
    directory, mtp = seeing_headed(family)
    return load_model(str(directory), mtp=mtp)


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="reprise-seeing-headed-")

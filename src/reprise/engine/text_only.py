"""The text side of a model without its weights: tokenizer and chat template, for what needs no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_lm import utils as mlx_lm_utils

from reprise.chat.text_model import TextModel
from reprise.core.errors import LoadFailed
from reprise.engine.load import inner_tokenizer, text_model_of


def load_text_model(source: str) -> TextModel:
    """The tokenizer and the template of a local directory or a hub id. Raises LoadFailed with a sentence."""
    path = Path(source).expanduser()
    if not path.exists() and source.startswith((".", "/", "~")):
        raise LoadFailed(f"{source}: there is no such directory. Give the path of a model directory, or a hub id.")
    directory = str(path) if path.exists() else source
    try:
        tokenizer = mlx_lm_utils.load_tokenizer(directory, eos_token_ids=_config(path).get("eos_token_id"))
    except Exception as error:
        # Tokenizers are loaded by transformers, which raises whatever its many parts raise.
        sentence = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoadFailed(f"{source}: its tokenizer cannot be loaded: {sentence}") from error
    return text_model_of(tokenizer, vocab_size=len(inner_tokenizer(tokenizer)))


def _config(path: Path) -> dict[str, Any]:
    """The model's configuration where it is here already; what is not says nothing about stop tokens."""
    file = path / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

"""Tiny models as the engine has them. Nothing writes to a loaded model, so a thousand tests share a few."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_weights

from reprise.core.settings import Settings
from reprise.engine.models.load import LoadedModel, load_model
from tests.models.tiny import CONFIGS, tiny_model


@functools.cache
def loaded(architecture: str) -> LoadedModel:
    return load_model(str(tiny_model(architecture)))


def loaded_anew(architecture: str) -> LoadedModel:
    """The same with weights of its own, for tests of what comes and goes with these; its texts are learnt once."""
    model, _ = load_weights(tiny_model(architecture))
    mx.eval([array for _, array in tree_flatten(model)])
    return replace(loaded(architecture), model=model)


def loader(settings: Settings) -> Callable[[], LoadedModel] | None:
    """What gives an engine loop its model; None where it has to be loaded by itself: not a tiny one, or not plainly."""
    name = Path(settings.model).name
    is_tiny = name in CONFIGS and settings.model == str(tiny_model(name))
    is_plain = settings.kv_bits is settings.chat_template is settings.adapter_path is None
    return functools.partial(loaded, name) if is_tiny and is_plain else None


@functools.cache
def nearly(architecture: str, noise: float) -> LoadedModel:
    """A model that mostly chooses what the tiny one does: its weights, and some noise."""
    model, keys = loaded_anew(architecture), iter(mx.random.split(mx.random.key(1), 1000))
    noisy = [
        (name, w + noise * mx.std(w) * mx.random.normal(w.shape, key=next(keys)))
        for name, w in tree_flatten(model.model.parameters())
    ]
    model.model.load_weights(noisy)
    mx.eval(model.model.parameters())
    return replace(model, fingerprint=f"nearly {model.fingerprint}", name=f"nearly {architecture}")

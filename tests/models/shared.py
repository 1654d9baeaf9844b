"""Tiny models as the engine has them. Nothing writes to a loaded model, so a thousand tests share a few."""

import functools
from collections.abc import Callable
from pathlib import Path

from reprise.core.settings import Settings
from reprise.engine.load import LoadedModel, load_model
from tests.models.tiny import CONFIGS, tiny_model


@functools.cache
def loaded(architecture: str) -> LoadedModel:
    return load_model(str(tiny_model(architecture)))


def loader(settings: Settings) -> Callable[[], LoadedModel] | None:
    """What gives an engine loop its model; None where it has to be loaded by itself: not a tiny one, or not plainly."""
    name = Path(settings.model).name
    is_tiny = name in CONFIGS and settings.model == str(tiny_model(name))
    is_plain = settings.kv_bits is settings.chat_template is settings.adapter_path is None
    return functools.partial(loaded, name) if is_tiny and is_plain else None

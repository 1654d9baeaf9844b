"""mlx-lm adapters (LoRA, DoRA or full weights) on a loaded model, whose weights they share."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters

from reprise.chat.learnt import FILE_NAME
from reprise.core.errors import LoadFailed, first_line
from reprise.core.settings import Settings
from reprise.engine.models.fingerprint import fingerprint_of
from reprise.engine.models.heads import without_head
from reprise.engine.models.load import LoadedModel, load_model, model_directory, on_weights_of, vocabulary_size
from reprise.engine.models.model_files import WEIGHTS

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapters.safetensors"


class SharedBases:
    """Loads models so that all that are made of the same files hold the weights once, for as long as one is held.

    These are the model itself, the model with another KV format, and adapters on either. From any thread. A base whose
    files have changed since is another one.
    """

    def __init__(self) -> None:
        self._held: WeakValueDictionary[Hashable, LoadedModel] = WeakValueDictionary()
        self._options: WeakKeyDictionary[LoadedModel, dict[str, Any]] = WeakKeyDictionary()
        """What each was loaded with."""
        self._loading = Lock()
        """Loads are serialized: two at a time could load one base twice."""
        self._latest: WeakValueDictionary[Hashable, LoadedModel] = WeakValueDictionary()

    def held(self, settings: Settings) -> LoadedModel | None:
        """The loaded base of the model in the settings, whose weights it would share, or None."""
        return self._latest.get(_place(settings.model))

    def load(self, settings: Settings, *, downloads: bool = True) -> LoadedModel:
        """The model that the settings name, with its adapter where they name one. Raises LoadFailed.

        `downloads`: the hub may be asked for what is not here.
        """
        source, options = settings.model, _options(settings)
        with self._loading:
            directory = model_directory(source, downloads=downloads)
            # Whether it sees is not changed on loaded weights: they are other modules of another library.
            key = directory.resolve(), _files(directory), settings.images, settings.embedder
            base = self._held.get(key)
            if base is None:
                base = self._held[key] = load_model(
                    source, downloads=False, images=settings.images, embedder=settings.embedder, **options
                )
                self._options[base] = options
            self._latest[_place(source)] = base
            # An embedder has no layer states, template or head to have in another form.
            is_other = options != self._options[base] and base.embedder is None
            loaded = on_weights_of(base, settings) if is_other else base
        return loaded if settings.adapter_path is None else with_adapter(loaded, settings.adapter_path)


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "kv_bits": settings.kv_bits,
        "kv_group_size": settings.kv_group_size,
        "chat_template": settings.chat_template,
        "learnt": settings.learnt,
        "trusts_remote_code": settings.trusts_remote_code,
        "mtp": settings.head_source,
    }


def _place(source: str) -> Hashable:
    """A model by what it is called: a path in one form, or a hub id."""
    path = Path(source).expanduser()
    return path.resolve() if path.exists() else source


def _files(directory: Path) -> Hashable:
    """Names, sizes and times of the model's files, as a cheap check for changes."""
    files = [*sorted(directory.glob(WEIGHTS)), directory / "config.json", directory / FILE_NAME]
    facts = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts)


def with_adapter(base: LoadedModel, adapter: str) -> LoadedModel:
    """The base with the adapter in this directory, as a model with its own fingerprint. Raises LoadFailed.

    It shares the arrays of `base`, which stays unchanged.
    """
    directory = Path(adapter).expanduser()
    config = _read_config(directory, adapter)
    if base.vision is not None:
        raise LoadFailed(
            f"{adapter}: adapters are for models that take text alone. Start {base.name} with --images off."
        )
    if base.embedder is not None:
        raise LoadFailed(f"{adapter}: {base.name} makes embeddings, and adapters are for models that make text.")
    model = _twin(base)
    try:
        load_adapters(without_head(model), str(directory))
        model.eval()
        # Wrong shapes only show when the layers run.
        vocab_size = vocabulary_size(model, base.blueprint)
    except Exception as error:
        # mlx-lm does not validate: anything may be raised for other names or shapes, missing keys, a truncated file.
        raise LoadFailed(
            f"{adapter}: this adapter does not fit {base.name}: {first_line(error)} "
            "Was it trained on this model, with mlx_lm.lora?"
        ) from error
    added = _added(without_head(model), without_head(base.model))
    _check_whole(directory, adapter, added)
    assert vocab_size == base.vocab_size, adapter
    mx.eval(added)
    added_nbytes = sum(array.nbytes for array in added.values())
    nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return replace(
        base,
        model=model,
        base=base if base.base is None else base.base,
        nbytes=nbytes,
        shared_nbytes=nbytes - added_nbytes,
        fingerprint=fingerprint_of(added, config, of=base.fingerprint),
    )


def check_adapter(adapter: str) -> None:
    """Raise LoadFailed where the directory has no adapter that mlx-lm could load, as its file names and configuration
    say."""
    _read_config(Path(adapter).expanduser(), adapter)


def _read_config(directory: Path, adapter: str) -> dict[str, Any]:
    if not directory.is_dir():
        raise LoadFailed(f"{adapter}: no such directory. Give the directory that mlx_lm.lora wrote the adapter to.")
    lacking = [name for name in (_CONFIG, _WEIGHTS) if not (directory / name).is_file()]
    if lacking:
        raise LoadFailed(f"{adapter} is missing {' and '.join(lacking)}, so mlx-lm cannot load it as an adapter.")
    try:
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{adapter}: its {_CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise LoadFailed(f"{adapter}: its {_CONFIG} is not a JSON object.")
    if "peft_type" in config:
        raise LoadFailed(
            f"{adapter} is a PEFT adapter, which mlx-lm cannot load. Train it with mlx_lm.lora, or fuse it."
        )
    return cast(dict[str, Any], config)


def _added(model: nn.Module, base: nn.Module) -> dict[str, mx.array]:
    """The arrays of the adapted model that the base does not have, by name."""
    of_base = {id(array) for _, array in tree_flatten(base.parameters())}
    return {name: array for name, array in tree_flatten(model.parameters()) if id(array) not in of_base}


def _check_whole(directory: Path, adapter: str, added: dict[str, mx.array]) -> None:
    """Raise LoadFailed if the file lacks weights, which mlx-lm would initialize at random."""
    weights = cast(dict[str, mx.array], mx.load(str(directory / _WEIGHTS)))
    lacking = sorted(set(added) - set(weights))
    if lacking:
        raise LoadFailed(f"{adapter}: {_WEIGHTS} lacks {lacking[0]} (and {len(lacking) - 1} more). Is it complete?")


def _twin(base: LoadedModel) -> nn.Module:
    """A copy of the module tree that shares its arrays: replacing a layer in one does not affect the other."""
    made: dict[int, Any] = {}

    def twin(value: Any) -> Any:
        if isinstance(value, nn.Module):
            # A module may occur in several places.
            if id(value) not in made:
                module: Any = nn.Module.__new__(type(value))
                made[id(value)] = module
                cast(nn.Module, module).__dict__.update(
                    {name: twin(attribute) for name, attribute in vars(value).items()}
                )
                for name, item in cast(dict[str, Any], value).items():
                    module[name] = twin(item)
            return made[id(value)]
        if isinstance(value, dict):
            return {name: twin(item) for name, item in cast(dict[str, Any], value).items()}
        if isinstance(value, list | tuple | set):
            return cast(Any, type(cast(object, value)))(map(twin, cast(Iterable[Any], value)))
        if callable(value) and not isinstance(value, type):
            # It may refer to modules of the base, as a bound method does.
            raise LoadFailed(f"{base.name}: adapters cannot share the weights of a model of type {base.architecture}.")
        return value

    return cast(nn.Module, twin(base.model))

"""Finds and reads the head of a model: the tensors in its files decide, not its configuration.

Heads are in the checkpoint itself, where mlx-lm drops them, in a file beside it, or in a folder of their own (a
drafter, `model_type: *_mtp`). `FORMATS` has one row per family. A wrong row is never a wrong answer, as what a head
guesses is verified: only fewer guesses are right.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from reprise.core.errors import LoadFailed, first_line
from reprise.engine.models.assistant import AssistantHead, layers_to_read
from reprise.engine.models.headed import Head, HeadedModel, HeadedSeeingModel, MtpHead
from reprise.engine.models.model_files import HEADS_BESIDE, WEIGHTS, read_config
from reprise.engine.states.seeing import SeeingModel

_NORM = re.compile(r"norm[^.]*\.weight$")
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+_proj\.\w+)")
_MX_FORMATS = {32: "mxfp", 16: "nvfp"}
"""Names of formats without biases, by their group size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFormat:
    """How a family of models stores its head. All of them continue from the hidden state behind the last norm.

    `text_at`: the attribute of mlx-lm's model that has the language model. `prefixes`: regular expressions of what
    stands before the names of a head's tensors. `names`: how those begin, another regular expression, and how in
    `MtpHead`. `one_layer`: the configuration under which the family's model is that of the head's layer alone.
    """

    text_at: str = ""
    prefixes: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: tuple[str, ...] = ()
    """Copies of the model's embedding and output."""
    one_layer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    promised_by: str = ""
    """The key of the configuration that has the number of its layers."""
    norm_offset: float = 0.0
    """What is added to the weights of norms in a checkpoint that was not converted for MLX."""
    needs_array: bool = False
    body: str = "model"
    """The attribute of the language model that has embedding, layers and the last norm."""
    embedding: str = "embed_tokens"
    eps: str = "rms_norm_eps"
    """The key of the configuration that has what norms add."""
    hidden_first: bool = False
    """Whether `fc` takes the hidden state before the embedding."""
    window: str = ""
    """The key of the configuration that has the window of its layer; "": it sees everything."""
    pattern: str = ""
    """The key that has the kinds of the head's layers, where it has several; "": it is one layer."""
    drafters: tuple[str, ...] = ()
    """Model types of folders with an assistant, which reads the model's entries. It is all the family has, if any."""


_QWEN = HeadFormat(
    text_at="language_model",
    prefixes=(r"(?:model\.)?(?:language_model\.)?mtp\.",),
    one_layer={"num_hidden_layers": 1, "full_attention_interval": 1},
    promised_by="mtp_num_hidden_layers",
    norm_offset=1.0,
)
_QWEN3_NEXT = replace(_QWEN, text_at="", one_layer={**_QWEN.one_layer, "decoder_sparse_step": 1, "mlp_only_layers": []})
_NEXTN_NAMES = {
    r"eh_proj\.": "fc.",
    r"enorm\.": "pre_fc_norm_embedding.",
    r"hnorm\.": "pre_fc_norm_hidden.",
    r"shared_head[._]norm\.": "norm.",
    r"mtp_block\.": "layers.0.",
    "": "layers.0.",
}
_NEXTN = HeadFormat(
    # The layer behind the last one, of which the configuration does not count.
    prefixes=(r"model\.layers\.{num_hidden_layers}\.",),
    names=_NEXTN_NAMES,
    ignored=("embed_tokens.", "shared_head.head.", "self_attn.rotary_emb."),
    one_layer={"num_hidden_layers": 1, "first_k_dense_replace": 0},
    promised_by="num_nextn_predict_layers",
)
_NEXTN_LATENT = replace(_NEXTN, needs_array=True)
_NEMOTRON = HeadFormat(
    prefixes=(r"(?:language_model\.)?mtp\.",),
    names={
        r"layers\.\d+\.eh_proj\.": "fc.",
        r"layers\.\d+\.enorm\.": "pre_fc_norm_embedding.",
        r"layers\.\d+\.hnorm\.": "pre_fc_norm_hidden.",
        r"layers\.\d+\.final_layernorm\.": "norm.",
    },
    one_layer={},
    promised_by="num_nextn_predict_layers",
    body="backbone",
    embedding="embeddings",
    eps="layer_norm_epsilon",
    pattern="mtp_hybrid_override_pattern",
)
_MIMO = HeadFormat(
    # Of several modules, the first: it is asked again for each further token.
    prefixes=(r"model\.mtp_layers\.0\.",),
    names={
        r"input_proj\.": "fc.",
        r"token_layernorm\.": "pre_fc_norm_embedding.",
        r"hidden_layernorm\.": "pre_fc_norm_hidden.",
        r"final_layernorm\.": "norm.",
        "": "layers.0.",
    },
    one_layer={"num_hidden_layers": 1},
    promised_by="num_nextn_predict_layers",
    hidden_first=True,
)
_MIMO_FLASH = HeadFormat(
    prefixes=(r"model\.mtp\.layers\.0\.",),
    names={
        **{name: ours for name, ours in _NEXTN_NAMES.items() if "norm" in name or "proj" in name},
        r"final_layernorm\.": "norm.",
        r"pre_mlp_layernorm\.": "layers.0.post_attention_layernorm.",
        "": "layers.0.",
    },
    # mlx-lm's model needs a layer of each kind. The first is the head's.
    one_layer={"num_hidden_layers": 2, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]},
    promised_by="num_nextn_predict_layers",
    eps="layernorm_epsilon",
    window="sliding_window_size",
)
_GEMMA = HeadFormat(text_at="language_model", drafters=("gemma4_assistant", "gemma4_unified_assistant"))

FORMATS: Mapping[str, HeadFormat] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN3_NEXT,
    "glm4_moe": _NEXTN,
    "glm4_moe_lite": _NEXTN_LATENT,
    "deepseek_v3": _NEXTN_LATENT,
    "nemotron_h": _NEMOTRON,
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_FLASH,
    "gemma4": _GEMMA,
    "gemma4_text": replace(_GEMMA, text_at=""),
}
"""By architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """What a user may want to know of a model's head.

    `place`: the file or folder that it was read from. `nbytes`: of its weights; `nbytes_per_token`: of its entries.
    `reason`: why the model has none although its configuration promises one, or the files have one; "" if it has.
    """

    place: str = ""
    nbytes: int = 0
    nbytes_per_token: int = 0
    reason: str = ""
    is_model: bool = False
    """Whether it is a small model beside the model, a companion."""

    @property
    def is_there(self) -> bool:
        return self.reason == ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StoredHead:
    """The tensors of a head in one place, by their names in `MtpHead`, lazy."""

    place: str
    tensors: Mapping[str, mx.array]
    is_converted: bool
    """Whether they were converted for MLX, so that norms are as it has them."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """That of its folder, if it has one."""


def attach_head(
    model: nn.Module, config: Mapping[str, Any], directory: Path, *, mtp: str
) -> tuple[nn.Module, HeadFacts | None]:
    """The model with its head, and where that is from. `mtp`: "auto", "off", or the folder that has the head.

    Without a head the model as it is, and why, if one was to be expected. Raises LoadFailed if it does not fit, where a
    folder was given.
    """
    stored = _find(config, directory, mtp=mtp)
    if not isinstance(stored, _StoredHead):
        return model, stored
    form = FORMATS[str(config.get("model_type"))]
    try:
        head = _read(stored, form, config, model)
    except LoadFailed as error:
        if mtp != "auto":
            raise LoadFailed(f"--mtp {mtp}: {error}") from error
        return model, HeadFacts(reason=str(error))
    nbytes = sum(array.nbytes for _, array in tree_flatten(head.parameters()))
    if isinstance(model, SeeingModel):
        headed = HeadedSeeingModel(model, head)
    else:
        headed = HeadedModel(model, head, text_at=form.text_at, body=form.body, embedding=form.embedding)
    return headed, HeadFacts(place=stored.place, nbytes=nbytes)


def look_for_head(config: Mapping[str, Any], directory: Path, *, mtp: str) -> HeadFacts | None:
    """What the files say of a head, as `attach_head` would find it, without reading its weights. Raises LoadFailed."""
    stored = _find(config, directory, mtp=mtp)
    if not isinstance(stored, _StoredHead):
        return stored
    return HeadFacts(place=stored.place, nbytes=sum(array.nbytes for array in stored.tensors.values()))


def without_head(model: nn.Module) -> nn.Module:
    """The model alone."""
    return model.model if isinstance(model, HeadedModel) else model


def with_entries(model: nn.Module) -> nn.Module:
    """The model and its head, or the model alone where the head adds nothing to what is stored."""
    return model.model if isinstance(model, HeadedModel) and isinstance(model.head, AssistantHead) else model


def _find(config: Mapping[str, Any], directory: Path, *, mtp: str) -> _StoredHead | HeadFacts | None:
    """The head's tensors; why there are none, if they were to be expected; None: they were not. Raises LoadFailed."""
    if mtp == "off":
        return None
    folder = None if mtp == "auto" else Path(mtp).expanduser()
    form = FORMATS.get(str(config.get("model_type")))
    if form is None and folder is None:
        return None
    if form is None:
        kind, known = config.get("model_type"), ", ".join(sorted(FORMATS))
        raise LoadFailed(f"--mtp {mtp}: the model is of type {kind!r}, and heads are known of {known}")
    if folder is not None:
        return _in_folder(folder, form, config)
    stored = _in_checkpoint(directory, form, config)
    promised = int(_text_of(config).get(form.promised_by) or 0) if form.promised_by else 0
    if stored is not None or promised == 0:
        return stored
    return HeadFacts(
        reason=f"its config.json has {form.promised_by} = {promised}, but its files lack the head's tensors"
    )


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about the language model."""
    return cast(Mapping[str, Any], config.get("text_config") or config)


# Where it is.


def _in_checkpoint(directory: Path, form: HeadFormat, config: Mapping[str, Any]) -> _StoredHead | None:
    """The head in the model's own files or beside them."""
    if form.drafters:
        return None
    files = sorted(directory.glob(WEIGHTS))
    stored = _stored(files, form, config, place=directory.name)
    for name in HEADS_BESIDE:
        if stored is None and (directory / name).is_file():
            stored = _stored([directory / name], form, config, place=name, is_bare=True)
    return stored


def _in_folder(folder: Path, form: HeadFormat, config: Mapping[str, Any]) -> _StoredHead:
    """The head in a folder of its own, or in one of a whole model. Raises LoadFailed."""
    if not folder.is_dir():
        raise LoadFailed(f"--mtp {folder}: no such directory. Give a folder with a head, auto or off.")
    own = read_config(folder, f"--mtp {folder}")
    kind = str(own.get("model_type", ""))
    is_bare = kind in form.drafters if form.drafters else kind.endswith("_mtp")
    files = sorted(folder.glob("*.safetensors"))
    stored = _stored(files, form, config, place=str(folder), is_bare=is_bare)
    if stored is None:
        raise LoadFailed(f"--mtp {folder}: it has no tensors of a head for this model.")
    return replace(stored, config=own)


def _stored(
    files: Sequence[Path], form: HeadFormat, config: Mapping[str, Any], *, place: str, is_bare: bool = False
) -> _StoredHead | None:
    """The head's tensors in these files. `is_bare`: all are its own, with or without the prefix."""
    text = _text_of(config)
    prefixes = [prefix.replace("{num_hidden_layers}", str(text.get("num_hidden_layers"))) for prefix in form.prefixes]
    found: dict[str, mx.array] = {}
    is_converted = True
    for file in files:
        weights, metadata = mx.load(str(file), return_metadata=True)
        for name, array in weights.items():
            own = next((name[m.end() :] for prefix in prefixes if (m := re.match(prefix, name)) is not None), None)
            if own is None and is_bare:
                own = name.removeprefix("model.")
            elif own is not None:
                # A folder's names have no prefix once they are converted, whatever wrote it.
                is_converted = is_converted and metadata.get("format") == "mlx"
            if own is not None and not own.startswith(form.ignored):
                found[_name(own, form)] = array
    return _StoredHead(place=place, tensors=found, is_converted=is_converted) if found else None


def _name(stored: str, form: HeadFormat) -> str:
    for theirs, ours in form.names.items():
        if (match := re.match(theirs, stored)) is not None:
            return ours + stored[match.end() :]
    return stored


# What it is.


def _one_layer(config: Mapping[str, Any]) -> nn.Module:
    """A model of the head's layer alone, of the same family."""
    form = FORMATS[str(config["model_type"])]
    model_class, arguments = mlx_lm_utils._get_classes(dict(config))  # pyright: ignore[reportPrivateUsage]
    own = dict(form.one_layer)
    if form.pattern:
        kinds = list(_text_of(config)[form.pattern])
        own |= {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds)}
    given = {"text_config": {**_text_of(config), **own}} if "text_config" in config else own
    return cast(nn.Module, model_class(arguments.from_dict({**config, **given})))


def _read(stored: _StoredHead, form: HeadFormat, config: Mapping[str, Any], model: nn.Module) -> Head:
    """A head for this model with these weights. Raises LoadFailed if they do not fit it."""
    try:
        if form.drafters:
            tensors = dict(stored.tensors)
            head = AssistantHead(stored.config, read_from=layers_to_read(config))
        else:
            one = _one_layer(config)
            tensors = _converted(stored, one, form)
            head = _of_layers(one, form, config, model)
            _check_number(tensors, head, stored)
        _quantise(head, tensors)
        head.load_weights(list(tensors.items()))
    except LoadFailed:
        raise
    except Exception as error:
        # Names and shapes of other families and of other tools: anything may be raised.
        raise LoadFailed(f"the head in {stored.place} does not fit the model: {first_line(error)}") from error
    head.eval()
    return head


def _of_layers(one: nn.Module, form: HeadFormat, config: Mapping[str, Any], model: nn.Module) -> MtpHead:
    text = _text_of(config)
    width, eps = int(text["hidden_size"]), float(text[form.eps])
    # Those of a model that sees are told where tokens stand.
    layers = model.head_layers(form.one_layer) if isinstance(model, SeeingModel) else list(cast(Any, one).layers)
    if not form.pattern:
        del layers[1:]
    window = int(text[form.window]) if form.window else None
    return MtpHead(layers, width=width, eps=eps, needs_array=form.needs_array, window=window)


def _check_number(tensors: Mapping[str, mx.array], head: MtpHead, stored: _StoredHead) -> None:
    num = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0)
    if num > len(head.layers):
        raise LoadFailed(f"the head in {stored.place} has {num} layers, and only those with one are known")


def _converted(stored: _StoredHead, one: nn.Module, form: HeadFormat) -> dict[str, mx.array]:
    """The tensors by the names and in the form of mlx-lm's layers, as the model's own code converts a checkpoint."""
    norms = {name: array for name, array in stored.tensors.items() if _NORM.search(name) and array.ndim == 1}
    rest = {name: array for name, array in stored.tensors.items() if name not in norms}
    outer = {name: array for name, array in rest.items() if not name.startswith("layers.")}
    if form.hidden_first:
        outer = {name: mx.concatenate(mx.split(array, 2, axis=-1)[::-1], axis=-1) for name, array in outer.items()}
    inner = {f"{form.body}.{name}": array for name, array in rest.items() if name not in outer}
    sanitized = cast(dict[str, mx.array], cast(Any, one).sanitize(inner)) if hasattr(one, "sanitize") else inner
    own = {"layers." + name.partition("layers.")[2]: array for name, array in _stacked(sanitized).items()}
    offset = 0.0 if stored.is_converted else form.norm_offset
    return {**outer, **own, **{name: array + offset if offset != 0 else array for name, array in norms.items()}}


def _stacked(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts that are still stored one by one, as one array for each projection."""
    experts: dict[str, dict[int, mx.array]] = defaultdict(dict)
    found: dict[str, mx.array] = {}
    for name, array in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name] = array
        else:
            experts[f"{match[1]}.switch_mlp.{match[3]}"][int(match[2])] = array
    return found | {name: mx.stack([each[at] for at in sorted(each)]) for name, each in experts.items()}


def _quantise(head: Head, tensors: Mapping[str, mx.array]) -> None:
    """Have the head's layers take quantised weights where the tensors are; their shapes say in which form."""

    def form_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        scales = tensors.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        width = cast(mx.array, cast(Any, module).weight).shape[-1]
        bits, group_size = tensors[f"{path}.weight"].shape[-1] * 32 // width, width // scales.shape[-1]
        mode = "affine" if f"{path}.biases" in tensors else f"{_MX_FORMATS.get(group_size, 'mxfp')}{bits}"
        return {"bits": bits, "group_size": group_size, "mode": mode}

    nn.quantize(head, class_predicate=form_of)

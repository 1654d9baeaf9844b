"""Loads a model with mlx-lm from a local directory or a hub id, with errors as one sentence.

What only running it shows (the width of its logits, whether it takes quantized entries) is tried once it is loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from reprise.chat.answers.thinking_learning import with_learnt_thinking
from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.extent import extent_of
from reprise.chat.families.family import with_calls_of_family
from reprise.chat.learnt import FILE_NAME, with_learnt
from reprise.chat.text_model import TextModel
from reprise.core.embedding import Embedder
from reprise.core.errors import LoadFailed, first_line
from reprise.core.installation import mend_line
from reprise.core.job import Number, read_generation_config
from reprise.core.kinds import Full
from reprise.core.settings import KV_GROUP_SIZES, Settings
from reprise.disk.folders.model_folder import PartsElsewhere
from reprise.engine.models.embedders import EmbedderPlan, is_encoder, look_for_embedder, read_embedder
from reprise.engine.models.fingerprint import fingerprint_of
from reprise.engine.models.headed import blueprint_with_head
from reprise.engine.models.heads import HeadFacts, attach_head, with_entries, without_head
from reprise.engine.models.hub import Download, fetch, fetch_config, local_directory, plan_download
from reprise.engine.models.model_files import (
    WEIGHTS,
    check_quantisation,
    check_weights,
    parsed_config,
    quantisation,
    quantisation_method,
    read_config,
)
from reprise.engine.models.vision import digest_of_processor, has_source, is_of_source, why_blind
from reprise.engine.states.blueprint import Blueprint, KvSpec, OpaqueSpec, blueprint_of
from reprise.engine.states.layers import FullLayer
from reprise.engine.states.seeing import Vision
from reprise.engine.states.sequence_batch import SequenceBatch

log = logging.getLogger("reprise.engine")

_TRIAL = (3, 2, 1, 1)
"""Tokens per pass: prefill of an empty and a non-empty state, and decode, which some models implement separately."""

_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to run.

    `name`: its name for clients. `context`: the most positions that its configuration allows (None: not specified).
    `fingerprint`: differs between models whose layer states are incompatible.
    """

    name: str
    model: nn.Module
    architecture: str
    text: TextModel
    blueprint: Blueprint
    vocab_size: int
    context: int | None
    nbytes: int
    fingerprint: str
    num_parameters: int | None = None
    """None: not known, as where each rank has a part of them."""
    quantisation: str = ""
    """The weights' format in a few words; empty: not known."""
    shared_nbytes: int = 0
    """Of `nbytes`: what this model holds together with `base`."""
    base: LoadedModel | None = None
    """The model that was read from the files, where this is another one on its weights: with an adapter, or with
    another KV format."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `config.json` says."""
    head: HeadFacts | None = None
    """Its head, or why it has none that was to be expected; None: none was, or it is turned off."""
    sampling: Mapping[str, Number] = field(default_factory=dict[str, Number])
    """Sampling defaults from `generation_config.json`, by the names of `Sampling`."""
    may_run_ahead: bool = True
    """Whether a pass may begin before the tokens that it is about have been read."""
    room_elsewhere: int | None = None
    """The least bytes that another machine with a part of this model has for layer states; None: it is whole here."""
    parts_elsewhere: PartsElsewhere | None = None
    """What those machines have on disk; None: the model is whole here."""
    vision: Vision | None = None
    """Of a model that sees; None: it takes text alone."""
    embedder: Embedder | None = None
    """Of a model that makes vectors or scores; None: it makes text."""

    @property
    def held_nbytes(self) -> int:
        """Bytes of its weights and of all of `base`, which it holds even where it has replaced a part."""
        return self.nbytes + (0 if self.base is None else self.base.nbytes - self.shared_nbytes)

    def without_weights(self) -> LoadedModel:
        """A copy without weights, which cannot run."""
        return replace(self, model=nn.Module(), base=None)


def load_model(
    source: str,
    *,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    chat_template: str | None = None,
    learnt: str | None = None,
    trusts_remote_code: bool = False,
    downloads: bool = True,
    mtp: str = "off",
    shard: Callable[[nn.Module], None] | None = None,
    images: str = "auto",
    embedder: str = "auto",
) -> LoadedModel:
    """Load a local directory or a hub id. `chat_template`: Jinja source instead of the model's. Raises LoadFailed.

    `learnt`: a file to read instead of learning from the template; None: the one beside the model, if there is one.

    `mtp`: where its head is, see `attach_head`; a model in parts has none. `shard` reduces the model to this machine's
    part before its weights are read. `images`: "auto" or "off", whether the model sees where it can. `embedder`: see
    `look_for_embedder`; an embedder has no parts, head or layer states.
    """
    directory = model_directory(source, downloads=downloads)
    config = check_config(read_config(directory, source), source)
    summary = check_weights(directory, source)
    plan = look_for_embedder(directory, config, choice=embedder)
    if plan is not None:
        if shard is not None:
            raise LoadFailed(f"{source} makes embeddings, and is not split over machines. Serve it on one of them.")
        return _load_embedder(directory, source, plan, quantised=quantisation(config, summary))
    check_makes_text(config, source)
    chosen = _tokenizer_config(chat_template, trusts_remote_code=trusts_remote_code)
    read: _ReadModel | None = None
    blind = why_blind(config, has_tower=summary.has_tower, images=images, is_whole=shard is None)
    if blind is None:
        read = _read_seeing(directory, source, chosen, trusts_remote_code=trusts_remote_code)
    elif blind != "":
        log.info("%s takes text alone: %s", source, blind)
    if read is None:
        read = _read_text(directory, source, chosen, shard=shard)
    tokenizer, config = read.tokenizer, read.config
    model, head = attach_head(read.model, config, directory, mtp=mtp if shard is None else "off")
    if kv_bits is not None:
        check_quantised(model, source, bits=kv_bits, group_size=kv_group_size)
    blueprint = blueprint_with_head(model, kv_bits=kv_bits, kv_group_size=kv_group_size)
    vocab_size = vocabulary_size(model, blueprint)
    head = None if head is None else replace(head, nbytes_per_token=_entry_nbytes(model, blueprint))
    weights = dict(tree_flatten(model.parameters()))
    # All arrays, not only weights: lazy ones would be bound to this thread, and another one runs the model.
    mx.eval([array for _, array in tree_flatten(cast(dict[str, Any], model))])
    return LoadedModel(
        name=directory.name if is_local(source) else source,
        model=model,
        architecture=str(config.get("model_type", "unknown")),
        text=_whole_text(tokenizer, directory, config, vocab_size=vocab_size, vision=read.vision, learnt=learnt),
        blueprint=blueprint,
        vocab_size=vocab_size,
        context=context_of(config),
        nbytes=sum(array.nbytes for array in weights.values()),
        num_parameters=None if shard is not None else _num_parameters(model),
        quantisation=quantisation(config, summary),
        fingerprint=_fingerprint(model, _facts(config, kv_bits, kv_group_size, read.vision)),
        config=config,
        head=head,
        sampling=read_generation_config(_generation_config(directory, source), vocab_size=vocab_size),
        vision=read.vision,
    )


def _load_embedder(directory: Path, source: str, plan: EmbedderPlan, *, quantised: str) -> LoadedModel:
    config = mlx_lm_utils.load_config(directory)
    wrapper = _load_tokenizer(str(directory), source, {}, eos=config.get("eos_token_id") or [])
    model, embedder = read_embedder(directory, source, config, plan, inner_tokenizer(wrapper))
    weights = dict(tree_flatten(model.parameters()))
    mx.eval([array for _, array in tree_flatten(cast(dict[str, Any], model))])
    return LoadedModel(
        name=directory.name if is_local(source) else source,
        model=model,
        architecture=str(config["model_type"]),
        # Its chat template is for pairs at most: nobody chats with it.
        text=replace(text_model_of(wrapper, vocab_size=embedder.vocab_size), render=None, template_source=""),
        blueprint=Blueprint(specs=()),
        vocab_size=embedder.vocab_size,
        context=embedder.max_tokens,
        nbytes=sum(array.nbytes for array in weights.values()),
        num_parameters=_num_parameters(model),
        quantisation=quantised,
        fingerprint=fingerprint_of(weights, {"config": config, "embedder": embedder.summary}),
        config=config,
        embedder=embedder,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadModel:
    """What a source made of a folder."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    vision: Vision | None = None


def _read_text(
    directory: Path, source: str, chosen: dict[str, Any], *, shard: Callable[[nn.Module], None] | None
) -> _ReadModel:
    config = read_config(directory, source)
    try:
        model, tokenizer, config = mlx_lm_utils.load(
            str(directory), tokenizer_config=chosen, return_config=True, lazy=shard is not None
        )
        if shard is not None:
            shard(model)
    except LoadFailed:
        raise
    except FileNotFoundError as error:
        raise LoadFailed(f"{source}: a file of the model is missing: {error}. Is the download complete?") from error
    except ValueError as error:
        quantised = quantisation_method(config)
        hint = "" if quantised is None else f" Its weights are quantized ({quantised}): is there a version for MLX?"
        raise LoadFailed(f"{source}: mlx-lm cannot load this model: {first_line(error)}{hint}") from error
    except Exception as error:
        log.error("%s: loading failed with %r", source, error)
        raise LoadFailed(f"{source}: mlx-lm failed to load this model: {first_line(error)}") from error
    return _ReadModel(model=model, tokenizer=tokenizer, config=config)


def _read_seeing(
    directory: Path, source: str, chosen: dict[str, Any], *, trusts_remote_code: bool
) -> _ReadModel | None:
    """The model from mlx-vlm; None where mlx-lm has to have it, for text alone. Raises LoadFailed if it has not."""
    from reprise.engine.models.vlm_source import load_seeing, model_and_reader  # noqa: PLC0415 (an extra)

    config = mlx_lm_utils.load_config(directory)
    tokenizer = _load_tokenizer(str(directory), source, chosen, eos=config.get("eos_token_id"))
    try:
        whole, processor = load_seeing(directory, source, trusts_remote_code=trusts_remote_code)
        text = text_model_of(tokenizer, vocab_size=len(inner_tokenizer(tokenizer)))
        model, reader = model_and_reader(whole, processor, text, config, files=digest_of_processor(directory))
        blueprint = blueprint_of(model)
        opaque = [spec for spec in blueprint.leaves if isinstance(spec, OpaqueSpec)]
        if opaque:
            raise LoadFailed(
                f"its layers keep their state in a class of their own ({type(opaque[0].prototype).__name__})."
            )
    except LoadFailed as error:
        log.warning("%s takes text alone: %s", source, error)
        return None
    return _ReadModel(model=model, tokenizer=tokenizer, config=config, vision=Vision(sight=model.sight, reader=reader))


def _num_parameters(model: nn.Module) -> int | None:
    try:
        return mlx_lm_utils.get_total_parameters(model)
    except AttributeError:
        return None  # A layer that is quantized in another form than mlx-lm's.


def on_weights_of(held: LoadedModel, settings: Settings) -> LoadedModel:
    """The model that the settings name, on the weights of `held`, which was read from the same files.

    Raises LoadFailed.
    """
    source, kv_bits, kv_group_size = settings.model, settings.kv_bits, settings.kv_group_size
    directory = model_directory(source, downloads=False)
    model, head = attach_head(without_head(held.model), held.config, directory, mtp=settings.head_source)
    if kv_bits is not None:
        check_quantised(model, source, bits=kv_bits, group_size=kv_group_size)
    weights = dict(tree_flatten(model.parameters()))
    nbytes = sum(array.nbytes for array in weights.values())
    return replace(
        held,
        model=model,
        head=head,
        nbytes=nbytes,
        name=directory.name if is_local(source) else source,
        text=with_template(held, settings),
        blueprint=blueprint_with_head(model, kv_bits=kv_bits, kv_group_size=kv_group_size),
        fingerprint=_fingerprint(model, _facts(held.config, kv_bits, kv_group_size, held.vision)),
        base=held,
        shared_nbytes=min(nbytes, held.nbytes),
    )


def _fingerprint(model: nn.Module, facts: Mapping[str, Any]) -> str:
    return fingerprint_of(dict(tree_flatten(with_entries(model).parameters())), facts)


def _facts(config: Mapping[str, Any], kv_bits: int | None, kv_group_size: int, vision: Vision | None) -> dict[str, Any]:
    """What a fingerprint says beside the weights."""
    facts = {"config": config, "kv": [kv_bits, kv_group_size]}
    return facts if vision is None else facts | {"vision": [vision.sight.source, vision.sight.files]}


def _whole_text(
    tokenizer: TokenizerWrapper,
    directory: Path,
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    vision: Vision | None,
    learnt: str | None,
) -> TextModel:
    """The text side, as its template shows it or a file says, with an image side if the template has a place for
    images."""
    text = text_model_of(tokenizer, vocab_size=vocab_size, model_type=str(config.get("model_type", "")))
    if text.calls.family:
        log.warning(
            "%s: its chat template shows tools and no call, so calls are read as %s writes them",
            directory.name,
            text.calls.family,
        )
    file = directory / FILE_NAME if learnt is None else Path(learnt).expanduser()
    if learnt is not None or file.is_file():
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadFailed(f"{file}: it cannot be read: {first_line(error)}") from error
        text = with_learnt(text, content, source=str(file))
        log.info("%s says what the chat template of %s writes", file, directory.name)
    return text if vision is None else replace(text, images=vision.reader.for_template_of(text))


def _tokenizer_config(chat_template: str | None, *, trusts_remote_code: bool) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if chat_template is None else {"chat_template": chat_template}
    return chosen | {"trust_remote_code": True} if trusts_remote_code else chosen


def model_directory(source: str, *, downloads: bool = True) -> Path:
    """Where the files of a model are, fetched from the hub where it has something newer. Raises LoadFailed.

    Without `downloads`, as they are here.
    """
    return Path(source).expanduser() if is_local(source) else fetch(source, downloads=downloads)


def checked_download(model: str) -> Download:
    """What downloading a model of the hub would take. Raises LoadFailed for one that could not be run or stored."""
    check_config(parsed_config(fetch_config(model), model), model)
    return plan_download(model)


def is_loadable(directory: Path) -> bool:
    """Whether the files look like those of a language model that mlx-lm has: by their names and the configuration."""
    try:
        check_config(read_config(directory, str(directory)), str(directory))
    except (LoadFailed, OSError):
        return False
    return any(directory.glob(WEIGHTS))


def has_architecture(kind: str) -> bool:
    """Whether mlx-lm has models of this type."""
    try:
        mlx_lm_utils._get_classes({"model_type": kind})  # pyright: ignore[reportPrivateUsage] -- the only way to find out
    except ValueError:
        return False
    return True


def is_local(source: str) -> bool:
    """Whether `source` is a local directory rather than a hub id. Raises LoadFailed if it is neither."""
    path = Path(source).expanduser()
    if not path.exists():
        if source.startswith((".", "/", "~")):
            raise LoadFailed(f"{source}: no such directory. Give the path of a model directory, or a hub id.")
        return False
    if not path.is_dir():
        raise LoadFailed(f"{source} is a file. Give the directory with config.json and the weights.")
    return True


def check_config(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the configuration if there is code for the model and its weights can be read. Raises LoadFailed."""
    if config.get("model_file") is not None:
        raise LoadFailed(f"{source} needs its own Python code, which Reprise does not run. Use another version.")
    if not isinstance(config.get("model_type"), str):
        raise LoadFailed(f"{source}: its config.json has no model_type, so it is not a language model for mlx-lm.")
    try:
        if not is_encoder(config):
            mlx_lm_utils._get_classes(config)  # pyright: ignore[reportPrivateUsage] -- the only way to find out
    except ValueError as error:
        if not is_of_source(config):
            may_see = config.get("vision_config") is not None and not has_source()
            hint = f" If it sees images, an extra may have it: {mend_line('vision')}" if may_see else ""
            raise LoadFailed(
                f"{source} is a model of type {config['model_type']!r}, which mlx-lm {version('mlx-lm')} does not "
                f"support. Choose another model, or install a newer version of Reprise.{hint}"
            ) from error
    check_quantisation(config, source)
    return config


def check_makes_text(config: Mapping[str, Any], source: str) -> None:
    """Raise LoadFailed for an encoder, which can only make embeddings."""
    if is_encoder(config):
        raise LoadFailed(
            f"{source} is an encoder ({config['model_type']}), which makes embeddings and no text. It cannot be served "
            "with --embedder off."
        )


def _generation_config(directory: Path, source: str) -> dict[str, Any]:
    """The content of `generation_config.json`; empty if it cannot be read, since the model runs without it."""
    try:
        config = json.loads((directory / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: cannot read its generation_config.json: %s", source, first_line(error))
        return {}
    return cast(dict[str, Any], config) if isinstance(config, dict) else {}


def context_of(config: Mapping[str, Any]) -> int | None:
    """The most positions that a configuration allows, or None if not specified."""
    for part in (config, cast(dict[str, Any], config.get("text_config") or {})):
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def text_model_of(tokenizer: TokenizerWrapper, *, vocab_size: int, model_type: str = "") -> TextModel:
    """The text side of mlx-lm's tokenizer wrapper, for a model of this type."""
    inner = inner_tokenizer(tokenizer)

    def encode(text: str) -> list[int]:
        return cast(list[int], inner.encode(text, add_special_tokens=False))

    def decode(tokens: Any) -> str:
        return cast(str, inner.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render(messages: Any, **options: Any) -> str:
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, **options))

    added = getattr(inner, "added_tokens_decoder", {})
    backend = getattr(inner, "backend_tokenizer", None)
    text = TextModel(
        encode=encode,
        decode=decode,
        render=render if tokenizer.has_chat_template else None,
        detokenizer=lambda: tokenizer.detokenizer,
        splitters={str(token.content): int(index) for index, token in added.items()},
        eos=frozenset(int(token) for token in tokenizer.eos_token_ids),
        bos=inner.bos_token_id,
        adds_bos=inner.bos_token_id is not None and inner.encode("a")[:1] == [inner.bos_token_id],
        vocab_size=vocab_size,
        template_source=_template_source(inner),
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        think_start_tokens=tuple(tokenizer.think_start_tokens or ()),
        think_end_tokens=tuple(tokenizer.think_end_tokens or ()),
        tool_start=tokenizer.tool_call_start,
        tool_end=tokenizer.tool_call_end,
        parse_tool_call=tokenizer.tool_parser,
        structural_markers=tuple(tokenizer.structural_markers),
        transitions=tokenizer.response_transitions,
        initial_state=tokenizer.response_initial_state,
        tokenizer_json=backend.to_str if backend is not None else None,
        extent=extent_of(backend.to_str()) if backend is not None else None,
    )
    learnt = with_learnt_thinking(text)
    if learnt.think_start is not None and text.think_start is None and text.render is not None:
        # mlx-lm enables thinking in the template only if it knows the markers itself.
        learnt = replace(learnt, render=partial(text.render, enable_thinking=True))
    return with_calls_of_family(replace(learnt, calls=learn_calls(learnt)), model_type)


def inner_tokenizer(tokenizer: TokenizerWrapper) -> Any:
    """The transformers tokenizer inside mlx-lm's wrapper."""
    return cast(Any, tokenizer)._tokenizer


def _template_source(inner: Any) -> str:
    template = getattr(inner, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(value) for value in cast(dict[str, Any], template).values())
    return template if isinstance(template, str) else ""


def load_text_model(source: str) -> TextModel:
    """The tokenizer and template of a local directory or a hub id. Raises LoadFailed."""
    directory = str(Path(source).expanduser()) if is_local(source) else source
    tokenizer = _load_tokenizer(directory, source, {}, eos=_config(source).get("eos_token_id"))
    return text_model_of(tokenizer, vocab_size=len(inner_tokenizer(tokenizer)), model_type=model_type_of(source))


def model_type_of(source: str) -> str:
    """The type of a model, as its configuration says; empty if that is not here."""
    return str(_config(source).get("model_type", ""))


def find_vision(source: str) -> Vision | None:
    """How a model sees, found with those of its weights that this takes; None: it takes text alone, or is not here."""
    try:
        directory = model_directory(source, downloads=False)
        config, summary = read_config(directory, source), check_weights(directory, source)
    except LoadFailed:
        return None
    if why_blind(config, has_tower=summary.has_tower) is not None:
        return None
    read = _read_seeing(directory, source, {}, trusts_remote_code=False)
    return None if read is None else read.vision


def with_template(loaded: LoadedModel, settings: Settings) -> TextModel:
    """The text side of a loaded model with the chat template of the settings that name it, or their file of what is
    learnt. Raises LoadFailed."""
    directory = model_directory(settings.model, downloads=False)
    chosen = _tokenizer_config(settings.chat_template, trusts_remote_code=settings.trusts_remote_code)
    tokenizer = _load_tokenizer(str(directory), settings.model, chosen, eos=loaded.config.get("eos_token_id"))
    return _whole_text(
        tokenizer,
        directory,
        loaded.config,
        vocab_size=loaded.vocab_size,
        vision=loaded.vision,
        learnt=settings.learnt,
    )


def _load_tokenizer(directory: str, source: str, chosen: dict[str, Any], *, eos: Any) -> TokenizerWrapper:
    try:
        return mlx_lm_utils.load_tokenizer(directory, chosen, eos_token_ids=eos)
    except Exception as error:
        # transformers may raise anything.
        raise LoadFailed(f"{source}: its tokenizer cannot be loaded: {first_line(error)}") from error


def _config(source: str) -> dict[str, Any]:
    """The model's configuration; empty if it is not here."""
    directory = Path(source).expanduser() if is_local(source) else local_directory(source)
    file = None if directory is None else directory / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}


def vocabulary_size(model: nn.Module, blueprint: Blueprint) -> int:
    """The width of the logits, from a forward pass: configurations and tokenizers may say otherwise."""
    logits = SequenceBatch(blueprint).forward(model, mx.array([[0]]))
    mx.eval(logits)
    return int(logits.shape[-1])


def _entry_nbytes(model: nn.Module, blueprint: Blueprint) -> int:
    """Bytes of what the model's head adds to each token."""
    rows = SequenceBatch(blueprint)
    rows.forward(model, mx.array([[0]]))
    own = [layer for layer in rows.layers(Full()) if isinstance(layer, FullLayer) and layer.hides_first]
    return sum(plane.shape[1] * plane.shape[3] * plane.dtype.size for layer in own for plane in layer.planes)


def check_quantised(model: nn.Module, source: str, *, bits: int, group_size: int) -> None:
    """Raise LoadFailed if the model cannot run on quantised entries, which not all mlx-lm models support."""
    blueprint = blueprint_with_head(model, kv_bits=bits, kv_group_size=group_size)
    if not any(isinstance(spec, KvSpec) and isinstance(spec.kind, Full) for spec in blueprint.leaves):
        log.warning("%s has no full-attention layer, so --kv-bits has no effect", source)
        return
    _check_widths(model, source, group_size)
    rows = SequenceBatch(blueprint)
    try:
        for num in _TRIAL:
            mx.eval(rows.forward(model, mx.array([[0] * num])), rows.arrays())
    except Exception as error:
        # A model's code may raise anything when it gets a tuple instead of an array.
        reason = first_line(error).partition(". ")[0].rstrip(".:")
        raise LoadFailed(
            f"{source}: its attention does not support quantized KV ({reason}). Start it without --kv-bits."
        ) from error


def _check_widths(model: nn.Module, source: str, group_size: int) -> None:
    rows = SequenceBatch(blueprint_with_head(model))
    mx.eval(rows.forward(model, mx.array([[0]])), rows.arrays())
    widths = {plane.shape[3] for layer in rows.layers(Full()) for plane in layer.planes}
    if all(width % group_size == 0 for width in widths):
        return
    fitting = [size for size in KV_GROUP_SIZES if all(width % size == 0 for width in widths)]
    advice = f"Start it with --kv-group-size {max(fitting)}" if fitting else "Start it without --kv-bits"
    raise LoadFailed(
        f"{source}: entries {' and '.join(map(str, sorted(widths)))} values wide cannot be quantized in groups of "
        f"{group_size}. {advice}."
    )

"""Models that make vectors or scores instead of text: which folder has one, and the model that it holds.

What a vector is made of, the files of sentence-transformers say (`modules.json` and the folders that it names);
`--embedder` says it where they are missing. The body is an encoder (`encoders.py`) or one of mlx-lm's models without
its output matrix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from reprise.core.embedding import Embedder, EmbeddingInput, Pooling
from reprise.core.errors import LoadFailed, first_line
from reprise.core.tokens import as_tokens
from reprise.engine.models.encoders import ENCODERS, EncoderBody
from reprise.engine.models.model_files import WEIGHTS
from reprise.engine.states.blueprint import Blueprint, blueprint_of
from reprise.engine.states.sequence_batch import SequenceBatch

YES_NO = "yes-no"
"""A reranker that is asked whether a document answers a query: its score is how much likelier "yes" is than "no"."""
CLASSIFIER = "ForSequenceClassification"
"""The end of the name of an architecture whose head scores its input."""

_MODULES = "modules.json"
_BESIDE = ("sentence_bert_config.json", "config_sentence_transformers.json")
EMBEDDER_FILES = (_MODULES, *_BESIDE, "*_Pooling/*.json", "*_Dense/*")
"""Files of a folder that only embedders have."""

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
_MARK = "\u241eMARK\u241e"
"""Stands in a rendered template where the pair comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderPlan:
    """What a folder's embedder makes of its body's hidden states."""

    pooling: Pooling = Pooling.MEAN
    normalises: bool = True
    denses: tuple[str, ...] = ()
    """The folders of matrices that a pooled state passes through, in order."""
    score: str = ""
    """`CLASSIFIER` or `YES_NO`, of a reranker; empty: it makes vectors."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    max_tokens: int | None = None

    @property
    def summary(self) -> str:
        """How vectors or scores are made, in a few words."""
        if self.score:
            return "reranker (yes or no)" if self.score == YES_NO else "reranker (cross-encoder)"
        parts = [
            f"{self.pooling} pooling",
            *("dense" for _ in self.denses),
            *(["normalised"] if self.normalises else []),
        ]
        return ", ".join(parts)


def look_for_embedder(directory: Path, config: Mapping[str, Any], *, choice: str = "auto") -> EmbedderPlan | None:
    """What the folder says, or the user's `choice` (`Settings.embedder`); None: it makes text. Raises LoadFailed."""
    if choice == "off":
        return None
    beside = _beside(directory)
    if choice == YES_NO:
        return replace(beside, score=YES_NO)
    has_modules = (directory / _MODULES).is_file()
    plan = _of_modules(directory, beside) if has_modules else beside
    if choice in set(Pooling):
        return replace(plan, pooling=Pooling(choice))
    if _is_classifier(config):
        return replace(beside, score=CLASSIFIER)
    return plan if has_modules or is_encoder(config) else None


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether it is one of the encoders: it can make no text."""
    return config.get("model_type") in ENCODERS


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or ())


def _beside(directory: Path) -> EmbedderPlan:
    """The plan without pooling: the prompts, and the longest input."""
    sizes, more = (_json(directory / name) for name in _BESIDE)
    longest = sizes.get("max_seq_length")
    prompts = cast(dict[str, Any], more.get("prompts") or {})
    texts = {name: text for name, text in prompts.items() if isinstance(text, str)}
    return EmbedderPlan(prompts=texts, max_tokens=longest if isinstance(longest, int) and longest > 0 else None)


def _of_modules(directory: Path, beside: EmbedderPlan) -> EmbedderPlan:
    plan = replace(beside, normalises=False)
    for module in _json_list(directory / _MODULES):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Pooling":
            plan = replace(plan, pooling=_pooling(_json(directory / path / "config.json"), directory))
        elif kind == "Dense":
            plan = replace(plan, denses=(*plan.denses, path))
        elif kind == "Normalize":
            plan = replace(plan, normalises=True)
        elif kind != "Transformer":
            raise LoadFailed(
                f"{directory.name}: its vectors pass through a module {kind!r}, which Reprise does not have."
            )
    return plan


def _pooling(config: Mapping[str, Any], directory: Path) -> Pooling:
    named = {"cls_token": Pooling.CLS, "mean_tokens": Pooling.MEAN, "lasttoken": Pooling.LAST}
    chosen = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    chosen = [name for name in chosen if not name.startswith("include")]
    if isinstance(mode := config.get("pooling_mode"), str):
        chosen = [{"cls": "cls_token", "mean": "mean_tokens"}.get(mode, mode)]
    if len(chosen) != 1 or chosen[0] not in named:
        raise LoadFailed(
            f"{directory.name}: its pooling ({', '.join(chosen) or 'none'}) is not cls, mean or last token."
        )
    return named[chosen[0]]


def _json(file: Path) -> dict[str, Any]:
    """An object in a file; empty where there is none. Raises LoadFailed for a broken one."""
    value = _parsed(file, default={})
    if not isinstance(value, dict):
        raise LoadFailed(f"{file} is not a JSON object.")
    return cast(dict[str, Any], value)


def _json_list(file: Path) -> list[dict[str, Any]]:
    value = _parsed(file, default=[])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in cast(list[object], value)):
        raise LoadFailed(f"{file} is not a list of JSON objects.")
    return cast(list[dict[str, Any]], value)


def _parsed(file: Path, *, default: object) -> object:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{file} cannot be read: {first_line(error)}") from error


class EmbedderModel(nn.Module):
    """A body, and what makes a vector or a score of its hidden states."""

    def __init__(
        self, body: EncoderBody | DecoderBody, head: PoolingHead | ScoringHead | AnswerHead, nbytes_per_token: int
    ) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.nbytes_per_token = nbytes_per_token

    def run(self, inputs: Sequence[EmbeddingInput], *, chunk: int) -> Iterator[mx.array]:
        """Lazy arrays between which a pass may be interrupted; the last one is the result, ``(inputs, dimensions)``.

        `chunk`: the tokens at a time, of an input that is longer and can be cut.
        """
        lengths = [len(each.tokens) for each in inputs]
        tokens = np.zeros((len(inputs), max(lengths)), dtype=np.int32)
        for row, each in zip(tokens, inputs, strict=True):
            row[: len(each.tokens)] = each.tokens
        hidden: mx.array | None = None
        for hidden in self.body.hidden(mx.array(tokens), lengths, [each.num_first for each in inputs], chunk=chunk):
            yield hidden
        assert hidden is not None, "a model has layers"
        yield self.head.result(hidden, lengths).astype(mx.float32)

    def pass_nbytes(self, num_rows: int, length: int) -> int:
        """About what a pass takes beside the weights."""
        return num_rows * length * self.nbytes_per_token


class DecoderBody(nn.Module):
    """One of mlx-lm's models up to its last norm. Causal, so that padding on the right changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._blueprint: Blueprint = blueprint_of(model)

    def hidden(
        self, tokens: mx.array, lengths: Sequence[int], first: Sequence[int | None], *, chunk: int
    ) -> Iterator[mx.array]:
        """As `EncoderBody.hidden`, but cut between tokens: one long input a `chunk` at a time."""
        body = cast(Any, self.model).model
        if tokens.shape[1] <= chunk or tokens.shape[0] > 1:
            yield body(tokens)
            return
        rows = SequenceBatch(self._blueprint)
        parts: list[mx.array] = []
        for start in range(0, tokens.shape[1], chunk):
            parts.append(rows.forward(body, tokens[:, start : start + chunk]))
            mx.async_eval(parts[-1], rows.arrays())
            yield parts[-1]
        yield mx.concatenate(parts, axis=1)


class BothWaysDecoder(DecoderBody):
    """Gemma 3's layers where each token attends to those behind it, too, as in EmbeddingGemma."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._window = int(config.get("sliding_window", 512)) // 2 + 1

    def hidden(
        self, tokens: mx.array, lengths: Sequence[int], first: Sequence[int | None], *, chunk: int
    ) -> Iterator[mx.array]:
        """As `EncoderBody.hidden`."""
        body = cast(Any, self.model).model
        hidden: mx.array = body.embed_tokens(tokens)
        hidden = hidden * mx.array(body.args.hidden_size**0.5, mx.bfloat16).astype(hidden.dtype)
        places = mx.arange(tokens.shape[1])
        is_text = (places[None] < mx.array(lengths)[:, None])[:, None, None, :]
        is_near = mx.abs(places[:, None] - places[None]) < self._window
        for layer in body.layers:
            hidden = layer(hidden, is_text & is_near if layer.self_attn.is_sliding else is_text, None)
            yield hidden
        yield body.norm(hidden)


class PoolingHead(nn.Module):
    """The vector of a text: pooled, through matrices where there are some, of length 1 where the folder says so."""

    def __init__(self, plan: EmbedderPlan, denses: Sequence[Dense]) -> None:
        super().__init__()
        self.pooling, self.normalises = str(plan.pooling), plan.normalises
        self.denses = list(denses)

    def result(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        """One row for each input."""
        pooled = pool(hidden, lengths, Pooling(self.pooling))
        for dense in self.denses:
            pooled = dense.forward(pooled)
        return pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12) if self.normalises else pooled


def pool(hidden: mx.array, lengths: Sequence[int], pooling: Pooling) -> mx.array:
    """One state per row, in float32; `lengths` without padding."""
    hidden = hidden.astype(mx.float32)
    if pooling is Pooling.CLS:
        return hidden[:, 0]
    ends = mx.array(lengths)
    if pooling is Pooling.LAST:
        return hidden[mx.arange(hidden.shape[0]), ends - 1]
    is_text = mx.arange(hidden.shape[1])[None] < ends[:, None]
    return mx.where(is_text[..., None], hidden, 0).sum(axis=1) / ends[:, None]


class Dense(nn.Module):
    """A matrix with its activation, as sentence-transformers keeps them."""

    def __init__(self, linear: nn.Linear, activation: str) -> None:
        super().__init__()
        self.linear = linear
        self.is_tanh = activation.endswith("Tanh")

    def forward(self, pooled: mx.array) -> mx.array:
        """The states behind this matrix."""
        out = self.linear(pooled)
        return mx.tanh(out) if self.is_tanh else out


class ScoringHead(nn.Module):
    """A classifier with one label: BERT's pooler, RoBERTa's two matrices, ModernBERT's with a norm between them, or one
    matrix on a decoder's last token."""

    def __init__(
        self, first: nn.Linear | None, score: nn.Linear, pooling: Pooling, norm: nn.LayerNorm | None = None
    ) -> None:
        super().__init__()
        if first is not None:
            self.first = first
        if norm is not None:
            self.norm = norm
        self.has_first, self.has_norm = first is not None, norm is not None
        self.score = score
        self.pooling = str(pooling)

    def result(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        """One row for each input."""
        state = pool(hidden, lengths, Pooling(self.pooling))
        if self.has_norm:
            state = self.norm(nn.gelu(self.first(state)))
        elif self.has_first:
            state = mx.tanh(self.first(state))
        return mx.sigmoid(self.score(state))


class AnswerHead(nn.Module):
    """How likely a causal model says "yes" and not "no" next."""

    def __init__(self, model: nn.Module, yes: int, no: int) -> None:
        super().__init__()
        self._logits: Callable[[mx.array], mx.array] = _output_of(model)
        self._answers = mx.array([no, yes])

    def result(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        """One row for each input."""
        last = hidden[mx.arange(hidden.shape[0]), mx.array(lengths) - 1]
        answers = self._logits(last).astype(mx.float32)[:, self._answers]
        return mx.softmax(answers, axis=-1)[:, 1:]


def _output_of(model: Any) -> Callable[[mx.array], mx.array]:
    """What makes logits of hidden states."""
    return model.get("lm_head", model.model.embed_tokens.as_linear)


def read_embedder(
    directory: Path, source: str, config: dict[str, Any], plan: EmbedderPlan, tokenizer: Any
) -> tuple[EmbedderModel, Embedder]:
    """The model of a folder, and its side for the API. `tokenizer`: transformers'. Raises LoadFailed."""
    try:
        tensors = _tensors(directory)
        body = _encoder(tensors, config) if is_encoder(config) else _decoder(tensors, config)
        if plan.score == YES_NO:
            head = _answer_head(body, *_answers(tokenizer))
        elif plan.score == CLASSIFIER:
            head = _classifier(tensors, body, config)
        else:
            head = PoolingHead(plan, [_dense(directory / path) for path in plan.denses])
    except LoadFailed as error:
        raise LoadFailed(f"{source}: {error}") from error
    except Exception as error:
        # A configuration may lack anything, and a file have any shape.
        raise LoadFailed(f"{source}: it cannot be loaded as an embedder: {first_line(error)}") from error
    model = EmbedderModel(body, head, _nbytes_per_token(config))
    model.eval()
    width = _width(head, config)
    longest = [bound for bound in (plan.max_tokens, _positions(body, config)) if bound is not None]
    max_tokens = min(longest, default=None)
    return model, _side(tokenizer, plan, width, max_tokens, int(config["vocab_size"]))


def _width(head: PoolingHead | ScoringHead | AnswerHead, config: Mapping[str, Any]) -> int:
    """The dimensions of what a head gives."""
    if not isinstance(head, PoolingHead):
        return 1
    if head.denses:
        weight = head.denses[-1].linear.weight
        return int(weight.shape[0])
    return int(config.get("hidden_size") or config["n_embd"])


def _positions(body: EncoderBody | DecoderBody, config: Mapping[str, Any]) -> int | None:
    return body.shape.num_positions if isinstance(body, EncoderBody) else config.get("max_position_embeddings")


def _nbytes_per_token(config: Mapping[str, Any]) -> int:
    """About what a token takes in a pass: some states, the inner ones, and a decoder's entries where it is cut."""
    width = config.get("hidden_size") or config["n_embd"]
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * width
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    entries = (
        0 if is_encoder(config) else 2 * layers * config.get("num_key_value_heads", 1) * config.get("head_dim", 128)
    )
    return int(4 * (8 * width + 3 * inner) + 2 * entries)


def _tensors(directory: Path) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for file in sorted(directory.glob(WEIGHTS)):
        tensors |= cast(dict[str, mx.array], mx.load(str(file)))
    return tensors


def _encoder(tensors: Mapping[str, mx.array], config: dict[str, Any]) -> EncoderBody:
    family = ENCODERS[config["model_type"]]
    encoder = EncoderBody(family.shape(config))
    _fill(encoder, family.weights(tensors), config)
    return encoder


_PREFIX = "model."


def _decoder(tensors: Mapping[str, mx.array], config: dict[str, Any]) -> DecoderBody:
    """mlx-lm's model. A folder that was saved without its output matrix may name its tensors without `model.`.

    Raises LoadFailed for one whose own code, which is not run, makes the vectors: gte-Qwen2's attends both ways.
    """
    if "AutoModel" in (config.get("auto_map") or {}) or config.get("is_causal") is False:
        raise LoadFailed("its vectors are made by code in its folder (`auto_map`), which Reprise does not run.")
    model_class, arguments = mlx_lm_utils._get_classes(config)  # pyright: ignore[reportPrivateUsage] -- the only way
    is_bare = not any(name.startswith(_PREFIX) for name in tensors)
    named = {f"{_PREFIX}{name}" if is_bare else name: tensor for name, tensor in tensors.items()}
    named = {name: tensor for name, tensor in named.items() if not name.startswith(("score.", "classifier."))}
    model = model_class(arguments.from_dict(config))
    sanitize = getattr(model, "sanitize", None)
    if sanitize is not None:
        named = cast(dict[str, mx.array], sanitize(named))
    if "lm_head" in model and "lm_head.weight" not in named:
        del model["lm_head"]
    _fill(model, named, config)
    return BothWaysDecoder(model, config) if config.get("use_bidirectional_attention") else DecoderBody(model)


def _fill(model: nn.Module, weights: dict[str, mx.array], config: Mapping[str, Any]) -> None:
    """Put the weights into the model, quantized where they are. Raises LoadFailed where one is missing."""
    quantised = config.get("quantization")
    if isinstance(quantised, dict):
        sizes = cast(dict[str, Any], quantised)
        nn.quantize(
            model,
            group_size=sizes["group_size"],
            bits=sizes["bits"],
            mode=sizes.get("mode", "affine"),
            class_predicate=lambda path, module: f"{path}.scales" in weights and hasattr(module, "to_quantized"),
        )
    own = dict(tree_flatten(model.parameters()))
    missing = sorted(set(own) - set(weights))
    if missing:
        raise LoadFailed(f"{len(missing)} of its tensors are missing, such as {missing[0]}.")
    for name, array in own.items():
        if weights[name].shape != array.shape:
            raise LoadFailed(f"its tensor {name} has the shape {weights[name].shape}, not {array.shape}.")
    model.load_weights([(name, weights[name]) for name in own])


def _answer_head(body: EncoderBody | DecoderBody, yes: int, no: int) -> AnswerHead:
    if isinstance(body, EncoderBody):
        raise LoadFailed("an encoder says neither yes nor no. Leave --embedder out.")
    return AnswerHead(body.model, yes, no)


def _dense(directory: Path) -> Dense:
    facts = _json(directory / "config.json")
    activation = str(facts.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if not activation.endswith(("Tanh", "Identity")):
        raise LoadFailed(f"its activation {activation!r} behind the pooling is neither tanh nor none.")
    return Dense(_linear(_tensors(directory), "linear"), activation)


def _classifier(
    tensors: Mapping[str, mx.array], body: EncoderBody | DecoderBody, config: Mapping[str, Any]
) -> ScoringHead:
    norm, pooling = None, Pooling.CLS
    if isinstance(body, DecoderBody):
        first, score, pooling = None, _linear(tensors, "score"), Pooling.LAST
    elif "classifier.out_proj.weight" in tensors:
        first, score = _linear(tensors, "classifier.dense"), _linear(tensors, "classifier.out_proj")
    elif "head.norm.weight" in tensors:
        if config.get("classifier_activation", "gelu") != "gelu":
            raise LoadFailed(f"its classifier's activation {config['classifier_activation']!r} is not gelu.")
        first, score = _linear(tensors, "head.dense"), _linear(tensors, "classifier")
        pooling = Pooling(config.get("classifier_pooling", "cls"))
        norm = nn.LayerNorm(first.weight.shape[0], eps=config.get("norm_eps", 1e-5), bias="head.norm.bias" in tensors)
        norm.load_weights([(n.removeprefix("head.norm."), w) for n, w in tensors.items() if n.startswith("head.norm.")])
    else:
        name = next((name for name in tensors if name.endswith("pooler.dense.weight")), "pooler.dense.weight")
        first, score = _linear(tensors, name.removesuffix(".weight")), _linear(tensors, "classifier")
    if score.weight.shape[0] != 1:
        raise LoadFailed(f"it sorts texts into {score.weight.shape[0]} classes; a reranker has one score.")
    return ScoringHead(first, score, pooling, norm)


def _linear(tensors: Mapping[str, mx.array], name: str) -> nn.Linear:
    weight = tensors.get(f"{name}.weight")
    if weight is None:
        raise LoadFailed(f"its tensor {name}.weight is missing.")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=f"{name}.bias" in tensors)
    linear.weight = weight
    if f"{name}.bias" in tensors:
        linear.bias = tensors[f"{name}.bias"]
    return linear


# The text side.


def _answers(tokenizer: Any) -> tuple[int, int]:
    """The tokens for "yes" and "no"."""
    found = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in found):
        raise LoadFailed('its tokenizer has no single token for "yes" and "no".')
    return int(found[0][0]), int(found[1][0])


def _side(tokenizer: Any, plan: EmbedderPlan, width: int, max_tokens: int | None, vocab_size: int) -> Embedder:
    def encode(text: str) -> list[int]:
        return cast(list[int], tokenizer(text, verbose=False)["input_ids"])

    ends = encode("a"), encode("b")
    num_suffix = next((i for i, (a, b) in enumerate(zip(*map(reversed, ends), strict=False)) if a != b), 0)
    embedder = Embedder(
        encode=encode,
        num_dimensions=width,
        num_suffix=num_suffix,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        prompts=plan.prompts,
        summary=plan.summary,
    )
    if plan.score == "":
        return embedder

    def encode_pair(query: str, document: str) -> EmbeddingInput:
        read = tokenizer(query, document, verbose=False, return_token_type_ids=True)
        tokens, types = cast(list[int], read["input_ids"]), cast(list[int], read["token_type_ids"])
        return EmbeddingInput(
            tokens=as_tokens(embedder.truncated(tokens)), num_first=types.index(1) if 1 in types else None
        )

    pair = _asking(tokenizer, max_tokens) if plan.score == YES_NO else encode_pair
    return replace(embedder, encode_pair=pair)


def _asking(tokenizer: Any, max_tokens: int | None) -> Callable[[str, str], EmbeddingInput]:
    """The question as Qwen3-Reranker was trained on it, in the model's own chat template."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _MARK}]
    try:
        rendered = cast(
            str,
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False),
        )
    except Exception as error:
        raise LoadFailed(f"its chat template cannot ask: {first_line(error)}") from error
    before, _, after = rendered.partition(_MARK)
    start, stop = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))

    def ask(query: str, document: str) -> EmbeddingInput:
        text = f"<Instruct>: {_INSTRUCT}\n<Query>: {query}\n<Document>: {document}"
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        room = len(tokens) if max_tokens is None else max(1, max_tokens - len(start) - len(stop))
        return EmbeddingInput(tokens=as_tokens([*start, *tokens[:room], *stop]))

    return ask

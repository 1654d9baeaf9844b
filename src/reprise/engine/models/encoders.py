"""Encoders of BERT's family: every token attends to every other one, and no state is kept.

One class for all of them; `_FAMILIES` has what differs. Tensors are renamed from those of transformers. Sources: Devlin
et al., 2019 (BERT); Conneau et al., 2020 (XLM-R); Nussbaum et al., 2024 (Nomic); Warner et al., 2024 (ModernBERT).
Checked against transformers (`tests/engine/test_embedders.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from reprise.core.errors import LoadFailed

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swiglu": nn.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The sizes of an encoder. `num_positions`: the longest input; `first_position`: the row of the first token's
    position; `rope_base`: of rotary positions, None: they are a table; `is_gated`: of the feed-forward network;
    `norms_first`: layers are normalised before their parts and not behind each sum; `near_layers`: those in which a
    token attends to what is at most `reach` from it, with another `near_rope_base`."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    inner_width: int
    num_positions: int
    num_types: int
    epsilon: float
    activation: str
    first_position: int = 0
    rope_base: float | None = None
    is_gated: bool = False
    has_bias: bool = True
    has_norm_bias: bool = True
    norms_first: bool = False
    near_layers: frozenset[int] = frozenset()
    reach: int = 0
    near_rope_base: float | None = None

    def __post_init__(self) -> None:
        assert self.width % self.num_heads == 0, self
        if self.activation not in _ACTIVATIONS:
            raise LoadFailed(f"its activation {self.activation!r} is not one of {', '.join(_ACTIVATIONS)}.")


class EncoderBody(nn.Module):
    """An encoder: embeddings, layers, and a norm behind them where they are normalised first."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocab_size, shape.width)
        if shape.rope_base is None:
            self.positions = nn.Embedding(shape.num_positions + shape.first_position, shape.width)
        if shape.num_types > 0:
            self.types = nn.Embedding(shape.num_types, shape.width)
        self.norm = _norm(shape)
        self.layers = [EncoderLayer(shape, number) for number in range(shape.num_layers)]
        if shape.norms_first:
            self.final_norm = _norm(shape)

    def hidden(
        self, tokens: mx.array, lengths: Sequence[int], first: Sequence[int | None], *, chunk: int
    ) -> Iterator[mx.array]:
        """The hidden states behind each layer, shape ``(rows, n, width)``, the last ones being the model's.

        `tokens`: shape ``(rows, n)``, padded on the right; `lengths`: without padding; `first`: see `EmbeddingInput`.
        `chunk` is for decoders: nothing here can be cut between tokens.
        """
        num = tokens.shape[1]
        places = mx.arange(num)
        hidden = self.words(tokens)
        if self.shape.rope_base is None:
            hidden = hidden + self.positions(places + self.shape.first_position)
        if self.shape.num_types > 0:
            stops = mx.array([num if stop is None else stop for stop in first])
            is_second = (places[None] >= stops[:, None]).astype(mx.int32)
            hidden = hidden + self.types(is_second if self.shape.num_types > 1 else mx.zeros_like(is_second))
        hidden = self.norm(hidden)
        mask = None
        if min(lengths) < num:
            mask = (places[None] < mx.array(lengths)[:, None])[:, None, None, :]
        near = mask
        if self.shape.near_layers and num - 1 > self.shape.reach:
            is_near = (mx.abs(places[:, None] - places[None]) <= self.shape.reach)[None, None]
            near = is_near if mask is None else mask & is_near
        for number, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, near if number in self.shape.near_layers else mask)
            yield hidden
        if self.shape.norms_first:
            yield self.final_norm(hidden)


def _norm(shape: EncoderShape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)


class EncoderLayer(nn.Module):
    """Attention in both directions, and a feed-forward network."""

    def __init__(self, shape: EncoderShape, number: int) -> None:
        super().__init__()
        width, inner, bias = shape.width, shape.inner_width, shape.has_bias
        self.num_heads = shape.num_heads
        self.scale = (width // shape.num_heads) ** -0.5
        self.rope_base = shape.near_rope_base if number in shape.near_layers else shape.rope_base
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.norms_first = shape.norms_first
        # What comes into the first layer has just been normalised.
        self.is_normalised = shape.norms_first and number == 0
        if not self.is_normalised:
            self.attention_norm = _norm(shape)
        self.up = nn.Linear(width, inner, bias=bias)
        if shape.is_gated:
            self.gate = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.norm = _norm(shape)
        self.is_gated, self.activation = shape.is_gated, shape.activation

    def forward(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        """The hidden states behind this layer. `mask`: which tokens are seen; None: all."""
        if self.norms_first:
            hidden = hidden + self._attention(hidden if self.is_normalised else self.attention_norm(hidden), mask)
            return hidden + self._feed(self.norm(hidden))
        hidden = self.attention_norm(hidden + self._attention(hidden, mask))
        return self.norm(hidden + self._feed(hidden))

    def _attention(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        rows, num, width = hidden.shape

        def heads(projected: mx.array) -> mx.array:
            return projected.reshape(rows, num, self.num_heads, -1).transpose(0, 2, 1, 3)

        query, key, value = heads(self.query(hidden)), heads(self.key(hidden)), heads(self.value(hidden))
        if self.rope_base is not None:
            size = width // self.num_heads
            query, key = (
                mx.fast.rope(each, size, traditional=False, base=self.rope_base, scale=1.0, offset=0)
                for each in (query, key)
            )
        seen = mx.fast.scaled_dot_product_attention(query, key, value, scale=self.scale, mask=mask)
        return self.out(seen.transpose(0, 2, 1, 3).reshape(rows, num, width))

    def _feed(self, hidden: mx.array) -> mx.array:
        act = _ACTIVATIONS[self.activation]
        return self.down(act(self.gate(hidden)) * self.up(hidden) if self.is_gated else act(self.up(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """How a type of model names its sizes and its tensors. `renames`: patterns and what stands in their place."""

    shape: Callable[[Mapping[str, Any]], EncoderShape]
    renames: tuple[tuple[str, str], ...]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Tensors that hold several one below the other, by a part of their names → what stands there for each."""

    def weights(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The encoder's tensors by our names. Others, such as those of a head, are not among them."""
        found: dict[str, mx.array] = {}
        for name, tensor in tensors.items():
            split = {name: tensor}
            for fused, parts in self.fused.items():
                if fused in name:
                    named = zip(parts, mx.split(tensor, len(parts)), strict=True)
                    split = {name.replace(fused, part): value for part, value in named}
            for each, value in split.items():
                ours = self._renamed(each)
                if ours is not None:
                    found[ours] = value
        return found

    def _renamed(self, name: str) -> str | None:
        for pattern, ours in self.renames:
            renamed, num = re.subn(pattern, ours, name)
            if num > 0:
                return re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", renamed))
        return None


def _bert(config: Mapping[str, Any]) -> EncoderShape:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise LoadFailed("its positions are relative, which Reprise's encoder does not have.")
    return EncoderShape(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        inner_width=config["intermediate_size"],
        num_positions=config["max_position_embeddings"],
        num_types=config.get("type_vocab_size", 2),
        epsilon=config.get("layer_norm_eps", 1e-12),
        activation=config.get("hidden_act", "gelu"),
    )


def _roberta(config: Mapping[str, Any]) -> EncoderShape:
    first = config.get("pad_token_id", 1) + 1
    shape = _bert(config)
    return replace(shape, num_positions=shape.num_positions - first, first_position=first)


def _nomic(config: Mapping[str, Any]) -> EncoderShape:
    if config.get("prenorm") or config.get("rotary_emb_interleaved") or config.get("num_experts"):
        raise LoadFailed("its layers are not those of nomic-embed-text v1 and v1.5.")
    rope = cast(dict[str, Any], config.get("rope_parameters") or {})
    return EncoderShape(
        vocab_size=config["vocab_size"],
        width=config.get("n_embd") or config["hidden_size"],
        num_layers=config.get("n_layer") or config["num_hidden_layers"],
        num_heads=config.get("n_head") or config["num_attention_heads"],
        inner_width=config.get("n_inner") or config["intermediate_size"],
        num_positions=config.get("max_trained_positions") or config.get("max_position_embeddings") or 2048,
        num_types=config.get("type_vocab_size", 2),
        epsilon=config.get("layer_norm_epsilon") or config.get("layer_norm_eps", 1e-12),
        activation=config.get("activation_function") or config.get("hidden_act", "silu"),
        rope_base=config.get("rotary_emb_base") or rope.get("rope_theta", 1000.0),
        is_gated=True,
        has_bias=False,
    )


def _modernbert(config: Mapping[str, Any]) -> EncoderShape:
    num_layers, has_bias = config["num_hidden_layers"], config.get("attention_bias", False)
    if config.get("mlp_bias", False) != has_bias:
        raise LoadFailed("its layers have biases in part, which Reprise's encoder does not have.")
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [
        "near" if number % every else "full_attention" for number in range(num_layers)
    ]
    ropes = cast(dict[str, dict[str, Any]], config.get("rope_parameters") or {})
    if config.get("rope_scaling") or any(rope.get("rope_type", "default") != "default" for rope in ropes.values()):
        raise LoadFailed("its rotary positions are scaled, which Reprise's encoder does not have.")

    def base(kind: str, name: str, default: float) -> float:
        return ropes.get(kind, {}).get("rope_theta") or config.get(name) or default

    return EncoderShape(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        num_layers=num_layers,
        num_heads=config["num_attention_heads"],
        inner_width=config["intermediate_size"],
        num_positions=config["max_position_embeddings"],
        num_types=0,
        epsilon=config.get("norm_eps", 1e-5),
        activation=config.get("hidden_activation", "gelu"),
        rope_base=base("full_attention", "global_rope_theta", 160_000.0),
        is_gated=True,
        has_bias=has_bias,
        has_norm_bias=config.get("norm_bias", False),
        norms_first=True,
        near_layers=frozenset(number for number, kind in enumerate(kinds) if kind != "full_attention"),
        reach=config.get("local_attention", 128) // 2,
        near_rope_base=base("sliding_attention", "local_rope_theta", 10_000.0),
    )


_ANY = r"^(?:[a-z_]+\.)?"
"""What a head's folder writes before the encoder's names: `bert.`."""
_BERT_NAMES = (
    (_ANY + r"embeddings\.word_embeddings\.", "words."),
    (_ANY + r"embeddings\.position_embeddings\.", "positions."),
    (_ANY + r"embeddings\.token_type_embeddings\.", "types."),
    (_ANY + r"embeddings\.LayerNorm\.", "norm."),
    (_ANY + r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"layers.\1.\2."),
    (_ANY + r"encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.out."),
    (_ANY + r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"layers.\1.attention_norm."),
    (_ANY + r"encoder\.layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.up."),
    (_ANY + r"encoder\.layer\.(\d+)\.output\.dense\.", r"layers.\1.down."),
    (_ANY + r"encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"layers.\1.norm."),
)
_NOMIC_NAMES = (
    (_ANY + r"embeddings\.word_embeddings\.", "words."),
    (_ANY + r"embeddings\.token_type_embeddings\.", "types."),
    (_ANY + r"emb_ln\.", "norm."),
    (_ANY + r"encoder\.layers\.(\d+)\.attn\.(query|key|value)\.", r"layers.\1.\2."),
    (_ANY + r"encoder\.layers\.(\d+)\.attn\.out_proj\.", r"layers.\1.out."),
    (_ANY + r"encoder\.layers\.(\d+)\.norm1\.", r"layers.\1.attention_norm."),
    (_ANY + r"encoder\.layers\.(\d+)\.norm2\.", r"layers.\1.norm."),
    (_ANY + r"encoder\.layers\.(\d+)\.mlp\.fc11\.", r"layers.\1.up."),
    (_ANY + r"encoder\.layers\.(\d+)\.mlp\.fc12\.", r"layers.\1.gate."),
    (_ANY + r"encoder\.layers\.(\d+)\.mlp\.fc2\.", r"layers.\1.down."),
)
_MODERNBERT_NAMES = (
    (_ANY + r"embeddings\.tok_embeddings\.", "words."),
    (_ANY + r"embeddings\.norm\.", "norm."),
    (_ANY + r"layers\.(\d+)\.attn\.(query|key|value)\.", r"layers.\1.\2."),
    (_ANY + r"layers\.(\d+)\.attn\.Wo\.", r"layers.\1.out."),
    (_ANY + r"layers\.(\d+)\.attn_norm\.", r"layers.\1.attention_norm."),
    (_ANY + r"layers\.(\d+)\.mlp\.(gate|up)\.", r"layers.\1.\2."),
    (_ANY + r"layers\.(\d+)\.mlp\.Wo\.", r"layers.\1.down."),
    (_ANY + r"layers\.(\d+)\.mlp_norm\.", r"layers.\1.norm."),
    (_ANY + r"final_norm\.", "final_norm."),
)
_WQKV = {"Wqkv": ("query", "key", "value")}
_ROBERTA = EncoderFamily(shape=_roberta, renames=_BERT_NAMES)
ENCODERS: Mapping[str, EncoderFamily] = {
    "bert": EncoderFamily(shape=_bert, renames=_BERT_NAMES),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "nomic_bert": EncoderFamily(shape=_nomic, renames=_NOMIC_NAMES, fused=_WQKV),
    "modernbert": EncoderFamily(shape=_modernbert, renames=_MODERNBERT_NAMES, fused={**_WQKV, "Wi": ("gate", "up")}),
}
"""By `model_type`."""

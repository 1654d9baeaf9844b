"""Gemma 4's assistant: a head that reads the entries of the model's own layers and has none of its own.

Each of its layers reads those of the model's last layer of the same kind, full attention or window, behind the pass
that it follows. So there is nothing to store: with the model's entries restored, it guesses as after a cold run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gemma4_text

from reprise.engine.models.headed import Head
from reprise.engine.states.layers import KvLayer


class AssistantHead(Head):
    """A small model over the embedding of a token and the model's hidden state before it, with an output of its own."""

    def __init__(self, config: Mapping[str, Any], *, read_from: Mapping[str, int]) -> None:
        """`config`: the assistant's. `read_from`: the model's layer that those of each kind read, by its number."""
        super().__init__()
        text = dict(cast(Mapping[str, Any], config["text_config"]))
        text |= {"num_kv_shared_layers": text["num_hidden_layers"], "hidden_size_per_layer_input": 0}
        arguments = gemma4_text.ModelArgs.from_dict({**text, "use_double_wide_mlp": False})
        width, outer = arguments.hidden_size, int(config["backbone_hidden_size"])
        self.embed_tokens = nn.Embedding(arguments.vocab_size, width)
        self.layers = [gemma4_text.DecoderLayer(arguments, i) for i in range(arguments.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=arguments.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * outer, width, bias=False)
        self.post_projection = nn.Linear(width, outer, bias=False)
        if not config.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(width, arguments.vocab_size, bias=False)
        if config.get("use_ordered_embeddings", False):
            self.masked_embedding = _GroupedOutput(
                width,
                num_tokens=arguments.vocab_size,
                num_groups=int(config["num_centroids"]),
                num_looked_into=int(config["centroid_intermediate_top_k"]),
            )
        self._read_from = dict(read_from)

    def step(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        own: Sequence[Any],
        caches: Sequence[Any],
        *,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        assert embeddings.shape[:2] == (1, 1), "it reads entries of all tokens before the one that it follows"
        seen = {kind: _SeenEntries(caches[at]) for kind, at in self._read_from.items()}
        x = self.pre_projection(mx.concatenate([embeddings, hidden], axis=-1))
        for layer in self.layers:
            entries = seen[layer.layer_type]
            x, _, _ = cast(Any, layer)(x, None, entries, shared_kv=entries.shared, offset=entries.offset)
        x = self.norm(x)
        return self.post_projection(x), self._logits(x)

    def _logits(self, x: mx.array) -> mx.array:
        if "masked_embedding" in self:
            return self.masked_embedding.logits(x, self.embed_tokens)
        return self.lm_head(x) if "lm_head" in self else self.embed_tokens.as_linear(x)


class _SeenEntries:
    """The entries of a layer that the next token sees, for one that adds none, in the form of a cache.

    `offset`: the position of the last of them, where all guesses of a chain are asked.
    """

    def __init__(self, layer: KvLayer) -> None:
        self.shared = layer.seen_next()
        self.offset = mx.array(layer.lengths[0] - 1)
        if hasattr(layer, "bits"):
            # By these the attention of mlx-lm knows quantised entries.
            self.bits, self.group_size = cast(Any, layer).bits, cast(Any, layer).group_size

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values


class _GroupedOutput(nn.Module):
    """Logits of the tokens in the likeliest groups; all others are below any of these."""

    def __init__(self, width: int, *, num_tokens: int, num_groups: int, num_looked_into: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(width, num_groups, bias=False)
        self.token_ordering = mx.zeros((num_tokens,), dtype=mx.int32)
        self._num_groups, self._num_looked_into = num_groups, num_looked_into

    def logits(self, x: mx.array, embedding: nn.Embedding) -> mx.array:
        """Shape ``(1, 1, width)`` to ``(1, 1, tokens)``."""
        order, num = self.token_ordering.reshape(self._num_groups, -1), self._num_looked_into
        groups = mx.argpartition(self.centroids(x)[0, 0], kth=-num)[-num:]
        tokens = order[groups].reshape(-1)
        found = embedding(tokens) @ x[0, 0]
        logits = mx.broadcast_to(found.min() - 1, self.token_ordering.shape)
        return mx.put_along_axis(logits, tokens, found, axis=0)[None, None]


def layers_to_read(config: Mapping[str, Any]) -> dict[str, int]:
    """The model's last layer of each kind that has entries of its own, by its number."""
    text = cast(Mapping[str, Any], config.get("text_config") or config)
    # Completes what a configuration leaves out.
    arguments = gemma4_text.ModelArgs.from_dict(dict(text))
    num = arguments.num_hidden_layers - arguments.num_kv_shared_layers
    return {kind: at for at, kind in enumerate(arguments.layer_types[:num])}

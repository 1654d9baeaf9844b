"""A model with its head: one call computes the model and, of the same tokens, the entries of the head's layers.

A head (multi-token prediction, MTP) guesses the token after the next one. Its input at token j is the embedding of
token j beside the model's hidden state behind token j - 1, so its entries follow from the tokens up to j, as those of
any other layer do, and are stored, shared and restored with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask

from reprise.engine.states.blueprint import Blueprint, blueprint_of
from reprise.engine.states.layers import HiddenLayer


class MtpHead(nn.Module):
    """Layers over the embedding of a token and the hidden state before it. Embedding and output are the model's."""

    def __init__(self, layers: list[nn.Module], *, width: int, eps: float, needs_array: bool) -> None:
        """`needs_array`: whether the layers take their mask as an array only."""
        super().__init__()
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.layers = layers
        self.norm = nn.RMSNorm(width, eps=eps)
        self._needs_array = needs_array

    def output(self, embeddings: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """The hidden states from which the tokens after the next ones are guessed, shape ``(rows, n, width)``."""
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(both, axis=-1))
        states, has_cache = iter(cache), self.has_cache
        for layer, attends in zip(self.layers, has_cache, strict=True):
            state = next(states) if attends else None
            mask = create_attention_mask(x, state, return_array=self._needs_array) if attends else None
            x = cast(Any, layer)(x, mask=mask, cache=state)
        return self.norm(x)

    @property
    def has_cache(self) -> list[bool]:
        """Whether each layer attends: some families have blocks of experts alone."""
        return [getattr(layer, "block_type", "*") == "*" for layer in self.layers]


class HeadedModel(nn.Module):
    """A model of mlx-lm and its head. The caches are the model's, then the head's, then the last hidden state."""

    def __init__(
        self, model: nn.Module, head: MtpHead, *, text_at: str, body: str = "model", embedding: str = "embed_tokens"
    ) -> None:
        """`text_at`: the attribute of the model that has the language model; empty: it is that itself. `body`: that
        one's attribute without the output matrix, and `embedding` what it embeds tokens with."""
        super().__init__()
        self.model = model
        self.head = head
        self._text_at, self._body, self._embedding = text_at, body, embedding
        self._num_own = sum(head.has_cache)

    def __call__(self, inputs: mx.array, *, cache: list[Any]) -> mx.array:
        num = self._num_own
        hidden = getattr(self._text, self._body)(inputs, cache=cache[: -num - 1])
        last = cast(HiddenLayer, cache[-1])
        # Only the entries of the head are evaluated: what it guesses behind each token is not asked for here.
        self.head.output(self.embed(inputs), last.follow(hidden), cache[-num - 1 : -1])
        return self.logits(hidden)

    def guess(
        self,
        tokens: Sequence[int],
        hidden: mx.array | None,
        cache: list[Any],
        *,
        num: int,
        choose: Callable[[mx.array, int], mx.array],
    ) -> mx.array:
        """`num` tokens that may follow `tokens`, of which none is fed yet; the caches stay as they are.

        `hidden`: the hidden states behind all of `tokens` but the last, if there are others. `choose`: the token for
        some logits, so many tokens later.
        """
        own, last = cache[-self._num_own - 1 : -1], cast(HiddenLayer, cache[-1])
        embeddings = self.embed(mx.array([list(tokens)]))
        before = last.last(embeddings)
        if hidden is not None:
            before = mx.concatenate([before, hidden], axis=1)
        chosen: list[mx.array] = []
        for num_pending in range(num):
            before = self.head.output(embeddings, before, own)[:, -1:]
            chosen.append(choose(self.logits(before)[0, -1], num_pending))
            embeddings = self.embed(chosen[-1].reshape(1, 1).astype(mx.int32))
        guessed = mx.stack(chosen)
        mx.eval(guessed, [plane for layer in own for plane in layer.planes])
        for layer in own:
            # What was chosen last is not fed.
            layer.undo_last(len(tokens) + num - 1)
        return guessed

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embed(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """The output for hidden states behind the last norm, the model's or the head's."""
        text = self._text
        return text.lm_head(hidden) if "lm_head" in text else self._embed.as_linear(hidden)

    @property
    def _embed(self) -> Any:
        return getattr(getattr(self._text, self._body), self._embedding)

    @property
    def _text(self) -> Any:
        return getattr(self.model, self._text_at) if self._text_at else self.model


def blueprint_with_head(model: nn.Module, *, kv_bits: int | None = None, kv_group_size: int = 64) -> Blueprint:
    """The layer states of a model, and of its head if it has one."""
    if not isinstance(model, HeadedModel):
        return blueprint_of(model, kv_bits=kv_bits, kv_group_size=kv_group_size)
    main, own = (
        blueprint_of(each, kv_bits=kv_bits, kv_group_size=kv_group_size)
        for each in (model.model, _HeadLayers(model.head))
    )
    return main.with_head(own)


class _HeadLayers(nn.Module):
    """A head's layers that attend, as mlx-lm looks at a model: a cache of plain attention for each."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__()
        self.layers = [layer for layer, attends in zip(head.layers, head.has_cache, strict=True) if attends]

"""A model with its head: one call computes the model and, of the same tokens, the entries of the head's layers.

A head (multi-token prediction, MTP) guesses the token after the next one. Its input at token j is the embedding of
token j beside the model's hidden state behind token j - 1, so its entries follow from the tokens up to j, as those of
any other layer do, and are stored, shared and restored with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask

from reprise.engine.states.blueprint import Blueprint, blueprint_of
from reprise.engine.states.layers import MOST_WAITING, FollowedTokens, FullLayer, HiddenLayer
from reprise.engine.states.seeing import Embedded, ImageFeatures, PassInputs, PreparedImage, SeeingModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuessRequest:
    """A run of `num` tokens to be guessed behind `tokens`, of which none is fed yet.

    `choose`: the token for some logits, so many tokens after the last of `tokens`. `hidden`: the hidden states behind
    all of `tokens` but the last, if there are others. `positions`: where all these stand, if the model has to be told.
    """

    tokens: Sequence[int]
    num: int
    choose: Callable[[mx.array, int], mx.array]
    hidden: mx.array | None = None
    positions: mx.array | None = None

    @property
    def num_fed(self) -> int:
        """Tokens whose logits are needed: what is guessed last is not fed."""
        return len(self.tokens) + self.num - 1

    def chain(self, follow: Callable[[mx.array], mx.array]) -> mx.array:
        """The guesses, each chosen from the logits that `follow` gives behind the tokens before it."""
        fed, chosen = mx.array([list(self.tokens)]), list[mx.array]()
        for num_pending in range(self.num):
            chosen.append(self.choose(follow(fed), num_pending))
            fed = chosen[-1].reshape(1, 1).astype(mx.int32)
        return mx.stack(chosen)


class GuessingModel(nn.Module):
    """A model and what guesses its next tokens, which every pass computes beside it. `model`: the model alone."""

    model: nn.Module

    def guess(self, request: GuessRequest, cache: list[Any]) -> mx.array:
        """Tokens that may follow those of a single sequence. The caches stay as they are."""
        raise NotImplementedError


class Head(nn.Module):
    """What guesses from a model's hidden state. `num_caches`: of layers of its own."""

    num_caches = 0

    def follow(
        self, embeddings: mx.array, hidden: mx.array, own: Sequence[Any], *, positions: mx.array | None = None
    ) -> None:
        """A pass has these tokens, and the model had these hidden states before each: write the entries."""

    def step(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        own: Sequence[Any],
        caches: Sequence[Any],
        *,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """What stands for the hidden state behind the last of these tokens, and the logits for the next one.

        Logits are None where the model's own output matrix makes them of it. `caches`: the model's.
        """
        raise NotImplementedError


class MtpHead(Head):
    """Layers over the embedding of a token and the hidden state before it. Embedding and output are the model's."""

    def __init__(
        self, layers: list[nn.Module], *, width: int, eps: float, needs_array: bool = False, window: int | None = None
    ) -> None:
        """`needs_array`: whether the layers take their mask as an array only. `window`: as far back as they see."""
        super().__init__()
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.layers = layers
        self.norm = nn.RMSNorm(width, eps=eps)
        self._needs_array = needs_array
        self._window = window
        self.num_caches = sum(self.has_cache)

    def output(
        self, embeddings: mx.array, hidden: mx.array, cache: Sequence[Any], *, positions: mx.array | None = None
    ) -> mx.array:
        """The hidden states from which the tokens after the next ones are guessed, shape ``(rows, n, width)``."""
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(both, axis=-1))
        states, told = iter(cache), {} if positions is None else {"position_ids": positions}
        for layer, attends in zip(self.layers, self.has_cache, strict=True):
            state = next(states) if attends else None
            mask = create_attention_mask(x, state, self._window, self._needs_array) if attends else None
            x = cast(Any, layer)(x, mask=mask, cache=state, **told)
        return self.norm(x)

    @property
    def has_cache(self) -> list[bool]:
        """Whether each layer attends: some families have blocks of experts alone."""
        return [getattr(layer, "block_type", "*") == "*" for layer in self.layers]

    def follow(
        self, embeddings: mx.array, hidden: mx.array, own: Sequence[Any], *, positions: mx.array | None = None
    ) -> None:
        # Only the entries are evaluated: what it guesses behind each token is not asked for.
        self.output(embeddings, hidden, own, positions=positions)

    def step(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        own: Sequence[Any],
        caches: Sequence[Any],
        *,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        return self.output(embeddings, hidden, own, positions=positions)[:, -1:], None


class HeadedModel(GuessingModel):
    """A model of mlx-lm and its head. The caches are the model's, then the head's, then the last hidden state."""

    _body: Any
    _embed: Any
    _output: Callable[[mx.array], mx.array]

    def __init__(
        self, model: nn.Module, head: Head, *, text_at: str = "", body: str = "model", embedding: str = "embed_tokens"
    ) -> None:
        """`text_at`: the attribute of the model that has the language model; empty: it is that itself. `body`: that
        one's attribute without the output matrix, and `embedding` what it embeds tokens with."""
        super().__init__()
        self.model = model
        self.head = head
        self._num_own = head.num_caches
        if not isinstance(model, SeeingModel):
            self._look_up(getattr(model, text_at) if text_at else model, body, embedding)

    def _look_up(self, text: Any, body: str, embedding: str) -> None:
        """What each pass needs of the model, found without the search among a module's children, and not as others."""
        self._cap, self._scale = (
            getattr(text, "final_logit_softcapping", None),
            getattr(text[body], "embed_scale", None),
        )
        object.__setattr__(self, "_body", text[body])
        object.__setattr__(self, "_embed", text[body][embedding])
        object.__setattr__(self, "_output", text.lm_head if "lm_head" in text else self._embed.as_linear)

    def __call__(self, inputs: mx.array, *, cache: list[Any]) -> mx.array:
        main, own, last = self._parts(cache)
        hidden = self._body(inputs, cache=main)
        self._follow(FollowedTokens(inputs, last.follow(hidden), None), own, last)
        return self.logits(hidden)

    def _follow(
        self,
        followed: FollowedTokens,
        own: Sequence[FullLayer],
        last: HiddenLayer,
        embeddings: mx.array | None = None,
    ) -> None:
        """Have the head follow the tokens of a pass. `embeddings`: theirs, if they do not follow from the tokens alone.

        The entries of a token that is fed alone are put off: they are a function of tokens and hidden states, and
        nobody needs them before the head guesses or they are stored.
        """
        if not own:
            return
        if embeddings is not None:
            self._write(own, last)
            self.head.follow(embeddings, followed.hidden, own, positions=followed.positions)
            return
        last.waiting.append(followed)
        last.write_waiting = self._write
        if followed.tokens.shape[1] == 1 and len(last.waiting) < MOST_WAITING and own[0].planes:
            for layer in own:
                layer.leave_unwritten()
        else:
            self._write(own, last)

    def _write(self, own: Sequence[FullLayer], last: HiddenLayer) -> None:
        """Write the entries that were put off; lazy."""
        if last.waiting:
            for layer in own:
                layer.undo_last(layer.num_unwritten)
            passed, last.waiting = FollowedTokens.joined(last.waiting), []
            self.head.follow(self.embed_tokens(passed.tokens), passed.hidden, own, positions=passed.positions)

    def guess(self, request: GuessRequest, cache: list[Any]) -> mx.array:
        main, own, last = self._parts(cache)
        self._write(own, last)
        before = last.last(self.embed_tokens(mx.array([[request.tokens[0]]])))
        if request.hidden is not None:
            before = mx.concatenate([before, request.hidden], axis=1)
        num_fed, positions = 0, request.positions

        def follow(fed: mx.array) -> mx.array:
            nonlocal before, num_fed
            stop = num_fed + fed.shape[1]
            where = None if positions is None else positions[..., num_fed:stop]
            before, logits = self.head.step(self.embed_tokens(fed), before, own, main, positions=where)
            num_fed = stop
            return (self.logits(before) if logits is None else logits)[0, -1]

        guessed = request.chain(follow)
        mx.eval(guessed, [plane for layer in own for plane in layer.planes])
        for layer in own:
            layer.undo_last(request.num_fed)
        return guessed

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        """Tokens as the model's first layer gets them."""
        embedded = self._embed(tokens)
        return embedded if self._scale is None else embedded * self._scale

    def logits(self, hidden: mx.array) -> mx.array:
        """The output for hidden states behind the last norm, the model's or the head's."""
        logits = self._output(hidden)
        return logits if self._cap is None else mx.tanh(logits / self._cap) * self._cap

    def _parts(self, cache: list[Any]) -> tuple[list[Any], list[FullLayer], HiddenLayer]:
        num = len(cache) - 1 - self._num_own
        return cache[:num], cache[num:-1], cache[-1]


class HeadedSeeingModel(HeadedModel, SeeingModel):
    """A model that sees, and its head, which gets an image's rows in the place of embeddings as the model does."""

    model: SeeingModel

    def __init__(self, model: SeeingModel, head: Head) -> None:
        super().__init__(model, head)
        self.sight = model.sight

    def __call__(
        self, tokens: mx.array, *, cache: list[Any], positions: mx.array | None = None, inputs: PassInputs | None = None
    ) -> mx.array:
        main, own, last = self._parts(cache)
        logits, hidden = self.model.with_hidden(tokens, cache=main, positions=positions, inputs=inputs)
        embeddings = None if inputs is None else inputs.embedded.embeds
        self._follow(FollowedTokens(tokens, last.follow(hidden), positions), own, last, embeddings)
        return logits

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        return self.model.embed(tokens).embeds

    def logits(self, hidden: mx.array) -> mx.array:
        return self.model.logits(hidden)

    def embed(self, tokens: mx.array) -> Embedded:
        return self.model.embed(tokens)

    def encode(self, prepared: PreparedImage) -> ImageFeatures:
        return self.model.encode(prepared)


def blueprint_with_head(model: nn.Module, *, kv_bits: int | None = None, kv_group_size: int = 64) -> Blueprint:
    """The layer states of a model, and of its head if it has one."""
    if not isinstance(model, HeadedModel):
        return blueprint_of(model, kv_bits=kv_bits, kv_group_size=kv_group_size)
    main = blueprint_of(model.model, kv_bits=kv_bits, kv_group_size=kv_group_size)
    if not isinstance(model.head, MtpHead):
        return main.with_head(Blueprint(specs=()))
    return main.with_head(blueprint_of(_HeadLayers(model.head), kv_bits=kv_bits, kv_group_size=kv_group_size))


class _HeadLayers(nn.Module):
    """A head's layers that attend, as mlx-lm looks at a model: a cache of plain attention for each."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__()
        self.layers = [layer for layer, attends in zip(head.layers, head.has_cache, strict=True) if attends]

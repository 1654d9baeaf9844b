"""A small model beside a model, which guesses its next tokens: more layers of it, with states of their own.

Every pass computes both on the same tokens, so the companion's states are stored, shared, evicted and restored with the
model's, and it has nothing to catch up with when it guesses. Only its states are computed then: not what it would say.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx import nn

from reprise.engine.models.headed import GuessingModel, GuessRequest
from reprise.engine.models.heads import HeadFacts
from reprise.engine.models.load import LoadedModel
from reprise.engine.models.vocabulary import check_draft_model
from reprise.engine.states.blueprint import leaf_states
from reprise.engine.states.layers import StateLayer

log = logging.getLogger(__name__)


class AccompaniedModel(GuessingModel):
    """A model and its companion. The caches are the model's, then the companion's."""

    def __init__(
        self, model: nn.Module, companion: nn.Module, *, num_caches: int, num_tokens: int, num_known: int
    ) -> None:
        """`num_caches`: of the model; `num_tokens`, `num_known`: the vocabularies of both."""
        super().__init__()
        self.model = model
        self.companion = companion
        self._num_caches = num_caches
        self._num_tokens = num_tokens
        self._num_known = num_known

    def __call__(self, inputs: mx.array, *, cache: list[Any]) -> mx.array:
        self._follow(inputs, cache[self._num_caches :])
        return self.model(inputs, cache=cache[: self._num_caches])

    def guess(self, request: GuessRequest, cache: list[Any]) -> mx.array:
        own = cache[self._num_caches :]
        states, total = leaf_states(own), request.num_fed
        before = {i: list(map(copy.copy, s.cache)) for i, s in enumerate(states) if isinstance(s, StateLayer)}
        for state in states:
            if not isinstance(state, StateLayer):
                state.keep_visible(total)
        guessed = request.chain(lambda fed: self._widened(self._follow(fed, own)[0, -1]))
        mx.eval(guessed)
        for i, state in enumerate(states):
            if isinstance(state, StateLayer):
                state.cache = before[i]
            else:
                state.undo_last(total)
        return guessed

    def _widened(self, logits: mx.array) -> mx.array:
        """Logits for the model's vocabulary, which may be padded to another length."""
        if logits.shape[-1] >= self._num_tokens:
            return logits[: self._num_tokens]
        never = mx.full((self._num_tokens - logits.shape[-1],), -float("inf"), dtype=logits.dtype)
        return mx.concatenate([logits, never])

    def _follow(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        # The model's vocabulary may be padded further.
        return self.companion(mx.minimum(tokens, self._num_known - 1), cache=cache)


def with_companion(loaded: LoadedModel, companion: LoadedModel) -> LoadedModel:
    """The model with another one beside it that drafts for it, in the place of a head.

    Raises LoadFailed if that cannot draft for it.
    """
    check_draft_model(companion, loaded)
    if loaded.vision is not None or not loaded.blueprint.can_undo:
        why = "it takes images" if loaded.vision is not None else "its tokens cannot be undone"
        log.warning("the draft model %s has no effect on %s: %s", companion.name, loaded.name, why)
        return loaded
    if companion.context is not None and (loaded.context is None or companion.context < loaded.context):
        log.warning(
            "the draft model %s was made for %d tokens, fewer than %s: behind them its drafts may be worth nothing",
            companion.name,
            companion.context,
            loaded.name,
        )
    blueprint, own = loaded.blueprint, companion.blueprint
    if blueprint.layout.resumes_anywhere and not own.layout.resumes_anywhere:
        log.warning(
            "with the draft model %s, prefixes of %s are not resumed everywhere any longer",
            companion.name,
            loaded.name,
        )
    return replace(
        loaded,
        model=AccompaniedModel(
            loaded.model,
            companion.model,
            num_caches=len(blueprint.specs),
            num_tokens=loaded.vocab_size,
            num_known=companion.vocab_size,
        ),
        blueprint=replace(blueprint, specs=(*blueprint.specs, *own.specs)),
        fingerprint=f"{loaded.fingerprint}+{companion.fingerprint}",
        nbytes=loaded.nbytes + companion.nbytes,
        shared_nbytes=loaded.nbytes if loaded.base is None else loaded.shared_nbytes,
        base=loaded if loaded.base is None else loaded.base,
        head=HeadFacts(place=companion.name, nbytes=companion.nbytes, is_model=True),
    )

"""One sequence on the engine's own layers, and the tokens to feed it."""

import mlx.core as mx
import numpy as np
from mlx import nn

from reprise.core.tokens import Tokens, as_tokens
from reprise.engine.states.blueprint import Blueprint
from reprise.engine.states.sequence_batch import SequenceBatch
from tests.zoo.forward import log_probabilities
from tests.zoo.sizes import VOCAB


def feed(model: nn.Module, rows: SequenceBatch, tokens: Tokens, *, chunk: int | None) -> mx.array:
    """Compute `tokens`, `chunk` at a time (None: at once), on one sequence: log-probabilities, `(n, vocabulary)`."""
    step = len(tokens) if chunk is None else chunk
    answers: list[mx.array] = []
    for start in range(0, len(tokens), step):
        logits = rows.forward(model, mx.array(tokens[None, start : start + step]))
        answers.append(log_probabilities(logits[0]))
        mx.eval(answers[-1], rows.arrays())
    return mx.concatenate(answers)


def answers_of(model: nn.Module, blueprint: Blueprint, tokens: Tokens, *, chunk: int | None = None) -> mx.array:
    """Log-probabilities of all positions, computed alone and from nothing."""
    return feed(model, SequenceBatch(blueprint), tokens, chunk=chunk)


def random_prompt(length: int, *, seed: int) -> Tokens:
    """Random tokens of the zoo's vocabulary."""
    return as_tokens(np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32))


def changed(tokens: Tokens, position: int) -> Tokens:
    """The same tokens with another one at `position`."""
    edited = tokens.copy()
    edited[position] = (edited[position] + 1) % VOCAB
    return as_tokens(edited)

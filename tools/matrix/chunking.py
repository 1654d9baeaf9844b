"""Chunked against whole: whether a model's answer depends on how its prompt was cut, with no reuse at all."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx import nn

from reprise.engine.states.blueprint import Blueprint
from tests.zoo.forward import prefill
from tools.matrix.gaps import Gap
from tools.matrix.sequence import answers_of, random_prompt
from tools.matrix.warm import CHUNKS

CUT_DEPENDENT: Mapping[str, str] = MappingProxyType(
    {
        "phi3small": "its sparse layers add a boolean mask to the scores, so that a token sees later ones of its chunk",
    }
)
"""Architectures whose own code makes an answer depend on how the prompt was cut, and why. Not one token at a time."""

_TOKENS = 100


def ours(model: nn.Module, blueprint: Blueprint) -> Gap:
    """On the engine's layers."""
    tokens = random_prompt(_TOKENS, seed=5)
    whole = answers_of(model, blueprint, tokens)
    gap = Gap()
    for chunk in CHUNKS:
        gap = gap.widened(answers_of(model, blueprint, tokens, chunk=chunk), whole, f"chunk {chunk}")
    return gap


def theirs(model: nn.Module, make_caches: Callable[[], list[Any]]) -> Gap:
    """On mlx-lm's own caches."""
    tokens = mx.array(random_prompt(_TOKENS, seed=5))
    whole = prefill(model, tokens, make_caches())
    gap = Gap()
    for chunk in CHUNKS:
        gap = gap.widened(prefill(model, tokens, make_caches(), chunk=chunk), whole, f"chunk {chunk}")
    return gap


def ours_against_theirs(model: nn.Module, blueprint: Blueprint, make_caches: Callable[[], list[Any]]) -> Gap:
    """The engine's layers against mlx-lm's, token by token as in decode."""
    tokens = random_prompt(_TOKENS, seed=5)
    one_by_one = prefill(model, mx.array(tokens), make_caches(), chunk=1)
    return Gap().widened(answers_of(model, blueprint, tokens, chunk=1), one_by_one, "token by token")

"""Warm against cold: a first request is stored, and others that share a part of it resume from there."""

import random
from dataclasses import dataclass

from mlx import nn

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, join_tokens
from reprise.engine.states.blueprint import Blueprint
from reprise.engine.states.restoration import restored
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
from tools.matrix.gaps import Gap
from tools.matrix.sequence import answers_of, changed, feed, random_prompt

CHUNKS = (1, 7, 64, None)
"""Prefill chunks in tokens; None is the whole prompt at once."""

_PROMPT = 100
_ANSWER = 12
_CHECKPOINTS = (21, 64, 99)
"""Where the first request stores itself, beside its end: inside a chunk of 64, at the end of one, and one token before
the prompt's end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmRequest:
    """A prompt that comes after the first one, and the least position that it must resume at."""

    name: str
    tokens: Tokens
    at_least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """The largest gap, and the requests that reused less than they should have."""

    gap: Gap
    missed: tuple[str, ...]


def followers(first: Tokens) -> tuple[WarmRequest, ...]:
    """What may follow a request of `first`, whose leading 100 tokens were the prompt and whose rest the answer."""
    draw = random.Random(7)
    prompt = first[:_PROMPT]

    def other(length: int) -> Tokens:
        return random_prompt(length, seed=draw.randrange(1 << 30))

    branches = tuple(
        WarmRequest(
            name=f"branch at {at}",
            tokens=join_tokens(changed(first[: at + 1], at), other(30)),
            at_least=max(position for position in (0, *_CHECKPOINTS) if position <= at),
        )
        for at in sorted(draw.sample(range(2, len(first) - 1), 4))
    )
    return (
        WarmRequest(name="exact repeat", tokens=first, at_least=_CHECKPOINTS[-1]),
        WarmRequest(name="the prompt again", tokens=prompt, at_least=_CHECKPOINTS[-1]),
        WarmRequest(name="longer", tokens=join_tokens(first, other(25)), at_least=len(first)),
        WarmRequest(name="one token longer", tokens=join_tokens(first, other(1)), at_least=len(first)),
        WarmRequest(name="edit", tokens=changed(first, 30), at_least=_CHECKPOINTS[0]),
        WarmRequest(name="edit of the last message", tokens=join_tokens(changed(prompt, 70), other(9)), at_least=64),
        WarmRequest(name="one token", tokens=first[:1], at_least=0),
        *branches,
    )


def warm_against_cold(model: nn.Module, blueprint: Blueprint, *, chunks: tuple[int | None, ...] = CHUNKS) -> WarmResult:
    """Every request warm, with prefill in each of `chunks`, against the same prompt computed from nothing.

    Cold is computed whole, or in the one chunk size that is given. Each request is stored too, so that later ones
    resume from entries that were computed warm.
    """
    first = random_prompt(_PROMPT + _ANSWER, seed=3)
    reference = chunks[0] if len(chunks) == 1 else None
    requests = followers(first)
    cold = [answers_of(model, blueprint, request.tokens, chunk=reference) for request in requests]
    gap = Gap()
    missed: list[str] = []
    for chunk in chunks:
        cache = PrefixCache(blueprint.layout)
        _compute_first(model, blueprint, cache, first, chunk=chunk)
        for request, expected in zip(requests, cold, strict=True):
            match = cache.match(request.tokens)
            at = cache.resume_at(match, limit=len(request.tokens) - 1)
            if at < request.at_least:
                missed.append(f"{request.name} resumed at {at}, not at {request.at_least}")
            rows = restored(blueprint, cache.read(match, at))
            answers = feed(model, rows, request.tokens[at:], chunk=chunk)
            gap = gap.widened(answers, expected[at:], f"{request.name}, chunk {chunk}")
            cache.commit(request.tokens, SequenceSource(rows, 0), kind=BoundaryKind.GENERATION_END)
        cache.check()
    return WarmResult(gap=gap, missed=tuple(missed))


def _compute_first(
    model: nn.Module, blueprint: Blueprint, cache: PrefixCache, tokens: Tokens, *, chunk: int | None
) -> None:
    rows = SequenceBatch(blueprint)
    at = 0
    for stop in (*_CHECKPOINTS, len(tokens)):
        feed(model, rows, tokens[at:stop], chunk=chunk)
        committed = cache.commit(tokens[:stop], SequenceSource(rows, 0), kind=BoundaryKind.STABLE)
        assert committed.is_resumable, (stop, committed)
        at = stop

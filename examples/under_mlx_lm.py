"""Reprise's prefix cache under mlx-lm's own generators.

mlx-lm computes every prompt from its first token, unless a program keeps whole caches and knows which one fits. Here
the prefix cache finds what is known of a prompt, and the generator starts there:

    prompts = CachedPrompts(model, nbytes=8 * 2**30)
    caches, rest = prompts.begin(ids)
    for piece in mlx_lm.stream_generate(model, tokenizer, rest, prompt_cache=caches):
        print(piece.text, end="")

It needs mlx-lm with what that brings, numpy and cachetools; nothing that only a server needs is imported.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import cache as mlx_lm_cache

import reprise

CHUNK = 512


class CachedPrompts:
    """The beginnings of prompts, computed once. For one thread."""

    def __init__(self, model: nn.Module, *, nbytes: int) -> None:
        self.num_computed = 0
        """How many tokens were computed for all prompts."""
        self._model = model
        self._blueprint = reprise.blueprint_of(model)
        self._cache = reprise.PrefixCache(self._blueprint.layout, memory=reprise.Memory(nbytes))

    def begin(self, ids: Sequence[int], *, boundaries: Sequence[int] = ()) -> tuple[list[Any], list[int]]:
        """mlx-lm's caches behind all of a prompt but its last token, and that token, for a generator.

        `boundaries`: where later prompts may diverge from this one, such as the end of the system prompt. Models with
        recurrent layers resume only there, and where prompts were seen to diverge.
        """
        end = len(ids) - 1
        prompt = reprise.Prompt(
            tokens=reprise.as_tokens(ids),
            boundaries=tuple(reprise.Boundary(at, reprise.BoundaryKind.EXPLICIT) for at in sorted(boundaries)),
        )
        match = self._cache.match(prompt.tokens)
        at = self._cache.resume_at(match, limit=end)
        plan = reprise.make_plan(
            prompt, layout=self._blueprint.layout, resume_at=at, end=end, branches=[match.length], interval=4 * CHUNK
        )
        lease = self._cache.lease(match, at)
        try:
            rows = reprise.restored(self._blueprint, self._cache.read(match, at), reserve=len(ids))
            for position in sorted({*plan.positions, end} - {at}):
                self._compute(rows, prompt, position)
                self._cache.commit(
                    prompt.tokens[:position], reprise.SequenceSource(rows, 0), kind=plan.kind_at(position)
                )
            fresh = mlx_lm_cache.make_prompt_cache(self._model)
            caches = [_as_theirs(theirs, ours, end) for theirs, ours in zip(fresh, rows.caches, strict=True)]
        finally:
            self._cache.release(lease)
        return caches, list(ids[end:])

    def _compute(self, rows: reprise.SequenceBatch, prompt: reprise.Prompt, position: int) -> None:
        while (at := rows.lengths[0]) < position:
            chunk = prompt.tokens[at : min(position, at + CHUNK)]
            rows.forward(self._model, mx.array(chunk)[None])
            mx.eval(rows.arrays())
            self.num_computed += len(chunk)


def _as_theirs(theirs: Any, ours: Any, position: int) -> Any:
    """A fresh cache of mlx-lm with the state of our layer at a position; ours where the model uses it as it is."""
    match theirs:
        case mlx_lm_cache.CacheList():
            parts = zip(theirs.caches, ours.caches, strict=True)
            return mlx_lm_cache.CacheList(*(_as_theirs(one, other, position) for one, other in parts))
        case mlx_lm_cache.ArraysCache():
            theirs.cache = list(ours.cache)
        case mlx_lm_cache.RotatingKVCache() if position > 0:
            spans = ours.kind.needs(position)
            planes = [ours.read(0, span) for span in spans]
            if position >= theirs.max_size:
                # It is full there: with an entry that the next token no longer sees, and that is overwritten first.
                planes.insert(len(planes) - 1, [plane[..., :1, :] for plane in planes[-1]])
            theirs.keys, theirs.values = (mx.concatenate(each, axis=2) for each in zip(*planes, strict=True))
            theirs.offset, theirs._idx = position, theirs.keys.shape[2]
        case mlx_lm_cache.KVCache() if position > 0:
            theirs.keys, theirs.values = ours.read(0, *ours.kind.needs(position))
            theirs.offset = position
        case mlx_lm_cache.KVCache() | mlx_lm_cache.RotatingKVCache():
            return theirs
        case _:
            return ours
    return theirs

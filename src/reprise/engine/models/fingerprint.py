"""The fingerprint of a model: a hash of everything but the tokens that layer states depend on.

These are the weights, the configuration and the KV format. Every bit of the weights counts, as MLX holds them: names,
sizes and times of files do not say what was loaded. The sums are computed on the device at memory bandwidth, so a large
model costs about as much as one decode step. Tokenizer and template do not matter: states are addressed by tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

_ROW = 1 << 14
"""Words per sum."""
_ROWS = 1 << 9
"""Sums computed at a time, over 32 MB of weights, which bounds the memory needed."""


def fingerprint_of(weights: Mapping[str, mx.array], facts: Mapping[str, Any], *, of: str = "") -> str:
    """A hash of these arrays by name, of JSON-compatible facts, and of another fingerprint on which they build."""
    digest = hashlib.blake2b(of.encode(), digest_size=16)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in sorted(weights):
        array = weights[name]
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        _add(digest, array)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, array: mx.array) -> None:
    """Add the content: per row of words, the sum of each word times a random factor for its index, modulo 2^64.

    Two different rows collide with a probability of at most 2^-33 (multilinear hashing: Carter and Wegman, 1979).
    """
    words = _words(array)
    factors = _factors()
    whole = words.size // _ROW
    for start in range(0, whole, _ROWS):
        stop = min(whole, start + _ROWS)
        rows = words[start * _ROW : stop * _ROW].reshape(stop - start, _ROW)
        _add_sums(digest, (rows.astype(mx.uint64) * factors).sum(axis=1))
    rest = words[whole * _ROW :]
    _add_sums(digest, (rest.astype(mx.uint64) * factors[: rest.size]).sum())


def _add_sums(digest: hashlib.blake2b, sums: mx.array) -> None:
    mx.eval(sums)
    digest.update(np.asarray(sums).tobytes())


def _words(array: mx.array) -> mx.array:
    """The bytes as unsigned numbers of at most 32 bits."""
    flat = array.reshape(-1)
    if array.nbytes % 4 == 0:
        return flat.view(mx.uint32)
    return flat.view(mx.uint16 if array.nbytes % 2 == 0 else mx.uint8)


@cache
def _factors() -> mx.array:
    """Must be the same in every process, since fingerprints are stored on disk."""
    return mx.array(np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, _ROW, dtype=np.uint64))

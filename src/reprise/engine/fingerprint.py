"""What layer states are a function of, beside the tokens: a hash of the weights, the configuration and the KV format.

Every bit of the weights counts, as MLX holds them: names, sizes and times of files say nothing of what was loaded. The
sums are formed where the weights are, at the speed of memory, so a large model costs about as much as one token of an
answer. Tokenizer and template are left out: states are addressed by tokens, so they stay right whatever made these.
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
"""Words of one sum."""
_ROWS = 1 << 9
"""Sums that are formed at a time, of 32 MB of weights: this bounds what is held meanwhile."""


def fingerprint_of(weights: Mapping[str, mx.array], facts: Mapping[str, Any], *, of: str = "") -> str:
    """A hash of these arrays by name, of facts that JSON can hold, and of what they stand on (another fingerprint)."""
    digest = hashlib.blake2b(of.encode(), digest_size=16)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in sorted(weights):
        array = weights[name]
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        _add(digest, array)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, array: mx.array) -> None:
    """Add the content: for each row of words the sum of each times a random factor of its place, modulo 2^64.

    Any two rows have one sum with a probability of 2^-33 at most, for whatever they differ in (multilinear hashing:
    Carter and Wegman, 1979).
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
    """The same in every process: fingerprints are kept on disk."""
    return mx.array(np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, _ROW, dtype=np.uint64))

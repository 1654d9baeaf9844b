"""Token runs: compact, read-only arrays of token ids.

A run is a one-dimensional ``numpy.int32`` array of shape ``(length,)``: four bytes a token, sliced without a copy.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def as_tokens(ids: Iterable[int] | Tokens) -> Tokens:
    """A read-only token run of these ids. A run that is read-only already is returned as it is."""
    if isinstance(ids, np.ndarray):
        given = cast(Tokens, ids)
        if given.dtype == np.int32 and not given.flags.writeable:
            return given
        run = given.astype(np.int32)
    else:
        run = np.fromiter(ids, dtype=np.int32)
    run.flags.writeable = False
    return run


def own_tokens(run: Tokens) -> Tokens:
    """A copy that owns its bytes, so that a short run does not keep a long prompt alive."""
    copy = run.copy()
    copy.flags.writeable = False
    return copy


def join_tokens(*runs: Tokens) -> Tokens:
    """The runs, one after the other, as one read-only run."""
    joined = np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)
    joined.flags.writeable = False
    return joined


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens the two runs share. O(length of the shared prefix), a few microseconds per 10,000."""
    n = min(len(a), len(b))
    # In steps, so that an early difference in two long prompts does not compare them to the end.
    start, step = 0, 1024
    while start < n:
        stop = min(n, start + step)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return start + int(differs.argmax())
        start, step = stop, step * 4
    return n

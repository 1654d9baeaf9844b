"""The shape of a JSON text (commas, containers, nesting), counted without parsing it.

An empty list takes some twenty times its two bytes once parsed, and a parser holds the GIL throughout. So large bodies
are checked first: block by block, without creating objects, in NumPy, which lets other threads run.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_NBYTES = 1 << 16

_Bytes = npt.NDArray[np.uint8]
_Flags = npt.NDArray[np.bool_]

_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
# "[" and "{" differ in one bit, "]" and "}" in the same.
_CASE, _OPEN, _CLOSE = 0x20, ord("{"), ord("}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonShape:
    """`num_containers` lists and objects, nested at most `depth` deep, with `num_commas` between their items."""

    num_containers: int
    num_commas: int
    depth: int


def json_shape(text: bytes) -> JsonShape:
    """The shape of a JSON text: exact if it is valid, otherwise an upper bound of what a parser creates.

    O(length): about 5 ms per MB, with a few blocks of memory.
    """
    whole = np.frombuffer(text, dtype=np.uint8)
    num_containers = num_commas = level = depth = 0
    is_within, is_escaped = False, False
    for start in range(0, len(whole), BLOCK_NBYTES):
        block = whole[start : start + BLOCK_NBYTES]
        quotes, is_escaped = _unescaped_quotes(block, is_escaped=is_escaped)
        # For each byte, whether the number of quotes up to it is odd.
        within = np.bitwise_xor.accumulate(quotes) ^ is_within
        is_within = bool(within[-1])
        outside = ~within
        opens = ((block | _CASE) == _OPEN) & outside
        closes = ((block | _CASE) == _CLOSE) & outside
        num_containers += int(np.count_nonzero(opens))
        num_commas += int(np.count_nonzero((block == _COMMA) & outside))
        at = np.flatnonzero(opens | closes)
        if len(at) > 0:
            levels = level + np.cumsum(np.where(opens[at], 1, -1))
            depth = max(depth, int(levels.max()))
            level = int(levels[-1])
    return JsonShape(num_containers=num_containers, num_commas=num_commas, depth=depth)


def _unescaped_quotes(block: _Bytes, *, is_escaped: bool) -> tuple[_Flags, bool]:
    """Where strings begin and end, and whether the last byte of the block escapes the first of the next.

    A byte is escaped by an odd number of backslashes before it; `is_escaped`: whether the first one is.
    """
    quotes = block == _QUOTE
    slashes = block == _BACKSLASH
    if not is_escaped and not slashes.any():
        return quotes, False
    places = np.arange(1, len(block) + 1)
    # The place after the last other byte gives how many backslashes end at each place.
    others = np.maximum.accumulate(np.where(slashes, 0, places))
    runs = places - others
    if is_escaped:
        # The backslash at the end of the previous block extends a run that begins here.
        runs[others == 0] += 1
    before = np.empty_like(runs)
    before[0], before[1:] = int(is_escaped), runs[:-1]
    return quotes & (before % 2 == 0), bool(runs[-1] % 2 == 1)

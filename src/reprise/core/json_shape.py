"""What a JSON text would become, counted before anything is made of it: values, lists and objects, and their nesting.

A list costs its reader some twenty times its two bytes, and a parser holds the interpreter for all of it. So large
bodies are looked at first, without making an object, a block at a time, and in numpy, which lets other threads run.
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
    """`num_containers` lists and objects, `depth` of them in each other, and `num_commas` between what they hold."""

    num_containers: int
    num_commas: int
    depth: int


def json_shape(text: bytes) -> JsonShape:
    """The shape of a JSON text; exact if it is valid, and an upper bound for what a parser makes of it before it fails.

    O(length), in blocks: about 5 ms a MB, and a few blocks of memory.
    """
    whole = np.frombuffer(text, dtype=np.uint8)
    num_containers = num_commas = level = depth = 0
    is_within, is_escaped = False, False
    for start in range(0, len(whole), BLOCK_NBYTES):
        block = whole[start : start + BLOCK_NBYTES]
        quotes, is_escaped = _unescaped_quotes(block, is_escaped=is_escaped)
        # Of a byte: whether an odd number of quotes stands up to here.
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
    """Where strings begin and end, and whether the block's last byte escapes the next block's first.

    A byte is escaped if an odd number of backslashes stands before it; `is_escaped` says so of the first.
    """
    quotes = block == _QUOTE
    slashes = block == _BACKSLASH
    if not is_escaped and not slashes.any():
        return quotes, False
    places = np.arange(1, len(block) + 1)
    # The place behind the last other byte: how many backslashes end at each place.
    others = np.maximum.accumulate(np.where(slashes, 0, places))
    runs = places - others
    if is_escaped:
        # The backslash of the block before counts for a run that begins here.
        runs[others == 0] += 1
    before = np.empty_like(runs)
    before[0], before[1:] = int(is_escaped), runs[:-1]
    return quotes & (before % 2 == 0), bool(runs[-1] % 2 == 1)

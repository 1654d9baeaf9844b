"""Tokenizing long texts in stretches: the tokens are the same, but who has gone is noticed between two of them, other
threads get their turn, and the tokenizer's own notes (some hundred bytes a token) are never those of the whole text.

Where a tokenizer may be cut cannot be known from outside, so each cut is tried: the text around it is tokenized whole
and in two, and has to give the same tokens. Merges and splits look no further than the words they are in; a tokenizer
that begins every text in its own way (a space put in front, say) never passes, and gets its texts whole.
"""

import re
from collections.abc import Callable, Iterator

from reprise.core.abandon import stop_if_abandoned
from reprise.core.tokens import Tokens, as_tokens, join_tokens

_STRETCH = 65_536
"""Characters of one stretch: some tens of milliseconds."""
_AROUND = 256
"""Characters on each side of a cut that are tokenized to try it."""
_MAX_TRIES = 8

# Between a line's end, or a space, and what it separates: where all tokenizers split words, on one side or the other.
_CUTS = re.compile(r"(?<=\n)(?=[A-Za-z])|(?<=[A-Za-z.,])(?= [A-Za-z])")

Encode = Callable[[str], list[int]]


def encode_long(encode: Encode, text: str) -> Tokens:
    """`encode(text)` as a run: a list takes ten times as much. Raises Abandoned."""
    runs: list[Tokens] = []
    for stretch in stretches(encode, text):
        stop_if_abandoned()
        runs.append(as_tokens(encode(stretch)))
    return runs[0] if len(runs) == 1 else join_tokens(*runs)


def stretches(encode: Encode, text: str, *, length: int = _STRETCH) -> Iterator[str]:
    """The text in pieces, most of about `length` characters, whose tokens joined are those of the text."""
    start = 0
    while len(text) - start > 2 * length:
        cut = _cut_near(encode, text, start + length, start + 2 * length)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _cut_near(encode: Encode, text: str, first: int, last: int) -> int | None:
    """A place in `[first, last)` at which the tokenizer can be cut, or None if none of the first few can."""
    for tries, found in enumerate(_CUTS.finditer(text, first, last)):
        if tries == _MAX_TRIES:
            break
        at = found.start()
        left, right = text[at - _AROUND : at], text[at : at + _AROUND]
        if encode(left + right) == encode(left) + encode(right):
            return at
    return None

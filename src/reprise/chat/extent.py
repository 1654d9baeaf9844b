"""How few tokens a text can be, from its length alone: what is far too long is refused before it is tokenized.

Sound where the tokenizer keeps every byte: each token then stands for a bounded number of them. `extent_of` reads that
from the definition of a fast tokenizer (`tokenizer.json`) and gives None where a step may lose some.
"""

import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any, cast

_LETTERS, _DIGITS = ascii_letters.encode(), digits.encode()
_BLOCK = 1 << 16
_SPACE = "▁"
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})
"""Pre-tokenizers that drop nothing, unless their behaviour is to remove what they split at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExtent:
    """The most bytes of UTF-8 that one token stands for: ASCII letters, digits, others.

    `composes`: the tokenizer composes characters first, which shortens a text.
    """

    most: tuple[int, int, int]
    composes: bool = False

    def __post_init__(self) -> None:
        assert min(self.most) > 0, self

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least. O(its length), far quicker than tokenizing."""
        if self.composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        counts = _counted(text)
        return max(-(-count // most) for count, most in zip(counts, self.most, strict=True))


def extent_of(definition: str) -> TokenExtent | None:
    """The extent of the tokens of a fast tokenizer; None if it may lose some of a text."""
    read = cast(dict[str, Any], json.loads(definition))
    model = cast(dict[str, Any], read.get("model") or {})
    normalizers, splitters = _steps(read.get("normalizer")), _steps(read.get("pre_tokenizer"))
    added = cast(list[dict[str, Any]], read.get("added_tokens") or [])
    vocabulary = cast(object, model.get("vocab"))
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if not all(map(_keeps_length, normalizers)):
        return None
    if not all(s.get("type") in _KEEPING and s.get("behavior") != "Removed" for s in splitters):
        return None
    tokens = list(cast(dict[str, int], vocabulary))
    is_bytes = any(step.get("type") == "ByteLevel" for step in splitters)
    if is_bytes and sum(len(token) == 1 for token in tokens) >= 256:
        counted = [_counted_bytes(token) for token in tokens]
    elif model.get("byte_fallback") is True and not is_bytes:
        counted = [_counted(token.replace(_SPACE, " ")) for token in tokens]
    else:
        return None
    counted += [_counted(str(token["content"])) for token in added]
    most = [max((counts[at] for counts in counted), default=0) for at in range(3)]
    if min(most) == 0:
        return None
    composes = any(step.get("type") == "NFC" for step in normalizers)
    return TokenExtent(most=(most[0], most[1], most[2]), composes=composes)


def _steps(step: object) -> list[Mapping[str, Any]]:
    """A step of the tokenizer, or the steps of a sequence."""
    if not isinstance(step, dict):
        return []
    found = cast(dict[str, Any], step)
    if found.get("type") != "Sequence":
        return [found]
    inner = cast(Iterable[object], found.get("normalizers") or found.get("pretokenizers") or ())
    return [one for entry in inner for one in _steps(entry)]


def _keeps_length(step: Mapping[str, Any]) -> bool:
    match step.get("type"):
        case "NFC" | "Prepend":
            return True
        case "Replace":
            # A space becomes the mark of one. Any other replacement may shorten.
            return step.get("pattern") == {"String": " "} and step.get("content") == _SPACE
        case _:
            return False


def _counted(text: str) -> tuple[int, int, int]:
    """Bytes of each class."""
    letters = numbers = others = 0
    for start in range(0, len(text), _BLOCK):
        # A block at a time: each count makes a copy.
        encoded = text[start : start + _BLOCK].encode("utf-8", "replace")
        rest = encoded.translate(None, _LETTERS)
        last = len(rest.translate(None, _DIGITS))
        letters, numbers, others = letters + len(encoded) - len(rest), numbers + len(rest) - last, others + last
    return letters, numbers, others


def _counted_bytes(token: str) -> tuple[int, int, int]:
    """The same for a token of a byte-level vocabulary, where each character is a byte, and ASCII is itself."""
    letters = sum(char in ascii_letters for char in token)
    numbers = sum(char in digits for char in token)
    return letters, numbers, len(token) - letters - numbers

"""Seams: the places where a tokenizer cuts its input before anything else, so that what lies between stands alone.

A piece is a seam's token with the text that follows it, up to the next seam; the first piece has no seam. The tokens
of a piece then depend on its own text only, which makes long prompts cheap: what was tokenized once need not be again.
Not every added token is a seam (some swallow the spaces around them, some are found only between words), so each is
tried out on the real tokenizer before a text is cut at it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary

# Text on both sides of a seam: letters, spaces, line breaks, digits, and characters of several bytes.
_PROBES = (
    ("a", "b"),
    ("a ", " b"),
    ("a\n", "\nb"),
    ("é \n\n", "\n\n  é"),
    ("1", "2"),
    ("世界", "界"),
    ("", " "),
    (" ", "\n"),
)
_NUM_TOGETHER = 16

_Encode = Callable[[str], list[int]]

_VERDICTS: WeakKeyDictionary[_Encode, dict[tuple[str, int], bool]] = WeakKeyDictionary()
"""For each tokenizer that is in use, which splitters (text and token) separate: what was tried stays true."""


class Seams:
    """Cuts texts at those `splitters` (text → token) at which `encode` is shown to work piece by piece."""

    def __init__(self, encode: _Encode, splitters: Mapping[str, int]) -> None:
        self._encode = encode
        self._splitters = {text: token for text, token in splitters.items() if text != ""}
        self._texts = {token: text for text, token in self._splitters.items()}
        self._known = _VERDICTS.setdefault(encode, {})
        # Leftmost, then longest, as tokenizers match their added tokens.
        longest_first = sorted(self._splitters, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        if not self._works_together():
            self._pattern = None

    def is_seam(self, text: str) -> bool:
        """Whether this splitter separates. The first answer costs some thirty short calls of the tokenizer."""
        key = (text, self._splitters[text])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = all(
                self._separates(text, left, right) for left, right in (*_PROBES, (text, text))
            )
        return known

    def is_seam_token(self, token: int) -> bool:
        """The same for a token id. O(1) after the first call."""
        text = self._texts.get(token)
        return text is not None and self._pattern is not None and self.is_seam(text)

    def cut(self, text: str) -> Iterator[str]:
        """The pieces of `text`, in order, lazily. Joined they are `text`; an empty text has none."""
        start = 0
        if self._pattern is not None:
            for found in self._pattern.finditer(text):
                if found.start() > start and self.is_seam(found.group()):
                    yield text[start : found.start()]
                    start = found.start()
        if start < len(text):
            yield text[start:]

    def _separates(self, seam: str, left: str, right: str) -> bool:
        tail = self._encode(seam + right)
        return tail[:1] == [self._splitters[seam]] and self._encode(left + seam + right) == self._encode(left) + tail

    def _works_together(self) -> bool:
        """Whether a text with several seams has the tokens of its pieces: what trying them singly could not show."""
        chosen = [text for text in list(self._splitters)[:_NUM_TOGETHER] if self.is_seam(text)]
        text = "Ab c\n" + "".join(seam + left + right for seam, (left, right) in zip(chosen, _PROBES * 2, strict=False))
        return self._encode(text) == [token for piece in self.cut(text) for token in self._encode(piece)]

"""Filling in the middle: the tokens that mark the text before and after, learnt from its vocabulary.

Markers are single tokens whose words say their part: `<|fim_prefix|>`, `<｜fim▁hole｜>`, `<PRE>`, `[SUFFIX]`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PARTS = {
    "prefix": "prefix",
    "pre": "prefix",
    "begin": "prefix",
    "suffix": "suffix",
    "suf": "suffix",
    "hole": "suffix",
    "middle": "middle",
    "mid": "middle",
    "end": "middle",
}
_ALONE = frozenset({"prefix", "pre", "suffix", "suf", "middle", "mid"})
"""Parts that name a marker without another word."""
_ENDS = frozenset({"endoftext", "end of text", "eot", "fim pad", "file sep", "file separator", "repo name", "reponame"})


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillMarkers:
    """The markers by their token ids. `middle` None: the model continues the prefix, which is last then.

    `ends` are the tokens at which the text in the middle is over.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The tokens that have a model write what stands between."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def infill_markers(tokens: Mapping[str, int]) -> InfillMarkers | None:
    """The markers among special and added tokens, by text; None if the model has none."""
    families: dict[str, dict[str, int]] = {}
    ends: set[int] = set()
    for text, token in tokens.items():
        if not re.search(r"[<\[].*[>\]]", text):
            continue
        words = re.findall(r"[a-z]+", text.lower())
        if " ".join(words) in _ENDS:
            ends.add(token)
        family, part = ("", words[0]) if len(words) == 1 else (words[0], words[-1])
        is_marker = (len(words) == 1 and part in _ALONE) or (len(words) == 2 and family in ("fim", "code"))
        if is_marker and part in _PARTS:
            families.setdefault(family, {})[_PARTS[part]] = token
    for family in ("fim", "code", ""):
        found = families.get(family, {})
        if "prefix" in found and "suffix" in found:
            return InfillMarkers(
                prefix=found["prefix"],
                suffix=found["suffix"],
                middle=found.get("middle"),
                ends=frozenset(ends | set(found.values())),
            )
    return None

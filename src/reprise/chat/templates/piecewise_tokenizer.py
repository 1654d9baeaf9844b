"""Tokenizing piece by piece: nothing is tokenized twice, and what was sampled keeps its tokens.

A piece is a seam's token with the text that follows it, up to the next seam; the first piece has no seam. A seam is a
place where the tokenizer cuts its input before anything else, so the tokens of a piece depend on its own text only. Not
every added token is a seam (some swallow the spaces around them, some are found only between words), so each is tried
out on the real tokenizer before a text is cut at it.

A long piece is tokenized in stretches: the tokens are the same, but who has gone is noticed between two of them, other
threads get their turn, and the tokenizer's own notes (some hundred bytes a token) are never those of the whole text.
Where a tokenizer may be cut there cannot be known from outside, so each cut is tried: the text around it is tokenized
whole and in two, and has to give the same tokens. Merges and splits look no further than the words they are in; a
tokenizer that begins every text in its own way (a space put in front, say) never passes, and gets its texts whole.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from weakref import WeakKeyDictionary

from reprise.chat.images import SeenImage, SeenImages
from reprise.chat.memo import Memo
from reprise.chat.text_model import TextModel
from reprise.core.abandon import stop_if_abandoned
from reprise.core.images import PromptImage
from reprise.core.prompt import Boundary, Prompt
from reprise.core.tokens import Tokens, as_tokens, common_prefix, join_tokens

Encode = Callable[[str], list[int]]

_STRETCH = 65_536
"""Characters of one stretch: some tens of milliseconds."""
_AROUND = 256
"""Characters on each side of a cut that are tokenized to try it."""
_MAX_TRIES = 8

# Between a line's end, or a space, and what it separates: where all tokenizers split words, on one side or the other.
_CUTS = re.compile(r"(?<=\n)(?=[A-Za-z])|(?<=[A-Za-z.,])(?= [A-Za-z])")


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

_VERDICTS: WeakKeyDictionary[Encode, dict[tuple[str, int], bool]] = WeakKeyDictionary()
"""For each tokenizer that is in use, which splitters (text and token) separate: what was tried stays true."""


class Seams:
    """Cuts texts at those `splitters` (text → token) at which `encode` is shown to work piece by piece."""

    def __init__(self, encode: Encode, splitters: Mapping[str, int]) -> None:
        self._encode = encode
        self._splitters = {text: token for text, token in splitters.items() if text != ""}
        self._texts = {token: text for text, token in self._splitters.items()}
        self._known = _VERDICTS.setdefault(encode, {})
        # Leftmost, then longest, as tokenizers match their added tokens.
        longest_first = sorted(self._splitters, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.longest = max(map(len, longest_first), default=0)
        """The most characters of a splitter."""
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

    def cut(self, text: str, start: int = 0) -> Iterator[str]:
        """The pieces of `text` from `start` on, where one begins, in order, lazily. An empty text has none."""
        if self._pattern is not None:
            for found in self._pattern.finditer(text, start):
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


_ENTRY_NBYTES = 300
"""What an entry of a memo costs beside its text and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPiece:
    """`text` stands after texts whose hash is `chain`, from the character `char_at` and the token `token_at` on.

    `image`: the one that it begins with.
    """

    text: str
    tokens: Tokens
    chain: int
    char_at: int
    token_at: int
    image: SeenImage | None = None

    def num_chars(self, num_tokens: int, decode: Callable[[Sequence[int]], str]) -> int:
        """How many characters its first tokens stand for. An image has none before it is whole."""
        begun, head = self.tokens[:num_tokens], 0
        if self.image is not None:
            begun, head = begun[len(self.image.run) :], self.text.index(self.image.tag) + len(self.image.tag)
            if num_tokens < len(self.image.run):
                return 0
        # An unfinished character decodes to a replacement: it begins where that stands.
        text = decode(begun.tolist()).rstrip("\ufffd") if len(begun) > 0 else ""
        return min(len(self.text), head + len(text))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedText:
    """A text cut into pieces, and the tokens of each.

    `num_learned`: how many spellings its tokenizer had learned before it."""

    pieces: tuple[TextPiece, ...]
    num_learned: int

    @cached_property
    def tokens(self) -> Tokens:
        """All tokens, shape ``(length,)``."""
        return join_tokens(*(piece.tokens for piece in self.pieces))

    @property
    def model_tokens(self) -> Tokens:
        """The tokens that the model reads: an image's placeholders are the model's own."""
        runs: list[Tokens] = []
        for piece in self.pieces:
            image = piece.image
            own = () if image is None else (image.expansion.tokens,)
            runs += [*own, piece.tokens[0 if image is None else len(image.run) :]]
        return join_tokens(*runs)

    @cached_property
    def images(self) -> tuple[PromptImage, ...]:
        """The images in it."""
        return tuple(piece.image.at(piece.token_at) for piece in self.pieces if piece.image is not None)

    def prompt(self, length: int | None = None, boundaries: Sequence[Boundary] = ()) -> Prompt:
        """Its first `length` tokens (None: all) as a prompt, or fewer where that would cut an image."""
        whole = Prompt(tokens=self.tokens, boundaries=tuple(boundaries), images=self.images)
        return whole if length is None else whole.up_to(length)

    def piece_of_token(self, position: int) -> TextPiece | None:
        """The piece that the token at `position` belongs to. O(pieces)."""
        for piece in reversed(self.pieces):
            if piece.token_at <= position:
                return piece if position < piece.token_at + len(piece.tokens) else None
        return None

    def token_at_last(self, text: str, tokens_of: Callable[[str], Tokens]) -> int | None:
        """The token at which the last occurrence of `text` begins, if a token begins there and it is within a piece.

        Tokenizes what is from there to the piece's end, and not what may be a long text before it.
        """
        for piece in reversed(self.pieces):
            at = piece.text.rfind(text)
            if at < 0:
                continue
            tail = tokens_of(piece.text[at:])
            start = len(piece.tokens) - len(tail)
            is_cut_there = start >= 0 and common_prefix(piece.tokens[start:], tail) == len(tail)
            return piece.token_at + start if is_cut_there else None
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """How far a run of tokens was read: the hash of its whole groups, and the tokens behind those."""

    chain: int = 0
    tail: tuple[int, ...] = ()


class PieceTokenizer:
    """The tokenizer of a model, with a memory of at most `nbytes` bytes. Safe to use from several threads.

    Pieces are remembered by their text alone, since their canonical tokens depend on nothing else. What a model sampled
    is remembered by its text and by all the text before it: the model's state stands on just these tokens, and
    only there another spelling of the same text is worth keeping.
    """

    def __init__(
        self,
        text_model: TextModel,
        *,
        images: SeenImages | None = None,
        is_faithful: bool = True,
        nbytes: int = 64 << 20,
    ) -> None:
        self._images = images
        self._image_groups: WeakKeyDictionary[SeenImage, tuple[list[int], ...]] = WeakKeyDictionary()
        """The groups of tokens that images are cut into."""
        self._encode = text_model.encode
        self._decode = text_model.decode
        self._seams = Seams(text_model.encode, text_model.splitters)
        self._is_faithful = is_faithful
        self._canonical: Memo[str, Tokens] = Memo(nbytes=nbytes, size=_nbytes)
        self._sampled: Memo[tuple[int, str], Tokens] = Memo(nbytes=nbytes, size=lambda key, run: _nbytes(key[1], run))
        self._num_learned = 0
        """Changes with `_sampled`, in which learning also forgets."""

    @property
    def decode(self) -> Callable[[Sequence[int]], str]:
        return self._decode

    def canonical(self, text: str) -> Tokens:
        """The tokenizer's own tokens of a text that is part of a piece."""
        return as_tokens(self._encode(text))

    def tokenize(self, text: str) -> TokenizedText:
        """The text's pieces and tokens. Costs the tokenizer the pieces that it has not seen lately."""
        # Read first: what is learned meanwhile may be in the tokens or not.
        num_learned = self._num_learned
        return TokenizedText(pieces=tuple(self._pieces(text)), num_learned=num_learned)

    def shared(self, known: TokenizedText, text: str) -> int:
        """How many leading tokens `known` and the tokens of `text` have in common.

        Stops at the first piece that differs, so the rest is never tokenized. Equal text is compared, and
        not cut and looked up again, unless the memory has learned a spelling since.
        """
        at = self._num_equal(known, text) if known.num_learned == self._num_learned else 0
        if at == len(known.pieces):
            return 0
        begun = known.pieces[at]
        position = begun.token_at
        others = self._pieces(text, begun)
        for piece in known.pieces[at:]:
            other = next(others, None)
            if other is None:
                return position
            if other.text == piece.text:
                # The memory may have learned a spelling in between, so equal texts are no proof.
                same = len(piece.tokens) if other.tokens is piece.tokens else common_prefix(piece.tokens, other.tokens)
            else:
                same = common_prefix(piece.tokens, other.tokens)
            position += same
            if same < len(piece.tokens) or other.text != piece.text:
                return position
        return position

    def _num_equal(self, known: TokenizedText, text: str) -> int:
        """A number of leading pieces of `known` that `text` is cut into, too; not all of them.

        Where the next piece begins is decided by at most the longest splitter's characters: these are equal as well.
        """
        num = 0
        longest = max(self._seams.longest, self._images.longest if self._images is not None else 0)
        for at, piece in enumerate(known.pieces):
            if not text.startswith(piece.text, piece.char_at):
                break
            if len(piece.text) >= longest:
                num = at
        return num

    def learn(self, prompt: TokenizedText, sampled: Sequence[int]) -> None:
        """Remember the tokens that a model sampled after `prompt`, as the spelling of their text in that place.

        What is learned decodes to exactly its text, and is found again only where a rendered text is cut as the tokens
        are: tokens that spell a seam out of ordinary ones are never asked for.
        """
        if not self._is_faithful or not prompt.pieces or len(sampled) == 0:
            return
        last = prompt.pieces[-1]
        if last.image is not None:
            return
        chain = last.chain
        tail = [*last.tokens.tolist(), *sampled]
        groups = list(self._groups(tail))
        texts = [self._decode(group) for group in groups]
        if "".join(texts) != self._decode(tail):
            # This decoder reads tokens by what is before them, so a piece's text does not follow from its tokens alone.
            return
        for group, text in zip(groups, texts, strict=True):
            self._remember(chain, text, group)
            chain = _after(chain, text)

    def _remember(self, chain: int, text: str, group: Sequence[int]) -> None:
        self._sampled.put((chain, text), as_tokens(group))
        self._num_learned += 1

    def recall(self, spelled: Spelled, tokens: Sequence[int]) -> Spelled:
        """Remember the spelling of stored tokens, where it is not the tokenizer's own; gives where they end.

        `spelled`: where the tokens before these end. The last piece may not be whole: `recall_end` is for that.
        """
        first, *others = self._groups(tokens) if len(tokens) > 0 else [[]]
        if spelled.tail and not (first and self._is_cut_between(spelled.tail[-1], first[0])):
            first = [*spelled.tail, *first]
        elif spelled.tail:
            others, first = [first, *others], list(spelled.tail)
        groups = [first, *others]
        return Spelled(chain=self._recall(spelled.chain, groups[:-1]), tail=tuple(groups[-1]))

    def recall_end(self, spelled: Spelled) -> None:
        """What was stored ends here: its last piece may be one of a prompt, too."""
        self._recall(spelled.chain, [list(spelled.tail)] if spelled.tail else [])

    def _recall(self, chain: int, groups: Sequence[list[int]]) -> int:
        for is_image, stretch in groupby(groups, key=_is_image):
            if is_image:
                for group in stretch:
                    chain = _after_image(chain, group)
                continue
            spelled = list(stretch)
            texts = [self._decode(group) for group in spelled]
            is_told_apart = "".join(texts) == self._decode([token for group in spelled for token in group])
            for group, text in zip(spelled, texts, strict=True):
                if is_told_apart and self._is_faithful and self._encode(text) != group:
                    self._remember(chain, text, group)
                chain = _after(chain, text)
        return chain

    def _pieces(self, text: str, begun: TextPiece | None = None) -> Iterator[TextPiece]:
        """The pieces of a text, from where `begun` stands in it."""
        chain, char_at, token_at = (0, 0, 0) if begun is None else (begun.chain, begun.char_at, begun.token_at)
        for part in self._parts(text, char_at):
            stop_if_abandoned()
            image = self._image_of(part)
            tokens = self._tokens(chain, part) if image is None else self._tokens_of_image(image, part)
            yield TextPiece(text=part, tokens=tokens, chain=chain, char_at=char_at, token_at=token_at, image=image)
            chain = _after(chain, part) if image is None else self._after_piece(chain, image, part)
            char_at += len(part)
            token_at += len(tokens)

    def _parts(self, text: str, start: int) -> Iterator[str]:
        """The text from `start` on, cut at its seams and before its images."""
        for part in self._seams.cut(text, start):
            at = 0
            for found in self._images.pattern.finditer(part, 1) if self._images is not None else ():
                yield part[at : found.start()]
                at = found.start()
            yield part[at:]

    def _image_of(self, part: str) -> SeenImage | None:
        """The image that a piece begins with."""
        found = None if self._images is None else self._images.pattern.match(part)
        return None if self._images is None or found is None else self._images.tagged(found.group(1))

    def _after_piece(self, chain: int, image: SeenImage, part: str) -> int:
        """The chain behind a piece that begins with an image, as it follows from tokens that are recalled."""
        rest = part[part.index(image.tag) + len(image.tag) :]
        groups = self._image_groups.get(image)
        if groups is None:
            groups = self._image_groups[image] = tuple(self._groups(image.run.tolist()))
        *groups, last = groups
        for group in groups:
            chain = _after_image(chain, group) if _is_image(group) else _after(chain, self._decode(group))
        if not _is_image(last):
            return _after(chain, self._decode(last) + rest)
        chain = _after_image(chain, last)
        return chain if rest == "" else _after(chain, rest)

    def _tokens_of_image(self, image: SeenImage, part: str) -> Tokens:
        """The image's own tokens, and those that the rest of the piece has behind its marker."""
        assert self._images is not None
        marker = self._images.marker
        behind = self._own_tokens(marker + part[len(marker) + len(image.tag) :])
        return join_tokens(image.run, behind[len(self._own_tokens(marker)) :])

    def _tokens(self, chain: int, part: str) -> Tokens:
        sampled = self._sampled.get((chain, part)) if self._is_faithful else None
        return self._own_tokens(part) if sampled is None else sampled

    def _own_tokens(self, part: str) -> Tokens:
        known = self._canonical.get(part)
        if known is None:
            known = self._spelled(part)
            self._canonical.put(part, known)
        return known

    def _spelled(self, part: str) -> Tokens:
        if self._images is None or self._images.cut_marker not in part:
            return encode_long(self._encode, part)
        # Somebody's words have what would be an image's marker as one token.
        first, second = self._images.halves
        texts = part.split(self._images.cut_marker)
        texts = [("" if at == 0 else second) + text for at, text in enumerate(texts)]
        return join_tokens(
            *(encode_long(self._encode, text + (first if at < len(texts) - 1 else "")) for at, text in enumerate(texts))
        )

    def _groups(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """The tokens, cut before each seam, and where placeholders of images begin and end."""
        group: list[int] = []
        for token in tokens:
            if group and self._is_cut_between(group[-1], token):
                yield group
                group = []
            group.append(token)
        yield group

    def _is_cut_between(self, token: int, following: int) -> bool:
        return (token < 0) != (following < 0) or self._seams.is_seam_token(following)


def _after(chain: int, text: str) -> int:
    return hash((chain, text))


def _after_image(chain: int, placeholders: Sequence[int]) -> int:
    return hash((chain, *placeholders))


def _is_image(group: Sequence[int]) -> bool:
    return len(group) > 0 and group[0] < 0


def _nbytes(text: str, run: Tokens) -> int:
    return _ENTRY_NBYTES + 2 * len(text) + run.nbytes

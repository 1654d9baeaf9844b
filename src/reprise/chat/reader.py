"""From tokens to parts: the state machine that walks a model's markup."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from reprise.chat.markup import HEADER, NORMAL, Header, Markup, Part, part_of, read_header
from reprise.chat.scan import first_match, num_held
from reprise.chat.text_model import Detokenizer, TextModel


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a part, spelled out."""

    part: Part
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A marker led from one state to another. `function` is the name that a channel header calls."""

    source: str
    to: str
    marker: str
    function: str | None = None


class Speller:
    """Tokens → text, with atoms for the special tokens of the markup."""

    def __init__(self, text_model: TextModel, markup: Markup, *, context: Sequence[int]) -> None:
        self._text_model = text_model
        self._markup = markup
        self._detokenizer = self._detokenizer_after(context)

    def text(self, token: int) -> str:
        """The text that is certain after this token."""
        _add(self._detokenizer, token)
        atom = self._markup.atoms.get(token)
        if atom is None:
            return self._detokenizer.last_segment
        text = self.finish().removesuffix(self._markup.spell(atom))
        self._detokenizer = self._detokenizer_after((token,))
        return text + atom

    def finish(self) -> str:
        """What was not certain yet."""
        self._detokenizer.finalize()
        return self._detokenizer.last_segment

    def _detokenizer_after(self, tokens: Sequence[int]) -> Detokenizer:
        """One that stands behind these tokens: at the beginning of a text it would drop a space."""
        detokenizer = self._text_model.detokenizer()
        for token in tokens:
            _add(detokenizer, token)
        _ = detokenizer.last_segment
        return detokenizer


def _add(detokenizer: Detokenizer, token: int) -> None:
    # The logits of many models are wider than their vocabulary: such a token has no text.
    with suppress(IndexError, KeyError, TypeError):
        detokenizer.add_token(token)


class Reader:
    """Walks the markup of one answer. `state` is where the text stands that was read so far.

    However a text is cut into pieces (between special tokens), the parts are the same.
    """

    def __init__(
        self, text_model: TextModel, markup: Markup, *, tool_names: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._speller = Speller(text_model, markup, context=context)
        self._markup = markup
        self._tool_names = tool_names
        self._pending = ""
        self._header = ""
        self.state = markup.initial
        # Until the first header is certain, an answer without any is possible.
        self._awaits_header = part_of(self.state) is Part.HEADER

    @property
    def part(self) -> Part:
        return part_of(self.state)

    def feed(self, token: int) -> list[Piece | Turn]:
        """What is certain after this token."""
        return self._read(self._speller.text(token))

    def finish(self) -> list[Piece | Turn]:
        """The rest, when no token follows: what could have become a marker is text."""
        out = self._read(self._speller.finish())
        if self._awaits_header:
            self.state = NORMAL
            self._awaits_header = False
        out += self._piece(self._pending)
        self._pending = ""
        return out

    def _read(self, text: str) -> list[Piece | Turn]:
        self._pending += text
        out: list[Piece | Turn] = []
        if self._awaits_header and not self._begins():
            return out
        while True:
            edges = self._markup.edges.get(self.state, ())
            markers = [edge.marker for edge in edges]
            found = first_match(self._pending, markers)
            if found is None:
                break
            before, self._pending = self._pending[: found.start], self._pending[found.stop :]
            out += self._piece(before)
            out += self._turn(markers[found.index], edges[found.index].to, is_kept=edges[found.index].is_kept)
        safe = len(self._pending) - num_held(self._pending, markers)
        out += self._piece(self._pending[:safe])
        self._pending = self._pending[safe:]
        return out

    def _begins(self) -> bool:
        """Whether it is certain how the answer begins: with a header, or (models slip) with content."""
        lead = self._pending.lstrip()
        if any(lead.startswith(start) for start in self._markup.header_starts):
            self._awaits_header = False
            return True
        if any(start.startswith(lead) for start in self._markup.header_starts):
            return False
        self._awaits_header = False
        self.state = NORMAL
        return True

    def _piece(self, text: str) -> list[Piece | Turn]:
        if not text:
            return []
        spelled = self._markup.spell(text)
        if self.part is Part.HEADER:
            self._header += spelled
            return []
        return [Piece(self.part, spelled)]

    def _turn(self, marker: str, to: str | None, *, is_kept: bool) -> list[Piece | Turn]:
        if to is None:
            assert self.state == HEADER, self.state
            header = read_header(self._header, tool_names=self._tool_names)
        else:
            header = Header(state=to)
        spelled = self._markup.spell(marker)
        turn = Turn(source=self.state, to=header.state, marker=spelled, function=header.function)
        self.state = header.state
        self._header = ""
        return [turn, *(self._piece(marker) if is_kept else [])]

"""From tokens to parts: the state machine that walks a model's markup."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reprise.chat.answers.markup import (
    HEADER,
    NORMAL,
    REASONING,
    TOOL,
    TOOL_IN_REASONING,
    Channel,
    Edge,
    Header,
    Markup,
    part_of,
    read_header,
)
from reprise.chat.calls.call_reader import CallEvent, CallReader
from reprise.chat.scan import first_match, num_held
from reprise.chat.text_model import Detokenizer, TextModel
from reprise.chat.tools import names_of


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Some text of a part, spelled out."""

    part: Channel
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A marker led from one state to another. `function` is the name that a channel header calls.

    `is_failed`: the text of a call that was none, which is not there yet, follows as content.
    """

    source: str
    to: str
    marker: str
    function: str | None = None
    is_failed: bool = False


class CallFailed:
    """The text behind the last whole call, which is no call. It becomes content, except what was already emitted."""


@dataclass(frozen=True, slots=True)
class CallCut:
    """The answer was cut short within a call. `text` is what was written of it."""

    text: str


Event = TextChunk | Transition | CallEvent | CallFailed | CallCut


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
        self,
        text_model: TextModel,
        markup: Markup,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        context: Sequence[int] = (),
        holds_calls: bool = False,
    ) -> None:
        """`tools` are those that can be called. `holds_calls`: a call is emitted only once it is whole."""
        self._holds_calls = holds_calls
        self._speller = Speller(text_model, markup, context=context)
        self._markup = markup
        self._tools = tools
        self._tool_names = names_of(tools)
        self._call: CallReader | None = None
        # Calls that begin like any text are calls only where the answer begins.
        self._awaits_call = markup.calls is not None and markup.calls.is_bare
        self._specials = [text for text in text_model.splitters if text] if self._awaits_call else []
        self._pending = markup.begun
        self._is_line_begun = True
        """Whether the next character is the first of a line, or of a part."""
        self._header = ""
        self.state = markup.initial
        # Until the first header is certain, an answer without any is possible.
        self._awaits_header = part_of(self.state) is Channel.HEADER

    @property
    def part(self) -> Channel:
        return part_of(self.state)

    def feed(self, token: int) -> list[Event]:
        """What is certain after this token."""
        return self._read(self._speller.text(token))

    def finish(self, *, is_ended: bool) -> list[Event]:
        """The rest, when no token follows: what could have become a marker is text. `is_ended`: the model ended it."""
        out = self._read(self._speller.finish())
        if self._call is not None:
            out += self._end_call_text(self._call, is_ended=is_ended)
        if self._awaits_header:
            self.state = NORMAL
            self._awaits_header = False
        if not is_ended and self._is_begun_call(self._pending):
            out.append(CallCut(self._markup.spell(self._pending)))
        else:
            out += self._piece(self._pending)
        self._pending = ""
        return out

    def _is_begun_call(self, text: str) -> bool:
        """Whether a text that is cut short is the beginning of a marker of calls.

        One character in a line is none, and neither are letters there, which begin a word.
        """
        starts = [edge.marker for edge in self._edges if edge.to is not None and part_of(edge.to) is Channel.CALL]
        is_possible = self._is_line_begun or (len(text) > 1 and not text[0].isalpha())
        return text != "" and is_possible and self.part is not Channel.CALL and any(s.startswith(text) for s in starts)

    def _read(self, text: str) -> list[Event]:
        self._pending += text
        out: list[Event] = []
        if self._awaits_header and not self._begins():
            return out
        while True:
            if self._call is not None and not self._read_call(self._call, out):
                return out
            if self._awaits_call and self.state == NORMAL:
                if self._begins_call(out):
                    continue
                if self._awaits_call and first_match(self._pending, self._markers) is None:
                    # White space may stand before the call, or a marker that is not whole.
                    return out
            found = first_match(self._pending, self._markers)
            if found is None:
                break
            edge = self._edges[found.index]
            before, self._pending = self._pending[: found.start], self._pending[found.stop :]
            out += self._piece(before)
            out += self._turn(edge.marker, edge.to, is_kept=edge.is_kept)
        safe = len(self._pending) - num_held(self._pending, self._markers)
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

    def _begins_call(self, out: list[Event]) -> bool:
        """Enter a call that begins like any text, if the text does, at the beginning of the content."""
        assert self._markup.calls is not None, "it awaits one"
        lead = self._pending.lstrip()
        # Some models write a special token first that their templates do not.
        special = next((text for text in self._specials if lead.startswith(text)), "")
        start = special + self._markup.calls.start
        if lead.startswith(start):
            self._awaits_call = False
            self._pending = lead[len(start) :]
            out += self._turn(start, TOOL, is_kept=False)
            return True
        if lead == special:
            return False
        if lead and not any(marker.startswith(lead) or lead.startswith(marker) for marker in self._markers):
            self._awaits_call = False
        return False

    def _read_call(self, call: CallReader, out: list[Event]) -> bool:
        """Give the call what there is to read. Whether something is left to be read otherwise."""
        pending, self._pending = self._pending, ""
        if pending:
            call.feed(pending)
        out += call.take()
        if not call.is_over:
            return False
        self._leave_call(call, out)
        return True

    def _leave_call(self, call: CallReader, out: list[Event]) -> None:
        self._call = None
        if call.is_broken:
            out.append(CallFailed())
            self._pending = call.raw[0 if self._holds_calls else call.num_emitted :]
            if self._edges == ():
                # It has no end marker, so that it is over here.
                out.append(Transition(source=self.state, to=self._outside, marker="", is_failed=True))
                self.state = self._outside
            return
        out.append(Transition(source=self.state, to=self._outside, marker=""))
        self.state, self._pending = self._outside, call.rest

    @property
    def _edges(self) -> tuple[Edge, ...]:
        return self._markup.edges.get(self.state, ())

    @property
    def _markers(self) -> list[str]:
        return [edge.marker for edge in self._edges]

    @property
    def _outside(self) -> str:
        return REASONING if self.state == TOOL_IN_REASONING else NORMAL

    def _end_call_text(self, call: CallReader, *, is_ended: bool) -> list[Event]:
        call.finish(is_ended=is_ended)
        out: list[Event] = list(call.take())
        if call.is_cut:
            self._call = None
            return [*out, CallCut(self._markup.spell(call.raw))]
        self._leave_call(call, out)
        return out + self._read("")

    def _piece(self, text: str) -> list[Event]:
        if not text:
            return []
        spelled = self._markup.spell(text)
        self._is_line_begun = text.endswith("\n")
        if self.part is Channel.HEADER:
            self._header += spelled
            return []
        return [TextChunk(self.part, spelled)]

    def _turn(self, marker: str, to: str | None, *, is_kept: bool) -> list[Event]:
        if to is None:
            assert self.state == HEADER, self.state
            header = read_header(self._header, tool_names=self._tool_names)
        else:
            header = Header(state=to)
        spelled = self._markup.spell(marker)
        turn = Transition(source=self.state, to=header.state, marker=spelled, function=header.function)
        self._is_line_begun = True
        self.state = header.state
        self._header = ""
        calls = self._markup.calls
        if calls is not None and self.part is Channel.CALL and (calls.is_bare or marker == calls.start):
            self._call = CallReader(calls, tools=self._tools, spell=self._markup.spell)
        return [turn, *(self._piece(marker) if is_kept else [])]

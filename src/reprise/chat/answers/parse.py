"""A model's answer, token by token: reasoning, content and tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reprise.chat.answer import Answer, ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.markup import NORMAL, TOOL_IN_REASONING, Channel, part_of
from reprise.chat.answers.reader import CallCut, CallFailed, Event, TextChunk, Transition
from reprise.chat.answers.stop import ContentText
from reprise.chat.call_format import HARMONY_CALLS
from reprise.chat.calls.call_reader import CallArguments, CallBegan, CallEnded, CallEvent, CallReader
from reprise.chat.tools import is_encodable, make_calls, new_call_id, parse_calls

_MALFORMED = "a malformed tool call was left in the text"
_MALFORMED_TOLD = "a tool call turned out to be malformed after part of it was streamed; the rest of it is text"
_NOTED = 200
"""Characters of a text that a note quotes."""


class AnswerParser:
    """Turns the tokens of one answer into deltas; joined, they are `answer`.

    A call is emitted as it is written, from its first argument on; with `holds_calls`, when it is complete. A malformed
    call is content (or reasoning, where it stands there). If its beginning was emitted, that stays a call, which is not
    whole, and only what follows is content. A call that is cut short is not whole either, and no content. Nothing that
    a model writes makes it raise.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._text_model = answer_format.text
        self._holds_calls = answer_format.holds_calls
        self._tools = answer_format.tools
        self._new_id = new_id
        self._markup = answer_format.markup()
        self._reader = answer_format.reader(self._markup, holds_calls=answer_format.holds_calls)
        self._visible = ContentText(answer_format.stops, is_begun=answer_format.is_content_open)
        self._num_kept = answer_format.min_tokens
        self._may_stop = answer_format.min_tokens == 0
        self._content = _Content(holds_space=answer_format.has_tools)
        self._reasoning = _Reasoning()
        self._call = _OpenCall()
        self._calls: list[ToolCall] = []
        self._open: _Written | None = None
        self._is_stopped = False
        self.is_call_cut = False
        """Whether the answer was cut short within a call."""
        self._notes: list[str] = []
        self.num_reasoning_tokens = 0
        """Tokens inside reasoning, its markers not counted."""

    @property
    def answer(self) -> Answer:
        """The answer so far; whole after `finish`."""
        content = self._content.text
        return Answer(
            content=None if not content and self._calls else content,
            reasoning=self._reasoning.text or None,
            tool_calls=(*self._calls, *(() if self._open is None else self._open.emitted())),
        )

    @property
    def num_calls_begun(self) -> int:
        """Calls that were written or are being written, emitted or not."""
        return len(self._calls) + (self._open is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was odd about the calls, for the request's record."""
        return tuple(self._notes)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the content, or None."""
        return self._visible.stop

    def feed(self, token: int, *, is_stop: bool = False) -> list[Delta]:
        """The deltas that are certain after this token. `is_stop`: the token ended the generation.

        A token that ends the generation is no text, unless it completed a stop string: what stands before the stop in
        that token's text is part of the answer.
        """
        if self._visible.stop is not None:
            return []
        self._is_stopped = self._is_stopped or is_stop
        if is_stop and (token in self._text_model.eos or not self._visible.has_stops):
            return []
        self._may_stop = self._num_kept == 0
        self._num_kept = max(0, self._num_kept - 1)
        was_reasoning = self._reader.part is Channel.REASONING
        deltas = self._take(self._reader.feed(token))
        if was_reasoning and self._reader.part is Channel.REASONING and token not in self._markup.atoms:
            self.num_reasoning_tokens += 1
        return deltas

    def finish(self) -> list[Delta]:
        """The last deltas, when no token follows. A call without its end is whole only if the model ended it."""
        if self._visible.stop is not None:
            deltas: list[Delta] = []
        else:
            deltas = self._take(self._reader.finish(is_ended=self._is_stopped))
            if self._reader.part is Channel.CALL and not self.is_call_cut:
                deltas += self._close_call(marker="", is_whole=self._is_stopped or not self._markup.needs_tool_end)
            deltas += self._add_content(self._visible.flush())
        return deltas + _content_delta(self._content.finish(drops_space=len(self._calls) > 0))

    def _take(self, parts: Sequence[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if self._visible.stop is not None:
                break
            match part:
                case Transition():
                    deltas += self._turn(part)
                case TextChunk():
                    deltas += self._piece(part)
                case CallFailed():
                    self._fail_call()
                case CallCut():
                    deltas += self._cut_call(self._call.opening + part.text)
                case _:
                    deltas += self._write_call(part)
        return deltas

    def _write_call(self, event: CallEvent) -> list[Delta]:
        match event:
            case CallBegan():
                taken = {made.id for made in self._calls}
                own = event.id if event.id is not None and event.id not in taken and is_encodable(event.id) else None
                self._open = _Written(id=own or self._new_id(), name=event.name)
                return []
            case CallArguments():
                assert self._open is not None, "arguments follow a name"
                self._open.arguments.append(event.text)
                # A name alone may still turn out to be no call's.
                return [] if self._holds_calls else self._tell_call(self._open)
            case CallEnded():
                # What follows in the same section is not between its markers any more.
                self._call.opening = ""
                return self._close_written(is_whole=True)

    def _tell_call(self, call: "_Written") -> list[Delta]:
        """What was not emitted of the call yet."""
        index = len(self._calls)
        deltas: list[Delta] = [] if call.is_emitted else [ToolCallDelta(index=index, id=call.id, name=call.name)]
        deltas += [ToolCallDelta(index=index, arguments=text) for text in call.arguments[call.num_emitted :]]
        call.is_emitted, call.num_emitted = True, len(call.arguments)
        return deltas

    def _close_written(self, *, is_whole: bool) -> list[Delta]:
        assert self._open is not None, "a call has begun"
        deltas = self._tell_call(self._open)
        self._calls.append(self._open.call(is_whole=is_whole))
        self._open = None
        self._content.calls_made()
        return deltas

    def _fail_call(self) -> None:
        self._call.has_failed = True
        self._call.was_named = self._open is not None
        if self._open is not None and self._open.is_emitted:
            self._call.was_emitted = True
            self._close_written(is_whole=False)
            self._notes.append(_MALFORMED_TOLD)
        self._open = None

    def _cut_call(self, text: str) -> list[Delta]:
        self.is_call_cut = True
        if self._open is not None:
            return self._close_written(is_whole=False)
        self._notes.append(f"the answer was cut short before a tool call had its name: {text[:_NOTED]!r}")
        return []

    def _piece(self, piece: TextChunk) -> list[Delta]:
        if piece.part is Channel.REASONING:
            return _reasoning_delta(self._reasoning.add(piece.text))
        if piece.part is Channel.CALL:
            self._call.text += piece.text
            return [] if self._call.reader is None else self._read_named(self._call.reader, piece.text)
        return self._add_content(self._visible.add(piece.text, may_stop=self._may_stop))

    def _turn(self, turn: Transition) -> list[Delta]:
        deltas = self._add_content(self._visible.turn(turn))
        source, to = part_of(turn.source), part_of(turn.to)
        if source is Channel.CALL:
            deltas += self._leave_call(turn)
        if to is Channel.CALL:
            # A header that names the function stands for the markers.
            opening = turn.marker if turn.function is None else ""
            self._call = _OpenCall(opening=opening, function=turn.function, state=turn.to)
            if turn.function is not None:
                self._call.reader = CallReader(HARMONY_CALLS, tools=self._tools, name=turn.function)
        elif to is Channel.REASONING and source not in {Channel.REASONING, Channel.CALL}:
            self._reasoning.begin_block()
        return deltas

    def _read_named(self, reader: CallReader, text: str) -> list[Delta]:
        """The arguments of a call whose function a header named."""
        if reader.is_over:
            if text.strip() and not self._call.has_failed and not reader.is_broken:
                self._notes.append(f"text after the arguments of a tool call was left out: {text[:_NOTED]!r}")
            return []
        reader.feed(text)
        return self._take(reader.take())

    def _leave_call(self, turn: Transition) -> list[Delta]:
        """A marker, or the end of what was read as a call, led out of a call."""
        marker = "" if part_of(turn.to) is Channel.CALL else turn.marker
        if turn.is_failed:
            # It began like a call, and is content.
            call, self._call = self._call, _OpenCall()
            if call.was_emitted:
                return []
            if call.was_named:
                self._notes.append(_MALFORMED)
            return self._add_content(call.opening + call.text)
        if turn.marker == "" and not self._call.has_failed:
            # Its calls have been read.
            self._call = _OpenCall()
            return []
        return self._close_call(marker=marker, is_whole=True)

    def _close_call(self, *, marker: str, is_whole: bool) -> list[Delta]:
        named = self._close_named(self._call, is_whole=is_whole and (self._is_stopped or marker != ""))
        if named is not None:
            return named
        call, self._call = self._call, _OpenCall()
        calls = self._parse(call) if is_whole and not call.was_emitted else None
        if calls is None and not is_whole and not call.has_failed:
            return self._cut_call(call.opening + call.text)
        if calls is None:
            raw = call.opening + call.text + ("" if call.function is not None else marker)
            if call.was_emitted:
                # What it began with is a call, and the markers are its.
                raw = call.text if call.text.strip() else ""
            else:
                self._notes.append(_MALFORMED)
            if call.state == TOOL_IN_REASONING:
                return _reasoning_delta(self._reasoning.add(raw))
            return self._add_content(raw)
        deltas: list[Delta] = []
        for made in calls:
            index = len(self._calls)
            self._calls.append(made)
            deltas.append(ToolCallDelta(index=index, id=made.id, name=made.name))
            deltas.append(ToolCallDelta(index=index, arguments=made.arguments))
        self._content.calls_made()
        return deltas

    def _close_named(self, call: "_OpenCall", *, is_whole: bool) -> list[Delta] | None:
        """The end of a call whose function a header named; None if it is to be read otherwise."""
        if call.reader is None:
            return None
        deltas: list[Delta] = []
        if not call.reader.is_over:
            call.reader.finish(is_ended=is_whole)
            deltas = self._take(call.reader.take())
        if call.reader.is_broken:
            if self._open is not None:
                self._fail_call()
            if call.was_emitted:
                self._call = _OpenCall()
                return deltas + self._add_content(call.text[call.reader.num_emitted :])
            return None
        if call.reader.is_cut:
            deltas += self._cut_call(call.text)
        self._call = _OpenCall()
        return deltas

    def _parse(self, call: "_OpenCall") -> tuple[ToolCall, ...] | None:
        taken = {made.id for made in self._calls}
        if call.function is not None:
            named = {"name": call.function, "arguments": call.text.strip() or "{}"}
            return make_calls(named, taken=taken, new_id=self._new_id)
        return parse_calls(self._text_model, call.text, tools=self._tools, taken=taken, new_id=self._new_id)

    def _add_content(self, text: str) -> list[Delta]:
        return _content_delta(self._content.add(text))


@dataclass(slots=True, kw_only=True)
class _OpenCall:
    """A call that is being written."""

    opening: str = ""
    function: str | None = None
    state: str = NORMAL
    text: str = ""
    reader: CallReader | None = None
    """Reads the arguments where a header named the function."""
    has_failed: bool = False
    """What was read is not of the model's format."""
    was_named: bool = False
    """And it calls one of the tools."""
    was_emitted: bool = False
    """And its beginning was given as a call's already."""


@dataclass(slots=True, kw_only=True)
class _Written:
    """A call that is being written, and how much of it was emitted."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])
    is_emitted: bool = False
    num_emitted: int = 0
    """Pieces of the arguments that were emitted."""

    def emitted(self) -> tuple[ToolCall, ...]:
        """What was emitted of it, as a call."""
        arguments = "".join(self.arguments[: self.num_emitted])
        return (ToolCall(id=self.id, name=self.name, arguments=arguments, is_whole=False),) if self.is_emitted else ()

    def call(self, *, is_whole: bool) -> ToolCall:
        return ToolCall(id=self.id, name=self.name, arguments="".join(self.arguments), is_whole=is_whole)


class _Content:
    """Content without the white space that only separates it from calls."""

    def __init__(self, *, holds_space: bool) -> None:
        self._holds_space = holds_space
        self._follows_call = False
        self._space = ""
        self.text = ""

    def calls_made(self) -> None:
        self._follows_call = True

    def add(self, text: str) -> str:
        if not self._holds_space:
            return self._emit(text)
        text = self._space + text
        if self._follows_call and not self.text:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        return self._emit(body)

    def finish(self, *, drops_space: bool) -> str:
        space, self._space = self._space, ""
        return self._emit("" if drops_space else space)

    def _emit(self, text: str) -> str:
        self.text += text
        return text


class _Reasoning:
    """Reasoning without the newlines around it; blocks are joined by one newline."""

    def __init__(self) -> None:
        self._is_block_begun = False
        self._newlines: str = ""
        self.text: str = ""

    def begin_block(self) -> None:
        self._is_block_begun = False
        self._newlines = ""

    def add(self, text: str) -> str:
        if not self._is_block_begun:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._is_block_begun = True
            self._newlines = "\n" if self.text else ""
        text = self._newlines + text
        body = text.rstrip("\n")
        self._newlines = text[len(body) :]
        self.text += body
        return body


def _content_delta(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []


def _reasoning_delta(text: str) -> list[Delta]:
    return [ReasoningDelta(text)] if text else []

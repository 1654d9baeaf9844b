"""Reads tool calls as they are written, in the format that was learnt: name, then arguments as JSON text, in pieces.

Text arrives in any pieces; what is certain is emitted at once, the rest is held back. The reader is a script that waits
for text where it needs more (a generator), so that it reads as what it does.
"""

import ast
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from reprise.chat.call_format import (
    CallFormat,
    KeyedArguments,
    Matched,
    Need,
    inside_string,
    json_text,
    match_loosely,
)
from reprise.chat.calls.call_values import (
    UNREAD,
    JsonScan,
    NotACall,
    could_be_text,
    end_of,
    is_text,
    json_or_none,
    property_schemas,
    read_literal,
    read_native,
    read_nested,
    spelled,
    typed,
)
from reprise.chat.scan import common_length, num_held


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegan:
    """A call of this function; `id` is the model's own, where it writes one."""

    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of the open call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The open call is whole."""


CallEvent = CallBegan | CallArguments | CallEnded


class _CallCutOff(Exception):
    """The text ends within a call."""


Script = Generator[None, None, None]


class CallReader:
    """Reads one section of calls, from behind its start marker.

    `tools` are those of the request, whose types decide how values without a written type are read. `spell` gives
    the text of a value. After `feed` or `finish`, `take` gives what is certain. `is_over`: the section has ended, and
    `rest` is the text behind it. `is_cut`: it ended with the text, within a call. `is_broken`: what follows is no
    call; then `raw` is the text since the last whole call, of which `num_emitted` characters are in events.
    """

    def __init__(
        self, form: CallFormat, *, tools: Sequence[Mapping[str, Any]], spell: Callable[[str], str] = str, name: str = ""
    ) -> None:
        """`name`: the call is of this function, and only its arguments are written."""
        self._form = form
        self._schemas = property_schemas(tools)
        self._spell = spell
        self._text = ""
        self._at = 0
        self._is_final = self._is_ended = False
        self._is_said = False
        """The text that follows is content for the user."""
        self._events: list[CallEvent] = []
        self._raw: list[str] = []
        self._num_dropped = self.num_emitted = 0
        self._id: str | None = None
        self._schema: Mapping[str, dict[str, Any]] = {}
        self.is_over = self.is_broken = self.is_cut = False
        self._script = self._section() if name == "" else self._named_call(name)

    @property
    def rest(self) -> str:
        """What has not been read."""
        return self._text[self._at :]

    @property
    def raw(self) -> str:
        """The text since the last whole call, as it came."""
        return "".join(self._raw) + self._text

    def feed(self, text: str) -> None:
        """Read on."""
        assert not self.is_over, "there is nothing more to read"
        self._text += text
        self._step()

    def finish(self, *, is_ended: bool) -> None:
        """No text follows. `is_ended`: the model ended its answer itself."""
        if not self.is_over:
            self._is_final, self._is_ended = True, is_ended
            self._step()

    def take(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    def _step(self) -> None:
        try:
            next(self._script)
        except StopIteration:
            self.is_over = True
        except NotACall:
            self.is_over = self.is_broken = True
        except _CallCutOff:
            # An answer that the model ended within a call is no call; one that was cut short could have become one.
            self.is_over, self.is_broken, self.is_cut = True, self._is_ended, not self._is_ended

    def _drop_read(self) -> None:
        if self._at > 0:
            self._raw.append(self._text[: self._at])
            self._num_dropped += self._at
            self._text, self._at = self._text[self._at :], 0

    # What stands where

    def _named_call(self, name: str) -> Script:
        yield from self._json_begins()
        self._begin_call(name)
        yield from self._json_arguments()
        self._end_call()

    def _section(self) -> Script:
        form = self._form
        yield from self._literal(form.opening)
        while True:
            yield from self._call()
            if self._is_said:
                return
            if form.has_own_section:
                yield from self._close_section()
                return
            more = (form.between or "") + form.head
            last = form.ending + form.end
            if form.between is not None and (yield from self._begins(more, rather_than=last)):
                yield from self._literal(form.between)
                continue
            yield from self._close_section()
            return

    def _close_section(self) -> Script:
        last = (self._form.ending + self._form.end).rstrip()
        if last == "":
            return
        found = yield from self._try(last)
        if found is None and self._is_final and not self._is_ended:
            self._leave_begun(last)
        if found is None:
            # The call itself is whole: what stands in the marker's place is text like any other.
            return
        self._at = found.stop

    def _leave_begun(self, last: str) -> None:
        """The text is cut short behind a whole call: within the section's end, or within another call."""
        form = self._form
        if match_loosely(self._text, self._at, last, is_final=False) is Need.MORE:
            self._at = len(self._text)
        elif form.between is not None and not form.has_own_section and self.rest.strip():
            more = match_loosely(self._text, self._at, form.between + form.head, is_final=False)
            if more is Need.MORE:
                raise _CallCutOff

    def _call(self) -> Script:
        form = self._form
        head = yield from self._literal(form.head)
        name = yield from self._name()
        middle = yield from self._literal(form.middle)
        self._id = self._id_between(head, middle)
        if name == form.words_name:
            self._is_said = True
            return
        if (form.is_bare or form.words_name) and name not in self._schemas:
            raise NotACall
        if form.arguments is None:
            yield from self._json_begins()
            self._begin_call(name)
            yield from self._json_arguments()
        else:
            yield from self._keyed_arguments(form.arguments, name)
        tail = yield from self._try(form.tail.rstrip())
        if tail is not None:
            self._at = tail.stop
        elif self._is_final and not self._is_ended:
            raise _CallCutOff
        elif form.arguments is not None:
            # Whether another argument should have followed is not known.
            raise NotACall
        self._end_call()

    def _id_between(self, head: Matched, middle: Matched) -> str | None:
        start = head.id_start if head.id_start is not None else middle.id_start
        stop = middle.id_stop if middle.id_stop is not None else head.id_stop
        return None if start is None or stop is None else self._spell(self._text[start:stop])

    def _json_begins(self) -> Script:
        """A call is emitted only once its arguments begin as they should."""
        yield from self._space()
        if not (yield from self._has_more()):
            raise _CallCutOff
        if self._text[self._at] not in '{"':
            raise NotACall

    def _begin_call(self, name: str) -> None:
        self._schema = self._schemas.get(name, {})
        self._events.append(CallBegan(name=name, id=self._id))

    def _end_call(self) -> None:
        self._events.append(CallEnded())
        # What was read belongs to a whole call.
        self._text, self._at = self._text[self._at :], 0
        self._raw.clear()
        self._num_dropped = self.num_emitted = 0

    def _name(self) -> Generator[None, None, str]:
        yield from self._space()
        end = self._form.middle.lstrip()[:1]
        keyed = self._form.arguments
        if end == "" and keyed is not None:
            end = keyed.key_opening.lstrip()[:1]
        start = at = self._at
        while True:
            while at < len(self._text) and self._text[at] != end and _is_name(self._text[at]):
                at += 1
            if at < len(self._text) or self._is_final:
                break
            yield
        if at == len(self._text):
            raise _CallCutOff
        if at == start:
            raise NotACall
        self._at = at
        return self._text[start:at]

    # Arguments

    def _json_arguments(self) -> Script:
        """One JSON object, emitted as it arrives; line breaks inside a string, which JSON forbids, are escaped."""
        if self._text[self._at] == '"':
            yield from self._json_in_text()
            return
        written = ""
        sent = 0
        scan = JsonScan(self._spell)
        while not scan.is_over:
            self._drop_read()
            if not (yield from self._has_more()):
                self._give(written[sent:])
                raise _CallCutOff
            while self._at < len(self._text) and not scan.is_over:
                written += scan.take(self._text[self._at])
                self._at += 1
            if not scan.is_over and scan.is_sure:
                self._give(written[sent:])
                sent = len(written)
        if not isinstance(json_or_none(written), dict):
            raise NotACall
        self._give(written[sent:])

    def _json_in_text(self) -> Script:
        """Arguments that are a JSON string with the object's text in it."""
        start = self._at
        self._at += 1
        while True:
            if not (yield from self._has_more()):
                raise _CallCutOff
            char = self._text[self._at]
            self._at += 1
            if char == "\\":
                if not (yield from self._has_more()):
                    raise _CallCutOff
                self._at += 1
            elif char == '"':
                break
        inner = json_or_none(self._spell(self._text[start : self._at]))
        if not isinstance(inner, str) or not isinstance(json_or_none(inner), dict):
            raise NotACall
        self._give(inner)

    def _keyed_arguments(self, keyed: KeyedArguments, name: str) -> Script:
        is_first = True
        while True:
            opening = keyed.key_opening if is_first else keyed.between + keyed.key_opening
            if (yield from self._ends_arguments(opening)):
                break
            if not is_first:
                yield from self._literal(keyed.between)
            yield from self._literal(keyed.key_opening.rstrip())
            key = yield from self._key(keyed)
            kind = yield from self._opening(keyed)
            if is_first:
                # A call is emitted only once its arguments begin as they should.
                self._begin_call(name)
            lead = ("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
            yield from self._value(keyed, key, lead, self._schema.get(key), kind)
            is_first = False
        closing = self._closing.rstrip()
        if (yield from self._try(closing)) is None and not (self._is_ended and self._form.tail.strip() == ""):
            self._fail(closing, opening)
        if is_first:
            if name not in self._schemas and self._form.head.strip() == "":
                # Any word would be a call.
                raise NotACall
            self._begin_call(name)
        self._give("{}" if is_first else "}")

    @property
    def _closing(self) -> str:
        """What follows the arguments of a call."""
        form = self._form
        return form.tail if form.tail.strip() else form.ending + form.end

    def _ends_arguments(self, opening: str) -> Generator[None, None, bool]:
        if opening.strip() == "" or self._closing.startswith(opening.strip()):
            # The key stands bare, or behind what the closing begins with as well.
            return (yield from self._try(self._closing.rstrip())) is not None
        return (yield from self._try(opening.rstrip())) is None

    def _value(
        self, keyed: KeyedArguments, key: str, lead: str, schema: dict[str, Any] | None, kind: str | None
    ) -> Script:
        ending = keyed.ending(key)
        if keyed.is_native or keyed.quote:
            yield from self._native_value(keyed, lead, schema)
        elif kind == "string" if kind is not None else (schema is not None and is_text(schema)):
            yield from self._text_value(ending, lead)
        elif keyed.item:
            value = yield from self._until(ending, again=keyed.key_opening + key + keyed.value_opening)
            self._give(lead + json_text(self._nested(value, keyed, schema or {})))
        else:
            value = yield from self._until(ending)
            self._give(lead + json_text(typed(self._spell(value), schema, kind=kind)))
        if not keyed.is_native:
            yield from self._literal(ending)

    def _key(self, keyed: KeyedArguments) -> Generator[None, None, str]:
        """The text up to what stands before every value."""
        stops = [opening.strip() for opening in (keyed.value_opening, *(text for _, text in keyed.openings))]
        shared = stops[0]
        for other in stops:
            shared = shared[: common_length(shared, other)]
        stop = shared.split()[0]
        yield from self._space()
        while True:
            found = self._text.find(stop, self._at)
            shown = self._text[self._at : found if found >= 0 else len(self._text)]
            if len(shown) > _MAX_KEY or any(c == "\n" or c in _ATOMS for c in shown):
                raise NotACall
            if found >= 0:
                break
            if self._is_final:
                raise _CallCutOff
            yield
        key = self._spell(self._text[self._at : found].strip())
        if key == "":
            raise NotACall
        self._at = found
        return key

    def _opening(self, keyed: KeyedArguments) -> Generator[None, None, str | None]:
        """Reads what opens the value; the JSON type that it names, where types are named."""
        if not keyed.openings:
            yield from self._literal(keyed.value_opening)
            return None
        options = (("string", keyed.value_opening), *keyed.openings)
        for kind, opening in options:
            found = yield from self._try(opening)
            if found is not None:
                self._at = found.stop
                shared = [other for other, text in options if text == opening]
                return kind if len(shared) == 1 else "json"
        self._fail(*(opening for _, opening in options))

    def _nested(self, value: str, keyed: KeyedArguments, schema: dict[str, Any]) -> Any:
        try:
            return read_nested(value, keyed, schema, spell=self._spell)
        except RecursionError as error:
            raise NotACall from error

    def _text_value(self, ending: str, lead: str, *, is_quoted: bool = False) -> Script:
        """Text up to the ending, emitted as it arrives, as a JSON string. Quotes are read with it, and have escapes."""
        self._give(lead + '"')
        tag = ending.strip()
        # The white space before the ending belongs to it.
        space = ending[: len(ending) - len(ending.lstrip())]
        has_escapes = tag in ("'", '"')
        while True:
            self._drop_read()
            found = self._text.find(tag, self._at)
            stop = found if found >= 0 else len(self._text) - num_held(self._text[self._at :], [tag])
            slash = self._text.find("\\", self._at, stop) if has_escapes else -1
            value = self._text[self._at : slash if slash >= 0 else stop]
            if found >= 0:
                value = value.removesuffix(space)
            elif space:
                # One character more than the space: all of it is held as well.
                value = value[: len(value) - num_held(value, [space + tag])]
            self._at += len(value)
            self._give(inside_string(self._spell(value)))
            if slash >= 0:
                self._give((yield from self._escape()))
                continue
            if found >= 0:
                break
            if self._is_final:
                raise _CallCutOff
            yield
        self._at += len(ending) if is_quoted else 0
        self._give('"')

    def _until(self, ending: str, *, again: str = "") -> Generator[None, None, str]:
        """The text up to the ending; `again` opens what has the same ending within it.

        The ending may stand in a text within a list or an object: then it is the first at which that can be read.
        """
        tag, at, first = ending.strip(), self._at, -1
        while True:
            found = end_of(self._text, at, tag, again)
            if found >= 0:
                value = self._text[self._at : found].strip()
                if again or value[:1] not in ("{", "[") or read_literal(self._spell(value)) is not UNREAD:
                    break
                at, first = found + len(tag), first if first >= 0 else found
            elif not self._is_final:
                yield
            elif first >= 0:
                found = first
                break
            else:
                raise _CallCutOff
        value = self._text[self._at : found]
        self._at = found
        return value.strip()

    # Values of languages that mark text themselves

    def _native_value(self, keyed: KeyedArguments, lead: str, schema: Mapping[str, Any] | None) -> Script:
        yield from self._space()
        quotes = ("'", '"') if keyed.quote in ("'", '"') else (keyed.quote,)
        for quote in quotes:
            found = yield from self._try(quote)
            if found is not None:
                self._at = found.stop
                yield from self._text_value(quote, lead, is_quoted=True)
                return
        value = yield from self._balanced(keyed)
        known = read_native(value, quote=keyed.quote) if keyed.has_bare_keys else read_literal(value)
        if known is UNREAD:
            # A word without quotes.
            if schema is not None and not could_be_text(schema):
                raise NotACall
            known = value
        self._give(lead + json_text(spelled(known, self._spell)))

    def _escape(self) -> Generator[None, None, str]:
        """One escape of a Python or JSON string, as the inside of a JSON string."""
        while True:
            kind = self._text[self._at + 1 : self._at + 2]
            length = 2 + {"x": 2, "u": 4, "U": 8}.get(kind, 0)
            if kind and len(self._text) - self._at >= length:
                break
            if self._is_final:
                raise _CallCutOff
            yield
        escape = self._text[self._at : self._at + length]
        self._at += length
        if kind == "u":
            # Half a character is joined with its other half by the reader of the JSON.
            return escape if all(c in _HEX for c in escape[2:]) else inside_string(escape)
        try:
            value = ast.literal_eval(f'"{escape}"') if kind not in "/" else "/"
        except (SyntaxError, ValueError):
            value = escape
        return inside_string(cast("str", value))

    def _balanced(self, keyed: KeyedArguments) -> Generator[None, None, str]:
        """The text of a value up to where what joins or ends arguments stands outside of its brackets and strings."""
        stops = {text.strip()[:1] for text in (keyed.between, self._form.tail, self._form.ending + self._form.end)}
        start = at = self._at
        depth = 0
        quote: str | None = None
        while True:
            if at >= len(self._text) or (self._is_quote_begun(at, keyed) and not self._is_final):
                if self._is_final:
                    raise _CallCutOff
                yield
                continue
            char = self._text[at]
            if quote is not None:
                if len(quote) == 1 and char == "\\":
                    at += 2
                    continue
                at, quote = (at + len(quote), None) if self._text.startswith(quote, at) else (at + 1, quote)
                continue
            opened = next((q for q in {keyed.quote, '"', "'"} if q and self._text.startswith(q, at)), None)
            if opened is not None and (len(opened) > 1 or not keyed.has_bare_keys or opened == keyed.quote):
                at, quote = at + len(opened), opened
                continue
            if depth == 0 and char in stops:
                break
            depth += (char in "([{") - (char in ")]}")
            if depth < 0:
                raise NotACall
            at += 1
        value = self._text[start:at].strip()
        self._at = at
        if value == "":
            raise NotACall
        return value

    def _is_quote_begun(self, at: int, keyed: KeyedArguments) -> bool:
        rest = self._text[at:]
        return len(rest) < len(keyed.quote) and keyed.quote.startswith(rest)

    # Waiting for text

    def _has_more(self) -> Generator[None, None, bool]:
        while self._at >= len(self._text):
            if self._is_final:
                return False
            yield
        return True

    def _space(self) -> Script:
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text) or self._is_final:
                return
            yield

    def _try(self, expected: str) -> Generator[None, None, Matched | None]:
        while True:
            found = match_loosely(self._text, self._at, expected, is_final=self._is_final)
            if found is not Need.MORE:
                return found
            yield

    def _literal(self, expected: str) -> Generator[None, None, Matched]:
        found = yield from self._try(expected)
        if found is None:
            self._fail(expected)
        self._at = found.stop
        return found

    def _fail(self, *expected: str) -> NoReturn:
        """None of these stands here: because the text ends, or because it is no call."""
        ways = [match_loosely(self._text, self._at, text, is_final=False) for text in expected]
        raise _CallCutOff if self._is_final and Need.MORE in ways else NotACall

    def _begins(self, expected: str, *, rather_than: str) -> Generator[None, None, bool]:
        """Whether `expected` stands here; where neither is certain, more text decides."""
        while True:
            found = match_loosely(self._text, self._at, expected.rstrip(), is_final=self._is_final)
            if found is not Need.MORE:
                return found is not None
            other = match_loosely(self._text, self._at, rather_than.rstrip(), is_final=self._is_final)
            if rather_than.strip() and isinstance(other, Matched):
                return False
            yield

    def _give(self, text: str) -> None:
        """Emit a piece of the arguments; with it all text read so far is emitted."""
        if text:
            self._events.append(CallArguments(text))
            self.num_emitted = self._num_dropped + self._at


_MAX_KEY = 1000
_ATOMS = {chr(code) for code in range(0xD800, 0xD800 + 64)}
"""Special tokens of the markup, which do not stand in keys."""
_HEX = frozenset("0123456789abcdefABCDEF")


def _is_name(char: str) -> bool:
    return char.isalnum() or char in "_-./:"

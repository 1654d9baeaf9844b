"""How a model writes tool calls, as data: what surrounds calls, names, keys and values.

A `CallFormat` is learnt from the chat template (`call_learning`) or is one of `known_formats`, which mlx-lm's parsers
read. The reader (`call_reader`), the grammar of forced calls (`tool_grammar`) and `reprise inspect` all follow from it.

White space in these texts is what the template writes. A model may write other white space between two pieces of
markup, and `match_loosely` takes it; inside a value it is text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, cast

INDEX, ID, KEY = "\ue000", "\ue001", "\ue002"
"""Holes in a text: the number of the call, its id, and the key of an argument (in `KeyedArguments.value_ending`)."""

ID_START, ID_STOP = "\ue003", "\ue004"
"""They enclose what is the call's id where it is composed, as in `functions.look:0`. They match nothing themselves."""


_HOLES = {INDEX: re.compile(r"\d*"), ID: re.compile(r"[\w-]*")}
_SPACE = re.compile(r"\s*")
_INSIDE_WORD = re.compile(r"(?<=\w)\w")
"""A character behind another of its word, before which no space can stand."""


def _run_end(run: re.Pattern[str], text: str, at: int) -> int:
    """Where the run that begins at `at`, perhaps of nothing, ends."""
    found = run.match(text, at)
    return at if found is None else found.end()


def json_text(value: Any) -> str:
    """The JSON text of a value; text that JSON lacks a type for is quoted."""
    return json.dumps(value, ensure_ascii=False, default=str)


def inside_string(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def type_name(value: object) -> str:
    """The JSON type of a value."""
    for kind, name in _TYPE_NAMES.items():
        if isinstance(value, kind):
            return name
    return "array"


_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
}
"""In this order: a `bool` is an `int` as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedArguments:
    """Arguments one by one: `key_opening` key `value_opening` value `value_ending`, joined by `between`.

    `quote`: what stands around a value that is text, inside the opening and ending ("": text stands as it is). Values
    of other types follow `openings` where their JSON type has another opening. With `is_native` a value that
    is no text is not enclosed: it ends where its brackets are closed. `has_bare_keys`: objects in values have keys
    without quotes, and text in `quote`. `item`: objects in values are written as arguments are, one within another, and
    lists as arguments of this name ("": values that are no text are JSON).
    """

    key_opening: str
    value_opening: str
    value_ending: str
    between: str = ""
    quote: str = ""
    openings: tuple[tuple[str, str], ...] = ()
    is_native: bool = False
    has_bare_keys: bool = False
    item: str = ""

    def __post_init__(self) -> None:
        assert self.is_native or self.value_ending.strip() != "", self
        assert self.item == "" or KEY in self.value_ending, "what is nested ends with its own name"

    def opening(self, kind: str) -> str:
        """What stands between the key and a value of this JSON type."""
        return dict(self.openings).get(kind, self.value_opening)

    def ending(self, key: str) -> str:
        """What stands behind the value of this key."""
        return self.value_ending.replace(KEY, key)

    def written(self, key: str, value: Any) -> str:
        """The text of one argument."""
        kind = type_name(value)
        text = self._nested(value) if self.item else self._native(value)
        return self.key_opening + key + self.opening("number" if kind == "integer" else kind) + text + self.ending(key)

    def _nested(self, value: Any) -> str:
        """The text of a value whose parts are written as arguments are."""
        match value:
            case dict() if value:
                items = cast("dict[str, Any]", value).items()
                return self.between.join(self.written(key, part) for key, part in items)
            case list() if value:
                return self.between.join(self.written(self.item, part) for part in cast("list[Any]", value))
            case _:
                return self._native(value)

    def _native(self, value: Any) -> str:
        """The text of a value in the format's quotes, and with bare keys where it has them."""
        match value:
            case str() if self.quote in ("'", '"'):
                # These languages have escapes.
                escaped = inside_string(value)
                escaped = escaped if self.quote == '"' else escaped.replace('\\"', '"').replace("'", "\\'")
                return self.quote + escaped + self.quote
            case str():
                return self.quote + value + self.quote
            case list() if self.has_bare_keys:
                return "[" + ",".join(map(self._native, cast("list[Any]", value))) + "]"
            case dict() if self.has_bare_keys:
                items = cast("dict[str, Any]", value).items()
                return "{" + ",".join(f"{key}:{self._native(item)}" for key, item in items) + "}"
            case _:
                return json_text(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A section of calls is `start` `opening` call (`between` call)* `ending` `end`.

    A call is `head` name `middle` arguments `tail`; `arguments` None: they are one JSON object. `start` and `end` are
    the markers at which content ends and begins again. `between` is None where the template takes one call at a time.
    With `has_own_section` each call stands in a separate section, and `between` is what joins sections. `is_bare`: the
    section begins with plain text, so it is one only where the answer begins. `words_name`: content for the user is
    addressed to this name as a call is to a function's, and the generation prompt has written the first `start` ("":
    neither is so).
    """

    start: str
    opening: str
    head: str
    middle: str
    arguments: KeyedArguments | None
    tail: str
    between: str | None
    ending: str
    end: str
    has_own_section: bool = False
    is_bare: bool = False
    words_name: str = ""

    def __post_init__(self) -> None:
        assert self.start.strip() != "", self

    @property
    def is_parallel(self) -> bool:
        return self.between is not None

    @property
    def name_is_quoted(self) -> bool:
        """Whether the name is a JSON string."""
        return (self.start + self.opening + self.head).rstrip().endswith('"') and self.middle.startswith('"')

    def texts(self) -> tuple[str, ...]:
        """All pieces of markup, in which special tokens may stand."""
        texts: list[str] = [getattr(self, name) or "" for name in _MARKUP]
        if self.arguments is not None:
            texts += [getattr(self.arguments, name) for name in _KEYED_MARKUP]
            texts += [opening for _, opening in self.arguments.openings]
        return tuple(texts)

    def mapped(self, change: Callable[[str], str]) -> "CallFormat":
        """The same format with each piece of markup changed."""
        arguments = self.arguments
        if arguments is not None:
            changed = {name: change(getattr(arguments, name)) for name in _KEYED_MARKUP}
            openings = tuple((kind, change(opening)) for kind, opening in arguments.openings)
            arguments = replace(arguments, openings=openings, **changed)
        texts = {name: change(text) for name in _MARKUP if (text := getattr(self, name)) is not None}
        return replace(self, arguments=arguments, **texts)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The text of these calls, at least one, between the markers of their sections. O(text)."""
        written = [self._written_call(number, name, arguments) for number, (name, arguments) in enumerate(calls)]
        joiner = "\n" if self.between is None else self.between
        if self.has_own_section or not self.is_parallel:
            return joiner.join(self.start + self.opening + call + self.ending + self.end for call in written)
        return self.start + self.opening + joiner.join(written) + self.ending + self.end

    def _written_call(self, number: int, name: str, arguments: Mapping[str, Any]) -> str:
        keyed = self.arguments
        if keyed is None:
            text = json_text(arguments)
        else:
            text = keyed.between.join(keyed.written(key, value) for key, value in arguments.items())
        filled = {INDEX: str(number), ID: _MADE_ID, ID_START: "", ID_STOP: ""}
        head, middle, tail = (part.translate(str.maketrans(filled)) for part in (self.head, self.middle, self.tail))
        return head + (inside_string(name) if self.name_is_quoted else name) + middle + text + tail


_MARKUP = ("start", "opening", "head", "middle", "tail", "between", "ending", "end")
_KEYED_MARKUP = ("key_opening", "value_opening", "value_ending", "between", "quote")
"""The fields of a format and of its arguments that are markup."""

_MADE_ID = "a1B2c3D4e"
"""The id in written calls: calls and results are joined by their order where they are text."""


HARMONY_CALLS = CallFormat(
    start="<|channel|>commentary to=functions.",
    opening="",
    head="",
    middle=" <|constrain|>json<|message|>",
    arguments=None,
    tail="",
    between=None,
    ending="",
    end="<|call|>",
    has_own_section=True,
)
"""The calls of gpt-oss, in which a channel's header names the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """What is known about a model's calls, from its template or from what mlx-lm's parser reads.

    `format` None: the template shows no call that is understood. `example` is a call as the template writes it.
    `shows_tools`: the template tells the model of the request's tools. `family`: the family from whose file the format
    is, where the template shows no call ("": it shows one, or there is no format).
    """

    format: CallFormat | None = None
    example: str = ""
    shows_tools: bool = True
    family: str = ""


class Need(Enum):
    """What a match that has not failed still lacks."""

    MORE = auto()
    """More text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A text matched up to `stop`; the call's id begins at `id_start` and ends at `id_stop`, where they stand in it."""

    stop: int
    id_start: int | None = None
    id_stop: int | None = None


def match_loosely(text: str, at: int, expected: str, *, is_final: bool) -> Matched | Need | None:
    """Whether `expected` stands at `at` of the text, whatever white space is between its pieces; None if it does not.

    White space at the end of `expected` is taken as far as it is there, exactly. `is_final`: no more text will come.
    O(length of the match).
    """
    id_start = id_stop = None
    core = expected.rstrip()
    for index, char in enumerate(core):
        if char == ID_START:
            id_start = at = _run_end(_SPACE, text, at)
            continue
        if char == ID_STOP:
            id_stop = at
            continue
        if char.isspace():
            continue
        if _INSIDE_WORD.match(core, index) is None:
            at = _run_end(_SPACE, text, at)
        if at >= len(text):
            return None if is_final else Need.MORE
        if char in _HOLES:
            start = at
            at = _run_end(_HOLES[char], text, start)
            if at == len(text) and not is_final:
                return Need.MORE
            if at == start:
                return None
            if char == ID:
                id_start, id_stop = start, at
        elif text[at] == char:
            at += 1
        else:
            return None
    for char in expected[len(core) :]:
        if at >= len(text):
            return Matched(stop=at, id_start=id_start, id_stop=id_stop) if is_final else Need.MORE
        if text[at] != char:
            break
        at += 1
    return Matched(stop=at, id_start=id_start, id_stop=id_stop)


def known_formats(start: str, end: str) -> tuple[CallFormat, ...]:
    """The formats that mlx-lm's parsers read, between a model's own markers, where the template shows no call."""

    def form(
        call: str,
        argument: str = "",
        *,
        section: str = "CALLS",
        between: str = "",
        joined: str = "",
        has_own_section: bool = False,
        **keyed: Any,
    ) -> CallFormat:
        """A format from a call with NAME and ARGUMENTS in it, an argument with KEY and VALUE ("": they are JSON)."""
        head, middle, tail = re.split("NAME|ARGUMENTS", call)
        opening, ending = section.split("CALLS")
        arguments: KeyedArguments | None = None
        if argument:
            before, inside, behind = re.split("KEY|VALUE", argument)
            arguments = KeyedArguments(
                key_opening=before, value_opening=inside, value_ending=behind, between=joined, **keyed
            )
        return CallFormat(
            start=start,
            opening=opening,
            head=head,
            middle=middle,
            arguments=arguments,
            tail=tail,
            between=between,
            ending=ending,
            end=end,
            has_own_section=has_own_section,
        )

    def each(call: str, argument: str = "", *, between: str = "\n", **keyed: Any) -> CallFormat:
        return form(call, argument, between=between, has_own_section=True, **keyed)

    def invoke(space: str) -> CallFormat:
        call = f'<{space}invoke name="NAME">\nARGUMENTS</{space}invoke>\n'
        return form(call, f'<{space}parameter name="KEY">VALUE</{space}parameter>\n', section="\nCALLS")

    def pairs(tag: str) -> CallFormat:
        return each("NAME\nARGUMENTS", f"<{tag}_key>KEY</{tag}_key>\n<{tag}_value>VALUE</{tag}_value>\n")

    def bare(quote: str) -> CallFormat:
        native: dict[str, Any] = {"joined": ",", "quote": quote, "is_native": True, "has_bare_keys": True}
        return each("call:NAME{ARGUMENTS}", "KEY:VALUE", between="", **native)

    typed = tuple((kind, f'" type="{kind}"<|sep|>') for kind in ("number", "boolean", "null", "object", "array"))
    return (
        # Qwen3-Coder, Qwen3.5
        each("\n<function=NAME>\nARGUMENTS</function>\n", "<parameter=KEY>\nVALUE\n</parameter>\n"),
        # GLM-4.5 and later, Laguna; LongCat
        pairs("arg"),
        pairs("longcat_arg"),
        # MiniCPM5
        each('"NAME">ARGUMENTS', '<param name="KEY">VALUE</param>'),
        # MiniMax-M2; Muse
        invoke(""),
        invoke("atem:"),
        # Kimi-K3
        form(
            f'<|open|>call tool="NAME" index="{INDEX}"<|sep|>ARGUMENTS<|close|>call<|sep|>',
            '<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>',
            openings=typed,
        ),
        # Gemma 4 and FunctionGemma
        bare('<|"|>'),
        bare("<escape>"),
        # LFM2
        form("NAME(ARGUMENTS)", "KEY=VALUE", section="[CALLS]", between=", ", joined=", ", quote="'", is_native=True),
        # Kimi-K2
        form(
            f"<|tool_call_begin|>{ID_START}functions.NAME:{INDEX}{ID_STOP}"
            "<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
        ),
        # Mistral since version 11 of its tokenizer
        each("NAME[ARGS]ARGUMENTS", between=""),
        # Qwen2.5, Qwen3, Hermes
        each('\n{"name": "NAME", "arguments": ARGUMENTS}\n'),
        # Mistral before
        form('{"name": "NAME", "arguments": ARGUMENTS}', section="[CALLS]", between=", "),
    )

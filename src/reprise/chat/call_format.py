"""How a model writes tool calls, as data: what surrounds calls, names, keys and values.

A `CallFormat` is learnt from the chat template (`call_learning`) or is one of `known_formats`, which mlx-lm's parsers
read. The reader (`call_reader`), the grammar of forced calls (`tool_grammar`) and `reprise inspect` all follow from it.

White space in these texts is what the template writes. A model may write other white space between two pieces of
markup, and `match_loosely` takes it; inside a value it means what it says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

INDEX, ID, KEY = "\ue000", "\ue001", "\ue002"
"""Holes in a text: the number of the call, its id, and the key of an argument (in `KeyedArguments.value_ending`)."""

ID_START, ID_STOP = "\ue003", "\ue004"
"""They enclose what is the call's id where it is composed, as in `functions.look:0`. They match nothing themselves."""


def _is_id(char: str) -> bool:
    return char.isalnum() or char in "-_"


_HOLES: Mapping[str, Callable[[str], bool]] = {INDEX: str.isdigit, ID: _is_id}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonArguments:
    """All arguments as one JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedArguments:
    """Arguments one by one: `key_opening` key `value_opening` value `value_ending`, joined by `between`.

    `quote`: what stands around a value that is text, inside the opening and ending ("": text stands as it is). Values
    of other types follow `openings` where they have openings of their own, by JSON type. With `is_native` a value that
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A section of calls is `start` `opening` call (`between` call)* `ending` `end`.

    A call is `head` name `middle` arguments `tail`. `start` and `end` are the markers at which content ends and begins
    again. `between` is None where the template takes one call at a time. With `has_own_section` each call stands in a
    section of its own, and `between` is what joins sections. `is_bare`: the section begins with plain text, so it is
    one only where the answer begins. `words_name`: what the model says to the user is addressed to this name as a call
    is to a function's, and the generation prompt has written the first `start` ("": neither is so).
    """

    start: str
    opening: str
    head: str
    middle: str
    arguments: JsonArguments | KeyedArguments
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
        texts = [self.start, self.opening, self.head, self.middle, self.tail, self.between or "", self.ending, self.end]
        if isinstance(self.arguments, KeyedArguments):
            keyed = self.arguments
            texts += [keyed.key_opening, keyed.value_opening, keyed.value_ending, keyed.between, keyed.quote]
            texts += [opening for _, opening in keyed.openings]
        return tuple(texts)

    def mapped(self, change: Callable[[str], str]) -> "CallFormat":
        """The same format with each text changed."""
        arguments = self.arguments
        if isinstance(arguments, KeyedArguments):
            arguments = replace(
                arguments,
                key_opening=change(arguments.key_opening),
                value_opening=change(arguments.value_opening),
                value_ending=change(arguments.value_ending),
                between=change(arguments.between),
                quote=change(arguments.quote),
                openings=tuple((kind, change(opening)) for kind, opening in arguments.openings),
            )
        return replace(
            self,
            start=change(self.start),
            opening=change(self.opening),
            head=change(self.head),
            middle=change(self.middle),
            arguments=arguments,
            tail=change(self.tail),
            between=None if self.between is None else change(self.between),
            ending=change(self.ending),
            end=change(self.end),
        )


ARGUMENTS_ALONE = CallFormat(
    start="{",
    opening="",
    head="",
    middle="",
    arguments=JsonArguments(),
    tail="",
    between=None,
    ending="",
    end="",
    has_own_section=True,
)
"""A call of which only the arguments are written, as JSON: a channel's header names the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """What is known about a model's calls, from its template or from what mlx-lm's parser reads.

    `format` None: the template shows no call that is understood. `example` is a call as the template writes it.
    `shows_tools`: the template tells the model of the request's tools.
    """

    format: CallFormat | None = None
    example: str = ""
    shows_tools: bool = True


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
            id_start = at = _skip_space(text, at)
            continue
        if char == ID_STOP:
            id_stop = at
            continue
        if char.isspace():
            continue
        if not _inside_word(core, index):
            at = _skip_space(text, at)
        if at >= len(text):
            return None if is_final else Need.MORE
        if char in _HOLES:
            start = at
            at = _run_end(text, start, _HOLES[char])
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


def _inside_word(expected: str, index: int) -> bool:
    """Whether the character goes on with a word of the character before it, so that no space can stand between."""
    return index > 0 and _is_word(expected[index]) and _is_word(expected[index - 1])


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _run_end(text: str, at: int, belongs: Callable[[str], bool]) -> int:
    while at < len(text) and belongs(text[at]):
        at += 1
    return at


def _tags(
    start: str, end: str, *, opening: str = "", head: str, middle: str, tail: str, between: str, **keyed: str
) -> CallFormat:
    return CallFormat(
        start=start,
        opening=opening,
        head=head,
        middle=middle,
        arguments=KeyedArguments(
            key_opening=keyed["key"], value_opening=keyed["value"], value_ending=keyed["close"], between=keyed["join"]
        ),
        tail=tail,
        between=between,
        ending="",
        end=end,
        has_own_section=opening == "" and between == "\n",
    )


def known_formats(start: str, end: str) -> tuple[CallFormat, ...]:
    """The formats that mlx-lm's parsers read, between a model's own markers, where the template shows no call."""
    json, own = JsonArguments(), True
    return (
        # Qwen3-Coder, Qwen3.5
        _tags(
            start,
            end,
            head="\n<function=",
            middle=">\n",
            key="<parameter=",
            value=">\n",
            close="\n</parameter>\n",
            join="",
            tail="</function>\n",
            between="\n",
        ),
        # GLM-4.5 and later, Laguna; LongCat
        *(
            _tags(
                start,
                end,
                head="",
                middle="\n",
                key=f"<{arg}_key>",
                value=f"</{arg}_key>\n<{arg}_value>",
                close=f"</{arg}_value>\n",
                join="",
                tail="",
                between="\n",
            )
            for arg in ("arg", "longcat_arg")
        ),
        # MiniCPM5
        _tags(
            start,
            end,
            head='"',
            middle='">',
            key='<param name="',
            value='">',
            close="</param>",
            join="",
            tail="",
            between="\n",
        ),
        # MiniMax-M2; Muse
        *(
            _tags(
                start,
                end,
                opening="\n",
                head=f'<{space}invoke name="',
                middle='">\n',
                key=f'<{space}parameter name="',
                value='">',
                close=f"</{space}parameter>\n",
                join="",
                tail=f"</{space}invoke>\n",
                between="",
            )
            for space in ("", "atem:")
        ),
        # Kimi-K3
        CallFormat(
            start=start,
            opening="",
            head='<|open|>call tool="',
            middle=f'" index="{INDEX}"<|sep|>',
            arguments=KeyedArguments(
                key_opening='<|open|>argument key="',
                value_opening='" type="string"<|sep|>',
                value_ending="<|close|>argument<|sep|>",
                openings=tuple(
                    (kind, f'" type="{kind}"<|sep|>') for kind in ("number", "boolean", "null", "object", "array")
                ),
            ),
            tail="<|close|>call<|sep|>",
            between="",
            ending="",
            end=end,
        ),
        # Gemma 4 and FunctionGemma
        *(
            CallFormat(
                start=start,
                opening="",
                head="call:",
                middle="{",
                arguments=KeyedArguments(
                    key_opening="",
                    value_opening=":",
                    value_ending="",
                    between=",",
                    quote=quote,
                    is_native=True,
                    has_bare_keys=True,
                ),
                tail="}",
                between="",
                ending="",
                end=end,
                has_own_section=own,
            )
            for quote in ('<|"|>', "<escape>")
        ),
        # LFM2
        CallFormat(
            start=start,
            opening="[",
            head="",
            middle="(",
            arguments=KeyedArguments(
                key_opening="", value_opening="=", value_ending="", between=", ", quote="'", is_native=True
            ),
            tail=")",
            between=", ",
            ending="]",
            end=end,
        ),
        # Kimi-K2
        CallFormat(
            start=start,
            opening="",
            head=f"<|tool_call_begin|>{ID_START}functions.",
            middle=f":{INDEX}{ID_STOP}<|tool_call_argument_begin|>",
            arguments=json,
            tail="<|tool_call_end|>",
            between="",
            ending="",
            end=end,
        ),
        # Mistral since version 11 of its tokenizer
        CallFormat(
            start=start,
            opening="",
            head="",
            middle="[ARGS]",
            arguments=json,
            tail="",
            between="",
            ending="",
            end=end,
            has_own_section=own,
        ),
        # Qwen2.5, Qwen3, Hermes
        CallFormat(
            start=start,
            opening="",
            head='\n{"name": "',
            middle='", "arguments": ',
            arguments=json,
            tail="}\n",
            between="\n",
            ending="",
            end=end,
            has_own_section=own,
        ),
        # Mistral before
        CallFormat(
            start=start,
            opening="[",
            head='{"name": "',
            middle='", "arguments": ',
            arguments=json,
            tail="}",
            between=", ",
            ending="]",
            end=end,
        ),
    )

"""Learning a model's format of tool calls from its chat template.

Chats with made-up calls are rendered: another name, no argument, arguments of every JSON type, two of them, two calls.
What differs between two renderings is the content of the call, and what stays the same is the markup around it. Nothing
depends on the name of a model or template. A format counts only if the reader reads all made-up calls back as they were
meant.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from reprise.chat.call_format import (
    ID,
    INDEX,
    KEY,
    CallFormat,
    KeyedArguments,
    ModelCalls,
    known_formats,
)
from reprise.chat.calls.call_reader import CallArguments, CallBegan, CallEnded, CallReader
from reprise.chat.calls.stated_calls import stated_format
from reprise.chat.message_format import REASONING_KEYS, Form
from reprise.chat.request import ChatRequest, Message, call_of, result_of
from reprise.chat.scan import common_length
from reprise.chat.templates.template import ChatTemplate, RenderContext
from reprise.chat.text_model import TextModel
from reprise.chat.tools import make_calls
from reprise.core.errors import BadRequest

NAME, OTHER = "turnstile", "quarry"
FIRST_KEY, SECOND_KEY = "zebra", "yacht"
FIRST_VALUE, SECOND_VALUE = "Falcon over", "Mango under"
WORDS, ASKED = "Rowboat", "Sycamore"
IDS = ("kP3xQ9vL2", "mT7wZ4bN8")
"""Some templates require nine letters or digits."""

TYPED: Mapping[str, Any] = {
    "string": FIRST_VALUE,
    "number": 4711,
    "boolean": True,
    "null": None,
    "object": {"inner": [31, "Quince"]},
    "array": [17, "Quince"],
}
EVERY_TYPE: Mapping[str, Any] = {f"{kind}_{FIRST_KEY}": value for kind, value in TYPED.items()}
"""Arguments of every JSON type."""
_LIST = {"type": "array", "items": {"type": ["integer", "string"]}}
_SCHEMAS: Mapping[str, Any] = {
    **{f"{kind}_{FIRST_KEY}": {"type": kind} for kind in TYPED},
    f"object_{FIRST_KEY}": {"type": "object", "properties": {"inner": _LIST}},
    f"array_{FIRST_KEY}": _LIST,
    FIRST_KEY: {"type": "string"},
    SECOND_KEY: {"type": "string"},
}


def _probe_tools(schemas: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    parameters: dict[str, Any] = {"type": "object", "properties": schemas, "required": []}
    return tuple(
        {"type": "function", "function": {"name": name, "description": "Counts.", "parameters": parameters}}
        for name in (NAME, OTHER)
    )


PROBE_TOOLS = _probe_tools(_SCHEMAS)
_SHOWN_TOOLS = _probe_tools({key: {"type": "string", "description": "It."} for key in _SCHEMAS})
"""What templates are shown of them: some know few types, and recurse without end at `null` or a list of types."""

MadeCall = tuple[str, Mapping[str, Any]]

FORMS = tuple(
    Form(has_text_arguments=as_text, fills_content=fills, has_null_content=not fills)
    for fills in (True, False)
    for as_text in (False, True)
)


_MARKER = re.compile(r"<\|[^|<>{}\s'\"]+\|>|\]<\][a-z]+\[>\[")
"""How special tokens look that a tokenizer may lack: a template that was put on another model's, or a converted one."""

_TYPED_SECTION = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
"""The section of Kimi-K3, whose markers all begin alike: what ends a message begins the end of an argument, too."""


class NotLearnt(Exception):
    """The renderings do not show a format."""


class CallProbes:
    """Renderings of made-up chats, with calls and without."""

    def __init__(self, text_model: TextModel, form: Form | None, *, has_plain_markers: bool = False) -> None:
        """`form` None: the one that the template takes, with thinking on.

        `has_plain_markers`: what the template writes like special tokens counts as such, with any tokenizer.
        """
        self.text_model = text_model
        self._template = ChatTemplate(text_model)
        self._form = form
        written = _MARKER.findall(text_model.template_source) if has_plain_markers else ()
        self.splitters = sorted({text for text in (*text_model.splitters, *written) if text}, key=len, reverse=True)
        self.message_ends = [end for end in (text_model.decode([token]) for token in text_model.eos) if end]

    def calls(self, calls: Sequence[MadeCall], *, content: str | None = None, has_results: bool = True) -> str:
        """The chat in which the model made these calls, and each has its result."""
        called, *results = call_chat(calls, content=content)
        return self.render(QUESTION, called, *(results if has_results else ()))

    def words(self, *, reasoning: Mapping[str, str] | None = None, has_prompt: bool = False) -> str:
        """The chat in which the model answered in words."""
        return self.render(QUESTION, answer(reasoning or {}), QUESTION, has_prompt=has_prompt)

    @cached_property
    def outside(self) -> tuple[str, ...]:
        """What stands in chats without calls, from the first question on."""
        texts: list[str] = []
        for key in dict.fromkeys(("content", *REASONING_KEYS, "tool_plan")):
            with suppress(NotLearnt):
                text = self.words(reasoning={key: WORDS}, has_prompt=True)
                texts.append(text[text.find(ASKED) :])
        return tuple(texts)

    @cached_property
    def opens_result(self) -> str:
        """The special token that the result of a call begins with; "" if it begins with none, or that is not shown."""
        called = [(NAME, {FIRST_KEY: FIRST_VALUE})]
        try:
            with_result, without = self.calls(called), self.calls(called, has_results=False).rstrip()
        except NotLearnt:
            return ""
        markup = first_markup(with_result.removeprefix(without), self.splitters)
        return markup if with_result.startswith(without) and markup in self.splitters else ""

    def instructions(self) -> tuple[str, str]:
        """A question with tools and one without."""
        return self.render(QUESTION, has_prompt=True), self.render(QUESTION, has_tools=False, has_prompt=True)

    def render(self, *messages: Message, has_tools: bool = True, has_prompt: bool = False) -> str:
        """The text of this chat. Raises NotLearnt where the template cannot render it."""
        if self.text_model.render is None:
            raise NotLearnt
        options = {} if self._form is not None else {"enable_thinking": True}
        request = ChatRequest(messages=messages, tools=_SHOWN_TOOLS if has_tools else (), template_options=options)
        moment = datetime(2031, 3, 4)
        try:
            if self._form is None:
                context, _ = self._template.open_scene(request, moment)
            else:
                context = RenderContext(request=request, moment=moment, form=self._form)
            return self._template.text(context, request.messages, has_prompt=has_prompt)
        except BadRequest as failed:
            raise NotLearnt from failed


QUESTION: Message = {"role": "user", "content": ASKED}


def answer(reasoning: Mapping[str, str]) -> Message:
    """A message in which the model answered in words."""
    return {"role": "assistant", "content": WORDS, **reasoning}


def call_chat(calls: Sequence[MadeCall], *, content: str | None = "") -> tuple[Message, ...]:
    """A message in which the model made these calls, and the result of each."""
    made = [call_of(made_id, name, arguments) for made_id, (name, arguments) in zip(IDS, calls, strict=False)]
    results = [result_of(made_id, name, "seen") for made_id, (name, _) in zip(IDS, calls, strict=False)]
    return ({"role": "assistant", "content": content, "tool_calls": made}, *results)


def first_markup(text: str, splitters: Sequence[str]) -> str:
    """The markup that a text begins with, white space left out."""
    text = text.lstrip()
    special = next((special for special in splitters if text.startswith(special)), None)
    if special is not None:
        return special
    tag = re.match(r"<[^\s<>]+>|\S+", text)
    return "" if tag is None else tag[0]


def learn_calls(text_model: TextModel) -> ModelCalls:
    """Find the format of this model's calls. Renders about a dozen small chats."""
    shown = _shown(text_model, has_plain_markers=False)
    if shown is not None:
        return shown
    known = _known(text_model)
    if known is None and (shown := _shown(text_model, has_plain_markers=True)) is not None:
        return shown
    example = "" if known is None else known.written([(NAME, {FIRST_KEY: FIRST_VALUE})])
    return ModelCalls(format=known, example=example, shows_tools=_shows_tools(text_model))


def _shown(text_model: TextModel, *, has_plain_markers: bool) -> ModelCalls | None:
    """The format of the calls that the template writes; None if it writes none that can be read."""
    for form in FORMS:
        probes = CallProbes(text_model, form, has_plain_markers=has_plain_markers)
        try:
            found = _learn(probes)
        except NotLearnt:
            continue
        return ModelCalls(format=found, example=_example(probes, found), shows_tools=_shows_tools(text_model))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What stands around the items of a sequence: `opening` (`head` item `tail`, joined by `between`) `ending`.

    `between` is None where a template writes one item at a time.
    """

    opening: str
    head: str
    tail: str
    between: str | None
    ending: str


def _format(
    probes: CallProbes, around: Around, middle: str, arguments: KeyedArguments | None, words_name: str
) -> CallFormat:
    """The format of what stands around calls, with which the reader reads all made-up ones. Raises NotLearnt.

    The markers at which content ends and begins again are still in `around`.
    """
    opening, head, tail = (_with_holes(text) for text in (around.opening, around.head, around.tail))
    between, ending = around.between, around.ending
    has_own = opening.strip() == "" and between is not None
    whole_lead = (opening + head).lstrip()
    start, lead = (whole_lead, whole_lead) if words_name else _call_start(probes, whole_lead)
    opening = lead[: len(lead) - len(head)] if len(lead) > len(head) else ""
    if has_own or between is None:
        head, opening = lead[len(start) :], ""
        whole_tail = (tail + ending if between is None else tail).rstrip()
        end = _end_marker(whole_tail, probes.splitters)
        tail, ending = whole_tail.removesuffix(end), ""
        has_own = True
    elif len(opening.lstrip()) >= len(start):
        opening = opening.lstrip()[len(start) :]
        end = _end_marker(ending, probes.splitters)
        ending = ending.rstrip().removesuffix(end)
    else:
        raise NotLearnt
    found = CallFormat(
        start=start,
        opening=opening,
        head=head,
        middle=_with_holes(middle),
        arguments=arguments,
        tail=tail,
        between=between,
        ending=ending,
        end=end,
        has_own_section=has_own,
        is_bare=not _is_marker(start, probes.splitters),
        words_name=words_name,
    )
    if any(end in text for end in probes.message_ends for text in found.texts()):
        # The model cannot write beyond it.
        raise NotLearnt
    _check(probes, found)
    return found


def _learn(probes: CallProbes) -> CallFormat:
    if probes.text_model.render is None:
        raise NotLearnt
    one = probes.calls([(NAME, {FIRST_KEY: FIRST_VALUE})])
    other = probes.calls([(OTHER, {FIRST_KEY: FIRST_VALUE})])
    name_at = common_length(one, other)
    if not one.startswith(NAME, name_at) or not other.startswith(OTHER, name_at):
        raise NotLearnt
    lead, begun = _lead(probes, one[:name_at]), ""
    if lead == "":
        lead = begun = _begun(probes)
    arguments, middle, final = _arguments(probes, one[name_at + len(NAME) :], name_at)
    last = _until_turn_end(probes, final)
    two = _two_calls(probes, name_at, middle, arguments)
    index_middle = middle
    if two is None:
        around = Around(opening="", head=lead, tail=last, between=None, ending="")
    else:
        inter, index_middle, last_of_two = two
        # Some templates end a section only if it has several calls.
        last = last_of_two if last_of_two.startswith(last.rstrip()) else last
        around = _sequence(lead, inter, last, probes.splitters)
    words_name = _words_name(probes, begun, middle) if begun else ""
    return _format(probes, around, index_middle, arguments, words_name)


def _begun(probes: CallProbes) -> str:
    """What begins a call, where the generation prompt has it already; "" if it does not."""
    prompt, _ = probes.instructions()
    text = probes.calls([(NAME, {FIRST_KEY: FIRST_VALUE})], content=WORDS)
    before = text[text.rfind(ASKED) :].partition(NAME)[0]
    start = before[before.rfind(WORDS) + len(WORDS) :].strip() if WORDS in before else ""
    return start if prompt.endswith(start) else ""


def _words_name(probes: CallProbes, begun: str, middle: str) -> str:
    """The name to which the model addresses its words to the user."""
    words = probes.words()
    before = words[: words.rfind(WORDS)]
    name = before[before.rfind(begun) + len(begun) :].removesuffix(middle)
    if begun + name + middle != before[before.rfind(begun) :] or not name.isidentifier():
        raise NotLearnt
    return name


def _lead(probes: CallProbes, before: str) -> str:
    """What stands between the beginning of an answer without words and the first call's name."""
    words = probes.words()
    lead = before[whole_markup(words, common_length(before, words), probes.splitters) :]
    with_words = probes.calls([(NAME, {FIRST_KEY: FIRST_VALUE})], content=WORDS)
    at = with_words.rfind(WORDS)
    name_at = with_words.find(NAME, at)
    if at >= 0 and name_at > at:
        # Words before a call may close what an answer without them never opened.
        behind = with_words[at + len(WORDS) : name_at]
        shared = _common_suffix(lead, behind)
        lead = lead[_whole_markup_back(lead, len(lead) - shared, probes.splitters) :]
    lead = lead.lstrip()
    model = probes.text_model
    is_more = True
    while is_more:
        is_more = False
        for marker in (model.think_start, model.think_end, *model.structural_markers):
            if marker and lead.startswith(marker) and marker != model.tool_start:
                lead, is_more = lead[len(marker) :].lstrip(), True
    return lead


def _arguments(probes: CallProbes, after_name: str, name_at: int) -> tuple[KeyedArguments | None, str, str]:
    """How arguments are written (None: as JSON), what stands between the name and them, and what follows them."""
    shown = _around_json(probes.calls([(NAME, EVERY_TYPE)])[name_at + len(NAME) :], EVERY_TYPE)
    return _keyed(probes, after_name, name_at) if shown is None else (None, *shown)


def _around_json(text: str, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """What stands before and behind these arguments, written as JSON; None if they are not there."""
    for opening in re.finditer(r"\{", text):
        with suppress(ValueError):
            value, length = json.JSONDecoder().raw_decode(text[opening.start() :])
            if value == arguments:
                return text[: opening.start()], text[opening.start() + length :]
    return None


def _keyed(probes: CallProbes, after_name: str, name_at: int) -> tuple[KeyedArguments, str, str]:
    def rest(arguments: Mapping[str, Any]) -> str:
        return probes.calls([(NAME, arguments)])[name_at + len(NAME) :]

    lead, opening, last = _around_argument(after_name, FIRST_KEY, FIRST_VALUE)
    # In the order in which templates that sort write them, too.
    two = rest({SECOND_KEY: SECOND_VALUE, FIRST_KEY: FIRST_VALUE})
    _, _, behind_first = _around_argument(two, SECOND_KEY, SECOND_VALUE)
    inter, _, _ = _around_argument(behind_first, FIRST_KEY, FIRST_VALUE)
    nothing = rest({})
    ending = _until_turn_end(probes, last)
    named = re.match(rf"[^{KEY}]*?{KEY}[^\s{KEY}]*?>", inter.replace(SECOND_KEY, KEY))
    item = ""
    if named is None:
        around_each = _sequence(lead, inter, ending, probes.splitters)
        before, after, between = around_each.opening, around_each.ending, around_each.between or ""
        key_opening, value_ending = around_each.head, around_each.tail
    else:
        # The key stands in what ends its value.
        value_ending, key_opening, between = named[0], inter[len(named[0].replace(KEY, SECOND_KEY)) :], ""
        closed = value_ending.replace(KEY, FIRST_KEY)
        if not lead.endswith(key_opening) or not ending.startswith(closed):
            raise NotLearnt
        before, after = lead[: len(lead) - len(key_opening)], ending[len(closed) :]
        item = _item(rest({FIRST_KEY: {OTHER: [SECOND_VALUE]}}), key_opening, opening)
    # Without arguments what stands around them is still there.
    bare = _until_turn_end(probes, nothing)
    if "".join(bare.split()) != "".join((before + after).split()):
        raise NotLearnt
    # What stands before values of the types that the template writes, all but text.
    openings: dict[str, str] = {}
    for key, value in EVERY_TYPE.items():
        text = rest({key: value})
        with suppress(NotLearnt):
            openings[key.removesuffix(f"_{FIRST_KEY}")] = _around_argument(text, key, value)[1]
    openings.pop("string", None)
    quote, value_opening, value_ending, is_native = _quoting(opening, value_ending, openings.get("number"))
    openings = {kind: found for kind, found in openings.items() if found != value_opening}
    keyed = KeyedArguments(
        key_opening=key_opening,
        value_opening=value_opening,
        value_ending=value_ending,
        between=between,
        quote=quote,
        openings=() if is_native else tuple(openings.items()),
        is_native=is_native,
        has_bare_keys=is_native and quote not in ("'", '"'),
        item=item,
    )
    return keyed, before, after + last[len(ending) :]


def _item(text: str, key_opening: str, opening: str) -> str:
    """The name under which a list's items are written, as arguments are; "" if lists are not written so."""
    lead = key_opening + OTHER + opening + key_opening
    inside = text[text.find(lead) + len(lead) : text.find(SECOND_VALUE)] if lead in text else ""
    return inside.removesuffix(opening) if inside.endswith(opening) else ""


def _around_argument(text: str, key: str, value: Any) -> tuple[str, str, str]:
    """What stands before a key, between it and its value, and behind that, written as JSON or as Python has it."""
    before, found, rest = text.partition(key)
    for spelling in (value,) if isinstance(value, str) else (json.dumps(value), str(value)):
        between, shown, behind = rest.partition(spelling)
        if found and shown:
            return before, between, behind
    raise NotLearnt


def _quoting(opening: str, ending: str, before: str | None) -> tuple[str, str, str, bool]:
    """The quotes of text values, and what stands around values apart from them. `before`: what a number follows."""
    if before is None:
        raise NotLearnt
    if len(opening) > len(before) and opening.startswith(before):
        quote = opening[len(before) :]
        if quote.strip() and ending.startswith(quote):
            return quote, before, ending[len(quote) :], True
    if ending.strip() == "":
        raise NotLearnt
    return "", opening, ending, False


def _two_calls(
    probes: CallProbes, name_at: int, middle: str, arguments: KeyedArguments | None
) -> tuple[str, str, str] | None:
    """What stands between the first call's arguments and the second's name; None where a template has one call only.

    With it the text between name and arguments, in which what differs from call to call is a hole, and what follows
    the second call's arguments.
    """
    try:
        text = probes.calls([(NAME, {FIRST_KEY: FIRST_VALUE}), (OTHER, {FIRST_KEY: SECOND_VALUE})])
    except NotLearnt:
        return None
    rest = text[name_at + len(NAME) :]
    second_at = rest.rfind(OTHER, 0, rest.find(SECOND_VALUE)) if SECOND_VALUE in rest else -1
    if second_at < 0:
        return None
    if arguments is None:
        first = _around_json(rest[:second_at], {FIRST_KEY: FIRST_VALUE})
        if first is None:
            raise NotLearnt
        inter = first[1]
        behind, last = _around_json(rest[second_at + len(OTHER) :], {FIRST_KEY: SECOND_VALUE}) or (middle, "")
        last = _until_turn_end(probes, last)
    else:
        value_at = rest.find(FIRST_VALUE)
        keyed_end = value_at + len(FIRST_VALUE) + len(arguments.quote)
        inter = rest[keyed_end:second_at]
        value_ending = arguments.ending(FIRST_KEY)
        if not inter.startswith(value_ending):
            raise NotLearnt
        inter = inter[len(value_ending) :]
        behind = rest[second_at + len(OTHER) :][: len(middle)]
        last = ""
    if len(behind) == len(middle) or arguments is None:
        middle = _numbered(_with_holes(middle), _with_holes(behind))
    return inter, middle, last


def _numbered(first: str, second: str) -> str:
    """The text with a hole where the two have another number."""
    parts = re.split(r"(\d+)", first)
    others = re.split(r"(\d+)", second)
    if len(parts) != len(others):
        return first
    return "".join(INDEX if a != b and a.isdigit() and b.isdigit() else a for a, b in zip(parts, others, strict=True))


def _with_holes(text: str) -> str:
    for made_id in IDS:
        text = text.replace(made_id, ID)
    return text


def _sequence(lead: str, inter: str, last: str, splitters: Sequence[str]) -> Around:
    """What stands around each item and around all, from the text around two of them.

    `lead` = opening + before; `inter` = behind + between + before; `last` = behind + ending.
    """
    lead, inter, last = _with_holes(lead), _with_holes(inter), _with_holes(last)
    lead, inter = _numbered_suffix(lead, inter)
    behind = whole_markup(inter, common_length(inter, last), splitters)
    behind = min(behind, whole_markup(last, behind, splitters))
    rest = inter[behind:]
    head_at = _whole_markup_back(lead, len(lead) - _common_suffix(lead, rest), splitters)
    return Around(
        opening=lead[:head_at],
        head=lead[head_at:],
        tail=inter[:behind],
        between=rest[: len(rest) - (len(lead) - head_at)],
        ending=last[behind:],
    )


def _numbered_suffix(lead: str, inter: str) -> tuple[str, str]:
    """Both with a hole where they end alike but for a number, as calls that are numbered do."""
    pattern = re.compile(r"\d+")
    plain, other = pattern.sub(INDEX, lead), pattern.sub(INDEX, inter)
    shared, exact = _common_suffix(plain, other), _common_suffix(lead, inter)
    if INDEX not in plain[len(plain) - shared :] or shared <= exact:
        return lead, inter
    return plain, other


def _call_start(probes: CallProbes, lead: str) -> tuple[str, str]:
    """The marker that the calls begin with, and the lead from there on.

    What stands in a chat without calls too (it begins or ends reasoning, or a message) is not the marker of calls: that
    follows it, or it extends to the next special token.
    """
    start = _start_marker(lead, probes.text_model, probes.splitters)
    # A word may stand in the instructions; in an answer it begins calls only with what follows it.
    is_word = start[:1].isalpha()
    while not is_word and _is_marker(start, probes.splitters) and any(start in text for text in probes.outside):
        behind = lead[len(start) :].lstrip()
        if first_markup(behind, probes.splitters).startswith(("<", "[", *probes.splitters)):
            start, lead = _start_marker(behind, probes.text_model, probes.splitters), behind
            continue
        stops = [at + len(text) for text in probes.splitters if (at := lead.find(text, len(start))) >= 0]
        if not stops:
            raise NotLearnt
        start = lead[: min(stops)]
    return start, lead


def _start_marker(lead: str, model: TextModel, splitters: Sequence[str]) -> str:
    """The marker that a text begins with."""
    if model.tool_start and lead.startswith(model.tool_start):
        return model.tool_start
    special = next((text for text in splitters if lead.startswith(text)), None)
    if special is not None:
        tag = re.match(r"<\w+>", lead[len(special) :])
        return special if tag is None else special + tag[0]
    tag = re.match(r"<[^\s<>]*[>=]|\[[A-Z_]+\]|[^\s\w\"'{}\[\]()]{2,}", lead)
    if tag is not None:
        return tag[0]
    if lead[:1] in ("{", "["):
        return lead[0]
    # A word alone would be found in any answer.
    word = re.match(r"[A-Za-z_]+[:\[]", lead)
    if word is None:
        raise NotLearnt
    return word[0]


def _end_marker(text: str, splitters: Sequence[str]) -> str:
    """The marker that the calls end with, "" if none."""
    text = text.rstrip()
    special = next((special for special in splitters if text.endswith(special)), None)
    if special is not None:
        return special
    tag = re.search(r"</?[^\s<>]+>$", text)
    return "" if tag is None else tag[0]


def _is_marker(start: str, splitters: Sequence[str]) -> bool:
    return start in splitters or len(start) > 2


def _check(probes: CallProbes, found: CallFormat) -> None:
    """Raise `NotLearnt` unless the reader reads all made-up calls back."""
    chats: list[list[MadeCall]] = [
        [(NAME, {})],
        [(NAME, {FIRST_KEY: FIRST_VALUE, SECOND_KEY: SECOND_VALUE})],
        [(NAME, EVERY_TYPE)],
    ]
    if found.is_parallel:
        chats.append([(NAME, {FIRST_KEY: FIRST_VALUE}), (OTHER, {})])
    for calls in chats:
        if _without_nulls(_calls_in(probes.calls(calls), found)) != _without_nulls(calls):
            raise NotLearnt


def _without_nulls(calls: Sequence[MadeCall]) -> list[MadeCall]:
    """The calls without what some templates leave out, which cannot come back."""
    return [
        (name, {key: value for key, value in arguments.items() if value not in (None, "None")})
        for name, arguments in calls
    ]


def _section_at(text: str, at: int, form: CallFormat) -> CallReader:
    """What has read the section that begins at `at`."""
    reader = CallReader(form, tools=PROBE_TOOLS)
    reader.feed(text[at + len(form.start) :])
    reader.finish(is_ended=False)
    return reader


def _calls_in(text: str, form: CallFormat) -> list[MadeCall]:
    """The calls in a rendered chat that are in this format."""
    at = text.rfind(ASKED)
    calls: list[MadeCall] = []
    while True:
        at = text.find(form.start, at)
        if at < 0:
            return calls
        reader = _section_at(text, at, form)
        names: list[str] = []
        texts: list[str] = []
        for event in reader.take():
            match event:
                case CallBegan():
                    names.append(event.name)
                    texts.append("")
                case CallArguments():
                    texts[-1] += event.text
                case CallEnded():
                    calls.append((names[-1], json.loads(texts[-1])))
        if reader.is_broken or not names or (form.is_bare and calls):
            at += len(form.start)
            if form.is_bare and calls:
                return calls
        else:
            at = len(text) - len(reader.rest)


def _example(probes: CallProbes, form: CallFormat) -> str:
    """A call as the template writes it, from its start marker to its end."""
    text = probes.calls([(NAME, {FIRST_KEY: FIRST_VALUE})])
    at = text.find(form.start, text.rfind(ASKED))
    return text[at : len(text) - len(_section_at(text, at, form).rest)]


def _known(text_model: TextModel) -> CallFormat | None:
    """The format that the model's parser reads, or that the template asks for, where it shows no call."""
    parse = text_model.parse_tool_call
    if parse is None or text_model.tool_start is None:
        form = _stated(text_model)
        if form is not None and is_not_refuted(text_model, form):
            return form
        # Without the special tokens the parser was not recognised.
        probes = CallProbes(text_model, FORMS[0])
        return next((form for form in known_formats(*_TYPED_SECTION) if _is_written(probes, form)), None)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    for form in known_formats(text_model.tool_start, text_model.tool_end or ""):
        specials = [text for text in ("[ARGS]", "<escape>", '<|"|>') if any(text in part for part in form.texts())]
        if any(text not in text_model.splitters for text in specials):
            continue
        section = form.written([("f", {"a": "b"})])
        written = section[len(form.start) : len(section) - len(form.end)]
        try:
            parsed: Any = parse(written.strip(), [tool])
        except Exception:  # whatever a parser raises at a format that is not its own
            continue
        calls = make_calls(parsed)
        if calls is not None and [(call.name, call.arguments) for call in calls] == [("f", '{"a": "b"}')]:
            return form if is_not_refuted(text_model, form) else None
    return None


def _is_written(probes: CallProbes, form: CallFormat) -> bool:
    """Whether the template writes its calls in this format."""
    try:
        _check(probes, form)
    except NotLearnt:
        return False
    return True


def _shows_tools(text_model: TextModel) -> bool:
    """Whether tools are in the prompt. One that cannot be rendered with them does not say that they are not."""
    try:
        shown, _ = CallProbes(text_model, FORMS[0]).instructions()
    except NotLearnt:
        return True
    return NAME in shown


def _stated(text_model: TextModel) -> CallFormat | None:
    probes = CallProbes(text_model, FORMS[0])
    try:
        shown, plain = probes.instructions()
    except NotLearnt:
        return None
    return stated_format(shown, plain, splitters=probes.splitters, names=(NAME, OTHER))


def is_not_refuted(text_model: TextModel, form: CallFormat) -> bool:
    """Whether the template shows no call, or shows it in this format."""
    probes = CallProbes(text_model, FORMS[0])
    try:
        text = probes.calls([(NAME, {FIRST_KEY: FIRST_VALUE})])
    except NotLearnt:
        return True
    if NAME not in text[text.rfind(ASKED) :]:
        return True
    return _is_written(probes, form)


def _until_turn_end(probes: CallProbes, text: str) -> str:
    """The text up to what ends a message."""
    words = probes.words()
    behind = words[words.rfind(WORDS) + len(WORDS) :]
    marker = first_markup(behind, probes.splitters)
    seen = text.find("seen")
    turn = text if seen < 0 else text[:seen]
    places = [at for end in (*probes.message_ends, marker, probes.opens_result) if end and (at := turn.find(end)) >= 0]
    if not places:
        # Nothing ends the message: what stands between two others opens the next.
        between = behind.partition(ASKED)[0]
        places = [at for end in probes.splitters if end in between and (at := turn.find(end)) >= 0]
    if not places and seen >= 0:
        # Up to the last special token before the result.
        ends_at = [at + len(s) for s in probes.splitters if (at := turn.rfind(s)) >= 0]
        places = [max(ends_at, default=seen)]
    cut = text[: min(places, default=len(text))]
    for marker in probes.text_model.structural_markers:
        cut = cut.rstrip().removesuffix(marker)
    return cut


def whole_markup(text: str, length: int, splitters: Sequence[str]) -> int:
    """`length` or what is less of it, so that no special token or tag is cut apart there."""
    for special in splitters:
        for at in range(max(0, length - len(special) + 1), length):
            if text.startswith(special, at):
                return whole_markup(text, at, splitters)
    tag = re.search(r"</?[^\s<>]*$", text[:length])
    return length if tag is None else tag.start()


def _whole_markup_back(text: str, at: int, splitters: Sequence[str]) -> int:
    """`at` or what is more of it, so that no special token or tag is cut apart there."""
    for special in splitters:
        for start in range(max(0, at - len(special) + 1), at):
            if text.startswith(special, start):
                return _whole_markup_back(text, start + len(special), splitters)
    if re.search(r"<[^\s<>]*$", text[:at]) is None:
        return at
    rest = re.match(r"[^\s<>]*[>=]?", text[at:])
    return at if rest is None else at + rest.end()


def _common_suffix(one: str, other: str) -> int:
    return common_length(one[::-1], other[::-1])

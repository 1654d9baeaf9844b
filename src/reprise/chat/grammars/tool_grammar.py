"""The grammar of an answer with tools: a forced call, an output that was asked for, or either of both.

`tool_choice` forces the model's own tool-call format, and nothing else.

The format is the one that was learnt from the chat template (`call_learning`). Where none was, forcing is refused,
since a call that is only asked for may not come.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from reprise.chat.answers.markup import is_harmony
from reprise.chat.call_format import (
    HARMONY_CALLS,
    ID,
    ID_START,
    ID_STOP,
    INDEX,
    CallFormat,
    KeyedArguments,
    type_name,
)
from reprise.chat.calls.call_values import (
    could_be_text,
    definitions_in,
    is_text,
    resolved,
    schema_of_part,
    schemas_in,
    types_of,
)
from reprise.chat.grammars.grammar import (
    HARMONY_RULES,
    JSON_OPTIONS,
    Grammar,
    check_properties,
    either,
    harmony_lead,
    lark,
    lark_markup,
    lark_text,
)
from reprise.chat.grammars.text_schema import text_terms, with_known_patterns
from reprise.chat.text_model import TextModel
from reprise.chat.tools import function_of
from reprise.core.errors import BadRequest

ALLOWED_TOOLS = "allowed_tools"
"""The type of a choice among the `names` of some of the tools."""
ToolChoice = str | Mapping[str, Any] | None

_ANY_TEXT = r"/(.|\n)*/"
_HOLE = re.compile(f"([{INDEX}{ID}{ID_START}{ID_STOP}])")
_HOLES = {INDEX: "/[0-9]{1,2}/", ID: "/[a-zA-Z0-9]{9}/", ID_START: "", ID_STOP: ""}
_QUOTED = {
    "'": r"""/([^'\\\n]|\\['"\\nrt])*/""",
    '"': r"""/([^"\\\n]|\\["\\\/nrt])*/""",
}
"""What can stand between quotes of a language that has escapes."""

_FREE_KEY = "/[a-zA-Z_][a-zA-Z0-9_-]*/"
_MAX_DEPTH = 6
_MAX_ITEMS = 64


def answer_grammar(
    text_model: TextModel,
    wanted: Grammar | None,
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    parallel: bool = True,
) -> Grammar | None:
    """What the answer has to be: `wanted` is the output that was asked for. None: anything.

    With tools that the model may call, the answer is the output or a call, from its first token on: words before a
    call could continue for ever, where the model intends neither. A forced call precedes the output, which is
    for the answer to its result. Raises BadRequest for a choice that is none, and for calls whose format the model's
    grammar cannot have.
    """
    forced = call_grammar(text_model, tools=tools, tool_choice=tool_choice, parallel=parallel)
    if forced is not None:
        return forced
    if wanted is None or len(tools) == 0 or tool_choice == "none":
        return wanted
    try:
        call = call_grammar(text_model, tools=tools, tool_choice="required", parallel=parallel)
    except BadRequest as error:
        raise BadRequest(
            f"`{wanted.param}` with tools needs a grammar for this model's tool calls, but there is none ({error}) "
            "Set tool_choice to 'none', or leave out the tools.",
            param=wanted.param,
        ) from error
    assert call is not None, "'required' forces a call"
    return either(wanted, call)


def call_grammar(
    text_model: TextModel,
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    parallel: bool = True,
) -> Grammar | None:
    """The grammar that forces the call, for "required" and a named function; None where nothing is forced.

    `tool_choice` in OpenAI form. A named function is called once; "required" allows several calls if `parallel`. Raises
    BadRequest for a choice that is none, and where the model's format cannot be forced.
    """
    if tool_choice is None or tool_choice in ("none", "auto"):
        return None
    functions = _chosen([function_of(tool) for tool in tools], tool_choice)
    if is_harmony(text_model):
        ends_itself = text_model.splitters.get("<|call|>") in text_model.eos
        form = replace(HARMONY_CALLS, end="") if ends_itself else HARMONY_CALLS
        grammar = _grammar(text_model, form, functions, lead=harmony_lead(text_model), more=HARMONY_RULES)
        return replace(grammar, is_whole=True)
    form = text_model.calls.format
    if form is None:
        reason = (
            "The format of this model's tool calls is unknown: its chat template shows no readable call."
            if text_model.calls.shows_tools
            else "This model's chat template takes no tools, so the model would not see them."
        )
        raise BadRequest(f"{reason} tool_choice can only be 'auto' or 'none'.", param="tool_choice")
    is_one = isinstance(tool_choice, Mapping) and tool_choice.get("type") != ALLOWED_TOOLS
    is_repeated = parallel and not is_one and form.is_parallel
    grammar = _grammar(text_model, form, functions, is_repeated=is_repeated)
    return replace(grammar, is_whole=form.words_name != "")


def _chosen(functions: Sequence[dict[str, Any]], tool_choice: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    named = [function for function in functions if isinstance(function.get("name"), str)]
    if tool_choice == "required":
        if len(named) == 0:
            raise BadRequest("tool_choice is 'required', but the request has no tools.", param="tool_choice")
        return named
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == ALLOWED_TOOLS:
        names: Collection[object] = tool_choice["names"]
        if chosen := [function for function in named if function["name"] in names]:
            return chosen
        raise BadRequest("tool_choice allows no function that is in tools.", param="tool_choice")
    if isinstance(tool_choice, Mapping):
        function: object = tool_choice.get("function")
        # The responses API names the function without the inner object.
        outer = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else tool_choice
        name = outer.get("name")
        chosen = [function for function in named if function["name"] == name]
        if chosen:
            return chosen[:1]
        raise BadRequest(f"tool_choice names the function {name!r}, which is not in tools.", param="tool_choice")
    raise BadRequest(
        "tool_choice must be 'none', 'auto', 'required', or an object that names a function.", param="tool_choice"
    )


def _grammar(
    text_model: TextModel,
    form: CallFormat,
    functions: Sequence[dict[str, Any]],
    *,
    is_repeated: bool = False,
    lead: str = "",
    more: str = "",
) -> Grammar:
    """The grammar of calls of these functions. `lead` stands before them; `more` are rules that it needs."""
    rules = _Rules(lambda text: lark_markup(text_model, text))
    calls = [rules.call(form, function) for function in functions]
    start, end = rules.literal(form.start + form.opening), rules.literal(form.ending + form.end)
    between = rules.literal(form.between or "")
    others = ""
    if is_repeated:
        others = f"({between} {start} call {end})*" if form.has_own_section else f"({between} call)*"
    first = rules.literal(form.opening) if form.words_name else start
    body = f"{first} call {end} {others}" if form.has_own_section else f"{first} call {others} {end}"
    text = "\n".join((f"start: {f'{lead} {body}'.lstrip()}", f"call: {' | '.join(calls)}", *rules.rules)) + more
    return lark(text, param="tool_choice")


class _Rules:
    """Lark rules, numbered as they come."""

    def __init__(self, markup: Callable[[str], str]) -> None:
        self.markup = markup
        self.rules: list[str] = []
        self._is_strict = False

    def literal(self, text: str) -> str:
        """Markup in which numbers and ids may stand."""
        parts = [_HOLES[part] if part in _HOLES else self.markup(part) for part in _HOLE.split(text) if part]
        return " ".join(part for part in parts if part)

    def call(self, form: CallFormat, function: dict[str, Any]) -> str:
        name, parameters = function["name"], self._parameters(function)
        name = json.dumps(name)[1:-1] if form.name_is_quoted else name
        if form.arguments is None:
            arguments = self.json(parameters)
        else:
            arguments = self._members(form.arguments, parameters, parameters)
        return " ".join((self.literal(form.head + name + form.middle), arguments, self.literal(form.tail)))

    def _parameters(self, function: dict[str, Any]) -> dict[str, Any]:
        """The schema of the arguments. Unless the function is strict, what cannot be enforced is left out."""
        self._is_strict = function.get("strict") is True
        parameters = function["parameters"]
        return parameters if self._is_strict else cast("dict[str, Any]", with_known_patterns(parameters))

    def json(self, parameters: dict[str, Any]) -> str:
        """A rule for an object of the schema, with no others where the schema names some."""
        closed = {"additionalProperties": False} if parameters["properties"] else {}
        schema = {"type": "object", **closed, **parameters}
        return self._rule(f"%json {self._schema_text(schema)}")

    def _members(self, form: KeyedArguments, schema: dict[str, Any], parameters: dict[str, Any], depth: int = 0) -> str:
        """The arguments of a call, or the members of an object, in their order."""
        properties: dict[str, Any] = schema.get("properties") or {}
        items = [
            (key, self._argument(form, key, resolved(_as_schema(part), parameters), parameters, depth))
            for key, part in properties.items()
        ]
        between, required = self.literal(form.between), schema.get("required", ())
        more, first = '""', '""'
        for key, item in reversed(items):
            following = f"{between} {item} {more}"
            whole = f"{item} {more}"
            first = self._rule(whole if key in required else f"{whole} | {first}")
            more = self._rule(following if key in required else f"{following} | {more}")
        return first

    def _argument(
        self, form: KeyedArguments, key: str, schema: dict[str, Any], parameters: dict[str, Any], depth: int
    ) -> str:
        lead = self.literal(form.key_opening + key)
        if form.is_native or form.item:
            opening = self.literal(form.value_opening)
            return f"{lead} {opening} {self._value(form, key, schema, parameters, depth)}"
        ways: list[str] = []
        if is_text(schema) or (form.openings and could_be_text(schema)):
            ways.append(f"{self.literal(form.value_opening)} {self._text(schema, form.value_ending)}")
        if not is_text(schema):
            ending = self.literal(form.value_ending)
            for opening, part in _by_opening(form, schema):
                ways.append(f"{self.literal(opening)} {self._json_value(part, parameters)} {ending}")
        return f"{lead} {self._rule(' | '.join(ways))}"

    def _json_value(self, schema: dict[str, Any], parameters: dict[str, Any]) -> str:
        return self._rule(f"%json {self._schema_text({**definitions_in(parameters), **schema})}")

    # Values of languages that write objects and lists in their own way

    def _value(
        self, form: KeyedArguments, key: str, schema: dict[str, Any], parameters: dict[str, Any], depth: int
    ) -> str:
        """A value and what ends it."""
        schema = resolved(schema, parameters)
        ending = form.ending(key)
        kinds = types_of(schema)
        if is_text(schema) and (kinds or depth == 0):
            return self._string(form, schema, ending)
        if not form.has_bare_keys and not form.item:
            return f"{self._json_value(schema, parameters)} {self.literal(ending)}"
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and depth < _MAX_DEPTH:
                parts = schemas_in(schema[name])
                return self._rule(" | ".join(self._value(form, key, part, parameters, depth + 1) for part in parts))
        ways: list[str] = []
        for kind in sorted(kinds) if depth < _MAX_DEPTH else ():
            if kind == "string":
                ways.append(self._string(form, schema, ending))
            elif kind == "object" and (schema.get("properties") or not form.item):
                ways.append(f"{self._object(form, schema, parameters, depth)} {self.literal(ending)}")
            elif kind == "array":
                ways.append(f"{self._list(form, schema, parameters, depth)} {self.literal(ending)}")
            else:
                ways.append(f"{self._json_value(_limited(schema, {kind}), parameters)} {self.literal(ending)}")
        return self._rule(" | ".join(ways) or f"{self._anything(form)} {self.literal(ending)}")

    def _object(self, form: KeyedArguments, schema: dict[str, Any], parameters: dict[str, Any], depth: int) -> str:
        if not form.has_bare_keys:
            return self._members(form, schema, parameters, depth + 1)
        if schema.get("properties"):
            return f'"{{" {self._members(form, schema, parameters, depth + 1)} "}}"'
        part = schema_of_part({**definitions_in(parameters), **schema}, "")
        return self._free_object(form, self._value(form, "", part, parameters, depth + 1))

    def _free_object(self, form: KeyedArguments, value: str) -> str:
        item = f"{_FREE_KEY} {self.literal(form.value_opening)} {value}"
        return f'"{{" ({item} ({self.literal(form.between)} {item})*)? "}}"'

    def _list(self, form: KeyedArguments, schema: dict[str, Any], parameters: dict[str, Any], depth: int) -> str:
        part = schema_of_part({**definitions_in(parameters), **schema}, None)
        if form.item:
            item = self._argument(form, form.item, part, parameters, depth + 1)
        else:
            item = self._value(form, "", part, parameters, depth + 1)
        fewest = schema.get("minItems", 0)
        most = max(fewest, 1, schema.get("maxItems", _MAX_ITEMS))
        more = f"{item} ({self.literal(form.between)} {item}){{{max(0, fewest - 1)},{most - 1}}}"
        items = more if fewest > 0 else f"({more})?"
        return items if form.item else f'"[" {items} "]"'

    def _anything(self, form: KeyedArguments) -> str:
        """A rule for any value: as JSON, where the language reads it."""
        if not form.has_bare_keys:
            return self._rule(f"%json {self._schema_text({})}")
        name = f"r{len(self.rules)}"
        self.rules.append("")
        comma = self.literal(form.between)
        ways = (
            self._string(form, {}, ""),
            self._rule(f"%json {self._schema_text({'type': ['number', 'boolean', 'null']})}"),
            self._free_object(form, name),
            f'"[" ({name} ({comma} {name})*)? "]"',
        )
        self.rules[int(name[1:])] = f"{name}: {' | '.join(ways)}"
        return name

    # Text

    def _string(self, form: KeyedArguments, schema: dict[str, Any], ending: str) -> str:
        """A value that is text, as the language marks it, and what ends it."""
        if form.quote == "":
            return self._text(schema, ending)
        quote = self.literal(form.quote)
        if form.quote not in _QUOTED:
            return f"{quote} {self._text(schema, form.quote)} {self.literal(ending)}"
        options = _options(schema)
        if options is not None:
            texts = [json.dumps(text, ensure_ascii=False)[1:-1] for text in options]
            if form.quote == "'":
                texts = [text.replace('\\"', '"').replace("'", "\\'") for text in texts]
            inside = self._rule(" | ".join(lark_text(text) for text in texts))
        else:
            terms = text_terms(schema)
            # What is asked of the text is asked without escapes.
            plain = rf"/[^{form.quote}\\\n]*/"
            inside = self._terminal(" & ".join((plain, *terms)) if terms else _QUOTED[form.quote])
        return f"{quote} {inside} {quote} {self.literal(ending)}"

    def _text(self, schema: dict[str, Any], ending: str) -> str:
        """Text of this schema up to the ending's tag, whatever white space stands before it.

        A special token ends a text by itself, since it cannot stand in one.
        """
        options = _options(schema)
        if options is not None:
            return f"{self._rule(' | '.join(lark_text(text) for text in options))} {self.literal(ending)}"
        terms = text_terms(schema)
        tag = ending.strip()
        after = self.markup(ending[ending.index(tag) + len(tag) :])
        end = self.markup(tag)
        if "<[" in end:
            at = end.index("<[")
            text = self._terminal(" & ".join(terms) or _ANY_TEXT)
            # A separate terminal: what is before the special token could be text as well.
            before = f"{self.literal(ending[: ending.index(tag)]) if terms else ''} {end[:at]}".strip()
            return f"{self._terminal(f'{text} {before}') if before else text} {end[at:]} {after}"
        if not terms:
            return f"{self._rule(_ANY_TEXT, option=f'[suffix={end}]')} {after}"
        # A text that is not yet what is asked could go on beyond the ending.
        first = re.escape(tag[0]).replace("/", r"\/")
        if "pattern" in schema and tag[0] not in schema["pattern"]:
            terms.append(f"/[^{first}]*/")
        elif schema.get("minLength"):
            terms.append(f"/[^{first}]{{{schema['minLength']}}}(?s:.*)/")
        whole = lark_text(ending[: ending.index(tag)] + tag)
        return f"{self._rule(' & '.join(terms), option=f'[suffix={whole}]')} {after}"

    def _schema_text(self, schema: dict[str, Any]) -> str:
        check_properties(schema, param="tools")
        return json.dumps({**schema, "x-guidance": {**JSON_OPTIONS, "lenient": not self._is_strict}})

    def _terminal(self, body: str) -> str:
        return self._rule(body, kind="T")

    def _rule(self, body: str, *, option: str = "", kind: str = "r") -> str:
        name = f"{kind}{len(self.rules)}"
        self.rules.append(f"{name}{option}: {body}")
        return name


def _as_schema(part: object) -> dict[str, Any]:
    """A schema may be a boolean."""
    return cast("dict[str, Any]", part) if isinstance(part, dict) else {}


def _by_opening(form: KeyedArguments, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What opens a value that is not marked as text, with the part of the schema that can follow it."""
    if not form.openings:
        return [(form.value_opening, schema)]
    kinds = (types_of(schema) or frozenset(kind for kind, _ in form.openings)) - {"string"}
    by_opening: dict[str, set[str]] = {}
    for kind in sorted(kinds):
        by_opening.setdefault(form.opening("number" if kind == "integer" else kind), set()).add(kind)
    return [(opening, _limited(schema, kinds)) for opening, kinds in by_opening.items()]


def _limited(schema: dict[str, Any], kinds: Collection[str]) -> dict[str, Any]:
    """The part of the schema whose values have these types."""
    options: object = schema.get("enum")
    if isinstance(options, list):
        fitting = [option for option in cast("list[object]", options) if _is_of(option, kinds)]
        return {**{key: part for key, part in schema.items() if key != "type"}, "enum": fitting}
    for key in ("anyOf", "oneOf"):
        parts: Any = schema.get(key)
        if isinstance(parts, list):
            return {**schema, key: [part for part in schemas_in(parts) if types_of(part) & set(kinds)]}
    return schema if "const" in schema else {**schema, "type": sorted(kinds)}


def _is_of(value: object, kinds: Collection[str]) -> bool:
    kind = type_name(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _options(schema: dict[str, Any]) -> list[str] | None:
    """The texts that a value can be, where only some can."""
    options: object = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(options, list):
        return None
    return [option for option in cast("list[object]", options) if isinstance(option, str)] or None

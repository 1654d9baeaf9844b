"""`tool_choice` as a grammar: the model's own tool-call format, and nothing else.

The format is the one that was learnt from the chat template (`call_learning`). Where none was, forcing is refused,
since a call that is only asked for may not come.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from reprise.chat.call_format import ID, ID_START, ID_STOP, INDEX, CallFormat, JsonArguments, KeyedArguments
from reprise.chat.grammar import (
    HARMONY_RULES,
    JSON_OPTIONS,
    Grammar,
    harmony_lead,
    lark,
    lark_markup,
    lark_text,
)
from reprise.chat.markup import is_harmony
from reprise.chat.text_model import TextModel
from reprise.chat.tool_types import could_be_text, is_text, resolved, schemas_in, types_of
from reprise.chat.tools import function_of
from reprise.core.errors import BadRequest

ToolChoice = str | Mapping[str, Any] | None

_ANY_TEXT = r"/(.|\n)*/"
_HOLE = re.compile(f"([{INDEX}{ID}{ID_START}{ID_STOP}])")
_HOLES = {INDEX: "/[0-9]{1,2}/", ID: "/[a-zA-Z0-9]{9}/", ID_START: "", ID_STOP: ""}
_QUOTED = {
    "'": r"""/([^'\\\n]|\\['"\\nrt])*/""",
    '"': r"""/([^"\\\n]|\\["\\\/nrt])*/""",
}
"""What can stand between quotes of a language that has escapes."""

_MAX_DEPTH = 6


def call_grammar(
    text_model: TextModel, *, tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice, parallel: bool = True
) -> Grammar | None:
    """The grammar that forces the call, for "required" and a named function; None where nothing is forced.

    `tool_choice` in OpenAI form. A named function is called once; "required" allows several calls if `parallel`.
    Raises BadRequest for a choice that is none, and where the model's format cannot be forced.
    """
    if tool_choice is None or tool_choice in ("none", "auto"):
        return None
    functions = _chosen([function_of(tool) for tool in tools], tool_choice)
    if is_harmony(text_model):
        return _harmony_grammar(text_model, functions)
    form = text_model.calls.format
    if form is None:
        raise BadRequest(
            "The format of this model's tool calls is not known: its chat template shows none that can be understood. "
            "tool_choice can only be 'auto' or 'none'.",
            param="tool_choice",
        )
    is_repeated = parallel and tool_choice == "required" and form.is_parallel
    return _grammar(text_model, form, functions, is_repeated=is_repeated)


def _chosen(functions: Sequence[dict[str, Any]], tool_choice: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    named = [function for function in functions if isinstance(function.get("name"), str)]
    if tool_choice == "required":
        if len(named) == 0:
            raise BadRequest("tool_choice is 'required', but the request has no tools.", param="tool_choice")
        return named
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
        "tool_choice has to be 'none', 'auto', 'required', or an object that names a function.", param="tool_choice"
    )


def _grammar(
    text_model: TextModel, form: CallFormat, functions: Sequence[dict[str, Any]], *, is_repeated: bool
) -> Grammar:
    rules = _Rules(lambda text: lark_markup(text_model, text))
    calls = [rules.call(form, function) for function in functions]
    start, end = rules.literal(form.start + form.opening), rules.literal(form.ending + form.end)
    between = rules.literal(form.between or "")
    if form.has_own_section:
        whole = f"{start} call {end}"
        body = f"{whole} ({between} {whole})*" if is_repeated else whole
    else:
        more = f"({between} call)*" if is_repeated else ""
        body = f"{start} call {more} {end}"
    return rules.grammar(start=body, call=" | ".join(calls))


def _harmony_grammar(text_model: TextModel, functions: Sequence[dict[str, Any]]) -> Grammar:
    rules = _Rules(lambda text: lark_markup(text_model, text))
    calls: list[str] = []
    for function in functions:
        header = f"<|channel|>commentary to=functions.{function['name']} <|constrain|>json<|message|>"
        calls.append(f"{rules.markup(header)} {rules.json(function['parameters'])}")
    ends_itself = text_model.splitters.get("<|call|>") in text_model.eos
    end = "" if ends_itself else rules.markup("<|call|>")
    grammar = rules.grammar(start=f"{harmony_lead(text_model)} call {end}", call=" | ".join(calls), more=HARMONY_RULES)
    return Grammar(text=grammar.text, param=grammar.param, is_whole=True)


class _Rules:
    """Lark rules, numbered as they come."""

    def __init__(self, markup: Callable[[str], str]) -> None:
        self.markup = markup
        self._rules: list[str] = []

    def grammar(self, *, start: str, call: str, more: str = "") -> Grammar:
        text = "\n".join((f"start: {start}", f"call: {call}", *self._rules)) + more
        return lark(text, param="tool_choice")

    def literal(self, text: str) -> str:
        """Markup in which numbers and ids may stand."""
        parts = [_HOLES[part] if part in _HOLES else self.markup(part) for part in _HOLE.split(text) if part]
        return " ".join(part for part in parts if part)

    def call(self, form: CallFormat, function: dict[str, Any]) -> str:
        name, parameters = function["name"], function["parameters"]
        name = json.dumps(name)[1:-1] if form.name_is_quoted else name
        if isinstance(form.arguments, JsonArguments):
            arguments = self.json(parameters)
        else:
            arguments = self._keyed(form.arguments, parameters)
        return " ".join((self.literal(form.head + name + form.middle), arguments, self.literal(form.tail)))

    def json(self, parameters: dict[str, Any]) -> str:
        """A rule for the arguments: an object of the schema, with no others where the schema names some."""
        closed = {"additionalProperties": False} if parameters["properties"] else {}
        schema = {"type": "object", **closed, **parameters}
        return self._rule(f"%json {_schema_text(schema)}")

    def _keyed(self, form: KeyedArguments, parameters: dict[str, Any]) -> str:
        required = parameters.get("required", ())
        items = [
            (self._argument(form, key, resolved(schema, parameters), parameters), key in required)
            for key, schema in parameters["properties"].items()
        ]
        return self._joined(items, self.literal(form.between))

    def _joined(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """Items in their order, each with whether it has to be there, and what is between two of them."""
        more, first = '""', '""'
        for item, is_required in reversed(items):
            following = f"{between} {item} {more}"
            whole = f"{item} {more}"
            first = self._rule(whole if is_required else f"{whole} | {first}")
            more = self._rule(following if is_required else f"{following} | {more}")
        return first

    def _argument(self, form: KeyedArguments, key: str, schema: dict[str, Any], parameters: dict[str, Any]) -> str:
        lead = self.literal(form.key_opening + key)
        if form.is_native:
            value = self._native(form, schema, parameters)
            return f"{lead} {self.literal(form.value_opening)} {value} {self.literal(form.value_ending)}"
        ways: list[str] = []
        if is_text(schema) or (form.openings and could_be_text(schema)):
            ways.append(f"{self.literal(form.value_opening)} {self._text(form, schema)}")
        if not is_text(schema):
            ending = self.literal(form.value_ending)
            for opening, part in _by_opening(form, schema):
                ways.append(f"{self.literal(opening)} {self._json_value(part, parameters)} {ending}")
        return f"{lead} {self._rule(' | '.join(ways))}"

    def _text(self, form: KeyedArguments, schema: dict[str, Any]) -> str:
        """A value that is text, and what ends it."""
        options = _options(schema)
        if options is not None:
            return f"{self._rule(' | '.join(lark_text(text) for text in options))} {self.literal(form.value_ending)}"
        return self._text_until(form.value_ending)

    def _json_value(self, schema: dict[str, Any], parameters: dict[str, Any]) -> str:
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        return self._rule(f"%json {_schema_text({**definitions, **schema})}")

    def _native(self, form: KeyedArguments, schema: dict[str, Any], parameters: dict[str, Any], depth: int = 0) -> str:
        """A value of a language that marks text itself: with bare keys its own objects, else JSON."""
        schema = resolved(schema, parameters)
        if is_text(schema):
            return self._quoted(form, _options(schema))
        if not form.has_bare_keys:
            return self._json_value(schema, parameters)
        ways = [self._bare(form, kind, schema, parameters, depth) for kind in sorted(types_of(schema))]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                ways = [self._native(form, part, parameters, depth + 1) for part in schemas_in(schema[key])]
        return self._rule(" | ".join(ways) or '"null"')

    def _bare(
        self, form: KeyedArguments, kind: str, schema: dict[str, Any], parameters: dict[str, Any], depth: int
    ) -> str:
        options: object = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if kind == "string":
            return self._quoted(form, _options(schema))
        if isinstance(options, list) and kind in ("integer", "number", "boolean", "null"):
            fitting = [option for option in cast("list[object]", options) if not isinstance(option, str)]
            return self._rule(" | ".join(lark_text(json.dumps(option)) for option in fitting))
        colon, comma = self.literal(form.value_opening), self.literal(form.between)
        if kind == "object":
            properties: dict[str, Any] = schema.get("properties", {}) if depth < _MAX_DEPTH else {}
            required = schema.get("required", ())
            items = [
                (f"{lark_text(key)} {colon} {self._native(form, part, parameters, depth + 1)}", key in required)
                for key, part in properties.items()
            ]
            return f'"{{" {self._joined(items, comma)} "}}"'
        if kind == "array":
            part: dict[str, Any] = {"type": "string"}
            if depth < _MAX_DEPTH:
                part = next(iter(schemas_in([schema.get("items")])), part)
            item = self._native(form, part, parameters, depth + 1)
            fewest = schema.get("minItems", 0)
            least = f"{item} ({comma} {item}){{{max(0, fewest - 1)},{max(fewest - 1, schema.get('maxItems', 64) - 1)}}}"
            return f'"[" {least} "]"' if fewest > 0 else f'"[" ({least})? "]"'
        return self._json_value({**schema, "type": kind}, parameters)

    def _quoted(self, form: KeyedArguments, options: Sequence[str] | None) -> str:
        quote = self.literal(form.quote)
        if options is not None:
            escaped = [json.dumps(text, ensure_ascii=False)[1:-1] for text in options]
            texts = escaped if form.quote in _QUOTED else list(options)
            if form.quote == "'":
                texts = [text.replace('\\"', '"').replace("'", "\\'") for text in texts]
            return f"{quote} {self._rule(' | '.join(lark_text(text) for text in texts))} {quote}"
        if form.quote in _QUOTED:
            return f"{quote} {self._rule(_QUOTED[form.quote])} {quote}"
        return f"{quote} {self._text_until(form.quote)}"

    def _text_until(self, ending: str) -> str:
        """Any text up to the ending's tag, whatever white space stands before it.

        A special token ends a text by itself, since it cannot stand in one.
        """
        tag = ending.strip()
        after = self.markup(ending[ending.index(tag) + len(tag) :])
        end = self.markup(tag)
        if "<[" in end:
            return f"{self._rule(_ANY_TEXT)} {end[end.index('<[') :]} {after}"
        return f"{self._rule(_ANY_TEXT, option=f'[suffix={end}]')} {after}"

    def _rule(self, body: str, *, option: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name


def _schema_text(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS})


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
    for key in ("anyOf", "oneOf"):
        parts: Any = schema.get(key)
        if isinstance(parts, list):
            return {**schema, key: [part for part in schemas_in(parts) if types_of(part) & set(kinds)]}
    if "enum" in schema or "const" in schema:
        return schema if "type" not in schema else {**schema, "type": sorted(kinds)}
    return {**schema, "type": sorted(kinds)}


def _options(schema: dict[str, Any]) -> list[str] | None:
    """The texts that a value can be, where only some can."""
    options: object = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(options, list):
        return None
    return [option for option in cast("list[object]", options) if isinstance(option, str)] or None

"""`tool_choice` as a grammar: the model's own tool-call format, and nothing else.

Which format a model writes is not asked by name: a format is used if it begins with the model's tool marker and the
model's own parser reads a probe of it back. Formats that are not known here are refused, since a call that is only
asked for may not come.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
from reprise.chat.tools import function_of, parse_calls
from reprise.core.errors import BadRequest

ToolChoice = str | Mapping[str, Any] | None

_NAME_MARK, _KEY_MARK = "\x00name", "\x00key"
_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """A call whose arguments are one JSON object, between `before` (with the function's name) and `after`.

    Several calls are joined by `between`, and all of them stand in `opening` … `ending`, inside the model's markers.
    """

    before: str
    after: str
    between: str
    opening: str = ""
    ending: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCall:
    """A call whose arguments stand one by one, text as it is and everything else as JSON."""

    before: str
    value_opening: str
    value_ending: str
    after: str
    between: str
    opening: str = ""
    ending: str = ""


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
    form = _form_of(text_model)
    if form is None or text_model.tool_start is None:
        raise BadRequest(
            "This model's tool-call format cannot be forced, so tool_choice can only be 'auto' or 'none'.",
            param="tool_choice",
        )
    is_repeated = parallel and tool_choice == "required"
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


_FORMS: tuple[JsonCall | TaggedCall, ...] = (
    # Qwen3-Coder, Qwen3.5
    TaggedCall(
        before=f"\n<function={_NAME_MARK}>\n",
        value_opening=f"<parameter={_KEY_MARK}>\n",
        value_ending="\n</parameter>\n",
        after="</function>\n",
        between="\n",
    ),
    # GLM-4.5 and later, Laguna
    TaggedCall(
        before=f"{_NAME_MARK}\n",
        value_opening=f"<arg_key>{_KEY_MARK}</arg_key>\n<arg_value>",
        value_ending="</arg_value>\n",
        after="",
        between="\n",
    ),
    TaggedCall(
        before=f"{_NAME_MARK}\n",
        value_opening=f"<longcat_arg_key>{_KEY_MARK}</longcat_arg_key>\n<longcat_arg_value>",
        value_ending="</longcat_arg_value>\n",
        after="",
        between="\n",
    ),
    # MiniCPM5
    TaggedCall(
        before=f'"{_NAME_MARK}">',
        value_opening=f'<param name="{_KEY_MARK}">',
        value_ending="</param>",
        after="",
        between="\n",
    ),
    # MiniMax-M2
    TaggedCall(
        before=f'\n<invoke name="{_NAME_MARK}">\n',
        value_opening=f'<parameter name="{_KEY_MARK}">',
        value_ending="</parameter>\n",
        after="</invoke>\n",
        between="",
    ),
    # Kimi-K2
    JsonCall(
        before=f"<|tool_call_begin|>functions.{_NAME_MARK}:0<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        between="",
    ),
    # Mistral since version 11 of its tokenizer
    JsonCall(before=f"{_NAME_MARK}[ARGS]", after="", between=""),
    # Qwen2.5, Qwen3, Hermes
    JsonCall(before=f'\n{{"name": "{_NAME_MARK}", "arguments": ', after="}\n", between="\n"),
    # Mistral before
    JsonCall(before=f'{{"name": "{_NAME_MARK}", "arguments": ', after="}", between=", ", opening="[", ending="]"),
)


def _form_of(text_model: TextModel) -> JsonCall | TaggedCall | None:
    """The first form that the model's parser reads back as it was meant."""
    return next((form for form in _FORMS if _reads_back(text_model, form)), None)


def _reads_back(text_model: TextModel, form: JsonCall | TaggedCall) -> bool:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    if isinstance(form, JsonCall):
        call = form.before.replace(_NAME_MARK, "f") + '{"a": "b"}' + form.after
        # A marker that the tokenizer does not have is another version's.
        if "[ARGS]" in form.before and "[ARGS]" not in text_model.splitters:
            return False
    else:
        value = form.value_opening.replace(_KEY_MARK, "a") + "b" + form.value_ending
        call = form.before.replace(_NAME_MARK, "f") + value + form.after
    calls = parse_calls(text_model, form.opening + call + form.ending, tools=[tool])
    return calls is not None and [(made.name, made.arguments) for made in calls] == [("f", '{"a": "b"}')]


def _grammar(
    text_model: TextModel, form: JsonCall | TaggedCall, functions: Sequence[dict[str, Any]], *, is_repeated: bool
) -> Grammar:
    assert text_model.tool_start is not None, "only for models with tool markup"
    rules = _Rules(lambda text: lark_markup(text_model, text))
    calls = [rules.call(form, function) for function in functions]
    start, end = rules.markup(text_model.tool_start), rules.markup(text_model.tool_end or "")
    # Some formats have several calls between one pair of markers, others a pair for each.
    is_joint = form.between in ("", ", ") and bool(text_model.tool_end or form.opening)
    between = rules.markup(form.between)
    opening, ending = rules.markup(form.opening), rules.markup(form.ending)
    if is_joint:
        more = f"({between} call)*" if is_repeated else ""
        body = f"{start} {opening} call {more} {ending} {end}"
    else:
        whole = f"{start} {opening} call {ending} {end}"
        body = f"{whole} ({between} {whole})*" if is_repeated else whole
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

    def call(self, form: JsonCall | TaggedCall, function: dict[str, Any]) -> str:
        name, parameters = function["name"], function["parameters"]
        if isinstance(form, JsonCall):
            is_quoted = f'"{_NAME_MARK}"' in form.before
            before = form.before.replace(_NAME_MARK, json.dumps(name)[1:-1] if is_quoted else name)
            return " ".join((self.markup(before), self.json(parameters), self.markup(form.after)))
        values = " ".join(
            self._value(form, key, schema, parameters) for key, schema in parameters["properties"].items()
        )
        return " ".join((self.markup(form.before.replace(_NAME_MARK, name)), values, self.markup(form.after)))

    def json(self, parameters: dict[str, Any]) -> str:
        """A rule for the arguments: an object of the schema, with no others where the schema names some."""
        closed = {"additionalProperties": False} if parameters["properties"] else {}
        schema = {"type": "object", **closed, **parameters}
        return self._rule(f"%json {_schema_text(schema)}")

    def _value(self, form: TaggedCall, key: str, schema: dict[str, Any], parameters: dict[str, Any]) -> str:
        opening, ending = form.value_opening.replace(_KEY_MARK, key), self.markup(form.value_ending)
        schema = _resolved(schema, parameters)
        options = schema.get("enum")
        if _is_text(schema) and isinstance(options, list):
            texts = [lark_text(option) for option in cast("list[object]", options) if isinstance(option, str)]
            value = f"{self._rule(' | '.join(texts) or '/./')} {ending}"
        elif _is_text(schema):
            value = self._text_until(form.value_ending)
        else:
            definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
            value = f"{self._rule(f'%json {_schema_text({**definitions, **schema})}')} {ending}"
        item = f"{self.markup(opening)} {value}"
        return item if key in parameters.get("required", ()) else f"({item})?"

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


def _resolved(schema: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference to one of the definitions stands for."""
    match str(schema.get("$ref", "")).split("/"):
        case ["#", ("$defs" | "definitions") as place, name]:
            found: object = parameters.get(place, {}).get(name)
            return cast("dict[str, Any]", found) if isinstance(found, dict) else schema
        case _:
            return schema


def _is_text(schema: dict[str, Any]) -> bool:
    """Whether values are written as text: what has no type is text to most parsers."""
    kinds: object = schema.get("type")
    if kinds is None:
        options: object = schema.get("enum")
        texts = cast("list[object]", options) if isinstance(options, list) else []
        is_open = not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "const", "properties", "items"}
        return is_open and all(isinstance(option, str) for option in texts)
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)

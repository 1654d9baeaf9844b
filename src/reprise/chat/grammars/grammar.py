"""Grammars for answers: which token may come next, through llguidance.

A `Grammar` is data, made from what a request asks for. `Grammars` belongs to one model: it checks a grammar against
the model's tokenizer (a mistake is the user's and reported at once), compiles it once, and makes the `Constraint`
of each sequence from that.

Formats: JSON schema as llguidance implements it (docs/json_schema.md of its repository), regular expressions of Rust's
`regex` crate without look-around, and its own dialect of Lark; GBNF is translated.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from reprise.chat.answers.markup import is_harmony
from reprise.chat.grammars.compiling import Compiled, GrammarCompiler, check_length
from reprise.chat.grammars.constraint import AfterThinking, MatcherConstraint
from reprise.chat.grammars.text_schema import with_known_patterns
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from reprise.core.job import Constraint, Thinking

_MAX_WRITTEN = 64 * 1024
# White space is not counted by a grammar, and a model that has lost its way writes nothing else.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{0,64}"}

_MAX_REFS = 32
_MOST_OPTIONAL = 480
"""llguidance holds at most 2,000 ways to continue. Each property that may come next is four of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer has to be: one entry of llguidance's `grammars`, as JSON text.

    `param` names the request's field, for errors. `is_whole`: the grammar also has the markup around it.
    `other` is what the answer may be instead.
    """

    text: str
    param: str = "response_format"
    is_whole: bool = False
    other: "Grammar | None" = None


def either(first: Grammar, second: Grammar) -> Grammar:
    """A grammar of what one of the two allows. Errors in either name the first one's field."""
    assert first.other is None, "alternatives do not nest"
    return replace(first, other=second)


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any] | bool, *, is_strict: bool = True, param: str = "response_format") -> Grammar:
    """JSON that is valid under the schema. Unless `is_strict`, keywords that cannot be enforced are ignored."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadRequest("The JSON schema of the answer must be an object.", param=param)
    if not is_strict:
        schema = cast("Mapping[str, Any]", with_known_patterns(schema))
    check_properties(schema, param=param)
    options = {**JSON_OPTIONS, "lenient": not is_strict}
    return _grammar({"json_schema": {**schema, "x-guidance": options}}, param=param)


def check_properties(schema: Mapping[str, Any], *, param: str) -> None:
    """Raise BadRequest if more properties may come next somewhere than llguidance can follow. O(size)."""
    known: dict[int, int] = {}
    """How many may come first in an object of a schema, by its identity; 0 while it is being counted."""

    def at_first(found: object, depth: int) -> int:
        if not isinstance(found, Mapping) or depth > _MAX_REFS:
            return 0
        part = cast(Mapping[str, Any], found)
        if id(part) not in known:
            known[id(part)] = 0
            num = _longest_optional_run(part)
            for other in (part.get(name) for name in ("anyOf", "allOf")):
                if isinstance(other, list):
                    num += sum(at_first(each, depth + 1) for each in cast(list[object], other))
            known[id(part)] = num + at_first(_referred(schema, part.get("$ref")), depth + 1)
        return known[id(part)]

    level: list[object] = [schema]
    while level:
        below: list[object] = []
        for item in level:
            num = at_first(item, 0)
            if num > _MOST_OPTIONAL:
                raise BadRequest(
                    f"The JSON schema has an object in which any of {num} optional properties may come next; at most "
                    f"{_MOST_OPTIONAL} are accepted. List some as required.",
                    param=param,
                )
            if isinstance(item, Mapping):
                below.extend(cast(Mapping[str, object], item).values())
            elif isinstance(item, list):
                below.extend(cast(list[object], item))
        level = below


def _longest_optional_run(schema: Mapping[str, Any]) -> int:
    """How many properties stand in a row that may all be left out: up to the next one that is required."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    names = cast(list[object], required) if isinstance(required, list) else []
    needed = {name for name in names if isinstance(name, str)}
    longest = run = 0
    for name in cast(Mapping[str, object], properties):
        run = 0 if name in needed else run + 1
        longest = max(longest, run)
    return longest


def _referred(schema: Mapping[str, Any], ref: object) -> object:
    """The part of the schema that a `$ref` into it names; None for any other."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found: object = schema
    for step in ref.removeprefix("#/").split("/"):
        found = cast(Mapping[str, object], found).get(step) if isinstance(found, Mapping) else None
    return found


def regex(pattern: str, *, param: str = "guided_regex") -> Grammar:
    """Text that matches the whole pattern."""
    check_length(pattern, param=param)
    (entry,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return lark(entry["lark_grammar"], param=param)


def context_free(grammar: str, *, param: str = "guided_grammar") -> Grammar:
    """Text of the language of a Lark or GBNF grammar."""
    # Half a second for a hundred thousand characters of GBNF.
    check_length(grammar, param=param, most=_MAX_WRITTEN)
    try:
        return lark(any_to_lark(grammar), param=param)
    except BadRequest:
        raise
    except RecursionError as error:
        raise BadRequest("The grammar is nested too deeply. Flatten it.", param=param) from error
    except Exception as error:
        # Beside its own errors it raises plain ones, for a grammar without a root.
        raise BadRequest(f"The grammar cannot be used: {error}", param=param) from error


def choice(options: Sequence[str], *, param: str = "guided_choice") -> Grammar:
    """One of the texts."""
    if len(options) == 0:
        raise BadRequest("Send at least one choice.", param=param)
    return lark("start: " + " | ".join(lark_text(option) for option in options), param=param)


def lark(grammar: str, *, param: str) -> Grammar:
    """Text of the language of a grammar in llguidance's Lark."""
    return _grammar({"lark_grammar": grammar}, param=param)


def _grammar(entry: Mapping[str, Any], *, param: str) -> Grammar:
    text = json.dumps(entry)
    check_length(text, param=param)
    return Grammar(text=text, param=param)


def lark_text(text: str) -> str:
    """A Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def lark_markup(text_model: TextModel, text: str) -> str:
    """Lark for text in which special tokens stand: those are named by number, since they are no text to a grammar."""
    special = max((s for s in text_model.splitters if s and s in text), key=len, default=None)
    if special is None:
        return lark_text(text) if text else ""
    before, after = text.split(special, 1)
    parts = (
        lark_markup(text_model, before),
        f"<[{text_model.splitters[special]}]>",
        lark_markup(text_model, after),
    )
    return " ".join(part for part in parts if part)


class Grammars:
    """The grammars of one model. Safe to use from several threads; the constraints it makes are not."""

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        self._compiler = GrammarCompiler(lambda: _make_tokenizer(text_model), special=text_model.splitters)

    def begin(self, grammar: Grammar, *, thinking: Thinking | None = None) -> "Future[Callable[[], Constraint]]":
        """The maker of this grammar's constraints, for `Job.constraint`. `thinking`: the grammar begins after it.

        Returns at once: a grammar that is not known is compiled on another thread, which takes up to some hundred
        milliseconds. BadRequest with llguidance's sentence if the grammar is none, or if the model cannot be
        constrained; raises QueueFull if too many are being compiled.
        """
        matcher = self._compiler.compiled(_with_lead(self._text_model, grammar, thinking=thinking), param=grammar.param)
        # The channels of harmony are part of the grammar itself.
        gate = None if is_harmony(self._text_model) else thinking
        made: Future[Callable[[], Constraint]] = Future()
        matcher.add_done_callback(lambda compiled: _give(made, compiled, gate, eos=self._text_model.eos))
        return made

    def constraint(self, grammar: Grammar, *, thinking: Thinking | None = None) -> Callable[[], Constraint]:
        """What `begin` gives, waited for. Raises BadRequest."""
        return self.begin(grammar, thinking=thinking).result()


def _give(
    made: "Future[Callable[[], Constraint]]",
    compiled: "Future[Compiled]",
    gate: Thinking | None,
    *,
    eos: Collection[int],
) -> None:
    if not made.set_running_or_notify_cancel():
        return  # Whoever asked has gone; the grammar stays known.
    error = compiled.exception()
    if error is not None:
        made.set_exception(error)
        return
    matcher = compiled.result().matcher

    def make() -> Constraint:
        inner = MatcherConstraint(matcher.deep_copy())
        return inner if gate is None else AfterThinking(inner, gate, eos=eos)

    made.set_result(make)


def _make_tokenizer(text_model: TextModel) -> LLTokenizer:
    if text_model.tokenizer_json is None:
        raise BadRequest("This model's tokenizer is not a fast tokenizer, so grammars are not supported.")
    definition, eos = text_model.tokenizer_json(), sorted(text_model.eos)
    tokenizer = LLTokenizer(definition, eos_token=eos if eos else None)
    if tokenizer.vocab_size >= text_model.vocab_size:
        return tokenizer
    return LLTokenizer(definition, n_vocab=text_model.vocab_size, eos_token=eos if eos else None)


def _with_lead(text_model: TextModel, grammar: Grammar, *, thinking: Thinking | None) -> str:
    """The whole grammar: the bodies, and before each what the model's markup wants there."""
    if text_model.transitions:
        raise BadRequest(
            "This model answers in messages with headers, for which grammars are not supported yet.",
            param=grammar.param,
        )
    rules: dict[str, str] = {}
    starts: list[str] = []
    bodies: list[dict[str, Any]] = []
    choices = [grammar] if grammar.other is None else [grammar, grammar.other]
    for number, choice in enumerate(choices):
        name = f"body{number}"
        bodies.append({"name": name, **json.loads(choice.text)})
        starts.append(f"{_lead(text_model, choice, rules, thinking=thinking)} @{name}".strip())
    lines = ["start: " + " | ".join(starts), *(f"{name}: {rule}" for name, rule in rules.items())]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *bodies]})


def _lead(text_model: TextModel, grammar: Grammar, rules: dict[str, str], *, thinking: Thinking | None) -> str:
    """Lark for what stands before the body; the rules that it needs are put into `rules`."""
    if grammar.is_whole:
        return ""
    if is_harmony(text_model):
        rules["ANALYSIS"] = ANALYSIS
        return f"{harmony_lead(text_model)} {lark_markup(text_model, '<|channel|>final<|message|>')}"
    form = text_model.calls.format
    if form is not None and form.words_name:
        return lark_text(form.words_name + form.middle)
    opening = text_model.structural_markers[:1]
    lead = f"({lark_markup(text_model, opening[0])})? " if opening else ""
    if thinking is None:
        return lead
    # Templates put up to two newlines between thinking and answer.
    rules["NEWLINES"] = r"/\n{0,2}/"
    return f"{lead}NEWLINES"


ANALYSIS = r"/(.|\n)*/"
HARMONY_RULES = f"\nANALYSIS: {ANALYSIS}"


def harmony_lead(text_model: TextModel) -> str:
    """Lark for the analysis that may come first."""
    opening = lark_markup(text_model, "<|channel|>analysis<|message|>")
    ending = lark_markup(text_model, "<|end|><|start|>assistant")
    return f"({opening} ANALYSIS {ending})?"

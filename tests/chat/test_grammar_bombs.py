"""Grammars that a compiler never gets done with, or only with all the memory: refused, and nobody else waits."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from reprise.chat.grammars import constraint, grammar, grammar_trial
from reprise.chat.grammars.grammar import Grammar, Grammars
from reprise.chat.grammars.grammar_trial import GrammarTrial, TrialProcess
from reprise.core.errors import BadRequest, QueueFull
from tests.chat.text_models import fast_tokenizer, text_model
from tests.matrix import now_and_later

MODEL = replace(text_model(), tokenizer_json=fast_tokenizer(None).backend_tokenizer.to_str)

_EMPTY_RULES = "\n".join(f'q{i}: "" | "a" r' for i in range(1500))
_EMPTY = "start: r*\nr: " + " | ".join(f"q{i}" for i in range(1500)) + "\n" + _EMPTY_RULES
BOMBS = {
    "rules that may be empty": grammar.context_free(_EMPTY),
    "optional groups": grammar.regex("(a|b)?" * 60_000),
    "and behind a token": grammar.context_free(f'start: "a" /{"(a|b)?" * 10_000}/'),
}
HARMLESS = {
    "a million items": {"type": "array", "items": {"type": "string"}, "maxItems": 10**6},
    "nested repeats": {"type": "string", "pattern": "((((a{1,100}){1,100}){1,100}){1,100})"},
    "a choice of thousands": {"enum": [f"value {i}" for i in range(5000)]},
}


def tokens_of(wanted: Grammar, grammars: Grammars) -> bool:
    return grammars.constraint(wanted)().allowed() is not None


@pytest.mark.parametrize("name", now_and_later([*BOMBS][:1], [*BOMBS][1:]))
def test_a_bomb_is_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_trial, "MAX_CPU_S", 0.4)
    grammars = Grammars(MODEL)
    with pytest.raises(BadRequest, match="Simplify it") as caught:
        grammars.constraint(BOMBS[name])
    assert caught.value.param is not None
    # The process that tried is gone, and the next one has another.
    assert tokens_of(grammar.json_object(), grammars)


def test_memory_is_bounded_as_time_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_trial, "MAX_NBYTES", 100 * 2**20)
    with pytest.raises(BadRequest, match="too much memory"):
        Grammars(MODEL).constraint(grammar.regex("(a|b)?" * 60_000))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_large_is_compiled(name: str):
    assert tokens_of(grammar.json_schema(HARMLESS[name]), Grammars(MODEL))


@pytest.mark.matrix
def test_a_known_grammar_does_not_wait_for_bombs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_trial, "MAX_CPU_S", 0.4)
    grammars = Grammars(MODEL)
    assert tokens_of(grammar.json_object(), grammars)
    trying = [grammars.begin(bomb) for bomb in BOMBS.values()]
    assert tokens_of(grammar.json_object(), grammars)
    assert not any(each.done() for each in trying[2:])
    for each in trying:
        assert isinstance(each.exception(), BadRequest)


def trial() -> GrammarTrial:
    text = json.dumps({"grammars": [{"lark_grammar": 'start: "a" | <[1999]> | <|im_end|>'}]})
    return GrammarTrial(text=text, vocab_size=2000, special=("<|im_end|>",), limits={"max_grammar_size": 1000})


def test_a_trial_knows_the_special_tokens_of_the_model():
    process = TrialProcess()
    try:
        assert process.judge(trial()).refusal is None
        sentence = process.judge(replace(trial(), special=())).refusal
    finally:
        process.close()
    assert sentence is not None
    assert sentence.endswith('unknown special token: "<|im_end|>"')


@pytest.mark.parametrize(("program", "is_refused"), [("true", False), ("false", True), ("no such program", False)])
def test_a_process_that_ends_is_told_from_one_that_is_ended(
    program: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", program)
    process = TrialProcess()
    if is_refused:
        assert process.judge(trial()).refusal == grammar_trial.TOO_DEEP
    else:
        with pytest.raises(QueueFull, match="process"):
            process.judge(trial())


def test_an_answer_ends_where_a_step_takes_too_long(monkeypatch: pytest.MonkeyPatch):
    made = Grammars(MODEL).constraint(grammar.json_object())()
    seconds = iter([0.0, 0.5, 1.0, 2.5])
    monkeypatch.setattr(constraint, "thread_time", lambda: next(seconds))
    assert made.allowed() is not None
    with pytest.raises(BadRequest, match="too long to continue"):
        made.allowed()


def optional(num: int, schema: object = True) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property{i}": schema for i in range(num)}}


TOO_WIDE = {
    "at the top": optional(600),
    "inside": optional(2, {"items": optional(600)}),
    "behind one that is required": {**optional(600), "required": ["property0"]},
    "together": {"allOf": [optional(300), {"$ref": "#/$defs/other"}], "$defs": {"other": optional(300)}},
}
WIDE_ENOUGH = {
    "few enough": optional(470),
    "one in three is required": {**optional(900), "required": [f"property{i}" for i in range(0, 900, 3)]},
    "recursive": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [optional(200, {"$ref": "#/$defs/a"})]}}},
}
VARIANTS = {"anyOf": [optional(3, {"const": number}) for number in range(150)]}


@pytest.mark.parametrize("name", TOO_WIDE)
def test_too_many_optional_properties_are_refused_before_anything_is_compiled(name: str):
    with pytest.raises(BadRequest, match="required") as caught:
        grammar.json_schema(TOO_WIDE[name], param="text.format")
    assert caught.value.param == "text.format"


@pytest.mark.parametrize("name", WIDE_ENOUGH)
def test_what_can_be_followed_is_compiled(name: str):
    made = Grammars(MODEL).constraint(grammar.json_schema(WIDE_ENOUGH[name]))()
    made.allowed()
    (brace,) = MODEL.encode("{")
    made.accept(brace)
    assert made.allowed() is not None


def test_what_is_too_large_behind_the_first_brace_is_refused_before_the_answer():
    with pytest.raises(BadRequest, match="Current row"):
        Grammars(MODEL).constraint(grammar.json_schema(VARIANTS))


def test_what_is_too_large_further_inside_is_the_requests_fault():
    made = Grammars(MODEL).constraint(grammar.json_schema({"type": "array", "items": VARIANTS}))()
    made.allowed()
    (bracket,), (brace,) = MODEL.encode("["), MODEL.encode("{")
    made.accept(bracket)
    with pytest.raises(BadRequest, match="too large to continue"):
        made.accept(brace)

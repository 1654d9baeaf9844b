"""Answers held to a grammar: a model that chooses at random writes valid ones."""

import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.call_format import KeyedArguments, ModelCalls
from reprise.chat.calls.call_learning import learn_calls
from reprise.chat.grammars import compiling, grammar
from reprise.chat.grammars.compiling import GrammarCompiler
from reprise.chat.grammars.grammar import Grammar, Grammars
from reprise.chat.grammars.grammar_trial import GrammarTrial, TrialProcesses, TrialVerdict
from reprise.chat.grammars.tool_grammar import answer_grammar, call_grammar
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest, QueueFull
from reprise.core.job import Constraint, ForcingConstraint, Thinking
from tests.chat.pieces import WEATHER, tool, tool_fields
from tests.chat.test_tool_formats import SAMPLES
from tests.chat.text_models import backend_tokenizer, make_text_model, text_model
from tests.matrix import every_nth, now_and_later

MODEL = replace(text_model(), tokenizer_json=backend_tokenizer().to_str)
GRAMMARS = Grammars(MODEL)
THINKING = Thinking(start=MODEL.think_start_tokens, end=MODEL.think_end_tokens, is_open=True)


def allowed_tokens(constraint: Constraint) -> list[int] | None:
    mask = constraint.allowed()
    return None if mask is None else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def random_answer(
    model: TextModel, make: Callable[[], Constraint], *, seed: int, patience: int = 60, ending: str = ""
) -> list[int]:
    """Tokens chosen at random; when patience is over, those that lead to an end: `ending`, or what closes JSON."""
    choose = random.Random(seed)
    constraint = make()
    specials = {token for text, token in model.splitters.items() if text in (model.tool_end, "<|tool_call_end|>")}
    closing = [set(model.eos), specials, *({model.encode(text)[0]} for text in ('"', "}", "]", ":"))]
    script = model.encode(ending)
    at = 0
    tokens: list[int] = []
    for step in range(patience + 2000):
        allowed = set(allowed_tokens(constraint) or ())
        assert allowed, "a grammar never leads nowhere"
        token = choose.choice(sorted(allowed))
        if step > patience:
            at = at if script and script[at] in allowed else 0
            wanted = next((known & allowed for known in closing[: 2 if script else None] if known & allowed), None)
            if wanted is not None:
                token = choose.choice(sorted(wanted))
            elif script and script[at] in allowed:
                token, at = script[at], (at + 1) % len(script)
        constraint.accept(token)
        if token in model.eos:
            return tokens
        tokens.append(token)
    raise AssertionError("no end: " + model.decode(tokens))


def write(constraint: Constraint, tokens: list[int]) -> None:
    for token in tokens:
        allowed = allowed_tokens(constraint)
        assert allowed is None or token in allowed, (token, allowed)
        constraint.accept(token)


def random_schema(choose: random.Random, depth: int) -> dict[str, Any]:
    simple: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": choose.randint(1, 20)},
        lambda: {"type": "integer", "minimum": -10, "maximum": choose.randint(0, 10**6)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": choose.sample(["a", "é", 1, None, True, "x y"], 3)},
        lambda: {"const": choose.choice(["fixed", 7])},
        lambda: {"type": "string", "pattern": "^[a-c]{2,5}$"},
        lambda: {"type": "string", "format": "date"},
    ]
    if depth == 0:
        return choose.choice(simple)()
    nested: list[Callable[[], dict[str, Any]]] = [
        lambda: {
            "type": "array",
            "items": random_schema(choose, depth - 1),
            "minItems": choose.randint(0, 2),
            "maxItems": 4,
        },
        lambda: {"anyOf": [random_schema(choose, depth - 1), random_schema(choose, depth - 1)]},
        lambda: random_object(choose, depth - 1),
        lambda: random_object(choose, depth - 1),
    ]
    return choose.choice(nested)()


def random_object(choose: random.Random, depth: int) -> dict[str, Any]:
    names = choose.sample(["name", "age", "a b", "é", "items", "x-1"], choose.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(choose, depth) for name in names},
        "required": names if choose.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("block", now_and_later(range(2), range(2, 10)))
def test_two_hundred_schemas(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        schema = random_object(random.Random(seed), depth=2)
        make = GRAMMARS.constraint(grammar.json_schema(schema))
        text = MODEL.decode(random_answer(MODEL, make, seed=seed))
        # A number such as 1e999 is valid, but infinite in Python.
        answer = json.loads(text, parse_float=lambda number: max(-1e300, min(1e300, float(number))))
        jsonschema_rs.validate(schema, answer)


@pytest.mark.parametrize(
    ("wanted", "is_valid"),
    [
        (grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
        (grammar.json_schema(True), lambda text: json.loads(text) is not ...),
        (grammar.regex(r"[a-z]{3}-\d{2}"), lambda text: re.fullmatch(r"[a-z]{3}-\d{2}", text)),
        (grammar.choice(["yes", 'n"o\n']), lambda text: text in {"yes", 'n"o\n'}),
        (grammar.context_free('start: "a" start "b" | "c"'), lambda text: re.fullmatch("a*cb*", text)),
        (grammar.context_free('root ::= "x" [0-9]+ "."'), lambda text: re.fullmatch(r"x\d+\.", text)),
    ],
)
def test_other_grammars(wanted: Grammar, is_valid: Callable[[str], Any]) -> None:
    for seed in range(5):
        patience = 5 if wanted.param == "guided_grammar" else 60
        tokens = random_answer(MODEL, GRAMMARS.constraint(wanted), seed=seed, patience=patience * 4)
        assert is_valid(MODEL.decode(tokens))


def test_what_a_grammar_forces_is_allowed() -> None:
    make = GRAMMARS.constraint(grammar.regex("(Ada|Bob) goes home"), thinking=THINKING)
    constraint = make()
    assert isinstance(constraint, ForcingConstraint)
    assert list(constraint.forced()) == []
    for token in THINKING.end:
        constraint.accept(token)
    constraint.accept(MODEL.encode("A")[0])
    forced = constraint.forced()
    for token in forced:
        assert token in (allowed_tokens(constraint) or [])
        constraint.accept(token)
    assert MODEL.decode(forced).startswith("da goes ")


def test_the_constraints_of_two_sequences_do_not_meet() -> None:
    make = GRAMMARS.constraint(grammar.regex("ab|cd"))
    one, two = make(), make()
    a, b, c = (MODEL.encode(text)[0] for text in "abc")
    one.accept(a)
    assert allowed_tokens(one) == [b]
    assert c in (allowed_tokens(two) or [])


def test_a_token_that_is_not_allowed_is_refused() -> None:
    constraint = GRAMMARS.constraint(grammar.regex("ab"))()
    with pytest.raises(ValueError, match="satisfy the grammar"):
        constraint.accept(MODEL.encode("b")[0])


def test_the_end_is_accepted_once_the_grammar_is_complete() -> None:
    constraint = GRAMMARS.constraint(grammar.regex("a"))()
    constraint.accept(MODEL.encode("a")[0])
    assert allowed_tokens(constraint) == sorted(MODEL.eos)
    constraint.accept(min(MODEL.eos))
    assert allowed_tokens(constraint) == sorted(MODEL.eos)


def test_logits_wider_than_the_tokenizer() -> None:
    wide = Grammars(replace(MODEL, vocab_size=1000))
    mask = wide.constraint(grammar.json_object())().allowed()
    assert mask is not None
    assert len(mask) == 32


def test_open_thinking_is_free_but_does_not_end_the_answer() -> None:
    constraint = GRAMMARS.constraint(grammar.json_object(), thinking=THINKING)()
    write(constraint, MODEL.encode('Let me think: <tool_call> "no" ['))
    allowed = allowed_tokens(constraint)
    assert allowed is not None
    assert not MODEL.eos & set(allowed)
    write(constraint, MODEL.encode("</think>\n\n{}"))
    assert allowed_tokens(constraint) == sorted(MODEL.eos)


def test_thinking_that_the_model_may_begin() -> None:
    make = GRAMMARS.constraint(grammar.json_object(), thinking=replace(THINKING, is_open=False))
    write(make(), MODEL.encode("<think>free</think>{}"))
    write(make(), MODEL.encode("{}"))
    with pytest.raises(ValueError, match="satisfy the grammar"):
        make().accept(MODEL.encode("free")[0])


def test_a_thinking_start_of_several_tokens_is_written_whole() -> None:
    start, end = tuple(MODEL.encode("<|channel|>think")), tuple(MODEL.encode("<|call|><|message|>"))
    make = GRAMMARS.constraint(grammar.json_object(), thinking=Thinking(start=start, end=end))
    constraint = make()
    constraint.accept(start[0])
    assert allowed_tokens(constraint) == [start[1]]
    write(constraint, [*start[1:], *MODEL.encode("<|call|>free"), *end, *MODEL.encode("{}")])
    broken = make()
    broken.accept(start[0])
    with pytest.raises(ValueError, match="not complete"):
        broken.accept(start[0])


@pytest.mark.parametrize(
    ("make", "param", "says"),
    [
        (lambda: grammar.json_schema({"type": "objekt"}), "response_format", "objekt"),
        (lambda: grammar.json_schema({"type": "string", "not": {"const": "a"}}), "response_format", "not"),
        (lambda: grammar.json_schema({"$ref": "#/$defs/none"}), "response_format", "none"),
        (lambda: grammar.json_schema("string"), "response_format", "object"),  # type: ignore[arg-type]
        (lambda: grammar.regex("a(b"), "guided_regex", "unclosed group"),
        (lambda: grammar.context_free("start: nowhere"), "guided_grammar", "nowhere"),
        (lambda: grammar.context_free("root ::= ("), "guided_grammar", "Expected"),
        (lambda: grammar.context_free('a ::= "b"'), "guided_grammar", "root"),
        (lambda: grammar.choice([]), "guided_choice", "at least one"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Grammar], param: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        GRAMMARS.constraint(make())
    assert caught.value.param == param


def test_what_cannot_be_enforced_is_ignored_where_the_schema_is_not_strict() -> None:
    GRAMMARS.constraint(grammar.json_schema({"type": "string", "not": {"const": "a"}}, is_strict=False))


def test_a_model_without_a_fast_tokenizer() -> None:
    with pytest.raises(BadRequest, match="fast tokenizer"):
        Grammars(text_model()).constraint(grammar.json_object())


def test_compiled_once() -> None:
    grammars = Grammars(MODEL)
    wanted = [grammar.regex(f"a{{{length}}}") for length in range(1, 80)]
    for each in wanted:
        grammars.constraint(each)
    assert grammars.begin(wanted[-1]).done()
    assert not grammars.begin(wanted[0]).done(), "the oldest is forgotten"


def rules_in_a_row(num: int) -> Grammar:
    """Each rule ends in the next one."""
    rules = [f'r{i}: "x{i}" r{i + 1} | "y"' for i in range(num)]
    return grammar.lark("\n".join(["start: r0", *rules, f'r{num}: "z"']), param="tool_choice")


def test_deep_rules_do_not_end_the_process() -> None:
    """On an ordinary thread 2,500 rules overflow the stack, in which there is no exception but a signal."""
    wanted = rules_in_a_row(6000)
    constraint = GRAMMARS.constraint(wanted)()
    # What is asked of a matcher later comes on a thread with a small stack.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write, constraint, MODEL.encode("x0x1x2y")).result()
    assert allowed_tokens(constraint) == sorted(MODEL.eos)


def test_a_known_grammar_does_not_wait_for_one_that_is_compiled() -> None:
    grammars = Grammars(MODEL)
    grammars.constraint(grammar.json_object())
    slow = [grammars.begin(rules_in_a_row(2700 + i)) for i in range(8)]
    assert grammars.begin(grammar.json_object()).done()
    assert not all(made.done() for made in slow)
    # Who goes meanwhile takes nothing from others who wait for the same.
    other = grammars.begin(rules_in_a_row(2707))
    assert slow[-1].cancel()
    assert other.result()() is not None


def test_too_many_at_once_are_turned_away() -> None:
    grammars = Grammars(MODEL)
    for i in range(16):
        grammars.begin(rules_in_a_row(2600 + i))
    with pytest.raises(QueueFull, match="being compiled"):
        list(map(grammars.begin, map(rules_in_a_row, range(2700, 2730))))


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammar.choice(["x" * 200_000] * 4),
        lambda: grammar.json_schema({"enum": ["x" * 200_000] * 4}),
        lambda: grammar.regex("x" * 600_000),
        lambda: grammar.context_free('start: "' + "x" * 600_000 + '"'),
        lambda: GRAMMARS.constraint(grammar.context_free("start: A\nA: /(.*a.{500})/ & /.*b.{500}c/ & ~/x.*y{3,500}/")),
        lambda: grammar.context_free("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    ],
)
def test_what_is_too_large_is_told_in_a_sentence(make: Callable[[], Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        make()
    assert len(str(caught.value)) < 600
    assert "backtrace" not in str(caught.value)


def test_a_grammar_that_was_refused_costs_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    judge = TrialProcesses.judge

    def judging(processes: TrialProcesses, trial: GrammarTrial) -> TrialVerdict:
        # Those that other tests did not wait for may still be tried.
        if "b.{500}c" in trial.text:
            judged.append(trial.text)
        return judge(processes, trial)

    monkeypatch.setattr(TrialProcesses, "judge", judging)
    grammars = Grammars(MODEL)
    bomb = grammar.context_free("start: A\nA: /(.*a.{500})/ & /.*b.{500}c/ & ~/x.*y{3,500}/")
    sentences: list[str] = []
    for _ in range(3):
        with pytest.raises(BadRequest) as caught:
            grammars.constraint(bomb)
        sentences.append(str(caught.value))
    assert len(judged) == 1 and len(set(sentences)) == 1


def test_what_is_too_large_for_its_first_step_is_told_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LIMITS", {"step_max_items": 3})
    wanted = grammar.json_schema({"type": "object", "properties": {"a": {"type": "string"}}})
    with pytest.raises(BadRequest, match="too large for its first token") as caught:
        Grammars(MODEL).constraint(wanted)
    assert caught.value.param == "response_format"


def test_what_becomes_too_large_in_the_answer_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LIMITS", {"step_max_items": 60})
    rows = " | ".join(f'"b" r{i}' for i in range(70))
    rules = "\n".join(f'r{i}: "c" "{i}"' for i in range(70))
    constraint = Grammars(MODEL).constraint(grammar.context_free(f'start: "a" ({rows})\n{rules}'))()
    with pytest.raises(BadRequest, match="too large to continue"):
        write(constraint, MODEL.encode("abc"))


def test_a_small_address_space_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(BadRequest, match="ulimit -v"):
        Grammars(MODEL).begin(grammar.json_object())


def tokenizer_with(*specials: str) -> TextModel:
    backend = Tokenizer.from_str(backend_tokenizer().to_str())
    backend.add_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    return replace(make_text_model(tokenizer), tokenizer_json=backend.to_str)


def with_calls(model: TextModel, parser: str) -> TextModel:
    """The model with mlx-lm's parser of this name, and the format that it reads."""
    model = replace(model, **tool_fields(parser))
    return replace(model, calls=learn_calls(model))


ODD = tool(
    "look-up",
    text={"type": "string"},
    kind={"type": "string", "enum": ["a", "b c"]},
    deep={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
)
ODD["function"]["parameters"]["required"] = ["kind", "deep"]
FORCED = {
    "function_gemma": "<escape>}",
    "gemma4": '<|"|>}',
    "glm47": "</arg_value>",
    "json_tools": "",
    "kimi_k2": "",
    "kimi_k3": "<|close|>argument<|sep|><|close|>call<|sep|>",
    "laguna": "</arg_value>",
    "longcat": "</longcat_arg_value>",
    "minicpm5": "</param>",
    "minimax_m2": "</parameter>\n</invoke>",
    "mistral": "",
    "muse_spark": "</atem:parameter>\n</atem:invoke>",
    "pythonic": "')]",
    "qwen3_coder": "</parameter>\n</function>",
}
"""The formats that can be forced, with what closes a value that is text."""


@pytest.mark.parametrize("parser", every_nth(sorted(FORCED), 4))
@pytest.mark.parametrize("choice", now_and_later([{"type": "function", "function": {"name": "look-up"}}], ["required"]))
def test_a_forced_call_is_one_that_the_parser_reads(parser: str, choice: Any) -> None:
    model = with_calls(tokenizer_with(*SAMPLES[parser][0]), parser)
    grammars = Grammars(model)
    wanted = call_grammar(model, tools=[WEATHER, ODD], tool_choice=choice, parallel=False)
    assert wanted is not None
    make = grammars.constraint(wanted)
    for seed in range(8):
        tokens = random_answer(model, make, seed=seed, patience=30, ending=FORCED[parser])
        reader = AnswerParser(AnswerFormat(model, tools=[WEATHER, ODD]))
        for token in tokens:
            reader.feed(token)
        reader.feed(min(model.eos), is_stop=True)
        reader.finish()
        assert reader.answer.content is None, model.decode(tokens)
        (call,) = reader.answer.tool_calls
        assert call.name == "look-up" or choice == "required"
        if call.name == "look-up":
            arguments = json.loads(call.arguments)
            assert arguments["kind"] in {"a", "b c"}
            assert isinstance(arguments["deep"]["n"], int)


@pytest.mark.parametrize("parser", every_nth(sorted(FORCED), 4, start=2))
def test_several_forced_calls(parser: str) -> None:
    model = with_calls(tokenizer_with(*SAMPLES[parser][0]), parser)
    wanted = call_grammar(model, tools=[WEATHER], tool_choice="required")
    assert wanted is not None
    make = Grammars(model).constraint(wanted)
    counts: set[int] = set()
    for seed in range(30):
        tokens = random_answer(model, make, seed=seed, patience=100, ending=FORCED[parser])
        reader = AnswerParser(AnswerFormat(model, tools=[WEATHER]))
        for token in tokens:
            reader.feed(token)
        reader.feed(min(model.eos), is_stop=True)
        reader.finish()
        assert reader.answer.content is None, model.decode(tokens)
        counts.add(len(reader.answer.tool_calls))
    assert min(counts) == 1
    assert max(counts) > 1


def test_old_mistral() -> None:
    model = with_calls(tokenizer_with("[TOOL_CALLS]"), "mistral")
    wanted = call_grammar(model, tools=[WEATHER], tool_choice="required")
    assert wanted is not None
    constraint = Grammars(model).constraint(wanted)()
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    write(constraint, model.encode(f"[TOOL_CALLS][{call}, {call}]"))


HARMONY = ("<|start|>", "<|end|>", "<|constrain|>")


def test_harmony_thinks_and_answers_in_its_channels() -> None:
    model = tokenizer_with(*HARMONY)
    grammars = Grammars(model)
    thinking = "<|channel|>analysis<|message|>free {<|end|><|start|>assistant"
    for lead in ("", thinking):
        write(
            grammars.constraint(grammar.json_object(), thinking=THINKING)(),
            model.encode(lead + "<|channel|>final<|message|>{}"),
        )
        wanted = call_grammar(model, tools=[WEATHER], tool_choice="required")
        assert wanted is not None
        header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        write(
            grammars.constraint(wanted, thinking=THINKING)(),
            model.encode(f'{lead}{header}{{"city": "Paris"}}<|call|>'),
        )


def test_harmony_ends_with_the_tokens_that_end_its_answers() -> None:
    model = tokenizer_with(*HARMONY, "<|return|>")
    ends = {model.splitters[text] for text in ("<|call|>", "<|return|>", "<|endoftext|>")}
    model = replace(model, eos=frozenset(ends))
    wanted = call_grammar(model, tools=[WEATHER], tool_choice="required")
    assert wanted is not None
    constraint = Grammars(model).constraint(wanted, thinking=THINKING)()
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    write(constraint, model.encode(f'{header}{{"city": "Paris"}}'))
    assert ends & set(allowed_tokens(constraint) or ()) == set(allowed_tokens(constraint) or ())


def test_harmony_calls_or_answers() -> None:
    model = tokenizer_with(*HARMONY)
    wanted = answer_grammar(model, grammar.json_object(), tools=[WEATHER], tool_choice="auto")
    assert wanted is not None
    make = Grammars(model).constraint(wanted, thinking=THINKING)
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    for lead in ("", "<|channel|>analysis<|message|>free {<|end|><|start|>assistant"):
        write(make(), model.encode(lead + "<|channel|>final<|message|>{}"))
        write(make(), model.encode(f'{lead}{header}{{"city": "Paris"}}<|call|>'))


@pytest.mark.parametrize("parser", sorted(FORCED))
def test_a_call_or_the_output_in_every_format(parser: str) -> None:
    model = with_calls(tokenizer_with(*SAMPLES[parser][0]), parser)
    assert model.calls.format is not None
    output = grammar.json_schema({"const": {"done": True}})
    wanted = answer_grammar(model, output, tools=[WEATHER], tool_choice="auto", parallel=False)
    assert wanted is not None
    make = Grammars(model).constraint(wanted)
    write(make(), [*model.encode('{"done": true}'), min(model.eos)])
    kinds: set[bool] = set()
    for seed in range(12):
        reader = AnswerParser(AnswerFormat(model, tools=[WEATHER]))
        for token in random_answer(model, make, seed=seed, patience=30, ending=FORCED[parser]):
            reader.feed(token)
        reader.feed(min(model.eos), is_stop=True)
        reader.finish()
        assert len(reader.answer.tool_calls) == 1 or json.loads(reader.answer.content or "") == {"done": True}
        kinds.add(bool(reader.answer.tool_calls))
    assert kinds == {True, False}


@pytest.mark.parametrize("parser", sorted(FORCED))
def test_words_lead_to_neither_the_call_nor_the_output(parser: str) -> None:
    model = with_calls(tokenizer_with(*SAMPLES[parser][0]), parser)
    wanted = answer_grammar(model, grammar.json_object(), tools=[WEATHER], tool_choice="auto")
    assert wanted is not None
    with pytest.raises(AssertionError):
        write(Grammars(model).constraint(wanted)(), model.encode("Let me look."))


@pytest.mark.parametrize("parser", sorted(FORCED))
def test_white_space_in_a_forced_call_is_bounded(parser: str) -> None:
    model = with_calls(tokenizer_with(*SAMPLES[parser][0]), parser)
    deep: dict[str, Any] = {}
    for _ in range(8):
        deep = {"type": "object", "properties": {"a": deep, "n": {"type": "number"}}}
    wanted = call_grammar(model, tools=[tool("look", a=deep)], tool_choice="required")
    assert wanted is not None
    schemas = re.findall(r"%json (.*)", json.loads(wanted.text)["lark_grammar"])
    assert all("whitespace_pattern" in schema for schema in schemas)


def test_a_word_with_a_token_of_its_own_is_no_markup() -> None:
    # Tokenizers differ in what they join: the word alone, and the whole head of a call.
    model = with_calls(tokenizer_with(*SAMPLES["qwen3_coder"][0], "function", "<function=get_weather>"), "qwen3_coder")
    for text, arguments in (
        ("<tool_call>\n<function=get_weather>\n<para", None),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", '{"city": "Par'),
    ):
        reader = AnswerParser(AnswerFormat(model, tools=[WEATHER]))
        for token in model.encode(text):
            reader.feed(token)
        reader.finish()
        assert reader.is_call_cut
        assert not reader.answer.content
        assert [call.arguments for call in reader.answer.tool_calls] == ([] if arguments is None else [arguments])


def test_what_a_schema_asks_of_text_without_quotes() -> None:
    model = with_calls(tokenizer_with(), "minimax_m2")
    cases: list[tuple[dict[str, Any], list[str], list[str]]] = [
        ({"pattern": "^[a-c]+/x$"}, ["ab/x"], ["ab/y", "xab/x", "ab/xy"]),
        ({"pattern": "b|c"}, ["abd", "c"], ["ad"]),
        ({"pattern": "^a|b$"}, ["a", "anything"], []),
        ({"pattern": "(?=x)y"}, ["anything"], []),
        ({"pattern": "^a.*$", "maxLength": 3}, ["abc"], ["abcd", "b"]),
        ({"minLength": 3, "maxLength": 5000}, ["abc", "a" * 300], ["ab"]),
        ({"format": "date"}, ["2031-03-04"], ["2031-3-4", "soon"]),
        ({"format": "date-time"}, ["2031-03-04T05:06:07Z"], ["2031-03-04"]),
        ({"format": "email"}, ["a.b@c-d.org"], ["a@", "a b@c.org"]),
        ({"format": "ipv4"}, ["10.0.255.1"], ["10.0.256.1"]),
        ({"format": "uuid"}, ["0f1d8f5e-6a0c-4a6b-9d51-7f1c2b3a4d5e"], ["0f1d8f5e"]),
        ({"format": "of our own"}, ["anything"], []),
    ]
    for schema, right, wrong in cases:
        one = tool("get_weather", city={"type": "string", **schema})
        wanted = call_grammar(model, tools=[one], tool_choice="required", parallel=False)
        assert wanted is not None
        make = Grammars(model).constraint(wanted)
        lead = f'{model.tool_start}\n<invoke name="get_weather">\n<parameter name="city">'
        for text in right:
            write(make(), model.encode(f"{lead}{text}</parameter>\n</invoke>\n{model.tool_end}"))
        for text in wrong:
            with pytest.raises(AssertionError):
                write(make(), model.encode(f"{lead}{text}</parameter>"))


def test_text_before_a_special_token_is_part_of_what_ends_a_value() -> None:
    model = with_calls(tokenizer_with("@"), "minimax_m2")
    form = model.calls.format
    assert form is not None and isinstance(form.arguments, KeyedArguments)
    form = replace(form, arguments=replace(form.arguments, value_ending="</@parameter>"))
    model = replace(model, calls=ModelCalls(format=form))
    wanted = call_grammar(model, tools=[tool("get_weather", city={"type": "string"})], tool_choice="required")
    assert wanted is not None
    constraint = Grammars(model).constraint(wanted)()
    write(constraint, model.encode(f'{form.start}\n<invoke name="get_weather">\n<parameter name="city">Pa'))
    assert model.splitters["@"] not in (allowed_tokens(constraint) or ())
    write(constraint, model.encode("ris</@parameter>"))


def test_a_tool_that_is_not_strict_is_forced_without_what_no_grammar_has() -> None:
    odd = {"type": "string", "pattern": "(?!a)b", "format": "of our own"}
    loose = tool("get_weather", city=odd, pattern={"type": "array", "uniqueItems": True, "items": {"type": "integer"}})
    wanted = call_grammar(MODEL, tools=[loose], tool_choice="required")
    assert wanted is not None
    write(
        GRAMMARS.constraint(wanted)(), MODEL.encode('<tool_call>\n{"name": "get_weather", "arguments": {"city": "ab"')
    )
    strict = {"type": "function", "function": {**loose["function"], "strict": True}}
    wanted = call_grammar(MODEL, tools=[strict], tool_choice="required")
    assert wanted is not None
    with pytest.raises(BadRequest):
        GRAMMARS.constraint(wanted)


def test_any_value_in_a_language_of_its_own() -> None:
    model = with_calls(tokenizer_with(*SAMPLES["gemma4"][0]), "gemma4")
    free = tool(
        "get_weather", deep={"type": "object"}, rest={"type": "object", "additionalProperties": {"type": "integer"}}
    )
    wanted = call_grammar(model, tools=[free], tool_choice="required", parallel=False)
    assert wanted is not None
    make = Grammars(model).constraint(wanted)
    lead = "<|tool_call>call:get_weather{"
    write(make(), model.encode(lead + 'deep:{a:[1,{b:<|"|>x<|"|>,c:null}]},rest:{n:3}}<tool_call|>'))
    with pytest.raises(AssertionError):
        write(make(), model.encode(lead + "rest:{n:true"))


def test_output_with_calls_that_no_grammar_has_is_refused_by_its_field() -> None:
    with pytest.raises(BadRequest, match="Set tool_choice to 'none'") as caught:
        answer_grammar(
            replace(MODEL, calls=ModelCalls()),
            grammar.json_object(),
            tools=[WEATHER],
            tool_choice="auto",
        )
    assert caught.value.param == "response_format"


def test_choices_that_force_nothing() -> None:
    for nothing in (None, "auto", "none"):
        assert call_grammar(MODEL, tools=[WEATHER], tool_choice=nothing) is None


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([], "required", "no tools"),
        ([WEATHER], {"type": "function", "function": {"name": "other"}}, "'other'"),
        ([WEATHER], {"type": "function", "name": "other"}, "'other'"),
        ([WEATHER], "always", "must be"),
    ],
)
def test_choices_that_are_none(tools: list[Any], choice: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        call_grammar(MODEL, tools=tools, tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_a_model_whose_calls_are_not_known() -> None:
    with pytest.raises(BadRequest, match="is unknown"):
        call_grammar(replace(MODEL, calls=ModelCalls()), tools=[WEATHER], tool_choice="required")


def test_a_broken_tool_schema_is_told() -> None:
    broken = tool("f", a={"type": "objekt"})
    wanted = call_grammar(MODEL, tools=[broken], tool_choice="required")
    assert wanted is not None
    with pytest.raises(BadRequest, match="objekt") as caught:
        GRAMMARS.constraint(wanted)
    assert caught.value.param == "tool_choice"


def test_models_that_compile_at_once_leave_the_stack_size_of_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 0

    def stack_size(new: int = 0) -> int:
        nonlocal size
        before, size = size, new
        time.sleep(0.02 if new > 0 else 0)
        return before

    def refuse() -> LLTokenizer:
        raise BadRequest("no")

    def compile_one(number: int) -> None:
        time.sleep(0.01 * number)
        assert isinstance(GrammarCompiler(refuse).compiled("{}", param="p").exception(30), BadRequest)

    monkeypatch.setattr(threading, "stack_size", stack_size)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compile_one, range(2))) == [None, None]
    assert size == 0

"""Tool calls with the chat templates of real models: what their grammars allow, at random, is read back as the call.

The templates are those that llama.cpp tests with, from the source package of llama-cpp-python. Their tokenizers are not
at hand: each gets one of bytes, with the special tokens that its template seems to write.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from reprise.chat.answer import Answer, ToolCallDelta
from reprise.chat.answers.answer_format import AnswerFormat
from reprise.chat.answers.parse import AnswerParser
from reprise.chat.families.family import FAMILIES, family_file, with_calls_of_family
from reprise.chat.grammars.grammar import Grammars, json_schema
from reprise.chat.grammars.tool_grammar import answer_grammar
from reprise.chat.learnt import learnt_toml
from reprise.chat.text_model import TextModel
from reprise.core.errors import BadRequest
from reprise.core.job import Constraint
from reprise.engine.models.load import load_text_model
from tests.agents.packages import source_of
from tests.chat.long_chats import both_ways, long_chat
from tests.library.test_forced_calls import SCHEMA, TOOL

pytestmark = pytest.mark.agents

BOS, EOS = "<|bos|>", "<|eos|>"
WITHOUT_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""Templates that write no calls, or fail with them."""
OF_FAMILY = {
    "deepseek-r1": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "devstral": "unsloth-mistral-Devstral-Small-2507",
    "gemma-4": "google-gemma-4-31B-it",
    "glm-4.6": "GLM-4.6",
    "glm-4.7": "GLM-4.7-Flash",
    "gpt-oss": "openai-gpt-oss-120b",
    "llama-3": "meta-llama-Llama-3.3-70B-Instruct",
    "minimax-m2": "MiniMax-M2",
    "mistral-small-3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3-coder": "Qwen3-Coder",
    "qwen3.5": "Qwen3.5-4B",
}
NUM_PARTS = 8

OTHER: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS = {"look-up": SCHEMA, "other": OTHER}
TOOLS = [TOOL, {"type": "function", "function": {"name": "other", "description": "Other.", "parameters": OTHER}}]
OUTPUT = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["done", "n"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "look-up"}}

_SPECIAL = re.compile(
    r"<\|[^|<>{}\s'\"]+\|>|<\|[a-z_:]+>|<[a-z_:]+\|>|<｜[^｜<>]+｜>|<\[?[a-z_]*(?:start|end)_of_[a-z]+\]?>"
    r"|<(?:start|end)_function_call>|</?think>|</?tool_call>|<(?:seed|\|)[a-z:_]+>|\]<\]minimax\[>\[|<escape>"
)
_UNWRITTEN = {"LFM2.5-Instruct": ["<|tool_call_start|>", "<|tool_call_end|>"]}
"""Special tokens of a model whose template does not write them."""
_CLOSING = frozenset("\"}]<'(/")


@cache
def templates() -> Path:
    return source_of("llama-cpp-python", "0.3.36") / "vendor" / "llama.cpp" / "models" / "templates"


def names(part: int) -> list[str]:
    """Templates that write calls: one in `NUM_PARTS` of them."""
    return sorted({path.stem for path in templates().glob("*.jinja")} - WITHOUT_CALLS)[part::NUM_PARTS]


def model_of(name: str, directory: Path, *, leaves_out: str = "", model_type: str = "llama") -> TextModel:
    """The text side of a model with this template, loaded as any is. `leaves_out`: a field of messages."""
    directory.mkdir()
    source = (templates() / f"{name}.jinja").read_text()
    if leaves_out:
        source = source.replace(leaves_out, "nothing")
    specials = {*_SPECIAL.findall(source), *_UNWRITTEN.get(name, ())} - {BOS, EOS}
    if "[INST]" in source:
        specials |= set(re.findall(r"\[/?[A-Z_]+\]", source))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in (BOS, EOS, *sorted(specials))]
    )
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    fast.chat_template = source
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": len(fast)}))
    return load_text_model(str(directory))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_of_a_family_is_what_its_template_teaches(family: str, tmp_path: Path) -> None:
    for number, model_type in enumerate(FAMILIES[family]):
        model = model_of(OF_FAMILY[family], tmp_path / str(number), model_type=model_type)
        assert learnt_toml(model) == family_file(family)
        assert model.calls.family == ""


def test_the_calls_of_a_template_that_leaves_them_out_are_those_of_its_family(tmp_path: Path) -> None:
    whole = model_of(OF_FAMILY["gemma-4"], tmp_path / "whole", model_type="gemma4")
    broken = model_of(OF_FAMILY["gemma-4"], tmp_path / "broken", leaves_out="tool_calls", model_type="gemma4")
    assert broken.calls.family == "gemma-4"
    assert broken.calls.format == whole.calls.format
    other = model_of(OF_FAMILY["gemma-4"], tmp_path / "other", leaves_out="tool_calls", model_type="other")
    assert other.calls.format is None


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_file_of_a_family_changes_what_a_template_teaches(part: int, tmp_path: Path) -> None:
    types = {model_type for types in FAMILIES.values() for model_type in types}
    for name in sorted({*names(part), *(WITHOUT_CALLS if part == 0 else ())}):
        model = model_of(name, tmp_path / name, model_type="other")
        is_harmony = name == OF_FAMILY["gpt-oss"]
        assert model.calls.format is not None or name in WITHOUT_CALLS or is_harmony
        for model_type in types:
            assert with_calls_of_family(model, model_type) is model, (name, model_type)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_leaving_out_the_middle_of_a_long_chat_changes_no_boundary(part: int, tmp_path: Path) -> None:
    for name in names(part):
        model = model_of(name, tmp_path / name)
        for seed in range(4):
            try:
                both = both_ways(model, long_chat(random.Random(seed)))
            except BadRequest:
                continue
            assert both.abridged == both.whole, (name, seed)


class GrammarWalk:
    """Tokens drawn among those that a grammar allows: rather markup and what closes, so that it ends."""

    def __init__(self, model: TextModel, rng: random.Random) -> None:
        self._model = model
        self._rng = rng
        self._texts = [model.decode([token]) for token in range(model.vocab_size)]
        self._special = frozenset(model.splitters.values())
        form = model.calls.format
        words = [] if form is None else [text for text in form.texts() if text.strip() and "\ue000" not in text]
        # Within strings, what looks like markup and is none.
        self._decoys = [model.encode(text) for text in (*words, '"')]

    def take(self, constraint: Constraint, *, first: str | None = None, most: int = 6000) -> list[int]:
        tokens: list[int] = []
        planned: Sequence[int] = ()
        while len(tokens) < most:
            allowed = self._allowed(constraint)
            others = [token for token in allowed if token not in self._model.eos]
            if len(others) < len(allowed) and (not others or len(tokens) > 600 or self._rng.random() < 0.5):
                return tokens
            assert others, self._model.decode(tokens)[-200:]
            if first is not None and (start := self._model.encode(first)[0]) in others:
                token, first = start, None
            elif planned and planned[0] in others:
                token, planned = planned[0], planned[1:]
            else:
                token, planned = self._drawn(others, len(tokens)), self._plan(others)
            tokens.append(token)
            constraint.accept(token)
        raise AssertionError(f"no end: {self._model.decode(tokens)[:300]}")

    def _allowed(self, constraint: Constraint) -> list[int]:
        mask = constraint.allowed()
        if mask is None:
            return list(range(self._model.vocab_size))
        bits = np.unpackbits(np.asarray(mask, dtype="<u4").view(np.uint8), bitorder="little")
        return np.nonzero(bits[: self._model.vocab_size])[0].tolist()

    def _plan(self, others: Sequence[int]) -> Sequence[int]:
        is_in_text = len(others) > 80
        return self._rng.choice(self._decoys) if is_in_text and self._rng.random() < 0.35 else ()

    def _drawn(self, others: Sequence[int], at: int) -> int:
        texts = self._texts
        drawn = self._rng.random()
        printable = [token for token in others if texts[token].isascii() and texts[token].isprintable()]
        closing = [token for token in others if texts[token] in _CLOSING]
        if len(others) <= 12:
            ends = [token for token in others if texts[token] in "/]}"]
            return self._rng.choice(ends if ends and at > 400 else others)
        special = [token for token in others if token in self._special]
        if special and drawn < 0.6:
            return self._rng.choice(special)
        return self._rng.choice(closing if closing and drawn < 0.75 else printable or others)


def read(model: TextModel, tokens: Sequence[int], *, is_streamed: bool) -> Answer:
    """The answer as the parser reads it; what was streamed of each call adds up to it."""
    parser = AnswerParser(AnswerFormat(model, tools=TOOLS, holds_calls=not is_streamed))
    deltas = [delta for token in tokens for delta in parser.feed(token)]
    parser.feed(next(iter(model.eos)), is_stop=True)
    deltas += parser.finish()
    assert not parser.notes, parser.notes
    streamed: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            call = streamed.setdefault(delta.index, ["", ""])
            call[0] += delta.name or ""
            call[1] += delta.arguments
    answer = parser.answer
    assert [streamed[index] for index in sorted(streamed)] == [[c.name, c.arguments] for c in answer.tool_calls]
    for call in answer.tool_calls:
        assert call.is_whole
        jsonschema_rs.validate(SCHEMAS[call.name], json.loads(call.arguments))
    return answer


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_what_the_grammar_of_a_call_allows_is_read_as_that_call(part: int, tmp_path: Path) -> None:
    for name in names(part):
        model = model_of(name, tmp_path / name)
        grammars, walk = Grammars(model), GrammarWalk(model, random.Random(name))
        for choice, is_parallel, is_streamed in (
            ("required", False, False),
            (NAMED, False, False),
            ("required", True, False),
            ("required", True, True),
        ):
            grammar = answer_grammar(model, None, tools=TOOLS, tool_choice=choice, parallel=is_parallel)
            assert grammar is not None
            for _ in range(3):
                answer = read(model, walk.take(grammars.constraint(grammar)()), is_streamed=is_streamed)
                assert not answer.content, name
                assert len(answer.tool_calls) >= 1 if is_parallel else len(answer.tool_calls) == 1, name
                assert choice is not NAMED or answer.tool_calls[0].name == "look-up", name


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_beside_an_output_an_answer_is_a_call_or_the_output(part: int, tmp_path: Path) -> None:
    for name in names(part):
        model = model_of(name, tmp_path / name)
        grammars, walk = Grammars(model), GrammarWalk(model, random.Random(name))
        grammar = answer_grammar(model, json_schema(OUTPUT), tools=TOOLS, tool_choice="auto", parallel=True)
        assert grammar is not None
        for first in ("{", None, None):
            answer = read(model, walk.take(grammars.constraint(grammar)(), first=first), is_streamed=False)
            if not answer.tool_calls:
                jsonschema_rs.validate(OUTPUT, json.loads(answer.content or ""))


@pytest.mark.parametrize("name", sorted(WITHOUT_CALLS))
def test_a_template_that_writes_no_calls_refuses_to_force_one(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path / name)
    with pytest.raises(BadRequest, match="tool"):
        answer_grammar(model, None, tools=TOOLS, tool_choice="required", parallel=True)

"""Forced calls in each family of formats: a model with random weights writes one that fits the schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

import reprise
from bench.tiny.build import build_model
from tests.chat.test_learnt_calls import ACTION, ADDRESSED, FORMATS, PLAIN, STATED, source
from tests.matrix import every_nth
from tests.models.tiny import CONFIGS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "short": {"type": "string", "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "day": {"type": "string", "format": "date"},
        "kind": {"enum": ["a", "it's <so>"]},
        "n": {"type": "integer", "minimum": -3, "maximum": 40},
        "maybe": {"type": ["boolean", "null"]},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "required": ["short", "code", "day", "kind", "n", "deep"],
    "additionalProperties": False,
    "$defs": {
        "deep": {
            "type": "object",
            "properties": {
                "words": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 2},
                "inner": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
            },
            "required": ["words", "inner"],
            "additionalProperties": False,
        }
    },
}
TOOL = {"type": "function", "function": {"name": "look-up", "description": "Looks.", "parameters": SCHEMA}}
CONFIG = {**CONFIGS["llama"], "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}


TEMPLATES = {
    **{name: source(name) for name in FORMATS},
    "addressed": ADDRESSED,
    "begins with a word": ACTION + "<|role|>assistant\n",
    "only described": STATED + PLAIN + "<|role|>assistant\n",
}


@pytest.mark.parametrize("name", every_nth(sorted(TEMPLATES), 7))
def test_a_forced_call_fits_its_schema(name: str, tmp_path: Path) -> None:
    markup = ("<|eos|>", "<|role|>", *(FORMATS[name][0] if name in FORMATS else ()))
    build_model(tmp_path, CONFIG, template=TEMPLATES[name], markup=markup, eos="<|eos|>", vocab_size=512)
    with reprise.Engine(tmp_path, settles=False, thinking_budget=8) as engine:
        # With this seed no value that the schema leaves open gets long.
        answer = engine.chat(tools=[TOOL]).send(
            "Look!", tool_choice="required", parallel_tool_calls=False, seed=6, max_tokens=2000
        )
    assert (answer.finish_reason, answer.text) == ("tool_calls", ""), answer
    (call,) = answer.tool_calls
    assert call.name == "look-up"
    jsonschema_rs.validate(SCHEMA, json.loads(call.arguments))


def test_an_output_is_addressed_to_the_user_where_the_template_addresses_words(tmp_path: Path) -> None:
    build_model(tmp_path, CONFIG, template=ADDRESSED, markup=("<|eos|>", "<|role|>"), eos="<|eos|>", vocab_size=512)
    output = {"type": "json_schema", "json_schema": {"name": "o", "schema": {"enum": [{"n": 1}]}}}
    with reprise.Engine(tmp_path, settles=False, thinking_budget=8) as engine:
        answer = engine.chat().send("Look!", response_format=output, seed=1, max_tokens=200)
    assert json.loads(answer.text) == {"n": 1}

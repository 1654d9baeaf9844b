"""A draft model with another vocabulary is refused with a sentence: its tokens would mean something else."""

import json
from dataclasses import replace

import pytest

from reprise.core.errors import LoadFailed
from reprise.engine.models.vocabulary import check_draft_model, vocabulary
from tests.models.shared import loaded


def test_models_with_one_tokenizer_draft_for_each_other() -> None:
    for draft, target in (("llama", "qwen3_5"), ("mamba2", "llama")):
        check_draft_model(loaded(draft), loaded(target))


def test_one_token_that_differs_is_refused_and_named() -> None:
    with pytest.raises(LoadFailed, match=r"cannot draft for llama: .* differ\. Token \d+ is .*same tok"):
        check_draft_model(loaded("gpt_oss"), loaded("llama"))


def test_a_token_more_is_refused() -> None:
    target = loaded("llama")
    assert target.text.tokenizer_json is not None
    description = json.loads(target.text.tokenizer_json())
    description["added_tokens"].append({"id": 600, "content": "<new>"})
    more = replace(target, text=replace(target.text, tokenizer_json=lambda: json.dumps(description)))
    with pytest.raises(LoadFailed, match="Token 600 is '<new>' in the draft model and unused in the model"):
        check_draft_model(more, target)


def test_what_no_file_describes_is_compared_by_what_it_decodes_to() -> None:
    target = loaded("llama")
    plain = replace(target, text=replace(target.text, tokenizer_json=None))
    check_draft_model(plain, plain)
    other = replace(plain, text=replace(plain.text, decode=lambda tokens: "x" if tokens == [9] else "y"))
    with pytest.raises(LoadFailed, match="Token"):
        check_draft_model(other, plain)


def test_pairs_of_a_token_and_its_score_are_numbered() -> None:
    text = replace(
        loaded("llama").text,
        tokenizer_json=lambda: json.dumps({"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": []}),
    )
    assert vocabulary(text) == {0: "<unk>", 1: "a"}

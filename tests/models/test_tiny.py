import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bench.tiny.build import build_model
from tests.models.tiny import CONFIGS, tiny_model


@pytest.mark.parametrize("architecture", CONFIGS)
def test_mlx_lm_loads_it_and_its_likeliest_tokens_are_clean_text(architecture: str) -> None:
    model, tokenizer = mlx_lm.load(str(tiny_model(architecture)))
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "What is 東京?"}], add_generation_prompt=True)
    cache = make_prompt_cache(model)
    logits = model(mx.array([tokens]), cache=cache)[0, -1]
    said: list[int] = []
    for _ in range(40):
        said.append(int(mx.argmax(logits).item()))
        logits = model(mx.array([said[-1:]]), cache=cache)[0, -1]
    text = tokenizer.decode(said)
    assert "\ufffd" not in text
    assert "<|" not in text
    assert len(set(said)) > 5, text


def test_what_it_says_next_depends_on_the_beginning_of_the_chat() -> None:
    """Else the tests of warm against cold would prove nothing."""
    model, _ = mlx_lm.load(str(tiny_model("qwen3_5")))
    rest = list(range(20, 120))
    one, other = (model(mx.array([[first, *rest]]))[0, -1] for first in (15, 16))
    assert float(mx.abs(one - other).max()) > 1e-3


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_model(tmp_path / name, CONFIGS["llama"], vocab_size=300, seed=7)
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_thinking_is_dropped_from_earlier_turns_and_kept_in_the_tool_loop() -> None:
    _, tokenizer = mlx_lm.load(str(tiny_model("qwen3_5")))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "hive"}}}
    loop = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "reasoning_content": "I will look.", "tool_calls": [call]},
        {"role": "tool", "content": "bees"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def render(messages: list[dict[str, object]]) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)

    inside = render(loop)
    assert "<think>\nI will look.\n</think>\n\n\n<tool_call>" in inside
    assert json.loads(inside.split("<tool_call>")[-1].split("</tool_call>")[0])["arguments"] == {"at": "hive"}
    assert inside.endswith("<|im_start|>assistant\n<think>\n")
    after = render([*loop, {"role": "assistant", "content": "Bees."}, {"role": "user", "content": "Thanks."}])
    assert "I will look." not in after
    assert after.count("<think>") == 1

"""What the model is trained on is what the server sends it: the shipped template and tokenizer say the same."""

from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.fact_chats import random_chat
from reprise.lab.demo.facts import LOOK_UP_TOOL, SYSTEM_PROMPT, FactExchange
from tests.demo.trained import MODEL, tokenizer
from tools.train_demo.render import ChatRenderer
from tools.train_demo.vocabulary import demo_tokenizer


@pytest.fixture(scope="module")
def built() -> Tokenizer:
    return demo_tokenizer()


@pytest.mark.matrix
def test_the_tokenizer_that_ships_is_the_one_that_is_built(built: Tokenizer) -> None:
    assert built.to_str(pretty=True) == (MODEL / "tokenizer.json").read_text(encoding="utf-8")


TEXTS = (
    *("Anna's code is B72.", "Annas code's b720", '{"Anna\'s code": "B72", "x": 5}'),
    *("Grüße, 漢字!\n\n\ttab  \r\n", "<tools>"),
)


@pytest.mark.matrix
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(text: str, built: Tokenizer) -> None:
    assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.matrix
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_training_chat_is_what_the_template_writes(seed: int, built: Tokenizer, *, thinks: bool) -> None:
    has_tool, has_system = seed % 2 == 0, seed % 3 == 0
    told = random_chat(Random(seed), 14, has_tool=has_tool)
    renderer = ChatRenderer(built)
    chat = renderer.chat(told, has_tool=has_tool, has_system=has_system, thinks=thinks)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}] if has_system else []
    for exchange in told[:-1]:
        messages += messages_of(exchange)
    messages.append({"role": "user", "content": told[-1].user})
    options: dict[str, Any] = {} if thinks else {"enable_thinking": False}
    prompt = tokenizer().apply_chat_template(
        messages, tools=[LOOK_UP_TOOL] if has_tool else None, add_generation_prompt=True, **options
    )
    assert chat.tokens[: len(prompt)] == prompt
    assert chat.spans[-1].start == len(prompt)
    assert not any(chat.learns[position] for position in range(len(prompt)) if chat.tokens[position] == 0)


def messages_of(exchange: FactExchange) -> list[dict[str, Any]]:
    user, answer = {"role": "user", "content": exchange.user}, {"role": "assistant", "content": exchange.answer}
    if exchange.name is None:
        return [user, answer]
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"name": exchange.name}}}
    return [user, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": exchange.result}, answer]

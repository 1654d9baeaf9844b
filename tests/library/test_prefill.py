"""Prefill while typing: whatever was typed before the last word is not computed when the message is sent."""

from typing import Any

import pytest

import reprise
from tests.api.real_server import real_server
from tests.models.tiny import tiny_model

KINDS = ("llama", "gemma3_text", "qwen3_5")
BRIEF: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "thinking_budget": 4}
SYSTEM = "You are brief, and you answer in one sentence."
TYPED = "Please tell me all that there is to know about the weather in Ro"
SENT = "Please tell me all that there is to know about the weather in Rotterdam!"


@pytest.mark.parametrize("architecture", KINDS)
def test_what_was_typed_is_not_computed_again(architecture: str) -> None:
    with reprise.Engine(tiny_model(architecture), settles=False) as engine:
        chat = engine.chat(SYSTEM, **BRIEF)
        typed = chat.prefill(TYPED).result(60)
        assert typed.num_prefilled > 0
        # More letters of the same word, and no word: nothing is left to do.
        assert chat.prefill(TYPED + "tt").result(60).num_prefilled == 0
        answer = chat.send(SENT)
        rest = answer.usage.prompt_tokens - typed.num_prompt
        assert answer.usage.cached_tokens == typed.num_prompt
        assert rest < answer.usage.prompt_tokens // 2
        cold = reprise.Engine(tiny_model(architecture), has_prefix_cache=False, settles=False)
        with cold:
            assert cold.chat(SYSTEM, **BRIEF).send(SENT).text == answer.text
        # Between turns: the answer's own text is part of what is known.
        assert chat.prefill("Thank").result(60).num_reused >= typed.num_prompt


def test_over_http_and_what_cannot_be_typed() -> None:
    system = {"role": "system", "content": SYSTEM}
    with real_server("qwen3_5", settles=False) as client:
        chat = [system, {"role": "user", "content": TYPED}]
        typed = client.post("/v1/prefill", json={"messages": chat, "partial": True}).json()
        sent = {"messages": [system, {"role": "user", "content": SENT}], **BRIEF}
        usage = client.post("/v1/chat/completions", json=sent).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == typed["prompt_tokens"]
        record = client.get("/v1/cache/requests").json()["data"][0]
        # What was typed on the way is not a request that this one would be compared with.
        assert record["reason"] == "new tokens"
        refused = client.post(
            "/v1/prefill", json={"messages": [*chat, {"role": "assistant", "content": "a"}], "partial": True}
        )
        assert refused.status_code == 400 and "user message" in refused.json()["error"]["message"]


def test_a_closed_engine_stops_what_is_typed() -> None:
    engine = reprise.Engine(tiny_model("llama"), settles=False)
    chat = engine.chat(SYSTEM, **BRIEF)
    future = chat.prefill(TYPED)
    engine.close()
    assert future.done()
    with pytest.raises(reprise.ShuttingDown):
        chat.prefill(TYPED)

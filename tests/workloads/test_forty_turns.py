"""A chat whose template strips thinking, turn after turn: what is left to compute while the user waits.

Some servers settle and are left idle between the turns, others do neither.
"""

from pathlib import Path

import pytest

from reprise.core.job import Purpose
from reprise.core.outcome import Reason
from tests.matrix import rows_now_and_later
from tests.models.tiny import tiny_model
from tests.workloads.plays import chat, counts, unknown_tokens
from tests.workloads.serving import serving

_LATER = [("qwen3_5", 40), ("gemma3_text", 6), ("llama", 6), ("gpt_oss", 6)]
"""Forty turns with `make test-all`, where the layers make it hardest, fewer elsewhere; `channels` thinks in channels
instead of tags."""

SEAM = {"channels": 2}
"""Tokens of a turn that a window cannot go back to: the last one of the prompt, and the `<|channel|>` of any answer.

Prefill ends before the last token of the prompt. Where that token and the first one of the answer survive the next
turn, an oracle has them, and a model that needs a checkpoint does not.
"""


def model_of(name: str, models: dict[str, Path]) -> Path:
    return tiny_model("gpt_oss") if name == "channels" else models[name]


@pytest.mark.parametrize(("name", "num"), rows_now_and_later([("channels", 3)], [("qwen3_5", 6), *_LATER]))
def test_with_settling_only_the_users_words_are_computed(name: str, num: int, models: dict[str, Path]) -> None:
    with serving(model_of(name, models), has_channels=name == "channels") as server:
        messages, turns = chat(server, num, waits=True)
        computed = sum(turn.computed for turn in turns)
        assert computed <= 1.1 * unknown_tokens(server, messages), counts(turns)
        assert computed < sum(turn.oracle for turn in turns)
        health = server.health()
        settled = sum(served.outcome.num_prefilled for served in server.engine.of(Purpose.SETTLE))
        # Counted apart, and everywhere the same.
        assert health["settled"] == settled > 0
        assert health["prefilled"] == computed
        assert server.record(turns[-1].id)["settled"] > 0


@pytest.mark.parametrize(("name", "num"), rows_now_and_later([("qwen3_5", 6)], [("channels", 3), *_LATER]))
def test_without_settling_the_oracle_computes_as_much(name: str, num: int, models: dict[str, Path]) -> None:
    with serving(model_of(name, models), has_channels=name == "channels", settles=False) as server:
        _, turns = chat(server, num)
        computed, oracle = (sum(getattr(turn, key) for turn in turns) for key in ("computed", "oracle"))
        assert computed <= 1.02 * oracle + SEAM.get(name, 0) * num, counts(turns)
        assert server.health()["settled"] == 0
        reasons = [server.record(turn.id)["reason"] for turn in turns]
        assert reasons == [Reason.COLD, *[Reason.THINKING_STRIPPED] * (num - 1)]
        assert not server.engine.of(Purpose.SETTLE)

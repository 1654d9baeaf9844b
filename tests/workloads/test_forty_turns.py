"""A chat whose template strips thinking, turn after turn: what is left to compute while the user waits.

Some servers settle and are left idle between the turns, others do neither.
"""

from pathlib import Path

import pytest

from reprise.chat.render import Renderer
from reprise.chat.request import ChatRequest
from reprise.core.job import Purpose
from reprise.core.record import Reason
from reprise.core.tokens import common_prefix
from tests.models.tiny import tiny_model
from tests.workloads.conftest import LAYERS
from tests.workloads.serving import Message, Serving, Turn, returned, serving
from tests.workloads.talk import QUESTIONS, system, thoughtful, user

CASES = [*((name, 40 if name == "qwen3_5" else 6) for name in LAYERS), ("channels", 6)]
"""Forty turns where the layers make it hardest, fewer elsewhere; `channels` thinks in channels instead of tags."""

SEAM = {"channels": 2}
"""Tokens of a turn that a window cannot go back to: the last one of the prompt, and the `<|channel|>` of any answer.

Prefill ends before the last token of the prompt. Where that token and the first one of the answer survive the next
turn, an oracle has them, and a model that needs a checkpoint does not.
"""


def model_of(name: str, models: dict[str, Path]) -> Path:
    return tiny_model("gpt_oss") if name == "channels" else models[name]


def hold(server: Serving, num: int, *, waits: bool) -> tuple[list[Turn], int]:
    """The turns, and how many tokens are the users' messages with what the template writes behind them."""
    messages: list[Message] = [system()]
    turns: list[Turn] = []
    unknown = 0
    for number, text in enumerate(QUESTIONS[:num]):
        unknown += unknown_tokens(server, messages, text) if number > 0 else 0
        messages.append(user(text))
        turns.append(server.ask(messages, thoughtful(number)))
        unknown += turns[0].prompt if number == 0 else 0
        messages.append(returned(turns[-1], has_reasoning=True))
        if waits:
            server.wait_until_idle()
    return turns, unknown


def unknown_tokens(server: Serving, messages: list[Message], text: str) -> int:
    """The tokens of the next prompt from the first one on that depends on what the user types."""
    # Of its own, or what nobody typed would be the latest rendering of the chat to the server's.
    renderer = Renderer(server.service.served.text)
    prompt, *others = (
        renderer.render(ChatRequest(messages=(*messages, user(typed)))).prompt.tokens for typed in (text, "0", "~")
    )
    return len(prompt) - min(common_prefix(prompt, other) for other in others)


@pytest.mark.parametrize(("name", "num"), CASES, ids=[name for name, _ in CASES])
def test_with_settling_only_the_users_words_are_computed(name: str, num: int, models: dict[str, Path]) -> None:
    with serving(model_of(name, models), has_channels=name == "channels") as server:
        turns, unknown = hold(server, num, waits=True)
        computed = sum(turn.computed for turn in turns)
        assert computed <= 1.1 * unknown, [(turn.computed, turn.oracle) for turn in turns]
        assert computed < sum(turn.oracle for turn in turns)
        health = server.health()
        settled = sum(served.outcome.prefilled for served in server.engine.of(Purpose.SETTLE))
        # Counted apart, and everywhere the same.
        assert health["settled"] == settled > 0
        assert health["prefilled"] == computed
        assert server.record(turns[-1].id)["settled"] > 0


@pytest.mark.parametrize(("name", "num"), CASES, ids=[name for name, _ in CASES])
def test_without_settling_the_oracle_computes_as_much(name: str, num: int, models: dict[str, Path]) -> None:
    with serving(model_of(name, models), has_channels=name == "channels", settles=False) as server:
        turns, _ = hold(server, num, waits=False)
        computed, oracle = (sum(getattr(turn, key) for turn in turns) for key in ("computed", "oracle"))
        assert computed <= 1.02 * oracle + SEAM.get(name, 0) * num, [(turn.computed, turn.oracle) for turn in turns]
        assert server.health()["settled"] == 0
        reasons = [server.record(turn.id)["reason"] for turn in turns]
        assert reasons == [Reason.COLD, *[Reason.THINKING_STRIPPED] * (num - 1)]
        assert not server.engine.of(Purpose.SETTLE)

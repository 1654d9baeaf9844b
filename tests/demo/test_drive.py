"""The demonstration's counting, comparing and judging, against servers and a tokenizer made of strings."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from reprise.core.tokens import Tokens, as_tokens, common_prefix
from reprise.lab.demo import story
from reprise.lab.demo.client import DemoFailed
from reprise.lab.demo.drive import Ask, Drive
from reprise.lab.demo.facts import FactExchange
from reprise.lab.demo.oracle import Oracle
from reprise.lab.demo.plots import plot_text, save_plot
from reprise.lab.demo.report import as_json, parts_table, summary, table, totals
from reprise.lab.demo.turns import OPENING, ClientAnswer, DemoPart, History, Turn

TOLD = tuple(FactExchange(kind="talk", user=word, thought="", answer=f"{word}!") for word in ("one", "two", "three"))


def render(history: History) -> str:
    return "".join(f"<{m['role'][0]}>{m['content']}" for m in history) + "<a>?"


class Characters:
    """One token a character. The `?` of the generation prompt is gone from history, as thinking is."""

    def prompt(self, history: History) -> Tokens:
        return as_tokens(ord(c) for c in render(history))

    def answer(self, texts: tuple[str, ...]) -> Tokens:
        return as_tokens(ord(c) for text in texts for c in text)


def echo(history: History) -> str:
    return f"{history[-1]['content']}!"


def perfect_server(answer: Callable[[History], str] = echo) -> Ask:
    """Remembers every prompt and answer to the last character."""
    computed: list[Tokens] = []

    def ask(history: History) -> ClientAnswer:
        prompt = Characters().prompt(history)
        cached = min(len(prompt) - 1, max((common_prefix(prompt, run) for run in computed), default=0))
        computed.append(as_tokens([*prompt.tolist(), *map(ord, answer(history))]))
        return reply(history, answer(history), num_cached=cached)

    return ask


def forgetful_server(answer: Callable[[History], str] = echo) -> Ask:
    return lambda history: reply(history, answer(history))


def reply(history: History, answer: str, *, num_cached: int = 0, extra: int = 0) -> ClientAnswer:
    return ClientAnswer(
        content=answer,
        reasoning="",
        tokens=tuple(answer),
        num_prompt=len(render(history)) + extra,
        num_cached=num_cached,
        ttft_s=0.1,
    )


def hold(warm: Ask, cold: Ask, told: tuple[FactExchange, ...] = TOLD) -> tuple[Turn, ...]:
    return tuple(Drive(warm=warm, cold=cold, tokenizer=Characters()).hold(told, OPENING))


def the_parts(*turns: Turn) -> list[DemoPart]:
    return [DemoPart(title="The chat", turns=turns), DemoPart(title="A branch", turns=turns[-1:])]


def test_the_oracle_is_what_a_perfect_server_computes() -> None:
    turns = hold(perfect_server(), forgetful_server())
    assert [turn.computed for turn in turns] == [turn.oracle for turn in turns]
    assert all(turn.is_same_answer and turn.is_right and turn.is_cold_right for turn in turns)
    assert turns[-1].cold_computed == turns[-1].prompt_tokens
    # The known part of the next turn ends where the user's words begin: those and the generation prompt are left.
    assert turns[1].typed == len("two<a>?")
    assert turns[0].typed == turns[0].prompt_tokens


def test_the_oracle_computes_one_token_of_what_it_knows_and_none_of_an_exact_repeat() -> None:
    oracle = Oracle()
    run = as_tokens([1, 2, 3])
    assert oracle.cost(run) == 3
    oracle.remember(run)
    assert oracle.cost(run) == 1
    oracle.remember(run, num_prompt=2)
    assert oracle.cost(run[:2]) == 0 and oracle.cost(run) == 1
    assert oracle.cost(as_tokens([1, 2, 4, 5])) == 2


def test_a_different_answer_is_counted_and_said() -> None:
    turns = hold(perfect_server(), forgetful_server(lambda _: "other"))
    sums = totals(turns)
    assert (sums.num_different, sums.num_right, sums.num_cold_right) == (3, 3, 0)
    assert "differ in 4 turns" in summary(the_parts(*turns))


def test_a_wrong_answer_is_counted_and_said() -> None:
    turns = hold(perfect_server(lambda _: "two!"), forgetful_server(lambda _: "two!"))
    assert (totals(turns).num_different, totals(turns).num_right) == (0, 1)
    assert "Right answers: 1 of 4 with reuse, 1 without." in summary(the_parts(*turns))


@pytest.mark.parametrize(("called", "is_right"), [("Leo", True), ("Ben", False), (None, False)])
def test_a_call_of_the_tool_is_answered_and_judged(called: str | None, is_right: bool) -> None:
    told = FactExchange(kind="look_up", user="Look up Leo.", thought="", answer="It is 47.", name="Leo", result="47")

    def ask(history: History) -> ClientAnswer:
        if history[-1]["role"] == "tool" or called is None:
            return reply(history, "It is 47.")
        arguments = json.dumps({"name": called})
        call = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
        return replace(reply(history, ""), calls=(call,))

    (turn,) = hold(ask, ask, (told,))
    assert turn.is_right is is_right
    roles = [message["role"] for message in turn.history[len(OPENING) :]]
    assert roles == (["user", "assistant"] if called is None else ["user", "assistant", "tool", "assistant"])
    # Both of its requests are counted.
    num_prompts = 1 if called is None else 2
    assert turn.ttft_s == pytest.approx(0.1 * num_prompts)


def test_a_server_that_counts_the_prompt_otherwise_fails_the_demonstration() -> None:
    with pytest.raises(DemoFailed, match="Turn 1: the server counts"):
        hold(lambda history: reply(history, "", extra=1), perfect_server())


def test_the_numbers_for_programs_have_the_promised_keys() -> None:
    numbers = as_json(the_parts(*hold(perfect_server(), perfect_server())))
    keys = {"turn", "prompt_tokens", "reused", "computed", "oracle", "ttft_s", "cold_ttft_s", "answer", "is_right"}
    sums = {"prompt_tokens", "computed", "cold_computed", "oracle", "num_right", "num_cold_right", "num_different"}
    assert [set(turn) for turn in numbers["turns"]] == [keys] * 3
    assert set(numbers["totals"]) == sums
    assert numbers["totals"]["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in numbers["turns"])
    assert [(part["title"], len(part["turns"])) for part in numbers["parts"]] == [("A branch", 1)]


def big_turn() -> Turn:
    return Turn(
        turn=40,
        exchange=TOLD[0],
        answer="one!",
        history=(),
        prompt_tokens=123_456,
        reused=123_400,
        computed=56,
        cold_computed=123_456,
        oracle=56,
        typed=20,
        ttft_s=12.3,
        cold_ttft_s=99.9,
        is_right=True,
        is_cold_right=True,
        is_same_answer=True,
        why="thinking stripped",
    )


def lines_of(*shown: object) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(*shown)
    return captured.get().splitlines()


def test_the_table_fits_a_small_terminal() -> None:
    big = big_turn()
    wrong, different = replace(big, is_right=False), replace(big, is_same_answer=False)
    rows = [line.split() for line in lines_of(table([big, wrong, different])) if line.strip().startswith("40")]
    numbers = ["40", "123,456", "123,400", "56", "100.0", "12,300", "123,456", "99,900"]
    assert rows == [[*numbers, "thinking", "stripped"], [*numbers, "wrong"], [*numbers, "ANSWERS", "DIFFER"]]


def test_the_parts_show_what_was_said() -> None:
    text = "\n".join(lines_of(parts_table(the_parts(big_turn())[1:])))
    assert all(word in text for word in ("A branch", "one", "one!", "123,456"))


def test_a_column_of_the_plot_is_full_up_to_what_reuse_computed() -> None:
    half = replace(big_turn(), prompt_tokens=80, reused=40, computed=40, cold_computed=80, oracle=40)
    rows = plot_text([half, replace(half, cold_computed=40)]).splitlines()[1:9]
    assert [row[-2:].strip() for row in rows] == ["░"] * 4 + ["██"] * 4


@pytest.mark.matrix
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    turns = [big_turn(), replace(big_turn(), turn=41)]
    assert save_plot(turns, tmp_path) == f"Wrote the plot to {tmp_path / 'reprise-demo.png'}."
    assert (tmp_path / "reprise-demo.png").read_bytes().startswith(b"\x89PNG")
    assert "Cannot write" in save_plot(turns, tmp_path / "none")


def test_the_plot_is_a_page_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    turns = [big_turn(), replace(big_turn(), turn=41)]
    assert save_plot(turns, tmp_path) == f"Wrote the plot to {tmp_path / 'reprise-demo.html'}."
    page = (tmp_path / "reprise-demo.html").read_text(encoding="utf-8")
    assert page.count("<polyline") == 4 and "Time to the first token" in page and "--accent" in page
    assert "http" not in page and "<script" not in page
    assert "Cannot write" in save_plot(turns, tmp_path / "none")


def test_the_story_has_forty_turns_and_asks_for_its_first_fact_at_its_end() -> None:
    told = story.exchanges(story.CHAT)
    assert len(told) == 40
    assert told[-1].key == told[0].key and told[-1].age == 38
    assert {exchange.kind for exchange in told} >= {"tell", "correct", "known", "changed", "unknown", "json", "look_up"}


def test_a_branch_begins_with_the_words_of_the_chat() -> None:
    at = story.BRANCH_AT
    branch = story.exchanges((*story.CHAT[:at], *story.BRANCH))
    assert branch[:at] == story.exchanges(story.CHAT)[:at]
    # It tells what the chat then does not know.
    assert branch[-1].answer != story.exchanges((*story.CHAT, *story.AFTER_BRANCH))[-1].answer
    edited = story.exchanges((story.EDITED, *story.CHAT[1:]))
    assert edited[1:-1] == story.exchanges(story.CHAT)[1:-1]
    assert edited[-1].answer != story.exchanges(story.CHAT)[-1].answer

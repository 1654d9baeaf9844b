"""The demonstration's counting and comparing, against servers and a tokenizer made of strings."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from rich.console import Console

from reprise.core.tokens import Tokens, as_tokens, common_prefix
from reprise.demo.client import DemoFailed
from reprise.demo.drive import Ask, drive
from reprise.demo.oracle import Oracle
from reprise.demo.report import as_json, summary, table, totals
from reprise.demo.turns import ClientAnswer, Message, Turn, questions


def render(history: Iterable[Message]) -> str:
    return "".join(f"<{m['role'][0]}>{m['content']}" for m in history) + "<a>?"


class Characters:
    """One token a character. The `?` of the generation prompt is gone from history, as thinking is."""

    def prompt(self, history: tuple[Message, ...]) -> Tokens:
        return as_tokens(ord(c) for c in render(history))

    def answer(self, texts: tuple[str, ...]) -> Tokens:
        return as_tokens(ord(c) for text in texts for c in text)


def perfect_server() -> Ask:
    """Remembers every prompt and answer to the last character."""
    computed: list[Tokens] = []

    def ask(history: tuple[Message, ...]) -> ClientAnswer:
        prompt = Characters().prompt(history)
        cached = min(len(prompt) - 1, max((common_prefix(prompt, run) for run in computed), default=0))
        answer = f"{len(prompt)}!"
        computed.append(as_tokens([*prompt.tolist(), *map(ord, answer)]))
        return reply(history, answer, num_cached=cached)

    return ask


def reply(history: tuple[Message, ...], answer: str = "yes", *, num_cached: int = 0, extra: int = 0) -> ClientAnswer:
    return ClientAnswer(
        content=answer,
        reasoning="",
        tokens=tuple(answer),
        num_prompt=len(render(history)) + extra,
        num_cached=num_cached,
        ttft_s=0.1,
    )


def forgetful_server(answer: Callable[[tuple[Message, ...]], str]) -> Ask:
    return lambda history: reply(history, answer(history))


def hold(warm: Ask, cold: Ask, *asked: str) -> list[Turn]:
    return list(drive(warm, cold, Characters(), asked or ("one", "two", "three")))


def test_the_oracle_is_what_a_perfect_server_computes() -> None:
    turns = hold(perfect_server(), forgetful_server(lambda h: f"{len(render(h))}!"))
    assert [turn.computed for turn in turns] == [turn.oracle for turn in turns]
    assert all(turn.is_same_answer for turn in turns)
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
    assert totals(turns).num_different == 3
    assert "differ in 3 turns" in summary(turns)


def test_a_server_that_counts_the_prompt_otherwise_fails_the_demonstration() -> None:
    with pytest.raises(DemoFailed, match="Turn 1: the server counts"):
        hold(lambda history: reply(history, extra=1), perfect_server())


def test_the_numbers_for_programs_have_the_promised_keys() -> None:
    numbers = as_json(hold(perfect_server(), perfect_server()))
    keys = {"turn", "prompt_tokens", "reused", "computed", "oracle", "ttft_s", "cold_ttft_s"}
    assert [set(turn) for turn in numbers["turns"]] == [keys] * 3
    assert set(numbers["totals"]) == {"prompt_tokens", "computed", "cold_computed", "oracle"}
    assert numbers["totals"]["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in numbers["turns"])


def test_the_table_shows_the_latest_turns() -> None:
    assert table(hold(perfect_server(), perfect_server()), last=2).row_count == 2


def test_the_table_fits_a_small_terminal() -> None:
    big = Turn(
        turn=40,
        prompt_tokens=123_456,
        reused=123_400,
        computed=56,
        cold_computed=123_456,
        oracle=56,
        typed=20,
        ttft_s=12.3,
        cold_ttft_s=99.9,
        is_same_answer=True,
        why="thinking stripped",
    )
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table([big, replace(big, is_same_answer=False)]))
    rows = [line.split() for line in shown.get().splitlines() if line.strip().startswith("40")]
    numbers = ["40", "123,456", "123,400", "56", "100.0", "12,300", "123,456", "99,900"]
    assert rows == [[*numbers, "thinking", "stripped"], [*numbers, "ANSWERS", "DIFFER"]]


def test_there_are_forty_different_questions() -> None:
    assert len(set(questions())) == 40

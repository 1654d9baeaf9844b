"""A model of attention alone, whose right answers are known, judges its state by its words, however a chat grows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

import reprise
from reprise.core.job import Sampling
from reprise.core.kinds import Full
from reprise.core.prompt import Boundary, BoundaryKind
from tests.demo.damage import Damage, confuse, damage_all, falling_behind, lose, replace_layer, shift
from tests.demo.recall_model import FULL, LOOKS_BACK, PERIOD, WINDOWED, continued, loaded, recall_model
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.restarts import Restarts
from tests.matrix import in_turn, now_and_later, rows_now_and_later

NUM = 2 * max(LOOKS_BACK.values())
"""Tokens of an answer: what is wrong in the full layer is seen when the window has come to it."""


def words(seed: int, num: int) -> list[int]:
    source = Random(seed)
    return [source.randrange(200) for _ in range(num)]


def answer(rows: reprise.SequenceBatch, rest: Sequence[int], num: int = NUM) -> list[int]:
    """The likeliest tokens when the rest of a prompt is computed on this state."""
    said: list[int] = []
    step = list(rest)
    for _ in range(num):
        said.append(int(mx.argmax(rows.forward(loaded().model, mx.array([step]))[0, -1]).item()))
        step = said[-1:]
    return said


def after(tokens: Sequence[int]) -> reprise.SequenceBatch:
    rows = reprise.SequenceBatch(loaded().blueprint)
    mx.eval(rows.forward(loaded().model, mx.array([list(tokens)])), rows.arrays())
    return rows


PROMPT = words(1, 300)
KNOWN = len(PROMPT) - 4


def dropped() -> reprise.SequenceBatch:
    """Entries of zeros."""
    rows = after(PROMPT[:KNOWN])
    for cache in rows.caches:
        cache.keys, cache.values = mx.zeros_like(cache.keys), mx.zeros_like(cache.values)
    return rows


DAMAGED: dict[str, Callable[[], reprise.SequenceBatch]] = {
    "dropped": dropped,
    "swapped": lambda: after(words(2, KNOWN)),
    "a token late": lambda: after([7, *PROMPT[: KNOWN - 1]]),
    "a token early": lambda: after([*PROMPT[1:KNOWN], 7]),
}
"""States of the same length, of which one layer's is taken."""


@pytest.mark.parametrize("num", now_and_later([PERIOD], [300, 1500]))
def test_the_state_as_it_is_gives_right_answers(num: int) -> None:
    prompt = words(3, num)
    assert answer(after(prompt[:-1]), prompt[-1:]) == continued(prompt, NUM)


@pytest.mark.matrix
@pytest.mark.parametrize(("damage", "layer"), in_turn(DAMAGED, [FULL, WINDOWED]))
def test_damage_to_one_layer_makes_answers_wrong(damage: str, layer: int) -> None:
    rows, damaged = after(PROMPT[:KNOWN]), DAMAGED[damage]()
    assert rows.lengths == damaged.lengths
    replace_layer(rows, layer, damaged)
    assert answer(rows, PROMPT[KNOWN:]) != continued(PROMPT, NUM)


# The same through the engine: what the cache holds is damaged between two turns.


@pytest.mark.parametrize(
    ("damage", "of_full"),
    rows_now_and_later(
        [(lose, True), (falling_behind(16), False)],
        [(damage, of_full) for damage in (confuse, None, shift) for of_full in (True, False)]
        + [(lose, False), (falling_behind(16), True)],
    ),
)
def test_damage_to_what_the_cache_holds_makes_the_next_answer_wrong(damage: Damage | None, of_full: bool) -> None:
    engine = DrivenEngine(recall_model())
    try:
        for seed in (1, 2):
            engine.run(words(seed, 300), num=1)
        if damage is not None:
            engine.ask(lambda worker: damage_all(worker, damage, of=lambda kind: isinstance(kind, Full) == of_full))
        prompt = [*words(1, 300), *words(4, 4)]
        running = engine.submit(prompt, num=NUM).wait()
    finally:
        engine.close()
    assert running.end.outcome.num_reused >= 299
    assert (running.tokens == continued(prompt, NUM)) == (damage is None)


# And no way in which a chat grows does.


def asked(engine: DrivenEngine, prompt: Sequence[int], *, num: int = 40, **options: object) -> SubmittedJob:
    running = engine.run(prompt, num=num, **options)
    assert running.tokens == continued(prompt, len(running.tokens)) and len(running.tokens) == num
    return running


@pytest.mark.parametrize(
    "settings",
    now_and_later([{"prefill_chunk": 32, "shares_from": 40}], [{"cache_bytes": 900_000}, {"drafts": "always"}, {}]),
    ids=["shared buffers", "little memory", "drafts", "plain"],
)
def test_grown_cut_branched_edited_and_batched_chats_are_answered_right(settings: dict[str, object]) -> None:
    engine = DrivenEngine(recall_model(), max_batch=4, **settings)
    source = Random(5)
    try:
        system = words(6, PERIOD + 20)
        boundary = [Boundary(len(system), BoundaryKind.SYSTEM)]
        chats = [[*system, *words(seed, 60)] for seed in (7, 8, 9)]
        reused = 0
        for turn in range(6):
            at = source.randrange(len(chats))
            chat = chats[at]
            match turn % 3:
                case 1:
                    # An edit, some turns ago.
                    chat = [*chat[: source.randrange(len(system), len(chat))], *words(turn, 9)]
                case 2:
                    # Two branches and another chat, at once.
                    prompts = [[*chat, *words(20, 9)], [*chat, *words(21, 5)], [*chats[at - 1], 3, 1, 4]]
                    for running in engine.submit_all(prompts, num=30, boundaries=boundary):
                        prompt = running.wait().job.prompt.tokens.tolist()
                        assert running.tokens == continued(prompt, 30)
                        reused += running.end.outcome.num_reused
                case _:
                    pass
            running = asked(engine, chat, boundaries=boundary)
            reused += running.end.outcome.num_reused
            chats[at] = [*chat, *running.tokens, *words(30 + turn, 12)]
        assert reused > 0
    finally:
        engine.close()


def test_a_chat_goes_on_right_from_disk(tmp_path: Path) -> None:
    start, chat = Restarts(tmp_path), words(10, 400)
    for turn in range(3):
        engine = start(recall_model())
        running = asked(engine, chat, sampling=Sampling(temperature=0.3, seed=turn))
        assert (running.end.outcome.num_loaded > 0) == (turn > 0)
        chat = [*chat, *running.tokens, *words(11 + turn, 20)]
    start.end()

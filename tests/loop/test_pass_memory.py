"""What prefill passes take at their peak: measured, reserved before they run, and a reason for shorter ones."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from reprise.core.errors import ContextTooLong
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Purpose
from reprise.core.pass_price import PassReading
from reprise.engine.running.live_sequence import LiveSequence
from reprise.loop.admission import PromptRoom
from reprise.loop.worker import Worker
from reprise.memory import Account
from tests.loop.driving import DrivenEngine
from tests.loop.test_reuse import words


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_5", "mamba2"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, cache_bytes=4_000_000, max_stall_ms=60_000)
    yield engine
    engine.close()


def lengths(engine: DrivenEngine, prompt: list[int]) -> list[int]:
    """The lengths of the passes over a prompt."""
    positions = [0, *engine.run(prompt, purpose=Purpose.PREFILL).progress]
    return [stop - start for start, stop in pairwise(positions)]


def make_dear(worker: Worker, num: int, nbytes: int) -> None:
    """As if a pass over so many tokens had taken so much."""
    worker.executor.note_peak(num, 0, PassReading(least=nbytes, most=nbytes))


def keep_for_passes(engine: DrivenEngine, nbytes: int) -> None:
    engine.ask(lambda worker: setattr(worker.memory, "kept_for_passes", nbytes))


def test_what_a_pass_takes_is_known_before_the_first_request(engine: DrivenEngine) -> None:
    price = engine.ask(lambda worker: worker.executor.price)
    assert len(price.seen) == 1
    assert 0 < price.of(128, 0) <= price.expected(128, 0) * 3


def test_a_pass_is_shorter_where_its_peak_would_not_fit_and_the_answer_is_the_same(engine: DrivenEngine) -> None:
    prompt = words(900, 700)
    assert max(lengths(engine, prompt)) > 512
    cold = engine.cold(prompt)
    engine.loop.clear()
    engine.ask(lambda worker: make_dear(worker, 600, 5_000_000))
    keep_for_passes(engine, 100_000)
    assert engine.cold(prompt) == cold
    assert max(lengths(engine, words(901, 700))) <= 512


def test_a_pass_is_charged_while_it_runs_and_makes_room_first(engine: DrivenEngine) -> None:
    keep_for_passes(engine, 0)
    worker: Worker = engine.ask(lambda worker: worker)
    charged, over = list[int](), list[int]()

    def look(*what: object) -> None:
        budget = worker.memory.budget
        assert budget is not None
        charged.append(worker.memory.nbytes(Account.PASSES))
        over.append(worker.memory.held - budget)

    for i in range(100):
        engine.run(words(1000 + i, 400))
        if engine.loop.status().counts.num_evictions > 0:
            break
    engine.ask(lambda worker: make_dear(worker, 200, 1_500_000))
    ACTIONS[Failpoint.PREFILL] = look
    engine.run(words(930, 200))
    del ACTIONS[Failpoint.PREFILL]
    assert engine.loop.status().counts.num_evictions > 0
    assert max(charged) >= 1_500_000
    assert max(over) <= 0
    assert engine.ask(lambda worker: worker.memory.nbytes(Account.PASSES)) == 0


def test_logits_are_charged_where_they_are_computed_and_room_is_made_for_them(engine: DrivenEngine) -> None:
    keep_for_passes(engine, 0)
    worker: Worker = engine.ask(lambda worker: worker)
    for i in range(100):
        engine.run(words(1100 + i, 400))
        if engine.loop.status().counts.num_evictions > 0:
            break
    charged, over = list[int](), list[int]()

    def look(*what: object) -> None:
        assert worker.memory.budget is not None
        charged.append(worker.memory.nbytes(Account.PASSES))
        over.append(worker.memory.held - worker.memory.budget)
        if len(charged) == 2:
            # The passes after this one need more than is free.
            make_dear(worker, 16, 2_800_000)

    price = worker.executor.price
    ACTIONS[Failpoint.DECODE] = look
    engine.run(words(950, 200))
    assert price.per_output >= 512 * 4 * 5
    assert charged[0] >= price.per_output and min(charged[3:]) >= 1_000_000
    assert max(over) <= 0
    assert engine.ask(lambda worker: worker.memory.nbytes(Account.PASSES)) == 0


def test_of_a_prompt_that_is_scored_some_logits_are_there_at_once(engine: DrivenEngine) -> None:
    executor = engine.ask(lambda worker: worker.executor)
    scored, plain = SimpleNamespace(scorer=object()), SimpleNamespace(scorer=None)
    for num in (100, 400):
        lives = cast(list[LiveSequence], [scored, plain])
        assert executor.price_to_prefill(lives, num, 0) == executor.price.of(2 * num, 0, num_outputs=min(num, 256))


def test_a_pass_that_fails_is_charged_no_longer(engine: DrivenEngine) -> None:
    keep_for_passes(engine, 0)

    def fail(*what: object) -> None:
        raise RuntimeError("broken")

    ACTIONS[Failpoint.PREFILL] = fail
    failed = engine.run(words(940, 200))
    del ACTIONS[Failpoint.PREFILL]
    assert failed.end.error is not None
    assert engine.ask(lambda worker: worker.memory.nbytes(Account.PASSES)) == 0


def test_a_refusal_says_what_would_fit_and_that_is_served() -> None:
    engine = DrivenEngine("llama", cache_bytes=2_000_000)
    try:

        def fitting_tokens() -> int:
            with pytest.raises(ContextTooLong, match="Shorten the conversation, or raise --cache-bytes") as refused:
                engine.submit(words(950, 6000))
            return int(str(refused.value).split(": ")[1].split(" tokens would fit")[0].replace(",", ""))

        without_passes = fitting_tokens()
        keep_for_passes(engine, 0)
        fitting = fitting_tokens()
        assert 0 < fitting < without_passes < 6000
        with pytest.raises(ContextTooLong):
            engine.submit(words(951, fitting + 1))
        assert engine.run(words(952, fitting), num=8).end.error is None
    finally:
        engine.close()


def test_a_refusal_counts_states_and_passes_and_tells_of_quantised_kv() -> None:
    room = PromptRoom(
        budget=10_000,
        states=lambda position: 10 * position,
        quantised=lambda position: 5 * position,
        passes=lambda position: position,
        advice="raise --memory",
    )
    assert room.refusal(809, num_slots=100) is None
    refusal = room.refusal(900, num_slots=100)
    assert refusal is not None
    assert "809 tokens would fit, it with --kv-bits 8 (approximate)" in str(refusal)
    assert str(refusal).endswith("Shorten the conversation, or raise --memory.")
    assert "809 tokens would fit, 1,566 with --kv-bits 8" in str(room.refusal(5000, num_slots=100))
    assert PromptRoom().refusal(10**9, num_slots=1) is None


def test_a_prompt_that_is_scored_says_nothing_of_other_passes(engine: DrivenEngine) -> None:
    before = engine.ask(lambda worker: worker.executor.price)
    assert engine.run(words(960, 300), purpose=Purpose.PREFILL, prompt_logprobs=0).end.error is None
    assert engine.ask(lambda worker: worker.executor.price) is before
    engine.run(words(961, 300))
    assert engine.ask(lambda worker: worker.executor.price) is not before

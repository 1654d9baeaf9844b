"""Warm answers equal cold ones, and what could be reused is: each tiny model, through the loop."""

import random
from collections.abc import Iterator

import pytest

from reprise.core.events import FinishReason, Progress, Started
from reprise.core.job import Purpose
from reprise.core.outcome import Reason
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.engine.running.runner import SHARES_FROM
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.matrix import now_and_later
from tests.models.tiny import CONFIGS

# Full attention with a window, and with recurrent state: what goes wrong in one kind alone goes wrong beside it.
_NOW = [("gemma3_text", False), ("qwen3_5", True)]
_ALL = [(name, lends) for name in sorted(CONFIGS) for lends in (False, True)]


@pytest.fixture(scope="module", params=now_and_later(_NOW, [pair for pair in _ALL if pair not in _NOW]), ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    """Each tiny model twice: sequences that are copied into the cache, and sequences that lend to it."""
    architecture, lends = request.param
    engine = DrivenEngine(architecture, prefill_chunk=256, shares_from=50 if lends else SHARES_FROM)
    yield engine
    engine.close()


def words(seed: int, num: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(512) for _ in range(num)]


def test_an_exact_repeat_computes_nothing(engine: DrivenEngine) -> None:
    prompt = words(1, 120)
    cold = engine.cold(prompt)
    first, second = engine.run(prompt), engine.run(prompt)
    assert first.tokens == second.tokens == cold
    assert (first.computed, second.computed) == (120, 0)
    assert second.end.outcome.reason is Reason.NOTHING_NEW


def test_the_next_turn_computes_what_is_new(engine: DrivenEngine) -> None:
    prompt = words(2, 100)
    for turn in range(4):
        answer = engine.run(prompt)
        assert answer.tokens == engine.cold(prompt)
        # The last token of an answer was sampled, but not fed.
        assert answer.computed == (100 if turn == 0 else 13)
        prompt = [*prompt, *answer.tokens, *words(20 + turn, 12)]


def test_a_branch_resumes_at_its_boundary(engine: DrivenEngine) -> None:
    shared = words(3, 90)
    boundary = [Boundary(90, BoundaryKind.SYSTEM)]
    engine.run([*shared, *words(30, 40)], boundaries=boundary)
    branch = [*shared, *words(31, 25)]
    answer = engine.run(branch, boundaries=boundary)
    assert answer.computed == 25
    assert answer.tokens == engine.cold(branch)


def test_a_branch_that_nobody_planned_is_resumable_the_next_time(engine: DrivenEngine) -> None:
    shared = words(4, 90)
    engine.run([*shared, *words(40, 40)])
    engine.run([*shared, *words(41, 25)])
    third = [*shared, *words(42, 25)]
    answer = engine.run(third)
    assert answer.computed == 25
    assert answer.tokens == engine.cold(third)


def test_an_edit_of_an_earlier_message(engine: DrivenEngine) -> None:
    start, end = words(5, 60), words(51, 60)
    boundary = [Boundary(60, BoundaryKind.LAST_USER)]
    engine.run([*start, *words(50, 30), *end], boundaries=boundary)
    edited = [*start, *words(52, 20), *end]
    answer = engine.run(edited, boundaries=boundary)
    assert answer.computed == 80
    assert answer.tokens == engine.cold(edited)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_very_short_prompts(engine: DrivenEngine, length: int) -> None:
    prompt = words(60 + length, length)
    cold = engine.cold(prompt)
    assert engine.run(prompt).tokens == cold
    again = engine.run(prompt)
    assert again.tokens == cold
    assert again.computed == 0


def test_parallel_requests_compute_their_shared_prefix_once(engine: DrivenEngine) -> None:
    shared = words(7, 150)
    prompts = [[*shared, *words(70 + i, 10 + 7 * i)] for i in range(6)]
    cold = [engine.cold(prompt) for prompt in prompts]
    answers = [running.wait() for running in engine.submit_all(prompts)]
    assert [answer.tokens for answer in answers] == cold
    unique = 150 + sum(len(prompt) - 150 for prompt in prompts)
    assert sum(answer.computed for answer in answers) <= unique * 1.02
    again = [running.wait() for running in [engine.submit(prompt) for prompt in prompts]]
    assert [answer.tokens for answer in again] == cold
    assert all(answer.computed == 0 for answer in again)


def test_a_cancelled_prefill_is_not_lost(engine: DrivenEngine) -> None:
    prompt = words(8, 900)
    running = engine.submit(prompt, cancel_when=lambda running: len(running.progress) > 0).wait()
    assert running.end.reason is FinishReason.CANCELLED
    engine.check()
    computed = running.computed
    assert 0 < computed < 900
    answer = engine.run(prompt)
    assert answer.end.outcome.num_reused == computed
    assert answer.computed == 900 - computed
    assert answer.tokens == engine.cold(prompt)


def test_a_client_that_always_gives_up_too_early_gets_its_answer_in_the_end(engine: DrivenEngine) -> None:
    """Its prompt takes six times as long as it waits: the seventh try answers, and no token is computed twice."""
    prompt = words(14, 900)
    answer = _given_up_after(engine, prompt, len(prompt) // 6)
    computed = [answer.computed]
    while answer.end.reason is FinishReason.CANCELLED and len(computed) < 9:
        answer = _given_up_after(engine, prompt, len(prompt) // 6)
        computed.append(answer.computed)
    assert 3 <= len(computed) <= 7
    assert sum(computed) == len(prompt)
    assert answer.tokens == engine.cold(prompt)


def _given_up_after(engine: DrivenEngine, prompt: list[int], patience: int) -> SubmittedJob:
    """The request, cancelled when so many tokens of its prompt have been computed and it has no answer yet."""

    def has_waited(running: SubmittedJob) -> bool:
        first = next((each for each in running.events if isinstance(each, Started)), None)
        is_prefilling = isinstance(running.events[-1], Progress)
        return is_prefilling and first is not None and running.progress[-1] - first.num_reused >= patience

    return engine.submit(prompt, cancel_when=has_waited).wait()


def test_a_cancelled_decode_is_not_lost(engine: DrivenEngine) -> None:
    prompt = words(9, 50)
    running = engine.submit(prompt, num=5000, cancel_when=lambda running: len(running.tokens) == 20).wait()
    assert running.end.reason is FinishReason.CANCELLED
    longer = [*prompt, *running.tokens, *words(90, 5)]
    answer = engine.run(longer)
    assert answer.computed == 6
    assert answer.tokens == engine.cold(longer)


def test_a_prefill_job_stores_its_prompt(engine: DrivenEngine) -> None:
    prompt = words(10, 80)
    assert engine.run(prompt, purpose=Purpose.PREFILL).end.reason is FinishReason.DONE
    longer = [*prompt, *words(100, 9)]
    answer = engine.run(longer)
    assert answer.computed == 9
    assert answer.tokens == engine.cold(longer)
    assert engine.run(prompt, purpose=Purpose.PREFILL).computed == 0


@pytest.mark.parametrize("purpose", [Purpose.PREFILL, Purpose.SETTLE])
def test_a_prompt_that_is_there_twice_is_computed_once(engine: DrivenEngine, purpose: Purpose) -> None:
    prompt = words(13 + len(purpose), 90)
    first, second = (engine.submit(prompt, purpose=purpose) for _ in range(2))
    assert [running.wait().end.reason for running in (first, second)] == [FinishReason.DONE] * 2
    assert first.computed == 90
    # Jobs that run at the same time may part one token before the end, as if both went on to sample.
    assert second.computed <= (1 if purpose is Purpose.PREFILL else 0)
    assert second.tokens == []
    engine.check()
    longer = [*prompt, *words(130, 9)]
    answer = engine.run(longer)
    assert answer.computed == 9
    assert answer.tokens == engine.cold(longer)


def test_a_settle_is_counted_apart(engine: DrivenEngine) -> None:
    prompt = words(11, 70)
    before = engine.loop.status().counts
    settle = engine.run(prompt, purpose=Purpose.SETTLE)
    after = engine.loop.status().counts
    assert settle.computed == 70
    assert after.num_settled - before.num_settled == 70
    assert after.num_prefilled == before.num_prefilled
    assert after.num_requests == before.num_requests
    answer = engine.run([*prompt, *words(110, 5)])
    assert answer.end.outcome.num_settled == 70
    assert answer.computed == 5


def test_nothing_stays_leased(engine: DrivenEngine) -> None:
    assert engine.num_leases() == 0
    shown = engine.inspect()
    assert shown.num_sequences == len(shown.idle)
    assert engine.loop.status().is_idle


def test_a_compacted_cache_gives_the_same_answers(engine: DrivenEngine) -> None:
    prompt = words(12, 40)
    for turn in range(6):
        answer = engine.run(prompt)
        prompt = [*prompt, *answer.tokens, *words(120 + turn, 7)]
    engine.ask(lambda worker: worker.cache.compact(max_entries=10**9))
    engine.check()
    answer = engine.run(prompt)
    assert answer.computed == 8
    assert answer.tokens == engine.cold(prompt)


@pytest.mark.parametrize("architecture", now_and_later(["gemma3_text", "qwen3_5"], ["llama"]))
@pytest.mark.parametrize(
    "kinds", now_and_later([(BoundaryKind.EXPLICIT,)], [(BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT)])
)
def test_what_a_client_marked_stays(architecture: str, kinds: tuple[BoundaryKind, ...]) -> None:
    engine = DrivenEngine(architecture)
    try:
        # For about four of the prompts that follow, and the buffers of one that runs.
        runner = engine.ask(lambda worker: worker.runner)
        budget = runner.most_live_nbytes(700, chunk=256) + 4 * runner.footprint.at(420)
        engine.ask(lambda worker: worker.set_budget(budget))
        shared = words(600, 200)
        marks = [Boundary(200, kind) for kind in kinds]
        # The mark of the second is on what is stored already: it holds as well.
        engine.run([*shared, *words(601, 20)], boundaries=marks, pin_for_s=None)
        engine.run([*shared, *words(602, 20)], boundaries=marks, pin_for_s=600)
        for seed in range(8):
            engine.run(words(610 + seed, 400))
        assert engine.loop.status().counts.num_evictions > 0
        assert engine.run([*shared, *words(603, 20)]).end.outcome.num_reused == 200
        engine.loop.clear()
        assert engine.run([*shared, *words(604, 20)]).end.outcome.num_reused == 0
    finally:
        engine.close()

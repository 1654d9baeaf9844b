"""Log-probabilities of prompts, and answers that may not end yet: through the loop, on models of two kinds."""

from collections.abc import Iterator

import pytest

from reprise.core.events import FinishReason, Sampled, Scored
from reprise.core.job import Purpose, Sampling
from reprise.core.outcome import Reason
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words


@pytest.fixture(scope="module", params=["qwen3_5", "gemma3_text"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, prefill_chunk=256)
    yield engine
    engine.close()


def scores(running: SubmittedJob) -> list[Sampled]:
    """The scored tokens of a prompt, from token 1 on."""
    found: list[Sampled] = []
    for event in running.events:
        if isinstance(event, Scored):
            assert event.start == len(found) + 1
            found += event.tokens
    return found


def test_a_prompt_is_scored_as_it_would_have_been_sampled(engine: DrivenEngine) -> None:
    start = words(50, 300)
    answered = engine.run(start, num=40, sampling=Sampling(temperature=0, logprobs=3))
    told = [event for event in answered.events if isinstance(event, Sampled)]
    whole = [*start, *answered.tokens]
    # The cache has all of it by now, and others of the same beginning run beside it.
    mine, other, plain = engine.ask(
        lambda _: [
            engine.submit(whole, num=2, prompt_logprobs=3),
            engine.submit([*whole[:200], *words(51, 90)], num=2, prompt_logprobs=0),
            engine.submit([*whole, *words(52, 30)], num=2),
        ]
    )
    for running in (mine, other, plain):
        running.wait()
    engine.check()
    scored = scores(mine)
    assert [event.token for event in scored] == whole[1:]
    for by_prompt, by_answer in zip(scored[len(start) - 1 :], told, strict=True):
        assert by_prompt.logprob == pytest.approx(by_answer.logprob, abs=1e-4)
        assert [score for _, score in by_prompt.top] == pytest.approx([score for _, score in by_answer.top], abs=1e-4)
        # It was the likeliest, and says so with the very same number.
        assert by_prompt.logprob == max(score for _, score in by_prompt.top)
    assert [event.token for event in scores(other)] == [*whole[1:200], *words(51, 90)]
    assert [event.logprob for event in scores(other)[:199]] == pytest.approx(
        [event.logprob for event in scored[:199]], abs=1e-4
    )
    assert scores(plain) == []
    outcome = mine.end.outcome
    assert (outcome.num_reused, outcome.num_prefilled, outcome.reason) == (0, len(whole), Reason.PROMPT_LOGPROBS)
    assert plain.end.outcome.num_reused > 0


def test_what_was_scored_is_stored_like_anything_else(engine: DrivenEngine) -> None:
    prompt = words(53, 130)
    alone = engine.run(prompt, purpose=Purpose.PREFILL, prompt_logprobs=0)
    assert [event.token for event in scores(alone)] == prompt[1:]
    longer = [*prompt, 7]
    again = engine.run(longer)
    assert (again.computed, again.tokens) == (1, engine.cold(longer))
    single = engine.run(prompt[:1], num=1, prompt_logprobs=2)
    assert scores(single) == [] and len(single.tokens) == 1


def test_an_answer_does_not_end_before_its_minimum(engine: DrivenEngine) -> None:
    prompt = words(54, 60)
    # Whatever comes likeliest without it would have ended the answer.
    free = engine.run(prompt, num=24)
    stops = frozenset(free.tokens)
    assert engine.run(prompt, num=24, stop_tokens=stops).end.reason is FinishReason.STOP
    held = engine.submit_all([prompt, [*prompt[:30], *words(55, 30)]], num=24, stop_tokens=stops, min_tokens=7)
    for running in held:
        running.wait()
        assert not stops & set(running.tokens[:7])
    assert len(held[0].tokens) >= 7
    never = engine.run(prompt, num=24, stop_tokens=stops, min_tokens=24)
    assert (len(never.tokens), never.end.reason) == (24, FinishReason.LENGTH)
    engine.check()

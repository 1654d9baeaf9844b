"""A companion guesses from states that are the model's too, and leaves them as they are."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest

from reprise.core.job import Job, Sampling
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.engine.models.companion import with_companion
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.runner import Runner
from tests.loop.test_reuse import words
from tests.models.shared import loaded

PAIRS = [("llama", "gemma3_text"), ("llama", "mamba2"), ("qwen3_5", "llama"), ("gemma3_text", "qwen3_5")]


@pytest.fixture(scope="module", params=PAIRS, ids="+".join)
def pair(request: pytest.FixtureRequest) -> tuple[LoadedModel, LoadedModel, LoadedModel]:
    model, companion = map(loaded, request.param)
    return model, companion, with_companion(model, companion)


def test_the_model_answers_as_alone(pair: tuple[LoadedModel, LoadedModel, LoadedModel]) -> None:
    model, _, both = pair
    text = as_tokens(words(1, 80))
    logits = [each.logits(each.begin(), text) for each in (Runner(model, can_batch=True), Runner(both, can_batch=True))]
    assert mx.array_equal(logits[0], logits[1])


def test_what_is_guessed_is_what_the_companion_says_and_leaves_no_trace(
    pair: tuple[LoadedModel, LoadedModel, LoadedModel],
) -> None:
    _, companion, both = pair
    prompt = as_tokens(words(2, 70))
    job = Job(id="it", prompt=Prompt(tokens=prompt), max_tokens=40, sampling=Sampling(temperature=0))
    alone, runner = Runner(companion, can_batch=True), Runner(both, can_batch=True)
    said: list[int] = []
    speaker = alone.begin()
    logits = alone.logits(speaker, prompt)
    for _ in range(7):
        said.append(int(mx.argmax(logits[-1]).item()))
        logits = alone.logits(speaker, as_tokens(said[-1:]))
    live = runner.begin()
    runner.prefill([live], [prompt[:-1]])
    runner.begin_decode(live, job)
    guess = partial(runner.guess, live)
    assert guess(7) == said
    assert guess(3) == said[:3]
    assert guess(7) == said
    assert live.position == len(prompt) - 1


def test_states_with_a_companion_are_those_of_another_model(pair: tuple[LoadedModel, LoadedModel, LoadedModel]) -> None:
    model, companion, both = pair
    assert len({model.fingerprint, companion.fingerprint, both.fingerprint}) == 3
    assert both.nbytes == model.nbytes + companion.nbytes
    assert both.held_nbytes == both.nbytes


def test_a_companion_that_was_made_for_shorter_texts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, companion = loaded("gemma3_text"), loaded("llama")
    with_companion(replace(model, context=100), replace(companion, context=100))
    with_companion(replace(model, context=None), replace(companion, context=None))
    assert caplog.text == ""
    with_companion(replace(model, context=101), replace(companion, context=100))
    assert "was made for 100 tokens" in caplog.text
    caplog.clear()
    with_companion(replace(model, context=None), replace(companion, context=100))
    assert "was made for 100 tokens" in caplog.text

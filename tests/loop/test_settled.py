"""What a record says was settled: also what a settle had computed when it was given up."""

import hashlib
from collections.abc import Iterator

import pytest

from reprise.core.events import Event, FinishReason, Progress
from reprise.core.job import Purpose
from reprise.core.tokens import as_tokens
from reprise.loop.prefixes import SettledSpans
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words


@pytest.fixture(params=["llama", "qwen3_5"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, prefill_chunk=64)
    yield engine
    engine.close()


def given_up(engine: DrivenEngine, prompt: list[int], *, at: int) -> SubmittedJob:
    """A settle of `prompt` for which a request comes when it has got to about `at`."""
    others: list[SubmittedJob] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, Progress) and event.position >= at and not others:
            others.append(engine.submit(words(901, 30)))

    settle = engine.submit(prompt, purpose=Purpose.SETTLE, on_event=interrupt).wait()
    assert settle.end.reason is FinishReason.CANCELLED
    others[0].wait()
    return settle


def test_what_a_settle_computed_before_it_was_given_up_counts_as_settled(engine: DrivenEngine) -> None:
    prompt = words(900, 600)
    engine.run(prompt[:200], purpose=Purpose.PREFILL)
    first = given_up(engine, prompt, at=300).end.outcome
    assert 0 < first.num_prefilled < 400
    second = given_up(engine, prompt, at=500).end.outcome
    assert second.num_reused == first.num_reused + first.num_prefilled
    answer = engine.run(prompt).end.outcome
    assert answer.num_reused == second.num_reused + second.num_prefilled
    assert answer.num_settled == first.num_prefilled + second.num_prefilled


def test_what_two_settles_computed_counts_once() -> None:
    tokens = as_tokens(words(910, 50))
    spans = SettledSpans()
    spans.add(tokens, 10, 30)
    spans.add(tokens, 20, 40)
    assert spans.within(tokens, 45) == 30
    assert spans.within(tokens, 35) == 20


def test_all_settles_of_a_prompt_take_one_pass_over_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hashed = as_tokens(words(920, 500)), list[int]()
    blake2b = hashlib.blake2b

    class Counting:
        def __init__(self, given: bytes = b"", *, digest_size: int) -> None:
            self._hash = blake2b(digest_size=digest_size)
            self.update(given)
            self.digest = self._hash.digest

        def update(self, given: bytes) -> None:
            hashed.append(len(given) // tokens.itemsize)
            self._hash.update(given)

    spans = SettledSpans()
    for stop in (500, 400, 500, 300, 500):
        spans.add(tokens, 0, stop)
    spans.add(as_tokens(words(921, 400)), 0, 450)
    monkeypatch.setattr(hashlib, "blake2b", Counting)
    assert spans.within(tokens, 450) == 400
    assert sum(hashed) == 450

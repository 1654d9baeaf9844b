"""A page that is translated: one long system prompt, six parallel requests, sent cold, again, and with other texts."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from reprise.core.events import Finished
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words
from tests.soak.lengths import times

LAYERS = ("llama", "gemma3_text", "qwen3_5", "mamba2")
"""Full attention, with windows, with recurrent state, and recurrent state alone."""

_PARALLEL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLengths:
    """Lengths in tokens; texts are within a third of their usual length."""

    system: int
    text: int


SHORT = TextLengths(system=300, text=75)
PAGE = TextLengths(system=2000, text=300)


@pytest.fixture(scope="module", params=LAYERS)
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, prefill_chunk=512)
    yield engine
    engine.close()


def page(seed: int, size: TextLengths) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a page, and those of another with the same system prompt."""
    source = random.Random(seed)
    system = words(source.randrange(10**9), size.system)

    def text() -> list[int]:
        length = source.randint(size.text * 2 // 3, size.text * 4 // 3)
        return [*system, *words(source.randrange(10**9), length)]

    return [text() for _ in range(_PARALLEL)], [text() for _ in range(_PARALLEL)]


def burst(engine: DrivenEngine, prompts: Sequence[Sequence[int]]) -> list[SubmittedJob]:
    answers = [each.wait() for each in engine.submit_all(prompts, num=6)]
    engine.check()
    return answers


def computed(answers: Sequence[SubmittedJob]) -> int:
    assert all(isinstance(answer.end, Finished) and answer.end.error is None for answer in answers)
    return sum(answer.computed for answer in answers)


def translate(engine: DrivenEngine, seed: int, size: TextLengths) -> None:
    prompts, others = page(seed, size)
    alone = [engine.cold(prompt, num=6) for prompt in [*prompts, *others]]
    engine.loop.clear()
    cold, again, other = (burst(engine, each) for each in (prompts, prompts, others))
    assert [answer.tokens for answer in [*cold, *again, *other]] == [*alone[:6], *alone[:6], *alone[6:]]
    texts = [sum(len(prompt) - size.system for prompt in each) for each in (prompts, others)]
    assert computed(cold) <= 1.02 * (size.system + texts[0])
    # The logits behind each prompt are kept.
    assert computed(again) == 0
    assert computed(other) <= 1.02 * texts[1]
    assert engine.num_leases() == 0


@pytest.mark.matrix
def test_a_page_is_computed_once(engine: DrivenEngine) -> None:
    translate(engine, 0, SHORT)


@pytest.mark.soak
def test_pages_of_two_thousand_tokens(engine: DrivenEngine) -> None:
    for seed in range(100, 100 + times(1)):
        translate(engine, seed, PAGE)

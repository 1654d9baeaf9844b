"""A pass that breaks off: what the sequences in it held is not to be trusted, and nobody is given it."""

from collections.abc import Iterator

import pytest

from reprise.core.events import Event
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.engine.states.layers import FullLayer, KvLayer
from reprise.loop.worker import Worker
from tests.loop.driving import OUT_OF_MEMORY, DrivenEngine, SubmittedJob, break_at
from tests.loop.test_reuse import words


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_5"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, shares_from=100, prefill_chunk=512)
    yield engine
    engine.close()


def _lenders(worker: Worker) -> set[object]:
    return {sequence for node in worker.cache.tree.nodes() for sequence in node.sequences()}


def _stored(engine: DrivenEngine, seed: int) -> list[int]:
    """A path that the cache owns: whoever goes on from it has a copy. Gives a prompt that does."""
    prompt = words(seed, 300)
    answer = engine.run(prompt, num=20)
    engine.ask(lambda worker: worker.sequences.close_idle())
    return [*prompt, *answer.tokens, *words(seed + 1, 40)]


def test_one_that_is_lost_lends_nothing_when_memory_gets_short(engine: DrivenEngine) -> None:
    longer = _stored(engine, 600)
    break_at(Failpoint.PREFILL)
    assert engine.run(longer).end.error is not None
    engine.ask(lambda worker: worker.sequences.share_duplicates())
    assert engine.ask(_lenders) == set()
    again = engine.run(longer)
    assert again.end.error is None
    assert again.tokens == engine.cold(longer)


def test_nobody_makes_room_with_what_a_broken_pass_left(engine: DrivenEngine) -> None:
    prompts = [_stored(engine, 610 + 10 * i) for i in range(2)]
    lent: set[object] = set()

    def no_room(nbytes: int) -> bool:
        lent.update(_lenders(worker))
        return False

    def break_short_of_memory(lives: object) -> None:
        del ACTIONS[Failpoint.DECODE]
        ACTIONS[Failpoint.FITS] = no_room
        raise RuntimeError(OUT_OF_MEMORY)

    running: list[SubmittedJob] = []

    def break_when_both_decode(event: Event) -> None:
        if len(running) == 2 and all(len(each.tokens) > 3 for each in running) and not broken:
            broken.append(event)
            ACTIONS[Failpoint.DECODE] = break_short_of_memory

    broken: list[Event] = []
    worker = engine.ask(lambda worker: worker)
    engine.ask(
        lambda worker: running.extend(
            engine.submit(prompt, num=60, on_event=break_when_both_decode) for prompt in prompts
        )
    )
    assert [each.wait().end.error is not None for each in running] == [True, True]
    assert lent == set()


def test_sequences_that_came_together_only_in_part_leave_nothing_behind(engine: DrivenEngine) -> None:
    prompts = [words(630 + i, 300 + 20 * i) for i in range(2)]
    cold = [engine.cold(prompt, num=30) for prompt in prompts]
    joined: list[FullLayer] = []

    def join(layer: KvLayer) -> None:
        if isinstance(layer, FullLayer):
            joined.append(layer)
            if len(joined) == 1:
                raise RuntimeError(OUT_OF_MEMORY)

    stored = [engine.run(prompt).tokens for prompt in prompts]
    longer = [[*prompt, *tokens, 5] for prompt, tokens in zip(prompts, stored, strict=True)]
    ACTIONS[Failpoint.JOINED] = join
    # All at once, so that they come together.
    assert any(running.wait().end.error is not None for running in engine.submit_all(longer, num=30))
    ACTIONS.clear()
    for prompt in longer:
        again = engine.run(prompt)
        assert again.end.error is None
        assert again.tokens == engine.cold(prompt)
    assert [engine.run(prompt, num=30).tokens for prompt in prompts] == cold

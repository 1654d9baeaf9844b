"""What is known of a next turn is computed ahead by the draft model, too: while idle, once, and not after a clear."""

from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest

from reprise.core.events import Event, FinishReason
from reprise.core.job import Purpose
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.drafts.benefit import DraftCosts
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.test_draft_model import FreeModel, draft_always, status, with_draft_model
from tests.loop.test_drafts import FreePasses
from tests.loop.test_reuse import words
from tests.models.shared import loaded, nearly


class Interrupted(FreeModel):
    """Does something behind the step in which the draft model computes the next part of a prefix."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(relative=0.0)
        self._acts = [act]

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        super().note_prefill(num_tokens, seconds)
        if self._acts:
            self._acts.pop()()


def settle_until(engine: DrivenEngine, prompt: list[int], act: Callable[[], object]) -> SubmittedJob:
    """A settle of `prompt`. What `act` asks of the engine is done when the draft model has computed a part of it."""

    def begin(worker: Worker) -> None:
        assert worker.draft_model is not None
        worker.draft_model.costs = Interrupted(act)

    engine.ask(begin)
    return engine.submit(prompt, purpose=Purpose.SETTLE)


def next_turn(answer: list[int], prompt: list[int]) -> list[int]:
    """The prompt with which the next turn will begin: the template writes half of the answer otherwise."""
    return [*prompt[:-3], *answer[len(answer) // 2 :], *words(1120, 10)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_what_is_known_of_a_next_turn_is_computed_ahead(architecture: str) -> None:
    with closing(DrivenEngine(architecture, load_draft_model=partial(loaded, architecture), drafts="auto")) as engine:
        engine.ask(partial(draft_always, is_far=True))
        prompt = words(1121, 100)
        # The template says where a next turn leaves this one.
        answer = engine.run(prompt, num=40, boundaries=[Boundary(97, BoundaryKind.STABLE)])
        known = next_turn(answer.tokens, prompt)
        before = status(engine)
        settle = engine.run(known, purpose=Purpose.SETTLE)
        now = status(engine)
        assert settle.end.reason is FinishReason.DONE
        assert (now.num_settled, now.num_prefilled) == (len(known) - 97, before.num_prefilled)
        prompt = [*known, *words(1122, 20)]
        engine.run(prompt, num=30)
        after = status(engine)
        assert 20 <= after.num_prefilled - now.num_prefilled <= 26
        assert after.num_reused - now.num_reused == len(known)
        # There is nothing left to do for the same once more, and less for another that begins like it.
        engine.run(known, purpose=Purpose.SETTLE)
        assert status(engine).num_settled == now.num_settled
        engine.run([*prompt, 5, 6, 7], purpose=Purpose.SETTLE)
        assert status(engine).num_settled <= now.num_settled + 24
        engine.check()


def test_a_request_pauses_what_the_draft_model_settles_and_loses_nothing() -> None:
    with closing(with_draft_model("llama", "qwen3_5", prefill_chunk=64)) as engine:
        engine.run(words(1130, 40), num=20)
        before = status(engine).num_settled
        known = words(1131, 1200)
        model = engine.ask(lambda worker: worker.draft_model)
        assert model is not None
        others: list[SubmittedJob] = []
        paused: list[tuple[bool, bool]] = []

        def look(event: Event) -> None:
            # On the engine's thread, while the request runs.
            if not paused:
                stored = model.cache.stats.num_tokens
                is_stopped = model.runner.num_sequences == model.sequences.num_idle
                paused.append((is_stopped, stored >= model.num_settled - before > 0))

        settle = settle_until(
            engine, known, lambda: others.append(engine.submit(words(1132, 50), num=10, on_event=look))
        )
        assert settle.wait().end.reason is FinishReason.DONE
        assert len(others[0].wait().tokens) == 10
        assert paused == [(True, True)]
        assert status(engine).num_settled - before == len(known)
        engine.check()


def test_what_is_settled_is_gone_after_a_clear() -> None:
    with closing(with_draft_model("llama", "qwen3_5", prefill_chunk=64)) as engine:
        engine.run(words(1140, 40), num=20)
        before = status(engine).num_settled
        held: list[tuple[bool, int]] = []

        def clear(worker: Worker) -> None:
            assert worker.draft_model is not None
            # As a server does it: what is settled ends first.
            worker.cancel(settle.job.id)
            was_stored = worker.draft_model.cache.stats.num_tokens > 64
            worker.clear_cache()
            held.append((was_stored, worker.draft_model.cache.stats.num_tokens))

        settle = settle_until(engine, words(1141, 1200), lambda: engine.loop.call(clear))
        assert settle.wait().end.reason is FinishReason.CANCELLED
        engine.run(words(1142, 4), num=1)
        assert held == [(True, 0)]
        assert status(engine).num_settled < before + 1200
        assert (
            engine.ask(lambda worker: worker.draft_model is not None and worker.draft_model.cache.stats.num_tokens) == 0
        )
        engine.check()


def test_nothing_is_computed_ahead_where_drafts_do_not_pay_or_there_is_too_much() -> None:
    with closing(
        DrivenEngine("llama", load_draft_model=partial(nearly, "llama", 0.05), drafts="auto", max_settle=100)
    ) as engine:

        def cost(worker: Worker, relative: float) -> None:
            assert worker.drafts is not None and worker.draft_model is not None
            worker.drafts.costs = FreePasses()
            worker.draft_model.costs = DraftCosts(relative=relative)

        engine.ask(lambda worker: cost(worker, 20.0))
        engine.run(words(1150, 60), num=10)
        for num in (50, 90):
            engine.run(words(1151, num), purpose=Purpose.SETTLE)
        assert status(engine).num_settled == 0
        engine.ask(lambda worker: cost(worker, 0.0))
        engine.run(words(1152, 101), purpose=Purpose.SETTLE)
        assert status(engine).num_settled == 0
        engine.run(words(1152, 100), purpose=Purpose.SETTLE)
        assert status(engine).num_settled == 100


def test_what_is_settled_gives_way_when_the_room_is_needed() -> None:
    with closing(with_draft_model("llama", "qwen3_5", prefill_chunk=64)) as engine:
        engine.run(words(1160, 40), num=20)
        before = status(engine).num_settled
        given_up: list[bool] = []

        def squeeze(worker: Worker) -> None:
            assert worker.draft_model is not None
            given_up.append(worker.draft_model.give_up())
            assert worker.draft_model.runner.num_sequences == 0

        settle = settle_until(engine, words(1161, 1200), lambda: engine.loop.call(squeeze))
        assert settle.wait().end.reason is FinishReason.DONE
        assert given_up == [True]
        assert status(engine).num_settled < before + 1200
        engine.check()

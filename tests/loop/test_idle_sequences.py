"""Long sequences lend to the cache and are parked: nothing is held twice, and nobody sees another's tokens."""

from collections.abc import Iterator

import pytest

from reprise.core.events import Finished, Progress, Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.prompt import Boundary, BoundaryKind
from tests.holding import active_memory, settled_memory
from tests.loop.driving import PATIENCE_S, DrivenEngine, break_at
from tests.loop.test_reuse import words
from tests.matrix import now_and_later


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_5"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, shares_from=100, prefill_chunk=512)
    yield engine
    engine.close()


def adoptions() -> list[int]:
    """Where parked sequences were adopted from now on."""
    seen: list[int] = []

    def note(position: int, keeps_full: bool) -> None:
        if keeps_full:
            seen.append(position)

    ACTIONS[Failpoint.BEGIN_RESTORE] = note
    return seen


def test_the_next_turn_goes_on_in_the_same_buffers(engine: DrivenEngine) -> None:
    seen = adoptions()
    prompt = words(400, 600)
    for turn in range(4):
        answer = engine.run(prompt)
        assert answer.tokens == engine.cold(prompt)
        prompt = [*prompt, *answer.tokens, *words(410 + turn, 20)]
    # Cold runs in between have namespaces of their own, and do not take the buffers away.
    assert seen == [607, 635, 663]


def test_a_branch_of_a_parked_sequence_leaves_the_other_path_whole(engine: DrivenEngine) -> None:
    prompt = words(420, 300)
    answer = engine.run(prompt, num=40)
    first = [*prompt, *answer.tokens, *words(421, 10)]
    other = [*prompt, *words(422, 25)]
    assert engine.run(other).tokens == engine.cold(other)
    again = engine.run(first)
    assert again.tokens == engine.cold(first)
    assert again.computed <= 11


def test_two_requests_on_one_parked_sequence(engine: DrivenEngine) -> None:
    prompt = words(430, 300)
    answer = engine.run(prompt, num=20)
    prompts = [[*prompt, *answer.tokens, *words(431 + i, 10)] for i in range(3)]
    cold = [engine.cold(p) for p in prompts]
    assert [running.wait().tokens for running in engine.submit_all(prompts)] == cold
    engine.check()


@pytest.mark.matrix
def test_a_sequence_that_joins_a_batch_still_lends(engine: DrivenEngine) -> None:
    prompt = words(440, 300)
    answer = engine.run(prompt, num=20)
    longer = [*prompt, *answer.tokens, *words(441, 10)]
    cold = engine.cold(longer, num=30)
    others = [engine.submit(words(442 + i, 250), num=40) for i in range(2)]
    assert engine.submit(longer, num=30).wait().tokens == cold
    for other in others:
        other.wait()
    engine.check()
    assert engine.run(longer, num=30).tokens == cold


def test_evicting_recalls_what_was_lent(engine: DrivenEngine) -> None:
    prompt = words(450, 400)
    answer = engine.run(prompt, num=20)
    assert engine.ask(lambda worker: len(worker.sequences.idle)) == 1
    # First the logits for exact repeats, which stand in no buffers.
    for num_idle in (1, 0):
        engine.ask(lambda worker: worker.cache.evict_one())
        engine.check()
        assert engine.ask(lambda worker: len(worker.sequences.idle)) == num_idle
    longer = [*prompt, *answer.tokens, *words(451, 10)]
    assert engine.run(longer).tokens == engine.cold(longer)


def test_those_that_are_idle_longest_make_room(engine: DrivenEngine) -> None:
    prompts = [words(580 + i, 150) for i in range(6)]
    turns = [[*prompt, *engine.run(prompt, num=2).tokens, 1] for prompt in prompts]
    seen = adoptions()
    # The oldest was closed, the newest goes on in its buffers.
    for turn, begun in ((turns[0], []), (turns[-1], [151])):
        engine.run(turn, num=1)
        assert seen == begun


def test_a_failed_pass_keeps_what_was_lent_before(engine: DrivenEngine) -> None:
    prompt = words(460, 300)
    answer = engine.run(prompt, num=20)
    longer = [*prompt, *answer.tokens, *words(461, 40)]

    break_at(Failpoint.PREFILL)
    failed = engine.run(longer)
    assert isinstance(failed.end, Finished)
    assert failed.end.error is not None
    again = engine.run(longer)
    assert again.tokens == engine.cold(longer)
    assert again.computed <= 41
    assert engine.num_leases() == 0


@pytest.mark.matrix
def test_a_long_conversation_is_held_once() -> None:
    engine = DrivenEngine("llama", prefill_chunk=512, shares_from=2000)
    try:
        each = engine.ask(lambda worker: worker.runner.footprint.full)
        before = engine.ask(lambda worker: active_memory())
        prompt = words(470, 3500)
        answer = engine.run(prompt, num=4)
        prompt = [*prompt, *answer.tokens, *words(471, 20)]
        at_work: list[int] = []
        engine.run(
            prompt,
            num=4,
            on_event=lambda event: at_work.append(settled_memory()) if isinstance(event, Sampled) else None,
        )
        held = engine.loop.status().held
        assert max(at_work) - before <= 1.2 * len(prompt) * each
        assert held.kv_nbytes + held.live_nbytes <= 1.2 * len(prompt) * each
        # The books agree with what MLX holds.
        active = engine.ask(lambda worker: settled_memory()) - before
        assert held.kv_nbytes + held.live_nbytes == pytest.approx(active, rel=0.01)
    finally:
        engine.close()


def test_what_was_lent_and_lost_empties_the_cache_and_no_more(engine: DrivenEngine) -> None:
    prompt = words(480, 300)
    answer = engine.run(prompt, num=20)
    longer = [*prompt, *answer.tokens, *words(481, 40)]

    def fail(lives: object) -> None:
        del ACTIONS[Failpoint.PREFILL]
        break_at(Failpoint.COPY_OUT)
        raise RuntimeError("the pass failed, and what it shares cannot be copied")

    ACTIONS[Failpoint.PREFILL] = fail
    assert engine.run(longer).end.error is not None
    assert Failpoint.COPY_OUT not in ACTIONS
    assert engine.loop.status().held.kv_nbytes == 0
    assert engine.run(longer).tokens == engine.cold(longer)
    assert engine.num_leases() == 0


def _lenders(worker) -> set[object]:
    return {sequence for node in worker.cache.tree.nodes() for sequence in node.sequences()}


def _marks(prompt: list[int], every: int = 100) -> list[Boundary]:
    return [Boundary(at, BoundaryKind.SYSTEM) for at in range(every, len(prompt), every)]


def test_a_failed_pass_leaves_no_loans_of_its_own_checkpoints() -> None:
    engine = DrivenEngine("qwen3_5", shares_from=64, prefill_chunk=64)
    try:
        prompt = words(490, 600)
        break_at(Failpoint.PREFILL, after=7)
        assert engine.run(prompt, boundaries=_marks(prompt)).end.error is not None
        assert engine.ask(_lenders) == set()
        again = engine.run(prompt, boundaries=_marks(prompt))
        assert again.end.outcome.num_reused == 300
        assert again.tokens == engine.cold(prompt)
        engine.ask(lambda worker: worker.cache.clear())
        engine.check()
    finally:
        engine.close()


@pytest.mark.matrix
@pytest.mark.parametrize("cache_bytes", now_and_later([700_000], [1_000_000]))
def test_what_a_running_sequence_lends_can_be_evicted(cache_bytes: int) -> None:
    engine = DrivenEngine("qwen3_5", shares_from=64, prefill_chunk=64, cache_bytes=cache_bytes)
    try:
        for turn in range(3):
            prompt = words(500 + turn, 900)
            answer = engine.run(prompt, num=20, boundaries=_marks(prompt))
            assert answer.end.error is None
            # What was computed and could not be kept is not held by a sequence that nobody can go on with.
            held = engine.loop.status().held
            assert held.live_nbytes == 0 or held.kv_nbytes > held.live_nbytes
    finally:
        engine.close()


def test_clearing_while_a_sequence_runs_changes_no_answer() -> None:
    engine = DrivenEngine("qwen3_5", shares_from=64, prefill_chunk=64)
    try:
        prompt = words(510, 600)
        cold = engine.cold(prompt)
        cleared: list[object] = []
        running = engine.run(
            prompt,
            boundaries=_marks(prompt),
            on_event=lambda event: cleared.append(engine.loop.clear()) if isinstance(event, Progress) else None,
        )
        assert running.tokens == cold and len(cleared) > 1
        engine.check()
        assert engine.run(prompt).tokens == cold
    finally:
        engine.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_lending_takes_no_room(architecture: str) -> None:
    engine = DrivenEngine(architecture)
    footprint = engine.ask(lambda worker: worker.runner.footprint)
    engine.close()
    # Nearly all of the budget: there is no room for the sequence and a copy.
    budget = int(footprint.at(2100) / 0.8) + 2 * footprint.snapshot
    engine = DrivenEngine(architecture, shares_from=64, prefill_chunk=256, cache_bytes=budget)
    try:
        prompt = words(520, 2000)
        answer = engine.run(prompt)
        longer = [*prompt, *answer.tokens, *words(521, 20)]
        assert engine.run(longer).end.outcome.num_reused == len(prompt) + len(answer.tokens) - 1
    finally:
        engine.close()


def test_a_parked_sequence_that_cannot_be_adopted_stays_parked(engine: DrivenEngine) -> None:
    prompt = words(530, 300)
    answer = engine.run(prompt, num=20)
    longer = [*prompt, *answer.tokens, *words(531, 10)]

    break_at(Failpoint.BEGIN_RESTORE)
    assert engine.run(longer).end.error is not None
    again = engine.run(longer)
    assert again.tokens == engine.cold(longer)
    assert again.computed <= 11
    engine.ask(lambda worker: worker.cache.clear())
    engine.check()
    assert engine.ask(_lenders) == set()


def test_a_recall_that_breaks_off_empties_the_cache_and_no_more(engine: DrivenEngine) -> None:
    prompt = words(540, 300)
    answer = engine.run(prompt, num=20)
    longer = [*prompt, *answer.tokens, *words(541, 10)]
    break_at(Failpoint.COPY_OUT)
    engine.loop.clear()
    assert engine.run(longer).tokens == engine.cold(longer)
    assert engine.loop.status().held.kv_nbytes > 0


def test_a_recall_that_breaks_off_fails_only_the_request_that_needed_the_room(engine: DrivenEngine) -> None:
    prompt = words(543, 300)
    engine.run(prompt, num=20)
    prompts = [words(544 + i, 340) for i in range(2)]
    cold = engine.cold(prompts[1])
    has_raised = break_at(Failpoint.COPY_OUT)
    # Until then nothing fits, so the first to start has idle sequences closed.
    ACTIONS[Failpoint.FITS] = lambda nbytes: nbytes <= 0 or has_raised()
    # Both are admitted in one step.
    failed, other = engine.submit_all(prompts)
    assert failed.wait().end.error is not None
    assert other.wait().end.error is None
    assert other.tokens == cold
    engine.check()


def test_one_whose_end_goes_wrong_ends_all_the_same(engine: DrivenEngine, caplog: pytest.LogCaptureFixture) -> None:
    prompt = words(550, 300)
    beside = words(551, 200)
    cold = engine.cold(beside, num=30)

    has_raised = break_at(Failpoint.COPY_OUT)
    other = engine.submit(beside, num=30)
    assert len(engine.submit(prompt, num=4).wait().tokens) == 4
    assert has_raised()
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == ["could not release the state"]
    assert other.wait().tokens == cold
    assert engine.num_leases() == 0
    assert engine.loop.status().is_idle
    again = engine.run(prompt, num=4)
    assert again.end.outcome.num_reused == 0
    assert again.tokens == engine.cold(prompt, num=4)
    engine.loop.clear().result(PATIENCE_S)
    assert engine.loop.status().held.live_nbytes == 0


def test_joining_small_pieces_leaves_lent_ones_alone(engine: DrivenEngine) -> None:
    prompt = words(560, 60)
    answer = engine.run(prompt)
    # The first 67 entries are the cache's own, those behind are lent.
    prompt = [*prompt, *answer.tokens, *words(561, 200)]
    answer = engine.run(prompt)
    while engine.ask(lambda worker: worker.has_work):
        pass
    lenders = engine.ask(_lenders)
    assert len(lenders) == 1
    assert lenders == engine.ask(lambda worker: set(worker.sequences.idle))


def test_a_sequence_is_parked_only_for_what_the_cache_has_on_loan(engine: DrivenEngine) -> None:
    engine.run(words(570, 900), num=20)
    assert engine.ask(lambda worker: len(worker.sequences.idle)) == 1
    # As when a path is cut back behind others' leases: what is dropped there is not asked for again.
    engine.ask(lambda worker: worker.cache.reset())
    engine.run(words(571, 20))
    assert engine.ask(lambda worker: len(worker.sequences.idle)) == 0
    assert engine.loop.status().held.live_nbytes == 0

"""A request that goes wrong ends alone; the loop, the cache and the others go on."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from reprise.core.errors import BadRequest, ContextTooLong, EngineFailed, QueueFull, ShuttingDown
from reprise.core.events import FinishReason, Sampled, Started
from reprise.core.job import Sampling, Thinking
from reprise.core.outcome import Reason
from reprise.core.prompt import Boundary, BoundaryKind
from tests.loop.driving import GREEDY, PATIENCE_S, DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words


@pytest.fixture(scope="module", params=["qwen3_5", "llama"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, max_batch=4, max_queue=3, prefill_chunk=256)
    yield engine
    engine.close()


def _raise(token: int) -> bool:
    raise RuntimeError("the watch is broken")


def test_one_that_raises_leaves_its_batch_mates_alone(engine: DrivenEngine) -> None:
    prompts = [words(200 + i, 30 + i) for i in range(3)]
    cold = [engine.cold(prompt, num=12) for prompt in prompts]
    running = [engine.submit(prompt, num=12) for prompt in prompts]
    broken = engine.submit(words(210, 33), num=12, watch=_raise)
    assert [r.wait().tokens for r in running] == cold
    error = broken.wait().end.error
    assert isinstance(error, EngineFailed)
    assert str(error) == "The request failed in the engine: the watch is broken. The log has the whole error."
    assert engine.run(prompts[0], num=12).tokens == cold[0]
    assert engine.num_leases() == 0


def test_a_sink_that_raises_harms_nobody(engine: DrivenEngine) -> None:
    prompt = words(220, 30)

    def broken(event: object) -> None:
        raise RuntimeError("the reader is gone")

    running = engine.submit(prompt, on_event=broken)
    running.wait()
    assert engine.run(prompt).tokens == engine.cold(prompt)


def test_a_token_that_the_model_does_not_have(engine: DrivenEngine) -> None:
    ended = engine.run(words(230, 20), sampling=replace(GREEDY, logit_bias={10**6: 1.0}))
    assert isinstance(ended.end.error, BadRequest)
    assert ended.end.error.param == "logit_bias"


def test_a_prompt_longer_than_the_context(engine: DrivenEngine) -> None:
    context = engine.model.context
    assert context is not None
    with pytest.raises(ContextTooLong, match="Shorten"):
        engine.submit([1] * context)


def test_the_queue_is_bounded(engine: DrivenEngine) -> None:
    # Four run and three wait; the engine is held up meanwhile.
    hold = threading.Event()
    engine.loop.call(lambda worker: hold.wait(PATIENCE_S) and None)
    accepted = [engine.submit(words(240 + i, 20)) for i in range(7)]
    with pytest.raises(QueueFull) as refused:
        engine.submit(words(250, 20))
    assert refused.value.retry_after_s >= 1
    hold.set()
    for running in accepted:
        assert running.wait().end.error is None
    assert engine.run(words(250, 20)).end.error is None


def test_a_waiting_job_can_be_cancelled(engine: DrivenEngine) -> None:
    hold = threading.Event()
    engine.loop.call(lambda worker: hold.wait(PATIENCE_S) and None)
    running = engine.submit(words(260, 20))
    assert engine.loop.cancel(running.job.id)
    hold.set()
    assert running.wait().end.reason is FinishReason.CANCELLED
    assert not any(isinstance(event, Started | Sampled) for event in running.events)
    assert not engine.loop.cancel(running.job.id)


def test_a_cancelled_prefill_that_is_sent_again_was_cancelled_and_not_evicted(engine: DrivenEngine) -> None:
    prompt = words(265, 1500)
    first = engine.submit(prompt, cancel_when=lambda running: len(running.progress) > 0).wait()
    assert first.end.reason is FinishReason.CANCELLED and first.end.outcome.num_prefilled < 1499
    other = engine.run([*prompt[: first.end.outcome.num_prefilled], *words(266, 20)]).end.outcome
    assert other.reason in (Reason.NEW_TOKENS, Reason.BRANCHED)
    again = engine.run(prompt).end.outcome
    assert again.num_reused > 0 and again.reason is Reason.CANCELLED
    # What is cleared was not evicted either.
    engine.loop.clear().result(PATIENCE_S)
    assert engine.run(prompt).end.outcome.reason is Reason.COLD


def test_a_follower_takes_over_from_a_cancelled_leader(engine: DrivenEngine) -> None:
    shared = words(270, 1500)
    prompts = [[*shared, *words(271 + i, 9)] for i in range(3)]
    cold = engine.cold(prompts[1])

    def submit(worker: object) -> list[SubmittedJob]:
        leader = engine.submit(prompts[0], cancel_when=lambda leader: len(leader.progress) > 0)
        return [leader, *(engine.submit(prompt) for prompt in prompts[1:])]

    leader, *followers = engine.ask(submit)
    assert leader.wait().end.reason is FinishReason.CANCELLED
    answers = [follower.wait() for follower in followers]
    assert answers[0].tokens == cold
    computed = leader.computed + sum(answer.computed for answer in answers)
    assert computed <= 1.02 * (1500 + 3 * 9)


def test_seeds_give_the_same_tokens_whatever_else_runs(engine: DrivenEngine) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, top_k=40, seed=7)
    prompt = words(280, 40)
    alone = engine.run(prompt, num=16, sampling=sampling).tokens
    others = [engine.submit(words(281 + i, 50), num=30, sampling=Sampling(seed=i)) for i in range(2)]
    beside = engine.submit(prompt, num=16, sampling=sampling).wait().tokens
    for other in others:
        other.wait()
    assert alone == beside
    assert alone != engine.run(prompt, num=16, sampling=replace(sampling, seed=8)).tokens


def test_thinking_ends_at_its_budget(engine: DrivenEngine) -> None:
    thinking = Thinking(start=(5,), end=(6, 7), budget=4, is_open=True)
    tokens = engine.run(words(290, 20), num=12, thinking=thinking).tokens
    assert len(tokens) == 12
    assert tokens[4:6] == [6, 7]


def test_logprobs_are_those_of_the_chosen_token(engine: DrivenEngine) -> None:
    running = engine.run(words(300, 20), num=4, sampling=replace(GREEDY, logprobs=3))
    for event in running.events:
        if isinstance(event, Sampled):
            assert len(event.top) == 3
            assert event.top[0][0] == event.token
            assert event.top[0][1] == event.logprob


@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3_text"])
def test_a_small_budget_is_kept_and_changes_no_answer(architecture: str) -> None:
    engine = DrivenEngine(architecture)
    try:
        # For the chat as it is in the end, once as it runs and once as it is stored, and not for the turns before it.
        runner = engine.ask(lambda worker: worker.runner)
        budget = runner.most_live_nbytes(800, chunk=256) + runner.footprint.at(500)
        engine.ask(lambda worker: worker.set_budget(budget))
        prompt = words(310, 200)
        for turn in range(8):
            answer = engine.run(prompt)
            assert answer.tokens == engine.cold(prompt)
            held = engine.loop.status().held
            assert held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes <= budget
            prompt = [*prompt, *answer.tokens, *words(311 + turn, 30)]
        assert engine.loop.status().counts.num_evictions > 0
    finally:
        engine.close()


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    engine = DrivenEngine("llama")
    running = engine.submit(words(320, 20), num=200)
    engine.close()
    assert running.end.reason is FinishReason.LENGTH
    with pytest.raises(ShuttingDown):
        engine.submit(words(321, 20))


def test_a_pin_beyond_all_clocks_ends_nothing(engine: DrivenEngine) -> None:
    prompt = words(290, 40)
    engine.run(prompt, boundaries=[Boundary(20, BoundaryKind.EXPLICIT)], pin_for_s=1e300)
    assert engine.run(prompt).computed == 0
    assert engine.ask(lambda worker: worker.wakes_in_s) is not None
    engine.loop.clear()
    assert engine.ask(lambda worker: worker.wakes_in_s) is None


def test_what_is_cleared_is_gone_when_the_answer_comes(engine: DrivenEngine) -> None:
    engine.run(words(291, 60))
    assert engine.loop.status().held.num_tokens > 0
    engine.loop.clear().result(PATIENCE_S)
    assert engine.loop.status().held.num_tokens == 0


def test_who_asked_and_has_gone_changes_nothing(engine: DrivenEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.run(words(292, 60))
    hold = threading.Event()
    engine.loop.call(lambda worker: hold.wait(PATIENCE_S) and None)
    is_cancelled = engine.loop.clear().cancel()
    # Whatever came of it: a thread that is held would hold up all tests after this one.
    hold.set()
    assert is_cancelled
    engine.ask(lambda worker: None)
    assert engine.loop.status().held.num_tokens > 0
    assert caplog.records == []

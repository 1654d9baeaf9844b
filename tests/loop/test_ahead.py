"""Passes that are begun before the last tokens are read change no answer, whoever comes, goes or stops meanwhile."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from reprise.core.events import Event, FinishReason, Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Sampling, Thinking
from reprise.loop.worker import Worker
from tests.loop.driving import GREEDY, DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words

SAMPLED = Sampling(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=11)


class StepwiseGrammar:
    """A grammar that allows everything: each token has to be read before the next pass."""

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        return None

    def accept(self, token: int) -> None:
        pass


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5", "mamba2"])
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, max_batch=4, drafts="off")
    yield engine
    engine.close()


@pytest.fixture
def num_ahead() -> list[str]:
    """What was done with passes that were run ahead, in order."""
    done: list[str] = []
    ACTIONS[Failpoint.RUN_AHEAD] = lambda: done.append("run")
    ACTIONS[Failpoint.STEP_BACK] = lambda: done.append("undone")
    return done


def step_by_step(engine: DrivenEngine, prompt: list[int], **options: object) -> list[int]:
    """The answer, cold, with every token read before the next pass begins."""
    return engine.cold(prompt, constraint=StepwiseGrammar, **options)


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, replace(GREEDY, logprobs=2), replace(SAMPLED, xtc_probability=0.5)]
)
def test_a_pass_ahead_is_the_pass_that_would_have_come(
    engine: DrivenEngine, num_ahead: list[str], sampling: Sampling
) -> None:
    prompt = words(500, 70)
    expected = step_by_step(engine, prompt, num=20, sampling=sampling)
    assert num_ahead == []
    assert engine.cold(prompt, num=20, sampling=sampling) == expected
    # The first pass is not ahead of any, and behind the last token there is none.
    # Where the state behind the prompt is saved for repeats, the second one waits for that.
    assert num_ahead == ["run"] * (19 if engine.ask(lambda worker: worker.cache.layout.resumes_anywhere) else 18)


def test_the_next_turn_goes_on_from_before_a_pass_that_was_undone(engine: DrivenEngine, num_ahead: list[str]) -> None:
    prompt = words(510, 60)
    expected = step_by_step(engine, prompt, num=30)
    seen: list[int] = []
    stopped = engine.run(prompt, num=30, watch=lambda token: seen.append(token) or len(seen) == 9)
    assert stopped.end.reason is FinishReason.STOP
    assert stopped.tokens == expected[:9]
    assert num_ahead[-1] == "undone"
    longer = [*prompt, *stopped.tokens, *words(511, 12)]
    warm = engine.run(longer, num=8)
    assert warm.computed == 13
    assert warm.tokens == step_by_step(engine, longer, num=8)


def test_those_who_come_go_and_stop_leave_the_others_their_tokens(engine: DrivenEngine, num_ahead: list[str]) -> None:
    """One stops by itself, one is cancelled and one joins in the midst of the others' passes."""
    prompts = [words(520 + i, 40 + 9 * i) for i in range(4)]
    expected = [step_by_step(engine, prompt, num=40) for prompt in prompts]
    stop = frozenset({expected[1][10]})
    late: list[SubmittedJob] = []
    running: list[SubmittedJob] = []

    def meanwhile(event: Event) -> None:
        if isinstance(event, Sampled) and len(running[0].tokens) == 6:
            late.append(engine.submit(prompts[3], num=40))
        if isinstance(event, Sampled) and len(running[0].tokens) == 18:
            engine.loop.cancel(running[2].job.id)

    def submit(worker: object) -> None:
        running.append(engine.submit(prompts[0], num=40, on_event=meanwhile))
        running.append(engine.submit(prompts[1], num=40, stop_tokens=stop))
        running.append(engine.submit(prompts[2], num=4000))

    engine.ask(submit)
    for each in running:
        each.wait()
    assert late[0].wait().tokens == expected[3]
    assert running[0].tokens == expected[0]
    assert running[1].tokens == expected[1][: expected[1].index(next(iter(stop))) + 1]
    cancelled = running[2].tokens
    assert cancelled[:40] == expected[2][: len(cancelled)]
    assert "undone" in num_ahead
    engine.check()
    for run, prompt in zip([*running[:2], *late], [*prompts[:2], prompts[3]], strict=True):
        again = [*prompt, *run.tokens, 3]
        assert engine.run(again).tokens == engine.cold(again)


def test_thinking_ends_at_its_budget_all_the_same(engine: DrivenEngine, num_ahead: list[str]) -> None:
    thinking = Thinking(start=(5,), end=(6, 7), budget=8, is_open=True)
    prompt = words(530, 20)
    tokens = engine.cold(prompt, num=24, thinking=thinking)
    assert tokens[8:10] == [6, 7]
    assert tokens == step_by_step(engine, prompt, num=24, thinking=thinking)
    assert num_ahead.count("run") > 10


def test_a_copy_in_the_midst_of_a_pass_ahead_counts_its_bytes(engine: DrivenEngine) -> None:
    """Recurrent states before the pass are kept beside those behind it, and are in the books."""
    held: list[tuple[int, int]] = []

    def look(event: Event) -> None:
        if isinstance(event, Sampled):
            live = next(request.live for request in workers[0].requests.values())
            assert live is not None
            rows = live.rows
            kept = [a for arrays in rows.ahead.before.values() for a in arrays if a is not None] if rows.ahead else []
            held.append((rows.nbytes, sum(a.nbytes for a in [*rows.arrays(), *kept])))

    workers: list[Worker] = []
    engine.loop.clear()
    engine.ask(workers.append)
    engine.submit(words(540, 20), num=6, on_event=look).wait()
    assert len(held) == 6
    assert all(counted == real for counted, real in held)

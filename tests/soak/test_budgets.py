"""Budgets that change, bursts, cancels and evictions at random, with the books recomputed at every event."""

import random
from dataclasses import dataclass

import pytest

from reprise.core.events import Event
from reprise.core.job import Sampling
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.loop.worker import Worker
from tests.loop.driving import GREEDY, DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words
from tests.soak.house import Alone, JobResult
from tests.soak.lengths import times

_CHUNK = 64
_STEP = 256
"""The entries by which buffers grow."""


@dataclass(slots=True, eq=False)
class Auditor:
    """Checks the books at events, on the engine thread: what raises there is kept for the test."""

    worker: Worker
    num_checks: int = 0
    failure: BaseException | None = None
    most_over: int = 0

    def __call__(self, event: Event) -> None:
        cache = self.worker.cache
        assert cache.memory.budget is not None
        over = cache.memory.held - cache.memory.budget
        if over > self._growth():
            self.failure = self.failure or AssertionError(f"{over} bytes over the budget")
        self.most_over = max(self.most_over, over)
        self.num_checks += 1
        try:
            cache.check()
        except AssertionError as error:
            self.failure = self.failure or error

    def _growth(self) -> int:
        """What one more chunk takes in each sequence that runs: its entries, and the steps in which buffers grow."""
        footprint = self.worker.runner.footprint
        num = sum(task.live is not None for task in self.worker.requests.values())
        return max(1, num) * ((_CHUNK + 2 * _STEP) * sum(footprint.by_kind.values()) + 2 * footprint.snapshot)


def some_prompt(source: random.Random, chats: list[list[int]]) -> list[int]:
    base = source.choice(chats) if chats and source.random() < 0.8 else []
    cut = len(base) if source.random() < 0.5 else source.randint(0, len(base))
    return [*base[:cut][:700], *words(source.randrange(10**9), source.randint(1, 200))]


def fuzz(architecture: str, *, seed: int, num_bursts: int) -> None:
    source = random.Random(f"{architecture}:{seed}")
    engine = DrivenEngine(architecture, max_batch=4, prefill_chunk=_CHUNK, cache_bytes=3_000_000, shares_from=100)
    alone = Alone(architecture)
    auditor = Auditor(engine.ask(lambda worker: worker))
    chats: list[list[int]] = []
    for _ in range(num_bursts):
        budget = source.choice([900_000, 1_500_000, 3_000_000, 8_000_000])
        engine.ask(lambda worker, budget=budget: worker.memory.resize(budget))
        burst = [one_request(engine, source, some_prompt(source, chats), auditor) for _ in range(source.randint(1, 6))]
        if source.random() < 0.3:
            engine.ask(lambda worker: worker.cache.evict_one())
        for running in burst:
            running.wait()
            assert running.end.error is None
            alone.check(JobResult(running.job, running.tokens, running.end))
            chats = [*chats, [*running.job.prompt.tokens.tolist(), *running.tokens]][-8:]
        if auditor.failure is not None:
            raise auditor.failure
        engine.check()
        assert engine.num_leases() == 0
        held = engine.loop.status().held
        assert held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes <= budget
    assert auditor.num_checks > num_bursts
    assert engine.loop.status().counts.num_evictions > 0
    print(f"{architecture}: {auditor.num_checks} checks, {auditor.most_over} bytes over at most, {alone.num_ties} ties")
    engine.close()
    alone.close()


def one_request(engine: DrivenEngine, source: random.Random, prompt: list[int], auditor: Auditor) -> SubmittedJob:
    sampling = source.choice([GREEDY, GREEDY, Sampling(temperature=0.9, top_p=0.9, seed=source.randrange(99))])
    marks = [Boundary(source.randint(1, len(prompt)), BoundaryKind.SYSTEM) for _ in range(source.randint(0, 2))]
    leaves_after = source.choice([None, None, None, source.randint(1, 12)])
    mine: list[SubmittedJob] = []
    heard: list[Event] = []

    def hear(event: Event) -> None:
        heard.append(event)
        auditor(event)
        if len(heard) == leaves_after and mine:
            engine.loop.cancel(mine[0].job.id)

    mine.append(
        engine.submit(prompt, num=source.randint(1, 16), sampling=sampling, boundaries=set(marks), on_event=hear)
    )
    return mine[0]


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5", "mamba2"])
def test_many_bursts(architecture: str) -> None:
    for seed in range(times(2)):
        fuzz(architecture, seed=100 + seed, num_bursts=14)

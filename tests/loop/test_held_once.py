"""A chat, its branches and requests side by side: the cache holds each token's entries once."""

import pytest

from reprise.core.prompt import Boundary, BoundaryKind
from reprise.engine.running.runner import SHARES_FROM
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine, SubmittedJob
from tests.loop.test_reuse import words
from tests.matrix import now_and_later

_MOST = 1.1


@pytest.mark.parametrize("shares_from", now_and_later([200], [SHARES_FROM]))
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5"])
def test_turns_branches_and_parallel_requests_are_held_once(architecture: str, shares_from: int) -> None:
    engine = DrivenEngine(architecture, shares_from=shares_from, prefill_chunk=128, max_batch=6)
    unique: set[tuple[int, ...]] = set()

    def ask(prompt: list[int]) -> SubmittedJob:
        return engine.submit(prompt, num=12, boundaries=[Boundary(len(prompt) - 2, BoundaryKind.STABLE)])

    def note(prompt: list[int], running: SubmittedJob) -> list[int]:
        # The last token is sampled, and not computed.
        whole = [*prompt, *running.wait().tokens[:-1]]
        unique.update(tuple(whole[:stop]) for stop in range(1, len(whole) + 1))
        return [*prompt, *running.tokens]

    def check(worker: Worker) -> None:
        cache, footprint = worker.cache, worker.runner.footprint
        cache.check()
        assert cache.stats.num_tokens <= len(unique)
        assert cache.stats.kv_nbytes <= _MOST * len(unique) * sum(footprint.by_kind.values())
        num_marks = cache.stats.num_checkpoints if cache.layout.has_snapshots else 0
        assert cache.stats.snapshot_nbytes == num_marks * footprint.snapshot

    try:
        chat = words(950, 240)
        for turn in range(6):
            chat = [*note(chat, ask(chat)), *words(960 + turn, 25)]
            engine.ask(check)
        for branch in range(5):
            other = [*chat[:300], *words(970 + branch, 40)]
            note(other, ask(other))
            engine.ask(check)
        side_by_side = [[*chat, *words(980 + i, 10)] for i in range(6)]
        running = [ask(prompt) for prompt in side_by_side]
        for each in running:
            each.wait()
        for prompt, each in zip(side_by_side, running, strict=True):
            note(prompt, each)
        engine.ask(check)
        assert sum(each.end.outcome.num_prefilled for each in running) <= 6 * 12 + len(chat)
        assert engine.ask(lambda worker: worker.cache.stats.num_tokens) == len(unique)
        live = engine.ask(lambda worker: worker.runner.live_nbytes)
        assert live == 0 or shares_from < SHARES_FROM
    finally:
        engine.close()

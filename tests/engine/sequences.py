"""Runs sequences on a runner as the loop does, without the loop."""

import itertools
from collections.abc import Sequence
from typing import Any

from reprise.cache.lookup import Restore
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.events import FinishReason, Sampled
from reprise.core.job import Job, Sampling
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import as_tokens
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner, TokenFailure, TokenResult
from tests.models.shared import loaded

GREEDY = Sampling(temperature=0)
_ids = itertools.count()


def a_job(tokens: Sequence[int], *, num: int = 8, sampling: Sampling = GREEDY, **more: Any) -> Job:
    return Job(
        id=f"job-{next(_ids)}", prompt=Prompt(tokens=as_tokens(tokens)), max_tokens=num, sampling=sampling, **more
    )


def resumed(runner: Runner, restore: Restore, *, reserve: int) -> LiveSequence:
    """A sequence restored at once, with buffers for about `reserve` positions."""
    live = runner.begin()
    runner.begin_restore(live, restore.position, reserve=reserve)
    while live.restoration is not None:
        runner.restore_part(live, restore)
    return live


class RunnerWithCache:
    """A runner with its prefix cache."""

    def __init__(self, architecture: str = "llama") -> None:
        self.runner = Runner(loaded(architecture), can_batch=True)
        self.cache = PrefixCache(self.runner.loaded.blueprint.layout)

    def begin(self, job: Job) -> LiveSequence:
        """Resume where the cache can, prefill up to the last token, get ready to decode."""
        tokens = job.prompt.tokens
        match = self.cache.match(tokens)
        at = self.cache.resume_at(match, limit=len(tokens) - 1)
        live = resumed(self.runner, self.cache.read(match, at), reserve=len(tokens))
        if at < len(tokens) - 1:
            self.runner.prefill([live], [tokens[at:-1]])
        self.runner.begin_decode(live, job)
        return live

    def keep(self, live: LiveSequence, job: Job) -> None:
        """Store what the sequence stands on."""
        tokens = as_tokens([*job.prompt.tokens.tolist(), *live.ready.tokens])[: live.position]
        self.cache.commit(tokens, self.runner.source(live), kind=BoundaryKind.GENERATION_END)

    def events(self, job: Job) -> list[Sampled]:
        """All tokens of one job, alone."""
        live = self.begin(job)
        found: list[Sampled] = []
        while True:
            (result,) = self.runner.decode([live])
            if isinstance(result, TokenFailure):
                raise result.error
            found.extend(result.sampled)
            if result.reason is not None:
                self.reason: FinishReason = result.reason
                self.keep(live, job)
                self.runner.stop(live)
                return found

    def tokens(self, tokens: Sequence[int], **more: Any) -> list[int]:
        return [event.token for event in self.events(a_job(tokens, **more))]

    def step(self, lives: Sequence[LiveSequence]) -> dict[LiveSequence, int | Exception]:
        """One pass: the token or the error of each."""
        results: list[TokenResult | TokenFailure] = self.runner.decode(lives)
        return {r.live: r.error if isinstance(r, TokenFailure) else r.sampled[-1].token for r in results}

"""What happens when no more memory can be reclaimed for who runs: the youngest give up their state, and wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from reprise.core.prompt import Prompt
from reprise.engine.runner import LiveSequence
from reprise.loop.prefixes import RequestPrefixes
from reprise.loop.request_table import RequestTable
from reprise.loop.requests import Preempted, RunningRequest, Waiting
from reprise.loop.sequences import SequencePool

log = logging.getLogger("reprise.loop")


class Preemption:
    """Comes after all that `Memory.reserve` asks: duplicates, eviction, idle sequences, pins."""

    def __init__(self, requests: RequestTable, prefixes: RequestPrefixes, sequences: SequencePool) -> None:
        self._requests = requests
        self._prefixes = prefixes
        self._sequences = sequences
        self.others: Sequence[Preemption] = ()
        """Those of the other models, which share the memory."""

    def until_fit(
        self, requests: Sequence[RunningRequest], reserve: Callable[[list[LiveSequence]], bool]
    ) -> list[RunningRequest]:
        """Those of `requests` that can take their next step: the youngest of all that run wait where there is no room.

        The last one that runs goes on whatever it takes.
        """
        going = list(requests)
        while going and not reserve([request.live for request in going if request.live is not None]):
            running = [(each, request) for each in (self, *self.others) for request in each.running]
            if len(running) == 1:
                break
            whose, youngest = max(running, key=lambda each: (each[1].is_settle, each[1].arrived_s))
            whose.preempt(youngest)
            going = [request for request in going if request.is_running]
        return going

    @property
    def running(self) -> list[RunningRequest]:
        return self._requests.running

    def preempt(self, request: RunningRequest) -> None:
        """Have it wait; if that goes wrong, it fails alone."""
        self._requests.run_isolated(request, self._preempt)

    def _preempt(self, request: RunningRequest) -> None:
        """Give the request's state up, to be computed again when there is room; what the cache can keep is kept."""
        assert request.live is not None
        log.info("request %s was preempted at token %d for lack of memory", request.id, request.position)
        self._prefixes.store_progress(request)
        sampler = self._sequences.runner.pause(request.live)
        preempted = request.preempted
        if sampler is not None:
            prompt = Prompt(tokens=request.tokens, boundaries=request.job.prompt.boundaries)
            preempted = Preempted(prompt=prompt, sampler=sampler)
        self._requests.release(request, Waiting(preempted=preempted))
        request.stored = 0
        self._requests.counts.update(num_preemptions=1)

    def is_context_full(self, request: RunningRequest, *, budget: int | None) -> bool:
        """Whether nothing else is there to give way, and its next token has no room: its memory is its context.

        Of the configured budget: what other programs need at this moment ends no answer.
        """
        live, is_alone = request.live, self.running == [request] and not any(other.running for other in self.others)
        return live is not None and is_alone and not self._sequences.fits_next_token(live, budget=budget)

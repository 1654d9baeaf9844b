"""Preemption: when no more memory can be reclaimed, the youngest requests lose their state and wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from reprise.engine.running.live_sequence import LiveSequence
from reprise.loop.prefixes import RequestPrefixes
from reprise.loop.request_table import RequestTable
from reprise.loop.requests import Preempted, RunningRequest, Waiting
from reprise.loop.sequences import SequencePool

log = logging.getLogger("reprise.loop")


class Preemption:
    """Preempts running requests, after `Memory.reserve` has freed duplicates, prefixes, idle sequences and pins."""

    def __init__(self, requests: RequestTable, prefixes: RequestPrefixes, sequences: SequencePool) -> None:
        self._requests = requests
        self._prefixes = prefixes
        self._sequences = sequences
        self.others: Sequence[Preemption] = ()
        """The preemptions of other models that share the memory."""

    def until_fit(
        self, requests: Sequence[RunningRequest], reserve: Callable[[list[LiveSequence]], bool]
    ) -> list[RunningRequest]:
        """Preempt the youngest running requests until `reserve` succeeds; returns the `requests` that still run.

        The last running request is never preempted. For it, features of images go that others hold, or that it is past.
        """
        going: list[RunningRequest] = list(requests)
        while going and not reserve([request.live for request in going if request.live is not None]):
            running = [(each, request) for each in (self, *self.others) for request in each.running]
            if len(running) == 1:
                if any(each.release_features() for each in (self, *self.others)):
                    continue
                break
            whose, youngest = max(running, key=lambda each: (each[1].is_settle, each[1].arrived_s))
            whose._requests.run_isolated(youngest, whose.preempt)
            going = [request for request in going if request.is_running]
        return going

    @property
    def running(self) -> list[RunningRequest]:
        return self._requests.running

    def release_features(self) -> bool:
        """Drop features of an image that no running request has still to be prefilled with. False if there are none."""
        needed = [each.image for r in self.running for each in r.prompt.images if each.span.stop > r.position]
        return self._sequences.runner.features.release_held(needed)

    def preempt(self, request: RunningRequest) -> None:
        """Store what the cache can take, free the request's state, and queue the request again."""
        assert request.live is not None
        log.info("request %s was preempted at token %d for lack of memory", request.id, request.position)
        self._prefixes.store_progress(request)
        sampler = self._sequences.runner.pause(request.live)
        preempted = request.preempted
        if sampler is not None:
            prompt = replace(request.job.prompt, tokens=request.tokens)
            preempted = Preempted(prompt=prompt, sampler=sampler)
        beside = frozenset(other.id for other in self.running if other is not request)
        self._requests.release(request, Waiting(preempted=preempted, preempted_beside=beside))
        request.stored = 0
        self._requests.counts.update(num_preemptions=1)

    def is_context_full(self, request: RunningRequest, *, budget: int | None) -> bool:
        """Whether its next token does not fit and no other request runs: memory then limits its context.

        By the configured budget, so that a temporary need of other programs does not end an answer.
        """
        live, is_alone = request.live, self.running == [request] and not any(other.running for other in self.others)
        if live is None or budget is None or not is_alone:
            return False
        return self._sequences.runner.growth([live], 2) > max(0, budget - self._sequences.memory.held)

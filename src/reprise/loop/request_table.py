"""The requests that are in the loop, and how each leaves it: for itself, whatever goes wrong, and with all that it
holds given back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, ValuesView

from reprise.core.clock import Clock
from reprise.core.errors import EngineFailed, OutOfMemory, RepriseError
from reprise.core.events import Event, Finished, FinishReason
from reprise.core.job import Purpose
from reprise.engine import memory as device_memory
from reprise.loop.admission import Gate
from reprise.loop.requests import Decoding, Ended, Prefilling, RunningRequest, Waiting
from reprise.loop.sequences import SequencePool
from reprise.schedule.sharing import common_prefix_lengths

log = logging.getLogger("reprise.loop")

_CHAT_TOKENS = 1024
"""Beside a prompt longer than this, a short one that shares nothing is an auxiliary request."""


class RequestTable:
    """Every request from its arrival to its end, in the order of arrival, and what all of them came to."""

    def __init__(self, sequences: SequencePool, gate: Gate, *, clock: Clock) -> None:
        self._sequences = sequences
        self._gate = gate
        self._clock = clock
        self._by_id: dict[str, RunningRequest] = {}
        self.counts: Counter[str] = Counter()
        """What was done so far, by the names of `Counts`."""
        self.num_ahead: Mapping[str, int] = {}
        """As in `Status`. Replaced, never changed: other threads have it."""
        self.saved_s = 0.0

    # Who is there.

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, request_id: str) -> RunningRequest:
        return self._by_id[request_id]

    def get(self, request_id: str) -> RunningRequest | None:
        """The request of this id; None if it has ended."""
        return self._by_id.get(request_id)

    def values(self) -> ValuesView[RunningRequest]:
        return self._by_id.values()

    @property
    def running(self) -> list[RunningRequest]:
        """Those that have a sequence."""
        return [request for request in self.values() if request.is_running]

    def is_awaited(self, leader: RunningRequest) -> bool:
        """Whether a repeat of this request waits."""
        return any(other.is_waiting and other.is_repeat_of(leader) for other in self.values())

    def has_chat_beside(self, request: RunningRequest) -> bool:
        """Whether a long prompt of another request is there."""
        others = (other for other in self.values() if other is not request and not other.is_settle)
        return any(len(other.job.prompt) > _CHAT_TOKENS for other in others)

    # Arriving.

    def add(self, request: RunningRequest) -> None:
        self._by_id[request.id] = request
        if not request.is_settle:
            self.counts.update(num_requests=1)

    def note_prefilled(self, request: RunningRequest, num: int) -> None:
        """So many more tokens of the request's prompt are computed."""
        self.counts.update({"num_settled" if request.is_settle else "num_prefilled": num})
        if request.job.purpose is not Purpose.GENERATE:
            owner = request.job.owner
            self.num_ahead = {**self.num_ahead, owner: self.num_ahead.get(owner, 0) + num}

    def relate(self, request: RunningRequest) -> None:
        """Note what the request's prompt has in common with those whose computed prefixes it could use."""
        if request.job.prompt_logprobs is None:
            others = (o for o in self.values() if o is not request and o.namespace == request.namespace)
            prompts = {other.id: other.job.prompt.tokens for other in others}
            request.common_prefix_lengths = common_prefix_lengths(request.job.prompt.tokens, prompts)

    def note_change(self, leader: RunningRequest) -> None:
        """The cache has got more of a request's path, or the request has gone: those who wait for it look again."""
        for other in self.values():
            if isinstance(other.phase, Waiting) and (
                leader.id in other.common_prefix_lengths or other.id in leader.common_prefix_lengths
            ):
                other.phase.is_matched = False

    # Going wrong.

    def run_isolated(self, request: RunningRequest, action: Callable[[RunningRequest], object]) -> None:
        """Do something for a request; if that raises, it fails alone."""
        if isinstance(request.phase, Ended):
            return
        try:
            action(request)
        except Exception as error:
            self.fail(request, error)

    def fail_together(self, requests: Sequence[RunningRequest], error: Exception) -> None:
        """End all of these with `error`, and keep nothing of them: their state is not to be trusted."""
        log.error("%d requests lost their state", len(requests), exc_info=error)
        # All of them before the first one fails, which may make room with what they hold.
        for request in requests:
            self._discard_state(request)
        for request in requests:
            self.fail(request, error)

    def fail(self, request: RunningRequest, error: Exception) -> None:
        """The request has failed. What is no error of ours becomes one, with a sentence for its client."""
        if device_memory.is_out_of_memory(error):
            shown: RepriseError = OutOfMemory(
                "Not enough memory for this request. Shorten it, or lower --cache-bytes or --max-batch."
            )
            self._relieve(request)
        elif isinstance(error, RepriseError):
            shown = error
        else:
            log.error("request %s failed", request.id, exc_info=error)
            shown = EngineFailed(f"The request failed in the engine: {type(error).__name__}: {error}")
        self.finish(request, FinishReason.FAILED, shown)

    def _relieve(self, request: RunningRequest) -> None:
        """There was too little memory for this request: make what room there is for its next try."""
        try:
            self._sequences.memory.reserve(self._sequences.estimate(len(request.prompt)))
        except Exception:
            log.exception("making room failed; the cache is reset")
            self.reset_cache()
        device_memory.give_back()

    # Ending.

    def finish(self, request: RunningRequest, reason: FinishReason, error: RepriseError | None = None) -> None:
        """The request is over: give back what it holds, forget it, and tell its client."""
        outcome = request.outcome(self._clock())
        del self._by_id[request.id]
        if request.drafts is not None:
            request.drafts.end()
        self.release(request, Ended())
        if request.job.purpose is Purpose.GENERATE:
            self.saved_s += outcome.saved_s
        if not request.is_settle:
            self.counts.update(
                num_prompt=outcome.num_prompt if request.admission is not None else 0,
                num_reused=outcome.num_reused,
                num_finished=int(error is None and reason is not FinishReason.CANCELLED),
                num_cancelled=int(reason is FinishReason.CANCELLED),
                num_failed=int(error is not None),
            )
        self._gate.ended(request.id)
        self.emit(request, Finished(reason=reason, outcome=outcome, error=error))

    def release(self, request: RunningRequest, phase: Waiting | Ended) -> None:
        """Give back what the request holds, and enter `phase`. Whatever goes wrong, its client and the gate wait."""
        before, position, tokens = request.phase, request.position, request.tokens_to(request.position)
        request.enter(phase)
        self.note_change(request)
        if not isinstance(before, Prefilling | Decoding):
            return
        request.reached = max(request.reached, position)
        try:
            if before.lease is not None:
                self._sequences.cache.release(before.lease)
            # After that, since it stays idle for what the cache still shares with it.
            self._sequences.end(before.live, tokens, namespace=request.namespace)
            self._sequences.measure()
        except Exception:
            log.exception("could not release the state of request %s; the cache is reset", request.id)
            self._sequences.drop(before.live)
            self.reset_cache()
        if self._sequences.is_broken:
            self.reset_cache()

    def _discard_state(self, request: RunningRequest) -> None:
        """The state of a sequence is not to be trusted any more; only what it shared before the failure is kept."""
        phase = request.phase
        if not isinstance(phase, Prefilling | Decoding):
            return
        request.enter(Waiting())
        try:
            if phase.lease is not None:
                self._sequences.cache.release(phase.lease)
            # All that it was given or has computed: a checkpoint of this very run may have shared as well.
            self._sequences.discard(phase.live, request.tokens, namespace=request.namespace)
        except Exception:
            log.exception("lost the shared state of request %s; the cache is reset", request.id)
            self.reset_cache()

    def reset_cache(self) -> None:
        """Nobody knows any more what the cache holds: it holds nothing, and what runs goes on without it."""
        for request in self.values():
            if isinstance(request.phase, Prefilling | Decoding):
                request.phase.lease = None
        self._sequences.cache.reset()
        self._sequences.reset()

    def emit(self, request: RunningRequest, event: Event) -> None:
        """Tell the request's client."""
        try:
            request.sink(event)
        except Exception:
            # A sink that is gone (its event loop closed, say) must not hold up the others.
            log.debug("the sink of %s raised", request.id, exc_info=True)

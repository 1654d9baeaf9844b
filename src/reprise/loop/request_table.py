"""The requests in the loop, and how each ends: separately, whatever fails, and with everything that it holds freed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from reprise.core.clock import Clock
from reprise.core.errors import OutOfMemory, RepriseError, engine_failed
from reprise.core.events import Event, Finished, FinishReason
from reprise.core.job import Purpose
from reprise.engine import memory as device_memory
from reprise.loop.admission import Gate
from reprise.loop.requests import Decoding, Ended, Prefilling, RunningRequest, Waiting
from reprise.loop.sequences import SequencePool
from reprise.schedule.decide import CHAT_TOKENS
from reprise.schedule.sharing import common_prefix_lengths

log = logging.getLogger("reprise.loop")


class RequestTable(dict[str, RunningRequest]):
    """All requests by id, from arrival to end, in order of arrival, and counters over them."""

    def __init__(self, sequences: SequencePool, gate: Gate, *, clock: Clock) -> None:
        super().__init__()
        self._sequences = sequences
        self._gate = gate
        self._clock = clock
        self.counts: Counter[str] = Counter()
        """Counters so far, by the names of `Counts`."""
        self.num_ahead: Mapping[str, int] = {}
        """As in `Status`. Replaced, never changed: other threads have it."""
        self.saved_s = 0.0

    # Queries.

    @property
    def running(self) -> list[RunningRequest]:
        """The requests that have a sequence."""
        return [request for request in self.values() if request.is_running]

    def is_awaited(self, leader: RunningRequest) -> bool:
        """Whether a repeat of this request is waiting."""
        return any(other.is_waiting and other.is_repeat_of(leader) for other in self.values())

    def has_chat_beside(self, request: RunningRequest) -> bool:
        """Whether another request has a long prompt."""
        others = (other for other in self.values() if other is not request and not other.is_settle)
        return any(len(other.job.prompt) > CHAT_TOKENS for other in others)

    # Arrival.

    def add(self, request: RunningRequest) -> None:
        self[request.id] = request
        if not request.is_settle:
            self.counts.update(num_requests=1)

    def note_prefilled(self, request: RunningRequest, num: int) -> None:
        """So many more tokens of the request's prompt are computed."""
        self.counts.update({"num_settled" if request.is_settle else "num_prefilled": num})
        if request.job.purpose is not Purpose.GENERATE:
            owner = request.job.owner
            self.num_ahead = {**self.num_ahead, owner: self.num_ahead.get(owner, 0) + num}

    def note_common_prefixes(self, request: RunningRequest) -> None:
        """Compute the common prefix lengths with the requests whose prefixes it could use."""
        if request.job.prompt_logprobs is None:
            others = (o for o in self.values() if o is not request and o.namespace == request.namespace)
            prompts = {other.id: other.job.prompt.tokens for other in others}
            request.common_prefix_lengths = common_prefix_lengths(request.job.prompt.tokens, prompts)

    def note_change(self, leader: RunningRequest) -> None:
        """After a commit of a request or its end: requests that share a prefix with it must look up again."""
        for other in self.values():
            if isinstance(other.phase, Waiting) and (
                leader.id in other.common_prefix_lengths or other.id in leader.common_prefix_lengths
            ):
                other.phase.is_matched = False

    # Failure.

    def run_isolated(self, request: RunningRequest, action: Callable[[RunningRequest], object]) -> None:
        """Run an action for a request; if it raises, only this request fails."""
        if isinstance(request.phase, Ended):
            return
        try:
            action(request)
        except Exception as error:
            self.fail(request, error)

    def fail_together(self, requests: Sequence[RunningRequest], error: Exception) -> None:
        """Fail these requests and discard their state, which can no longer be trusted."""
        log.error("%d requests lost their state", len(requests), exc_info=error)
        # Discard all states first: failing a request may reclaim memory from the others.
        for request in requests:
            self._discard_state(request)
        for request in requests:
            self.fail(request, error)

    def fail(self, request: RunningRequest, error: Exception) -> None:
        """End a request with an error; other exceptions become a `RepriseError` for its client."""
        if device_memory.is_out_of_memory(error):
            shown: RepriseError = OutOfMemory(
                "Not enough memory for this request. Shorten it, or lower --cache-bytes or --max-batch."
            )
            self._free_memory_for(request)
        elif isinstance(error, RepriseError):
            shown = error
        else:
            log.error("request %s failed", request.id, exc_info=error)
            shown = engine_failed("The request failed in the engine", error)
        self.finish(request, FinishReason.FAILED, shown)
        if self._sequences.is_broken:
            # Others may be admitted in this step.
            self.reset_cache()

    def _free_memory_for(self, request: RunningRequest) -> None:
        """Reclaim memory for another attempt of a request that ran out of memory."""
        try:
            needed = self._sequences.estimate(len(request.prompt), images=request.prompt.spans)
            self._sequences.memory.reserve(needed)
        except Exception:
            log.exception("making room failed; the cache is reset")
            self.reset_cache()
        device_memory.give_back()

    # End.

    def finish(self, request: RunningRequest, reason: FinishReason, error: RepriseError | None = None) -> None:
        """End a request: free what it holds, remove it, and emit `Finished`."""
        outcome = request.outcome(self._clock())
        del self[request.id]
        try:
            if request.drafts is not None:
                request.drafts.end()
            self._sequences.runner.features.let_go(request.id)
            self.release(request, Ended())
        finally:
            # Whatever fails: nobody else knows this request any more.
            if request.job.purpose is Purpose.GENERATE:
                self.saved_s += outcome.saved_s
            if not request.is_settle:
                self.counts.update(
                    num_prompt=outcome.num_prompt if request.stats.admission is not None else 0,
                    num_reused=outcome.num_reused,
                    num_images_encoded=outcome.num_images_encoded,
                    num_images_reused=outcome.num_images_reused,
                    num_finished=int(error is None and reason is not FinishReason.CANCELLED),
                    num_cancelled=int(reason is FinishReason.CANCELLED),
                    num_failed=int(error is not None),
                )
            if self._gate.ended(request.id):
                self.emit(request, Finished(reason=reason, outcome=outcome, error=error))

    def release(self, request: RunningRequest, phase: Waiting | Ended) -> None:
        """Free what the request holds and enter `phase`. Does not raise, so that its client always gets an end."""
        before, position, tokens = request.phase, request.position, request.tokens_to(request.position)
        request.enter(phase)
        self.note_change(request)
        if not isinstance(before, Prefilling | Decoding):
            return
        request.stats.reached = max(request.stats.reached, position)
        try:
            if before.lease is not None:
                self._sequences.cache.release(before.lease)
            # After the lease: whether it stays idle depends on what the cache still shares with it.
            self._sequences.end(before.live, tokens, namespace=request.namespace)
            self._sequences.measure()
        except Exception:
            log.exception("could not release the state of request %s; the cache is reset", request.id)
            self._sequences.drop(before.live)
            self.reset_cache()

    def _discard_state(self, request: RunningRequest) -> None:
        """Discard a sequence whose state cannot be trusted; only what it shared before the failure is kept."""
        phase = request.phase
        if not isinstance(phase, Prefilling | Decoding):
            return
        request.enter(Waiting())
        try:
            if phase.lease is not None:
                self._sequences.cache.release(phase.lease)
            # Its whole path: commits of this run may share its buffers too.
            self._sequences.discard(phase.live, request.tokens, namespace=request.namespace)
        except Exception:
            log.exception("lost the shared state of request %s; the cache is reset", request.id)
            self.reset_cache()

    def reset_cache(self) -> None:
        """Empty a cache that can no longer be trusted; running requests continue without it."""
        for request in self.values():
            if isinstance(request.phase, Prefilling | Decoding):
                request.phase.lease = None
        self._sequences.cache.reset()
        self._sequences.reset()

    def emit(self, request: RunningRequest, event: Event) -> None:
        """Send an event to the request's client."""
        try:
            request.sink(event)
        except Exception:
            # A dead sink (its event loop closed) must not affect others.
            log.debug("the sink of %s raised", request.id, exc_info=True)

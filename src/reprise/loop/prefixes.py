"""Connects requests with the prefix cache and the disk: lookups, restores, commits and pins."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable

from cachetools import FIFOCache

from reprise.cache.lookup import Match, evicted_to, was_cancelled
from reprise.cache.node import Lease
from reprise.core.allowance import StepAllowance
from reprise.core.clock import Clock
from reprise.core.images import outside
from reprise.core.job import Purpose
from reprise.core.outcome import Reason
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, union
from reprise.engine.running.score import PromptScorer
from reprise.loop.read_ahead import MIN_TOKENS
from reprise.loop.request_table import RequestTable
from reprise.loop.requests import Admission, Decoding, Prefilling, RunningRequest, Waiting
from reprise.loop.sequences import SequencePool, initial_decode_slots
from reprise.loop.tier import DiskTier
from reprise.plan.checkpoints import Plan, interval_tokens, make_plan
from reprise.schedule.decide import is_auxiliary_request
from reprise.schedule.state import Speed

log = logging.getLogger("reprise.loop")

_PINNED_SHARE = 2
"""Pins can use at most this fraction (1/2) of the budget."""

_MOST_SETTLED = 64


class SettledSpans:
    """The last 64 settling jobs: the span that each computed, and a digest of the tokens up to its end."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Span, bytes]] = deque(maxlen=_MOST_SETTLED)

    def add(self, tokens: Tokens, start: int, stop: int) -> None:
        """The tokens ``[start, stop)`` were computed while idle."""
        self._latest.append((Span(start, stop), _digests(tokens, [stop])[stop]))

    def within(self, tokens: Tokens, position: int) -> int:
        """How many of the tokens ``[0, position)`` of this prompt were computed while idle."""
        known = [(span, digest) for span, digest in self._latest if span.stop <= position]
        digests = _digests(tokens, {span.stop for span, _ in known})
        # Spans of a settling job that was stopped and continued may overlap.
        return sum(map(len, union([span for span, digest in known if digests[span.stop] == digest])))


def _digests(tokens: Tokens, stops: Iterable[int]) -> dict[int, bytes]:
    """The digest of the tokens up to each of these positions. O(tokens): the tokens are hashed once for all."""
    hashed, start = hashlib.blake2b(digest_size=16), 0
    digests: dict[int, bytes] = {}
    for stop in sorted(stops):
        hashed.update(tokens[start:stop].tobytes())
        digests[stop], start = hashed.digest(), stop
    return digests


class RequestPrefixes:
    """Matches prompts, starts and restores their sequences, and commits what they compute.

    Owns the record of which spans were computed while idle.
    """

    def __init__(
        self,
        requests: RequestTable,
        sequences: SequencePool,
        disk: DiskTier,
        *,
        is_on: bool,
        last_slice: int,
        clock: Clock,
    ) -> None:
        """`is_on`: whether there is a prefix cache; without one nothing is found or stored. `last_slice`: see
        `SchedulerLimits`."""
        self._is_on = is_on
        self._requests = requests
        self._disk = disk
        self._sequences = sequences
        self._runner = sequences.runner
        self._cache = sequences.cache
        self._clock = clock
        self._settled = SettledSpans()
        self._numbers = FIFOCache[str, int](_MOST_SETTLED)
        """The policy's numbers of the latest requests, by id."""
        footprint = self._runner.footprint
        self._last_slice = last_slice
        self._interval = interval_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full)

    # Lookup.

    def look_up(self, request: RunningRequest) -> None:
        """Look up the prompt of a new request, and set what follows from the result."""
        if self._is_on:
            self._requests.note_common_prefixes(request)
        self.match(request)
        request.stats.first_resume_at = request.position
        request.is_auxiliary = request.job.lineage.is_side or is_auxiliary_request(
            prompt_len=len(request.job.prompt),
            resume_at=max(request.position, self._disk.reach(request)),
            has_chats=self._requests.has_chat_beside(request),
        )

    def match(self, request: RunningRequest) -> Match:
        """Look up the request's prompt; if it waits, update where it could resume."""
        match = self._cache.match(request.prompt.tokens, namespace=request.namespace)
        if not isinstance(request.phase, Waiting):
            return match
        request.phase.is_matched = True
        if not self._is_on:
            request.stats.reason = Reason.CACHE_OFF
        else:
            request.phase.row = self._cache.row_at(match) if request.may_sample_at_once else None
            limit = len(request.prompt) if request.phase.row is not None else request.reusable
            request.phase.resume_at = self._cache.resume_at(match, limit=limit, spans=request.prompt.spans)
            request.stored = max(request.stored, request.phase.resume_at)
            if request.stats.admission is None:
                request.stats.matched = match.length
        return match

    def present(self) -> list[RunningRequest]:
        """The requests that run or could be admitted.

        Not those that wait for the disk or for another's logits.
        """
        for request in list(self._requests.values()):
            if isinstance(request.phase, Waiting) and not request.phase.is_matched:
                self._requests.run_isolated(request, self.match)
        there = [r for r in self._requests.values() if r.is_running or (r.is_waiting and not r.is_loading)]
        return [request for request in there if not self._awaits_row(request)]

    def _awaits_row(self, request: RunningRequest) -> bool:
        """Whether another request with the same prompt is computing its logits, for which this one waits."""
        phase = request.phase
        if not isinstance(phase, Waiting) or phase.row is not None or not self.keeps_row(request):
            return False
        leaders = map(self._requests.get, request.common_prefix_lengths)
        return any(
            leader is not None
            and leader.may_sample_at_once
            and not leader.is_loading
            and not leader.has_ended
            and request.is_repeat_of(leader)
            for leader in leaders
        )

    def is_on_disk(self, request: RunningRequest) -> bool:
        """Start or join a disk read for a request about to be admitted. Returns whether it has to wait."""
        if request.reusable < request.end or not self._disk.begin(request):
            return False
        assert isinstance(request.phase, Waiting), request.phase
        request.phase.loading_since_s = self._clock()
        return True

    def take_loaded(self) -> list[tuple[RunningRequest, float]]:
        """The requests whose disk reads have ended, with the seconds they took."""
        loaded = [self._requests[request_id] for request_id in self._disk.advance()]
        return [(request, self._end_loading(request)) for request in loaded]

    def _end_loading(self, request: RunningRequest) -> float:
        self._requests.note_change(request)
        waiting = request.phase
        if not isinstance(waiting, Waiting):
            return 0.0
        waiting.is_matched = False
        if waiting.loading_since_s is None:
            return 0.0
        seconds = self._clock() - waiting.loading_since_s
        request.stats.loading_s, waiting.loading_since_s = request.stats.loading_s + seconds, None
        return seconds

    def start(self, request: RunningRequest) -> None:
        """Start a waiting request's sequence at its resume position. It can run once `restore` is complete."""
        match, waiting = self.match(request), request.phase
        assert isinstance(waiting, Waiting), waiting
        resume_at, row = waiting.resume_at, waiting.row
        # A model that resumes anywhere has no use for where paths part.
        common = 0 if self._cache.layout.resumes_anywhere else self._disk.common_length(request)
        # Only at the first admission: a preempted request keeps its reason.
        if self._is_on and request.stats.admission is None:
            request.stats.continues = match.continues
            on_disk = request.reading.not_read_to or self._unresumable_to(request, common, held=resume_at)
            if on_disk > request.stats.matched:
                # What is stored there is not what memory has behind its own match.
                request.stats.matched, request.stats.continues = on_disk, None
            lost_to = evicted_to(match, resume_at)
            request.stats.reason = _reason(
                request,
                resume_at,
                was_evicted=lost_to is not None,
                was_cancelled=was_cancelled(match),
            )
            if lost_to is not None:
                request.stats.num_evicted = max(0, min(lost_to, len(request.prompt)) - request.stats.matched)
        plan = self._plan(request, match, resume_at, on_disk=common, has_row=row is not None)
        lease = self._cache.lease(match, resume_at, is_request=not request.is_settle)
        self._note_lineage(request, lease)
        self._number(request, match, lease)
        try:
            reserve = len(request.prompt) + initial_decode_slots(request.job)
            live = self._sequences.start(match, resume_at, reserve=reserve)
        except Exception:
            self._cache.release(lease)
            raise
        live.scorer = _scorer(request)
        live.see(request.job.prompt.images)
        request.enter(Prefilling(live=live, lease=lease, plan=plan, row=row, preempted=waiting.preempted))
        request.stats.checkpoints = plan.positions
        self._sequences.measure()
        self.keep_pins(request)

    def _note_lineage(self, request: RunningRequest, lease: Lease) -> None:
        boundaries = request.job.prompt.boundaries
        trunk_at = max((b.position for b in boundaries if b.kind is BoundaryKind.SYSTEM), default=0)
        self._cache.note_lineage(request.id, lease, request.job.lineage, trunk_at=trunk_at, namespace=request.namespace)

    def _number(self, request: RunningRequest, match: Match, lease: Lease) -> None:
        """Note the policy's number of the request; what is settled has that of the request that it follows."""
        if lease.number is not None:
            self._numbers[request.job.id] = lease.number
        follows = request.job.follows
        number = None if follows is None else self._numbers.get(follows)
        if number is not None:
            self._cache.expect(match, number=number, calls_tool=request.job.calls_tool)

    def restore(self, request: RunningRequest, allowance: StepAllowance) -> bool:
        """Restore a request's state, within the step's allowance. Returns whether it is complete."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        if request.is_restoring and phase.lease is None:
            # The cache was reset during the restore: look it up again.
            self._requests.release(request, Waiting(preempted=phase.preempted))
            request.stored = 0
            return False
        tokens = request.prompt.tokens[: phase.plan.resume_at]
        is_there = self._sequences.restore(phase.live, tokens, namespace=request.namespace, allowance=allowance)
        if phase.lease is not None:
            phase.lease.is_restored = is_there
        self._sequences.measure()
        return is_there

    def _unresumable_to(self, request: RunningRequest, common: int, *, held: int) -> int:
        """`common`, how far the prompt agrees with a path on disk, if that cannot be resumed behind `held`; else 0.

        What agrees for no more than is worth reading counts as nothing.
        """
        is_more = common > request.stats.matched and common - held >= MIN_TOKENS
        return common if is_more and self._disk.reach(request) <= held else 0

    def _plan(self, request: RunningRequest, match: Match, resume_at: int, *, on_disk: int, has_row: bool) -> Plan:
        branches = [match.length] if match.continues is not None else []
        # The other path may be on disk alone: of that no more was read than what can be resumed.
        branches += [on_disk] if on_disk > 0 else []
        return make_plan(
            request.prompt,
            layout=self._cache.layout,
            resume_at=resume_at,
            end=request.end,
            branches=[at for at in branches if at < len(request.prompt)],
            interval=self._interval,
            has_row=has_row,
            # An exact repeat then starts from the logits, or computes so few tokens in the one pass that it needs.
            end_within=self._last_slice if self.keeps_row(request) else 0,
        )

    def admission_of(self, request: RunningRequest, resume_at: int, speed: Speed) -> Admission:
        """What a request being admitted reuses, and what that saves at this speed."""
        # Some of it may have been evicted again.
        loaded = min(request.reading.num_loaded, resume_at)
        # What another request computed meanwhile saves nothing: this one waited for it.
        found = min(resume_at, request.stats.first_resume_at + loaded)
        # Unknown until the speed was measured.
        computing_s = speed.prefill_s(0, found) if speed.by_depth else 0.0
        return Admission(
            at_s=self._clock(),
            num_reused=resume_at,
            num_settled=self._settled.within(request.prompt.tokens, resume_at),
            num_loaded=loaded,
            saved_s=max(0.0, computing_s - request.stats.loading_s),
        )

    # Logits at the end of a prompt.

    def keeps_row(self, request: RunningRequest) -> bool:
        """Whether to store the logits at the end of the request's prompt."""
        footprint = self._runner.footprint
        return (
            self._is_on
            and request.may_sample_at_once
            and self._cache.rows.admits(footprint.logits + footprint.snapshot)
        )

    def reserve_row(self, request: RunningRequest) -> bool:
        """Like `keeps_row`, and makes room for them. False if there is none."""
        footprint = self._runner.footprint
        return self.keeps_row(request) and self._cache.has_room_for_row(footprint.logits, snapshot=footprint.snapshot)

    # Storing.

    def store_progress(self, request: RunningRequest) -> None:
        """Store what the request has computed so far."""
        phase = request.phase
        if not isinstance(phase, Prefilling | Decoding):
            return
        self._runner.catch_up([phase.live])
        if request.position <= phase.plan.resume_at or not self._is_of_use(request):
            return
        is_decoding = isinstance(phase, Decoding)
        self.store(request, request.position, BoundaryKind.GENERATION_END if is_decoding else BoundaryKind.INTERVAL)
        self.note_settled(request)

    def _is_of_use(self, request: RunningRequest) -> bool:
        """Whether anyone can resume from what it has computed: where snapshots are needed, not inside an image."""
        at = request.position
        return self._cache.layout.resumes_anywhere or outside(at, request.prompt.spans) == at

    def store_for_repeats(self, request: RunningRequest) -> None:
        """After the first token, commit the state at the end of the prompt, for exact repeats.

        If every position is resumable, only for requests that wait for it: others can resume there later.
        """
        if request.live is None or request.live.prompt_row is None:
            return
        if self._requests.is_awaited(request) or not self._cache.layout.resumes_anywhere:
            # Not for the disk, which stores no logits: there the position before serves as well.
            self._commit(request, request.position, BoundaryKind.PROMPT_END)

    def store(self, request: RunningRequest, position: int, kind: BoundaryKind) -> None:
        """Commit what the request has computed up to `position`, its current one, and schedule it for the disk."""
        if self._is_on:
            self._commit(request, position, kind)
            self._disk.note(request, position, kind)

    def _commit(self, request: RunningRequest, position: int, kind: BoundaryKind) -> None:
        live = request.live
        assert live is not None and position == request.position, (request.id, position, request.position)
        committed = self._cache.commit(
            request.tokens_to(position),
            self._runner.source(live),
            kind=kind,
            namespace=request.namespace,
            is_auxiliary=request.is_auxiliary,
            overrides_admission=request.overrides_admission,
            stable_at=request.job.prompt.stable_at,
            number=self._numbers.get(request.job.follows or request.job.id),
        )
        self.keep_pins(request)
        request.stats.num_stored += committed.num_tokens
        request.stored = min(position, len(request.job.prompt))
        row, end = live.prompt_row, len(request.job.prompt)
        if row is not None and position >= end:
            live.prompt_row = None
            self._sequences.measure()
            self._cache.keep_row(request.tokens_to(end), row, namespace=request.namespace)
        self._requests.note_change(request)

    def note_cancelled(self, request: RunningRequest) -> None:
        """Remember that a request ended before it had computed its prompt: not all that it began with is stored."""
        if self._is_on and not request.is_settle and not isinstance(request.phase, Decoding):
            self._cache.note_cancelled(request.job.prompt.tokens[: request.end], namespace=request.namespace)

    def note_settled(self, request: RunningRequest) -> None:
        """Record what a settling job has computed, to be counted for later requests that reuse it."""
        if request.is_settle and isinstance(request.phase, Prefilling):
            self._settled.add(request.job.prompt.tokens, request.phase.plan.resume_at, request.position)

    # Pins.

    def keep_pins(self, request: RunningRequest) -> None:
        """Pin what the client marked, as far as it is stored. A pin's time starts once per request, when it is set."""
        cache, now_s, owner = self._cache, self._clock(), request.job.owner
        num_before = cache.pins.num_changes
        for position, seconds in request.pins.items():
            if position <= request.position:
                until = request.pinned_until.get(position, now_s + seconds)
                if cache.pin(request.tokens_to(position), until=until, namespace=request.namespace, owner=owner):
                    request.pinned_until[position] = until
        retained_at, seconds = request.retained_at, request.job.retain_for_s
        if retained_at is not None and seconds is not None and retained_at <= request.position:
            until = request.retained_until if request.retained_until is not None else now_s + seconds
            if cache.retain(request.tokens_to(retained_at), until=until, namespace=request.namespace, owner=owner):
                request.retained_until = until
        if cache.pins.num_changes > num_before and cache.memory.budget is not None:
            num = cache.pins.keep_within(cache.memory.budget // _PINNED_SHARE)
            if num > 0:
                log.warning("dropped %d pins: pins can use at most half of --cache-bytes", num)
        prompt = request.job.prompt
        if request.stats.pin is None and request.job.purpose is Purpose.PREFILL and len(prompt) in request.pinned_until:
            # Read it now, before it can expire.
            request.stats.pin = cache.pin_of(prompt.tokens, namespace=request.namespace)

    def unpin_first(self) -> bool:
        """Remove the pin that expires first. False if there is none."""
        has_gone = self._cache.pins.unpin_first()
        if has_gone:
            log.warning("dropped a pin: running requests had no room otherwise")
        return has_gone


def _scorer(request: RunningRequest) -> PromptScorer | None:
    is_wanted = request.job.prompt_logprobs is not None and request.scored < len(request.job.prompt)
    return PromptScorer(request.job, start=request.scored) if is_wanted else None


def _reason(request: RunningRequest, resume_at: int, *, was_evicted: bool, was_cancelled: bool) -> Reason:
    """Why the tokens past `resume_at` are computed, as far as the cache knows."""
    if request.job.prompt_logprobs is not None:
        return Reason.PROMPT_LOGPROBS
    if resume_at < request.reading.not_read_to:
        return Reason.SLOWER_TO_READ
    if resume_at >= request.end:
        return Reason.NOTHING_NEW
    if was_evicted:
        return Reason.EVICTED
    if was_cancelled:
        return Reason.CANCELLED
    if request.stats.matched == 0:
        return Reason.COLD
    if request.stats.continues is not None:
        return Reason.BRANCHED
    return Reason.NEW_TOKENS if resume_at >= request.stats.matched else Reason.NO_SNAPSHOT

"""A request in the loop: its record and its phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reprise.cache.node import Lease
from reprise.cache.payload import Payload
from reprise.core.events import Event
from reprise.core.job import Job, Purpose
from reprise.core.outcome import Outcome, Reason
from reprise.core.pin import Pin
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.drafts.drafter import RequestDrafts
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.sampler import TokenSampler
from reprise.plan.checkpoints import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preempted:
    """What a request that was preempted during its answer recomputes (prompt and answer so far), and its sampler."""

    prompt: Prompt
    sampler: TokenSampler


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """In the queue. `resume_at`: where it could resume now.

    `row`: the logits at the end of its prompt if the cache has them; `resume_at` is then the end of the prompt.
    """

    resume_at: int = 0
    row: Payload | None = None
    loading_since_s: float | None = None
    """When it began to wait for the disk; None if it does not."""
    is_matched: bool = False
    """Whether `resume_at` and `row` are up to date."""
    preempted: Preempted | None = None
    """Set if it was preempted during its answer."""
    preempted_beside: frozenset[str] = frozenset()
    """The requests that continued when it was preempted."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """What an admitted request has."""

    live: LiveSequence
    lease: Lease | None
    """None if the cache was reset."""
    plan: Plan


@dataclass(slots=True, kw_only=True, eq=False)
class Prefilling(_Running):
    """Its prompt is being restored or computed. `preempted`: set if it was decoding before."""

    preempted: Preempted | None = None
    row: Payload | None = None
    """The logits at the end of its prompt: it samples from them once that state is restored."""


@dataclass(slots=True, kw_only=True, eq=False)
class Decoding(_Running):
    """Its answer is being sampled. `group`: its last decode group; None before its first token."""

    group: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Ended:
    """It is finished and holds nothing."""


Phase = Waiting | Prefilling | Decoding | Ended

NEXT: dict[type[Phase], frozenset[type[Phase]]] = {
    Waiting: frozenset({Prefilling, Decoding, Ended}),
    Prefilling: frozenset({Decoding, Waiting, Ended}),
    Decoding: frozenset({Waiting, Ended}),
    Ended: frozenset(),
}
"""The transitions between phases. A preempted request waits again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """What a request reused at its first admission."""

    at_s: float
    num_reused: int = 0
    """Where prefill started."""
    num_settled: int = 0
    num_loaded: int = 0
    saved_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class RequestStats:
    """What the loop counts of a request for its `Outcome`."""

    matched: int = 0
    first_resume_at: int = 0
    """Where it could resume on arrival; what was added until its admission was computed by others."""
    num_evicted: int = 0
    reason: Reason = Reason.COLD
    continues: Tokens | None = None
    """The tokens with which the nearest stored path continues after the match; None if it ends there."""
    admission: Admission | None = None
    """None before its first admission."""
    reached: int = 0
    """The furthest position computed before its state was freed."""
    loading_s: float = 0.0
    """Seconds it has waited for the disk in earlier reads."""
    decode_began_s: float | None = None
    """When its prompt was computed, except the last token."""
    first_token_s: float | None = None
    num_stored: int = 0
    """Tokens that it added to the cache."""
    checkpoints: tuple[int, ...] = ()
    pin: Pin | None = None
    num_images_encoded: int = 0
    tower_s: float = 0.0
    """What encoding them took."""
    tower_foreseen_s: float = 0.0


@dataclass(slots=True, eq=False)
class Reading:
    """What is read from the disk for a request, and was."""

    is_loading: bool = False
    """Whether the request waits for the disk."""
    num_loads: int = 0
    """How often it was sent to the disk."""
    not_read_to: int = 0
    """How far it could resume from the disk, where reading takes longer than computing."""
    has_awaited_scan: bool = False
    """Whether it has waited for a scan for other servers' records."""
    num_loaded: int = 0
    """By how many tokens disk reads moved its resume position forward while it waited."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRequest:
    """A job in the loop. Owned by the engine thread."""

    job: Job
    sink: Callable[[Event], None]
    arrived_s: float
    common_prefix_lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    """Lengths of the common prefixes with the prompts of requests that arrived before it, by id."""
    is_auxiliary: bool = False
    phase: Phase = field(default_factory=Waiting)

    stats: RequestStats = field(default_factory=RequestStats)
    generated: list[int] = field(default_factory=list[int])
    drafts: RequestDrafts | None = None
    """None if drafts are off for it."""

    # Progress.
    stored: int = 0
    """``[0, stored)`` of the prompt is committed, or was refused by the cache."""
    scored: int = 1
    """The first prompt token whose log-probability was not emitted yet, if the job wants them."""
    pinned_until: dict[int, float] = field(default_factory=dict[int, float])
    """When the pins that were set expire (cache's clock), by position."""
    retained_until: float | None = None
    """When the conversation's pin expires; None: not set yet."""
    reading: Reading = field(default_factory=Reading)

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def is_settle(self) -> bool:
        return self.job.purpose is Purpose.SETTLE

    @property
    def samples(self) -> bool:
        """Whether it generates an answer."""
        return self.job.purpose is Purpose.GENERATE

    @property
    def namespace(self) -> str:
        return self.job.namespace

    # Phases.

    def enter(self, phase: Phase) -> None:
        assert type(phase) in NEXT[type(self.phase)], (self.id, self.phase, phase)
        self.phase = phase

    @property
    def live(self) -> LiveSequence | None:
        """Its sequence, if it runs."""
        return self.phase.live if isinstance(self.phase, _Running) else None

    @property
    def is_restoring(self) -> bool:
        """Whether it is admitted and its state is still being restored."""
        return isinstance(self.phase, Prefilling) and self.phase.live.restoration is not None

    @property
    def is_running(self) -> bool:
        return isinstance(self.phase, _Running)

    @property
    def is_waiting(self) -> bool:
        return isinstance(self.phase, Waiting)

    @property
    def has_ended(self) -> bool:
        return isinstance(self.phase, Ended)

    @property
    def is_loading(self) -> bool:
        """Whether nothing can be done for it before something is read from disk."""
        return isinstance(self.phase, Waiting) and self.reading.is_loading

    @property
    def preempted(self) -> Preempted | None:
        return self.phase.preempted if isinstance(self.phase, Waiting | Prefilling) else None

    # Positions.

    @property
    def prompt(self) -> Prompt:
        """The tokens to prefill: the job's prompt, with the answer so far if it was preempted."""
        preempted = self.preempted
        return self.job.prompt if preempted is None else preempted.prompt

    @property
    def end(self) -> int:
        """Where prefill ends: before the last prompt token if that starts the decode."""
        num = len(self.prompt.tokens)
        return num - 1 if self.job.purpose is Purpose.GENERATE else num

    @property
    def reusable(self) -> int:
        """The furthest position to resume from: scoring a token needs the logits before it."""
        if self.job.prompt_logprobs is None or self.scored >= len(self.job.prompt):
            return self.end
        return min(self.end, self.scored - 1)

    @property
    def may_sample_at_once(self) -> bool:
        """Whether it can start from stored logits: it has sampled nothing and scores nothing."""
        is_fresh = self.job.purpose is Purpose.GENERATE and self.preempted is None and self.stats.first_token_s is None
        return is_fresh and self.reusable == self.end

    def is_repeat_of(self, other: RunningRequest) -> bool:
        """Whether it arrived after the other, with the same prompt."""
        num = len(self.job.prompt)
        return len(other.job.prompt) == num and self.common_prefix_lengths.get(other.id) == num

    @property
    def position(self) -> int:
        """The position of its sequence, or where it could resume if it waits."""
        match self.phase:
            case Prefilling(live=live) | Decoding(live=live):
                return live.position
            case Waiting(resume_at=resume_at):
                return resume_at
            case Ended():
                return 0

    @property
    def end_kind(self) -> BoundaryKind:
        """The kind of boundary at the end of a job without an answer: SYSTEM or STABLE."""
        ends = {boundary.kind for boundary in self.job.prompt.boundaries if boundary.position == len(self.job.prompt)}
        # A SYSTEM checkpoint is not superseded by the chats that continue from it.
        return BoundaryKind.SYSTEM if BoundaryKind.SYSTEM in ends else BoundaryKind.STABLE

    def tokens_to(self, position: int) -> Tokens:
        """The first `position` tokens of prompt and answer."""
        prompt = self.job.prompt.tokens
        return prompt[:position] if position <= len(prompt) else self.tokens[:position]

    @property
    def tokens(self) -> Tokens:
        """The prompt and the answer so far."""
        return join_tokens(self.job.prompt.tokens, as_tokens(self.generated))

    # What its client asked to keep.

    @property
    def pins(self) -> dict[int, float]:
        """The positions to pin, with the seconds to keep each."""
        seconds, boundaries = self.job.pin_for_s, self.job.prompt.boundaries
        if seconds is None:
            return {}
        return {b.position: seconds for b in boundaries if b.kind is BoundaryKind.EXPLICIT and b.position > 0}

    @property
    def retained_at(self) -> int | None:
        """The position to pin for the conversation, None if the client did not ask for that.

        It is the last stable boundary; without one, the end of prefill.
        """
        if self.job.retain_for_s is None:
            return None
        prompt = self.job.prompt
        end = len(prompt) - 1 if self.job.purpose is Purpose.GENERATE else len(prompt)
        stable = [b.position for b in prompt.boundaries if b.kind is BoundaryKind.STABLE and 0 < b.position <= end]
        return max(stable, default=end)

    @property
    def overrides_admission(self) -> bool:
        """Whether the client asked to keep this path, so that it is stored whatever its score."""
        return self.job.retain_for_s is not None or len(self.pins) > 0

    # Its record.

    def outcome(self, now_s: float) -> Outcome:
        stats, prompt = self.stats, len(self.job.prompt)
        first_s, is_admitted = stats.first_token_s, stats.admission is not None
        admission = stats.admission or Admission(at_s=now_s, num_loaded=self.reading.num_loaded)
        computed = min(max(self.position, stats.reached) if self.is_running else stats.reached, prompt)
        # A request that ended early may have encoded an image that it never computed.
        num_images = max(stats.num_images_encoded, sum(s.stop <= computed for s in self.job.prompt.spans))
        return Outcome(
            num_prompt=prompt,
            num_matched=stats.matched,
            num_evicted=stats.num_evicted,
            num_reused=admission.num_reused,
            num_prefilled=max(0, computed - admission.num_reused) if is_admitted else 0,
            num_settled=admission.num_settled,
            num_loaded=admission.num_loaded,
            num_awaited=max(0, admission.num_reused - stats.first_resume_at - admission.num_loaded),
            num_generated=len(self.generated),
            num_images_encoded=stats.num_images_encoded,
            num_images_reused=num_images - stats.num_images_encoded,
            tower_s=stats.tower_s,
            tower_foreseen_s=stats.tower_foreseen_s,
            drafted=self.drafts.drafted if self.drafts is not None else {},
            draft_saved_s=self.drafts.saved_s if self.drafts is not None else 0.0,
            num_stored=stats.num_stored,
            reason=stats.reason,
            stored_next=stats.continues,
            checkpoints=stats.checkpoints,
            pin=stats.pin,
            saved_s=admission.saved_s,
            queued_s=admission.at_s - self.arrived_s,
            loading_s=stats.loading_s,
            prefill_s=(first_s if first_s is not None else now_s) - admission.at_s,
            first_pass_s=first_s - stats.decode_began_s
            if first_s is not None and stats.decode_began_s is not None
            else 0.0,
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            total_s=now_s - self.arrived_s,
        )

"""One job on its way through the loop: what is known of it and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from reprise.cache.tree import Lease
from reprise.core.events import Event
from reprise.core.job import Job, Purpose
from reprise.core.pin import Pin
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.record import Outcome, Reason
from reprise.core.tokens import Tokens, as_tokens, join_tokens
from reprise.engine.decode import Decoder
from reprise.engine.runner import Live
from reprise.plan.checkpoints import Plan


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILLING, Phase.DECODING, Phase.ENDED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.WAITING, Phase.ENDED}),
    Phase.DECODING: frozenset({Phase.WAITING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Which phase may follow which. One that runs waits again when it is paused for lack of room."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paused:
    """A task that had to give its state up in the middle of its answer: what it computes again, and decodes with."""

    prompt: Prompt
    decoder: Decoder


@dataclass(slots=True, eq=False)
class Task:
    """A job in the loop. Owned by the engine thread."""

    job: Job
    sink: Callable[[Event], None]
    arrived_s: float
    shares: dict[str, int] = field(default_factory=dict[str, int])
    is_side: bool = False
    phase: Phase = Phase.WAITING
    resume_at: int = 0
    first_resume_at: int = 0
    """What the cache had on arrival; what it had more on admission came from others while this one waited."""
    is_loading: bool = False
    """Whether it waits for what is being read from the disk."""
    num_loads: int = 0
    loaded: int = 0
    """How much further it could resume for what was read from the disk while it waited."""
    matched: int = 0
    reason: Reason = Reason.COLD
    continues: Tokens | None = None
    lease: Lease | None = None
    live: Live | None = None
    plan: Plan | None = None
    group: int | None = None
    stored: int = 0
    """``[0, stored)`` of the prompt is in the cache, or the cache has refused it."""
    newly_stored: int = 0
    scored: int = 1
    """The first token of the prompt whose log-probability is still to be told, where the job wants them."""
    settled: int = 0
    reused: int = 0
    """Where prefill started when it was admitted first."""
    reached: int = 0
    """How far it had come when it was paused."""
    paused: Paused | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    kept_until: dict[int, float] = field(default_factory=dict[int, float])
    """Until when the positions that were pinned stay, on the cache's clock."""
    retained_until: float | None = None
    """The same for what is kept for the conversation; None: it is not there yet."""
    pin: Pin | None = None
    generated: list[int] = field(default_factory=list[int])

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def is_settle(self) -> bool:
        return self.job.purpose is Purpose.SETTLE

    @property
    def prompt(self) -> Prompt:
        """What is computed before the next token: the job's prompt, and the answer so far if it was paused."""
        return self.job.prompt if self.paused is None else self.paused.prompt

    @property
    def end(self) -> int:
        """Where prefill ends: before the last prompt token if that starts a decode."""
        prompt = len(self.prompt)
        return prompt - 1 if self.job.purpose is Purpose.GENERATE else prompt

    @property
    def reusable(self) -> int:
        """The furthest position to resume from: the log-probability of a token needs the logits before it."""
        if self.job.prompt_logprobs is None or self.scored >= len(self.job.prompt):
            return self.end
        return min(self.end, self.scored - 1)

    @property
    def end_kind(self) -> BoundaryKind:
        """What the end of a job that samples nothing is: where all chats part, or what survives the next turn."""
        ends = {boundary.kind for boundary in self.job.prompt.boundaries if boundary.position == len(self.job.prompt)}
        # A chat that goes on from a shared beginning does not take its place.
        return BoundaryKind.SYSTEM if BoundaryKind.SYSTEM in ends else BoundaryKind.STABLE

    @property
    def pins(self) -> dict[int, float]:
        """The positions that the client marked, and for how many seconds the cache is to keep them."""
        seconds, boundaries = self.job.pin_for_s, self.job.prompt.boundaries
        if seconds is None:
            return {}
        return {b.position: seconds for b in boundaries if b.kind is BoundaryKind.EXPLICIT and b.position > 0}

    @property
    def retained_at(self) -> int | None:
        """The position to keep for the conversation, None if the client did not ask for that.

        It is what survives the next turn; where the prompt does not say what does, as far as it is computed first.
        """
        if self.job.retain_for_s is None:
            return None
        prompt = self.job.prompt
        end = len(prompt) - 1 if self.job.purpose is Purpose.GENERATE else len(prompt)
        stable = [b.position for b in prompt.boundaries if b.kind is BoundaryKind.STABLE and 0 < b.position <= end]
        return max(stable, default=end)

    @property
    def is_wanted(self) -> bool:
        """Whether the client asked to keep something of this path."""
        return self.job.retain_for_s is not None or len(self.pins) > 0

    @property
    def position(self) -> int:
        return self.live.position if self.live is not None else self.resume_at

    def move(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], (self.id, self.phase, phase)
        self.phase = phase

    def tokens_to(self, position: int) -> Tokens:
        """The first `position` tokens of prompt and output."""
        prompt = self.job.prompt.tokens
        if position <= len(prompt):
            return prompt[:position]
        return join_tokens(prompt, as_tokens(self.generated))[:position]

    def outcome(self, now_s: float) -> Outcome:
        prompt = len(self.job.prompt)
        reused = self.reused
        computed = min(max(self.position, self.reached) if self.live is not None else self.reached, prompt)
        admitted_s = self.admitted_s if self.admitted_s is not None else now_s
        first_s = self.first_token_s
        return Outcome(
            prompt=prompt,
            matched=self.matched,
            reused=reused,
            prefilled=max(0, computed - reused) if self.admitted_s is not None else 0,
            settled=self.settled,
            loaded=self.loaded,
            awaited=max(0, reused - self.first_resume_at - self.loaded),
            generated=len(self.generated),
            stored=self.newly_stored,
            reason=self.reason,
            stored_next=self.continues,
            checkpoints=self.plan.positions if self.plan is not None else (),
            pin=self.pin,
            queued_s=admitted_s - self.arrived_s,
            prefill_s=(first_s if first_s is not None else now_s) - admitted_s,
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            total_s=now_s - self.arrived_s,
        )

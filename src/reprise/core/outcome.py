"""The outcome of a request: counts, and why tokens were not reused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reprise.core.pin import Pin
from reprise.core.tokens import Tokens


class Reason(StrEnum):
    """Why the tokens after the resume position had to be computed. A closed set."""

    NOTHING_NEW = "nothing new"
    """Only the last token, whose logits start the decode."""
    NEW_TOKENS = "new tokens"
    """Everything stored was reused; the rest is new."""
    COLD = "cold"
    """The cache had nothing for the start of this prompt."""
    CACHE_OFF = "cache off"
    PROMPT_LOGPROBS = "log-probabilities of the prompt"
    """The request wants them: they need the logits, which the cache does not keep."""
    SYSTEM_CHANGED = "system prompt changed"
    TOOLS_CHANGED = "tools changed"
    TEMPLATE_OPTIONS_CHANGED = "template options changed"
    DATE_CHANGED = "date changed"
    CLOCK_CHANGED = "clock changed"
    """A time of day changes with every request, a date only once a day."""
    BREAKER = "value that changes with every request"
    EARLIER_MESSAGE_EDITED = "earlier message edited"
    CONTEXT_CLEARED = "context cleared"
    """Something was taken out of the chat before its end, and the prompt is shorter."""
    COMPACTED = "compacted"
    """Likewise, and not half of what was replaced is left: a summary."""
    LAST_MESSAGE_EDITED = "last message edited"
    THINKING_STRIPPED = "thinking stripped"
    ANSWER_RENDERED_DIFFERENTLY = "answer rendered differently"
    """The client or the template renders the answer differently from how it was sampled."""
    TEMPLATE_RERENDERED = "template renders earlier messages differently"
    """The messages are the same, but the template moves or rewrites their text as the chat grows."""
    IMAGE_CHANGED = "image changed"
    """Another image stands where one stood."""
    IMAGE_DROPPED = "earlier image left out"
    """An image that an earlier request had is gone, and what stood behind it has moved up."""
    BRANCHED = "branched"
    """A different continuation of the same prefix."""
    NO_SNAPSHOT = "no snapshot below the match"
    """Tokens matched, but some layer has no stored state to resume from there."""
    EVICTED = "evicted"
    """Tokens matched, or would have, but their state was evicted."""
    CANCELLED = "cancelled before it got there"
    """An earlier request with these tokens was cancelled before it had computed them."""
    NOT_STORED = "not stored"
    """An earlier request had these tokens, but it failed or had not ended, or what it stored was cleared."""
    SLOWER_TO_READ = "slower to read than to compute"
    """They are on disk or in an object store, and reading them would have taken longer than computing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Tokens that one source drafted and a pass verified, and how many of them were accepted."""

    num: int
    num_accepted: int

    def __add__(self, other: "Drafted") -> "Drafted":
        return Drafted(num=self.num + other.num, num_accepted=self.num_accepted + other.num_accepted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The counts of one job in the engine, in tokens; times in seconds.

    `num_prompt` = `num_reused` + `num_prefilled` for a job that ran to its first sample.
    """

    num_prompt: int
    num_matched: int = 0
    """Leading tokens that matched the tree."""
    num_reused: int = 0
    """Where prefill started."""
    num_prefilled: int = 0
    """Prompt tokens computed for this job (while a user waited, except for a SETTLE)."""
    num_settled: int = 0
    """Of `num_reused`, tokens that were computed while idle for this chat."""
    num_loaded: int = 0
    """Of `num_reused`, tokens that were read from disk for this job."""
    num_awaited: int = 0
    """Of `num_reused`, tokens that another running request computed while this one waited."""
    num_generated: int = 0
    num_images_encoded: int = 0
    """Images behind the resume position that the model's tower ran for."""
    num_images_reused: int = 0
    """Images before it, or of which the features were still there."""
    tower_s: float = 0.0
    """What the tower took, part of the prefill."""
    tower_foreseen_s: float = 0.0
    """What was set aside for it of the longest gap: 0 for the first image of a model, of which nothing is known."""
    drafted: Mapping[str, Drafted] = field(default_factory=dict[str, Drafted])
    """Draft tokens that were verified for the answer, by source."""
    draft_saved_s: float = 0.0
    """Decode time saved by that, compared to passes over one token; negative if it cost more."""
    num_stored: int = 0
    """Tokens newly added to the cache by this job."""
    num_evicted: int = 0
    """Tokens from `num_matched` on whose state was evicted."""
    reason: Reason = Reason.COLD
    stored_next: Tokens | None = None
    """At most 32 tokens with which the nearest stored path continues after the match, or None if it ends there."""
    checkpoints: tuple[int, ...] = ()
    pin: Pin | None = None
    """The pin of the whole prompt, if a PREFILL requested one and there was room for it."""
    saved_s: float = 0.0
    """Estimated time to compute the reused tokens, less the wait for the disk."""
    queued_s: float = 0.0
    """From arrival to admission."""
    loading_s: float = 0.0
    """Of `queued_s`, the wait for the disk."""
    prefill_s: float = 0.0
    """From admission to the first token."""
    first_pass_s: float = 0.0
    """Of `prefill_s`, from the end of the prompt to the first token."""
    ttft_s: float | None = None
    total_s: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Draft tokens of all sources."""
        return sum(drafted.num for drafted in self.drafted.values())

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all sources."""
        return sum(drafted.num_accepted for drafted in self.drafted.values())

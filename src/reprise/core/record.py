"""What happened to a request: the counts, and why tokens were not reused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from reprise.core.pin import Pin
from reprise.core.tokens import Tokens


class Reason(StrEnum):
    """Why the tokens behind the resume position had to be computed. A closed set."""

    NOTHING_NEW = "nothing new"
    """Only the last token, whose logits start the decode."""
    NEW_TOKENS = "new tokens"
    """Everything that was known was reused; the rest is new."""
    COLD = "cold"
    """The cache held nothing for this prompt's beginning."""
    CACHE_OFF = "cache off"
    PROMPT_LOGPROBS = "log-probabilities of the prompt"
    """Asked for by the request: they follow from logits, which the cache does not keep."""
    SYSTEM_CHANGED = "system prompt changed"
    TOOLS_CHANGED = "tools changed"
    TEMPLATE_OPTIONS_CHANGED = "template options changed"
    DATE_CHANGED = "date changed"
    CLOCK_CHANGED = "clock changed"
    """A time of day: another with every request, where a date is another with every day."""
    BREAKER = "value that changes with every request"
    EARLIER_MESSAGE_EDITED = "earlier message edited"
    LAST_MESSAGE_EDITED = "last message edited"
    THINKING_STRIPPED = "thinking stripped"
    ANSWER_RENDERED_DIFFERENTLY = "answer rendered differently"
    """The client or the template gives the answer back in another form than it was sampled."""
    TEMPLATE_RERENDERED = "template renders earlier messages differently"
    """The messages are the same, but the template moves or rewrites their text as the chat grows."""
    BRANCHED = "branched"
    """Another continuation of the same beginning."""
    NO_SNAPSHOT = "no snapshot below the match"
    """Tokens matched, but a layer of this model had no state to resume from there."""
    EVICTED = "evicted"
    """Tokens matched in the index, or once did, but their state had to give way."""
    SLOWER_TO_READ = "slower to read than to compute"
    """They are on disk or in an object store, from where reading them would have taken longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Tokens that one source drafted and a pass verified; `num_accepted`: those that were right."""

    num: int
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The counts of one job, as the engine saw them. All in tokens; times in seconds.

    `num_prompt` = `num_reused` + `num_prefilled` for a job that ran to its first sample.
    """

    num_prompt: int
    num_matched: int = 0
    """How far the tree agreed with the prompt."""
    num_reused: int = 0
    """Where prefill started."""
    num_prefilled: int = 0
    """Prompt tokens computed for this job (while a user waited, unless the job is a SETTLE)."""
    num_settled: int = 0
    """Of `num_reused`, tokens that were computed while idle for this chat."""
    num_loaded: int = 0
    """Of `num_reused`, tokens that were read from the disk for this job."""
    num_awaited: int = 0
    """Of `num_reused`, tokens that another running request computed while this one waited."""
    num_generated: int = 0
    drafted: Mapping[str, Drafted] = field(default_factory=dict[str, Drafted])
    """What was drafted for the answer and verified, by source."""
    draft_saved_s: float = 0.0
    """What that saved of decoding, by the time of a pass over one token; negative where it cost more."""
    num_stored: int = 0
    """Tokens newly added to the cache by this job."""
    reason: Reason = Reason.COLD
    stored_next: Tokens | None = None
    """At the divergence: the tokens that the nearest stored path goes on with (at most 32), or None at a path's end."""
    checkpoints: tuple[int, ...] = ()
    pin: Pin | None = None
    """The pin of the whole prompt as it was set, where a PREFILL asked for one and there was room for it."""
    saved_s: float = 0.0
    """What computing the reused tokens would have taken at the measured speed, less the wait for the disk."""
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
        """Of all sources."""
        return sum(drafted.num for drafted in self.drafted.values())

    @property
    def num_accepted(self) -> int:
        """Of all sources."""
        return sum(drafted.num_accepted for drafted in self.drafted.values())

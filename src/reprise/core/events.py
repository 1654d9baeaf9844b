"""The events of a job, in order: Started, any Progress and Scored, any Sampled, then one Finished."""

from dataclasses import dataclass
from enum import StrEnum

from reprise.core.errors import RepriseError
from reprise.core.outcome import Outcome


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was sampled, or the job's `watch` ended it."""
    LENGTH = "length"
    """`max_tokens` or the end of the context was reached."""
    DONE = "done"
    """A job without an answer has computed its prompt."""
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The job was admitted; prefill of the tokens ``[num_reused, total)`` begins."""

    num_reused: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prefill has reached `position` of `total` prompt tokens."""

    position: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token. `logprob` and `top` (token, log-probability; likeliest first) if requested."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_stop: bool = False
    """The token ends the answer and is not part of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The prompt's tokens ``[start, start + len(tokens))`` with their log-probabilities, if the job requests them.

    The events of a job have no gaps and start at token 1: token 0 has no tokens before it to be predicted from.
    """

    start: int
    tokens: tuple[Sampled, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a job. `error` is set when `reason` is FAILED."""

    reason: FinishReason
    outcome: Outcome
    error: RepriseError | None = None


Event = Started | Progress | Scored | Sampled | Finished

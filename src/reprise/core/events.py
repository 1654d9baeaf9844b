"""What the engine thread says about a job, in order: Started, Progress and Scored…, Sampled…, then one Finished."""

from dataclasses import dataclass
from enum import StrEnum

from reprise.core.errors import RepriseError
from reprise.core.record import Outcome


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was sampled, or the watch said so."""
    LENGTH = "length"
    """`max_tokens` or the context's end was reached."""
    DONE = "done"
    """A job that samples nothing has computed its prompt."""
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The job left the queue; prefill of the tokens ``[reused, total)`` begins."""

    reused: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state now stands at `position` of `total` prompt tokens."""

    position: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token. `logprob` and `top` (token, log-probability; likeliest first) where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_stop: bool = False
    """The token ended the generation and is no part of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The prompt's tokens ``[start, start + len(tokens))`` with their log-probabilities, where a job asked for them.

    The events of a job follow each other without a gap, from token 1: nothing comes before token 0.
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

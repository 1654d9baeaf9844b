"""Seconds that reuse saved and broken prefixes cost, summed from the records of requests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from reprise.api.service.exchange import Record
from reprise.api.service.records import sources
from reprise.chat.reasons.explain import ADVICE, Explanation
from reprise.core.backend import Status
from reprise.core.outcome import Drafted, Outcome, Reason

_NOT_BROKEN = frozenset(
    {
        Reason.NOTHING_NEW,
        Reason.NEW_TOKENS,
        Reason.COLD,
        Reason.CACHE_OFF,
        Reason.PROMPT_LOGPROBS,
        Reason.BRANCHED,
        Reason.CANCELLED,
        Reason.NOT_STORED,
    }
)
"""What is computed for these reasons is new, or was asked for."""

LOST = frozenset({Reason.EVICTED, Reason.NO_SNAPSHOT})
"""The cache once knew these tokens: one that keeps everything would have reused them."""


@dataclass(slots=True, kw_only=True)
class Breaker:
    """A reason why known beginnings were computed again. `record` is the latest request that it cost something."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    record: str = ""
    explanation: Explanation | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class ChangeSum:
    """The requests whose prompts are one thing to what was there before: computed of them, and the least possible."""

    requests: int = 0
    computed: int = 0
    at_best: int = 0


class SinceMidnight:
    """What of a total that only grows came today. It has to be asked often enough to notice midnight."""

    def __init__(self, today: Callable[[], date]) -> None:
        self._today = today
        self._day = today()
        self._before = self._last = 0.0

    def today(self, total: float) -> float:
        """The part of `total` that came since midnight, or since the start."""
        if self._day != self._today():
            self._day, self._before = self._today(), self._last
        self._last = total
        return total - self._before


@dataclass(slots=True, kw_only=True)
class Savings:
    """The sums of one namespace since the start. Tokens, but for seconds."""

    today: SinceMidnight
    saved_s: float = 0.0
    prompt: int = 0
    reused: int = 0
    computed: int = 0
    ahead: int = 0
    """Of `reused`, prefilled while idle."""
    lost: int = 0
    """Of `computed`, what a cache that keeps everything would have reused."""
    lost_s: float = 0.0
    prefill_s: float = 0.0
    """What computing `computed` took."""
    drafted: dict[str, Drafted] = field(default_factory=dict[str, Drafted])
    """Draft tokens that were verified, by source."""
    draft_saved_s: float = 0.0
    """Decode time that drafts saved, compared with passes over one token; less than 0 if they cost more."""
    breakers: dict[Reason, Breaker] = field(default_factory=dict[Reason, Breaker])
    changes: dict[Reason, ChangeSum] = field(default_factory=dict[Reason, ChangeSum])


class Ledger:
    """The sums by namespace, of all models and of each. A watcher of the service."""

    def __init__(self, status: Callable[[], Status], *, today: Callable[[], date] = date.today) -> None:
        self._status = status
        self._today = today
        self._sums: dict[tuple[str, str | None], Savings] = {}
        """By namespace and model; None: all models."""
        self.written = SinceMidnight(today)
        """Of the bytes written to the disk."""

    def of(self, namespace: str, model: str | None = None) -> Savings:
        """The sums of one namespace, of one model or of all. Do not change them."""
        return self._sums.setdefault((namespace, model), Savings(today=SinceMidnight(self._today)))

    def token_came(self, gap_s: float, model: str) -> None:
        pass

    def request_ended(self, record: Record) -> None:
        if not record.outcomes:
            return
        disk = self._status().disk
        if disk is not None:
            self.written.today(disk.written_nbytes)
        for savings in (self.of(record.namespace), self.of(record.namespace, record.model)):
            _add_record(savings, record)


def _add_record(savings: Savings, record: Record) -> None:
    savings.today.today(savings.saved_s)
    for outcome in record.outcomes:
        savings.saved_s += outcome.saved_s
        savings.prompt += outcome.num_prompt
        savings.reused += outcome.num_reused
        savings.computed += outcome.num_prefilled
        savings.ahead += sources(outcome)["ahead"]
        savings.prefill_s += outcome.prefill_s - outcome.first_pass_s
        savings.draft_saved_s += outcome.draft_saved_s
        for source, drafted in outcome.drafted.items():
            savings.drafted[source] = savings.drafted.get(source, Drafted(num=0, num_accepted=0)) + drafted
    if record.explanation is not None:
        _add_accounts(savings, record, record.explanation, record.outcomes[0])


def _add_accounts(savings: Savings, record: Record, explanation: Explanation, outcome: Outcome) -> None:
    """Who is to blame for what of a request's prefill, by the tokens of each account."""
    change = savings.changes.setdefault(explanation.change, ChangeSum())
    change.requests += 1
    change.computed += outcome.num_prefilled
    change.at_best += min(explanation.num_at_best, outcome.num_prefilled)
    computing_s = outcome.prefill_s - outcome.first_pass_s
    for account in explanation.accounts:
        num = min(len(account.span), outcome.num_prefilled)
        if num <= 0 or account.reason in _NOT_BROKEN:
            continue
        seconds = computing_s * num / max(1, outcome.num_prefilled)
        if account.reason in LOST:
            savings.lost += num
            savings.lost_s += seconds
        breaker = savings.breakers.setdefault(account.reason, Breaker())
        breaker.requests += 1
        breaker.tokens += num
        breaker.seconds += seconds
        breaker.record = record.id
        if account.reason is explanation.reason:
            # A request's other losses have no separate explanation.
            breaker.explanation, breaker.notes = explanation, record.notes


def breaker_bodies(savings: Savings) -> list[dict[str, Any]]:
    """The breakers as JSON, what cost most first."""
    ranked = sorted(savings.breakers.items(), key=lambda item: item[1].seconds, reverse=True)
    return [
        {
            "reason": str(reason),
            "requests": breaker.requests,
            "tokens": breaker.tokens,
            "seconds": breaker.seconds,
            "last_request": breaker.record,
            "advice": ADVICE[reason],
            "expected_text": "" if breaker.explanation is None else breaker.explanation.expected_text,
            "actual_text": "" if breaker.explanation is None else breaker.explanation.actual_text,
            "notes": list(breaker.notes),
        }
        for reason, breaker in ranked
    ]


def change_bodies(savings: Savings) -> list[dict[str, Any]]:
    """What was computed of all requests, by what their prompts are to those before them, as JSON; the most first."""
    ranked = sorted(savings.changes.items(), key=lambda item: item[1].computed, reverse=True)
    return [
        {"reason": str(reason), "requests": one.requests, "computed": one.computed, "at_best": one.at_best}
        for reason, one in ranked
    ]

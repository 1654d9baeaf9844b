"""Measurements and their summary: counts, waits, and their spread over the repeats."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from reprise.lab.bench.client import ClientReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some repeats, with the least and the most."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None of nothing."""
        return cls(middle=median(values), least=min(values), most=max(values)) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One workload, held once by one side: waves of requests that were sent at once, with their answers."""

    workload: str
    repeat: int
    side: str
    waves: tuple[tuple[ClientReply, ...], ...]
    refusal: str | None = None
    """Why this side has no numbers, where it has none."""
    reasons: tuple[str, ...] = ()
    """Why the rest was computed, in our server's words, for each request."""
    cpu_s: float | None = None
    """Processor seconds that the server took meanwhile; None where that is not known."""

    @property
    def replies(self) -> tuple[ClientReply, ...]:
        return tuple(reply for wave in self.waves for reply in wave)

    @property
    def num_prompt(self) -> int | None:
        return _sum(reply.num_prompt for reply in self.replies)

    @property
    def num_computed(self) -> int | None:
        return _sum(reply.num_computed for reply in self.replies)

    @property
    def wait_s(self) -> float:
        """What the users waited: of each wave, from its sending to the end of its last answer."""
        return sum(max(r.ended_s for r in wave) - min(r.sent_s for r in wave) for wave in self.waves)

    @property
    def ttft_s(self) -> float:
        """The median of its requests."""
        return median(reply.ttft_s for reply in self.replies)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All of it. `runs` in the order in which they were held; `memory` by side: seconds and bytes."""

    head: dict[str, Any]
    sides: tuple[str, ...]
    """The first one leads: its answers are what the others' are compared with."""
    workloads: tuple[tuple[str, str], ...]
    """Names, and what each is."""
    runs: tuple[Run, ...]
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict[str, list[tuple[float, int]]])
    notes: tuple[str, ...] = ()

    def runs_of(self, workload: str, side: str) -> list[Run]:
        """Those with numbers."""
        return [r for r in self.runs if (r.workload, r.side) == (workload, side) and r.refusal is None]

    def refusal_of(self, workload: str, side: str) -> str | None:
        """Why a side has no numbers of a workload."""
        runs = (r for r in self.runs if (r.workload, r.side) == (workload, side))
        return next((run.refusal for run in runs if run.refusal is not None), None)

    def summaries(self) -> list["Summary"]:
        """A row for each workload and side that has numbers."""
        rows = ((name, side, self.runs_of(name, side)) for name, _ in self.workloads for side in self.sides)
        return [self._summary(name, side, runs) for name, side, runs in rows if runs]

    def _summary(self, workload: str, side: str, runs: Sequence[Run]) -> "Summary":
        leading = {run.repeat: run for run in self.runs_of(workload, self.sides[0])}
        pairs = [
            (reply, other)
            for run in runs
            if run.repeat in leading
            for reply, other in zip(run.replies, leading[run.repeat].replies, strict=True)
        ]
        return Summary(
            workload=workload,
            side=side,
            num_repeats=len(runs),
            num_requests=sum(len(run.replies) for run in runs),
            num_prompt=Spread.of(_known(run.num_prompt for run in runs)),
            num_computed=Spread.of(_known(run.num_computed for run in runs)),
            ttft_s=Spread.of([run.ttft_s for run in runs]),
            wait_s=Spread.of([run.wait_s for run in runs]),
            cpu_s=Spread.of([run.cpu_s / max(1, len(run.replies)) for run in runs if run.cpu_s is not None]),
            num_compared=len(pairs),
            num_different=sum(_answer(reply) != _answer(other) for reply, other in pairs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A workload on a side, over its repeats. None: the server did not report it."""

    workload: str
    side: str
    num_repeats: int
    num_requests: int
    num_prompt: Spread | None
    num_computed: Spread | None
    ttft_s: Spread | None
    wait_s: Spread | None
    cpu_s: Spread | None
    """Processor seconds of the server for each request."""
    num_compared: int
    num_different: int
    """Of the answers compared with the leading side's to the same prompts, those in other words."""


def _answer(reply: ClientReply) -> tuple[str, str, tuple[Any, ...]]:
    """The answer, without the spaces that a server leaves around its parts."""
    calls = tuple((call["function"]["name"], "".join(call["function"]["arguments"].split())) for call in reply.calls)
    return reply.content.strip(), reply.reasoning.strip(), calls


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    return None if any(value is None for value in found) else sum(value or 0 for value in found)


def _known(values: Iterable[int | None]) -> list[float]:
    return [value for value in values if value is not None]

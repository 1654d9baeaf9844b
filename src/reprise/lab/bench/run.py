"""Holds the workloads with every side, turn by turn, until they are done or the time is over."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from reprise.lab.bench.client import ClientReply, Post, Refused
from reprise.lab.bench.fit import Fit, SideSpeed, demand_of, fitted, seconds_of
from reprise.lab.bench.results import Run
from reprise.lab.bench.sides import BenchFailed, RepriseSide, Side, started
from reprise.lab.bench.words import text
from reprise.lab.bench.workloads import Restart, Script, Size, Step, Workload

_TRIES, _PAUSE_S = 40, 0.025
"""For the record of a request, which is written just after its answer."""
_PAGE = 200
"""Records that the server lists at most."""
_WARM_WORDS = 40
_SPEED_WORDS = (300, 1500)
"""Of the prompts that speed is measured with: the longer one where the shorter is over too soon to say much."""
_TOO_SOON_S = 0.3
_MEASURED_TOKENS = 16
_LEAST_TIMEOUT_S = 30.0
_REPEATS = 3
_LATER = 1.1
"""A workload's next repeat takes so much longer than the last, at most."""


class TimeIsOver(Exception):
    """In the middle of a workload, which does not count then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What the user asks for. `size` and `num_repeats`: None: as much as there is time for."""

    minutes: float
    workloads: tuple[Workload, ...]
    seed: int = 0
    size: Size | None = None
    num_repeats: int | None = None
    takes_turns: bool = True
    """All servers run at the same time, and each wave is asked of one after the other. If not, one server runs at a
    time, and is asked all that the first one was asked."""


@dataclass(slots=True, eq=False)
class Bench:
    """One benchmark under way. The first side leads: the histories are made of its answers."""

    plan: BenchPlan
    sides: Sequence[Side]
    tell: Callable[[str], None]
    runs: list[Run] = field(default_factory=list[Run])
    notes: list[str] = field(default_factory=list[str])
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict[str, list[tuple[float, int]]])
    speeds: dict[str, SideSpeed] = field(default_factory=dict[str, SideSpeed])
    """By side; measured where it is not given."""
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the leading side tells of itself."""
    fit: Fit | None = None
    clock: Callable[[], float] = time.perf_counter
    _end_s: float = 0.0
    _num_waves: int = 0
    _scripts: dict[tuple[str, int], list[Step]] = field(default_factory=dict[tuple[str, int], list[Step]])

    def hold(self) -> None:
        """Start the servers, hold everything, and stop them. Raises BenchFailed."""
        began_s = self.clock()
        seconds = 60 * self.plan.minutes
        groups = [tuple(self.sides)] if self.plan.takes_turns else [(side,) for side in self.sides]
        for number, group in enumerate(groups, start=1):
            self._end_s = began_s + seconds * number / len(groups)
            self.tell(f"starting {', '.join(side.name for side in group)}")
            with started(group) as sampler:
                self._hold_group(group)
            self.memory |= sampler.samples
        self.fit = (
            replace(self.fit, num_repeats=1 + max((run.repeat for run in self.runs), default=0)) if self.fit else None
        )
        if not any(run.waves for run in self.runs):
            raise BenchFailed(f"In {self.plan.minutes:g} minutes no workload finished. Raise --minutes, or set --size.")

    @property
    def left_s(self) -> float:
        return self._end_s - self.clock()

    def _hold_group(self, group: Sequence[Side]) -> None:
        for side in group:
            self.tell(f"measuring the speed of {side.name}")
            self.speeds[side.name] = self.speeds.get(side.name) or self._speed_of(side)
        if self.fit is None:
            self.about = about_model(group[0])
            self.fit = self._fit()
        seconds = {w.name: self._predicted_s(w, group) for w in self.fit.workloads}
        plain = [workload for workload in self.fit.workloads if not workload.restarts]
        restarting = [workload for workload in self.fit.workloads if workload.restarts]
        # With the start of the one that gets a disk for it.
        starts_s = max((side.start_s for side in group), default=0.0) if restarting else 0.0
        reserved_s = starts_s + _LATER * self.fit.num_repeats * sum(seconds[workload.name] for workload in restarting)
        self._rounds(plain, group, seconds, reserved_s=reserved_s)
        if restarting:
            for side in group:
                if isinstance(side, RepriseSide):
                    side.begin_restarts()
            self._rounds(restarting, group, seconds, reserved_s=0.0)

    def _fit(self) -> Fit:
        plan = self.plan
        # Who has not started yet is taken to be like the one that has.
        first = self.speeds[self.sides[0].name]
        speeds = {side.name: self.speeds.get(side.name, first) for side in self.sides}
        seconds = self.left_s if plan.takes_turns else self.left_s * len(self.sides)
        fit = fitted(plan.workloads, speeds, seconds=seconds, context=self.about.get("context"))
        if plan.size is not None:
            fit = replace(
                fit, size=plan.size, workloads=plan.workloads, num_repeats=plan.num_repeats or fit.num_repeats
            )
        if plan.num_repeats is not None:
            fit = replace(fit, num_repeats=plan.num_repeats)
        for workload in plan.workloads:
            if workload not in fit.workloads:
                self.notes.append(f"{workload.name}: skipped for lack of time. Raise --minutes.")
        return fit

    def _predicted_s(self, workload: Workload, group: Sequence[Side]) -> float:
        assert self.fit is not None
        demand = demand_of(workload, self.fit.size)
        return sum(seconds_of(demand, self.speeds[side.name]) for side in group)

    def _rounds(
        self, workloads: Sequence[Workload], group: Sequence[Side], seconds: dict[str, float], *, reserved_s: float
    ) -> None:
        assert self.fit is not None
        # Where the prediction was too long, there is time for more.
        most = self.fit.num_repeats if self.plan.num_repeats is not None else max(_REPEATS, self.fit.num_repeats)
        for repeat in range(most):
            for workload in workloads:
                began_s = self.clock()
                # A first time is tried even where the prediction says no: it may be wrong, and the clock is not.
                if self.left_s - reserved_s < seconds[workload.name] * (_LATER if repeat > 0 else 0.0):
                    self._note_short(workload, repeat)
                    continue
                self.tell(f"{workload.name}, {repeat + 1} of {most}, {self.left_s:.0f} s left")
                try:
                    self._hold_once(workload, repeat, group)
                except TimeIsOver:
                    self._note_short(workload, repeat)
                    continue
                seconds[workload.name] = self.clock() - began_s

    def _note_short(self, workload: Workload, repeat: int) -> None:
        if self.fit is not None and repeat >= self.fit.num_repeats:
            return
        held = "not run" if repeat == 0 else f"ran {repeat} of {self.fit.num_repeats if self.fit else 0} times"
        note = f"{workload.name}: {held}, since the time was up. Raise --minutes."
        if not any(known.startswith(f"{workload.name}: ") for known in self.notes):
            self.notes.append(note)

    def _hold_once(self, workload: Workload, repeat: int, group: Sequence[Side]) -> None:
        assert self.fit is not None
        lead = self.sides[0]
        key = (workload.name, repeat)
        if lead in group:
            source = Random(f"{self.plan.seed}/{workload.name}/{repeat}")
            script, steps = workload.script(self.fit.size, source), list[Step]()
        elif key in self._scripts:
            script, steps = _replayed(self._scripts[key]), list[Step]()
        else:
            return
        waves: dict[str, list[tuple[ClientReply, ...]]] = {side.name: [] for side in group}
        reasons: dict[str, list[str]] = {side.name: [] for side in group}
        refusals: dict[str, str] = {}
        spent_s: dict[str, float | None] = {side.name: 0.0 for side in group}
        for step in _steps(script, lambda: list(waves[lead.name][-1]) if lead in group and waves[lead.name] else []):
            steps.append(step)
            for side in self._in_turn(group):
                if side.name in refusals:
                    continue
                if isinstance(step, Restart):
                    if side.can_restart:
                        side.restart()
                    else:
                        refusals[side.name] = "bench cannot restart it"
                else:
                    before_s = side.cpu_s()
                    self._ask(side, step, waves[side.name], refusals)
                    spent_s[side.name] = _plus(spent_s[side.name], before_s, side.cpu_s())
                    # At once: a restart forgets them.
                    reasons[side.name] += _reasons(side, waves[side.name][-1:])
        self._scripts[key] = steps
        for side in group:
            refusal = refusals.get(side.name)
            held = () if refusal is not None else tuple(waves[side.name])
            why = tuple(reasons[side.name])
            run = Run(
                workload=workload.name,
                repeat=repeat,
                side=side.name,
                waves=held,
                refusal=refusal,
                reasons=why,
                cpu_s=spent_s[side.name],
            )
            self.runs.append(run)

    def _in_turn(self, group: Sequence[Side]) -> Sequence[Side]:
        """The sides, each time another one first."""
        self._num_waves += 1
        start = self._num_waves % len(group)
        return (*group[start:], *group[:start])

    def _ask(
        self, side: Side, wave: Sequence[Post], waves: list[tuple[ClientReply, ...]], refusals: dict[str, str]
    ) -> None:
        if self.left_s < 0:
            raise TimeIsOver
        try:
            replies = side.ask(wave, timeout_s=max(_LEAST_TIMEOUT_S, self.left_s + _LEAST_TIMEOUT_S))
        except Refused as error:
            if side.is_ours:
                raise BenchFailed(f"{side.name} refuses a request: {error}.") from error
            refusals[side.name] = str(error)
        else:
            waves.append(tuple(replies))

    def _speed_of(self, side: Side) -> SideSpeed:
        """Two or three prompts that nobody has asked before. The first one is not counted: it may load the model."""
        source = Random(f"{self.plan.seed}/speed/{side.name}")
        measured = self._measured(side, source, _WARM_WORDS)
        for num_words in _SPEED_WORDS:
            if self.left_s > 0:
                measured = self._measured(side, source, num_words)
            if measured[1].ttft_s > _TOO_SOON_S:
                break
        post, reply = measured
        # Where the server counts nothing: four characters are a token.
        num_prompt = reply.num_prompt or max(1, post.num_chars // 4)
        num_decoded = max(1, (reply.num_generated or _MEASURED_TOKENS) - 1)
        return SideSpeed(
            prefill=num_prompt / max(1e-4, reply.ttft_s),
            decode=num_decoded / max(1e-4, reply.total_s - reply.ttft_s),
            chars_per_token=post.num_chars / num_prompt,
            start_s=side.start_s,
        )

    def _measured(self, side: Side, source: Random, num_words: int) -> tuple[Post, ClientReply]:
        content = f"Case {source.randrange(10**9)}. {text(source, num_words)}"
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": _MEASURED_TOKENS,
        }
        post = Post(body=body)
        try:
            (reply,) = side.ask((post,), timeout_s=max(_LEAST_TIMEOUT_S, self.left_s + _LEAST_TIMEOUT_S))
        except Refused as error:
            raise BenchFailed(f"{side.name} refuses a plain chat request: {error}.") from error
        return post, reply


def _plus(spent_s: float | None, before_s: float | None, after_s: float | None) -> float | None:
    """`spent_s` and what was spent since; None once any of it is not known."""
    return None if spent_s is None or before_s is None or after_s is None else spent_s + after_s - before_s


def _steps(script: Script, replies: Callable[[], list[ClientReply]]) -> Generator[Step]:
    """The steps of a script, which hears what `replies` gives after each."""
    try:
        step = next(script)
        while True:
            yield step
            step = script.send(replies())
    except StopIteration:
        return


def _replayed(steps: Sequence[Step]) -> Script:
    """A script that was held before, by the leading side."""
    # Not `yield from`: what is sent back is not for the steps.
    for step in tuple(steps):  # noqa: UP028
        yield step


def about_model(side: Side) -> dict[str, Any]:
    """What the server tells of its model."""
    overview = side.get("/v1/cache/overview")
    return {name: overview.get(name) for name in ("model", "architecture", "layers", "context")}


def records_of(side: Side, replies: Sequence[ClientReply]) -> list[dict[str, Any]]:
    """Our server's own records of these requests, which are written just after their answers; empty ones of others."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(_TRIES if side.is_ours else 0):
        page = side.get(f"/v1/cache/requests?limit={min(_PAGE, 2 * len(replies))}").get("data", ())
        found = {record["id"]: record for record in page}
        if all(reply.id in found for reply in replies):
            break
        time.sleep(_PAUSE_S)
    return [found.get(reply.id, {}) for reply in replies]


def _reasons(side: Side, waves: Sequence[Sequence[ClientReply]]) -> list[str]:
    """Why each request had to compute what it computed; none of servers that do not say."""
    replies = [reply for wave in waves for reply in wave] if side.is_ours else []
    return [str(record.get("reason", "")) for record in records_of(side, replies)]

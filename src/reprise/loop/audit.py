"""The live audit: while the server is idle, a sample of its answers is recomputed without reuse and compared.

It takes a few percent of the idle time, yields to any request, and uses only free memory, so it affects neither the
tree nor the policy. To distinguish errors from rounding, an answer that differs is computed a second time with another
chunk length: the difference between the two cold runs is this model's rounding error.
"""

from __future__ import annotations

import json
import logging
import random
from collections import deque
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version

from cachetools import FIFOCache

from reprise.core.backend import AuditTotals, Verdict
from reprise.core.clock import Clock
from reprise.core.settings import Settings
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.cold_run import ColdRun, GivenAnswer, OtherChoice, rounding_between
from reprise.engine.running.runner import Runner
from reprise.loop.requests import RunningRequest
from reprise.memory import Account, Memory
from reprise.quiet import why_quiet

log = logging.getLogger("reprise.audit")

_SHARE = 0.04
"""Share of the idle time that audits use."""

_MOST_WAITING = 16
_MOST_TOLD = 512

_RETRY_S = 10.0
"""How long to wait before checking again whether memory is free."""

_CHUNK = 256
"""Tokens per step, few enough not to delay a request that arrives."""

_TIMES_ROUNDING = 4.0

_TOLERANCE, _TOLERANCE_16_BIT, _TOLERANCE_KV = 0.01, 0.5, 1.0
"""Differences in log-probability that need no second run: in float32, in 16 bits, with quantized KV."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditFinding:
    """The result of auditing one answer. `worst`: see `AuditTotals`. `rounding`: between two cold runs, if two ran."""

    answer: GivenAnswer
    verdict: Verdict
    worst: float
    others: tuple[OtherChoice, ...]
    rounding: float | None


class Audit:
    """The answers to be audited, and the one being recomputed. Used by one thread."""

    def __init__(self, runner: Runner, memory: Memory, settings: Settings, *, chunk: int, clock: Clock) -> None:
        """`chunk`: the longest chunk that the model can be fed."""
        self._runner = runner
        self._memory = memory
        self._rate = 0.0 if settings.is_audit_off or not settings.has_prefix_cache else settings.audit_rate
        self._chunk = min(chunk, _CHUNK)
        self._tolerance = _tolerance(runner, kv_bits=settings.kv_bits)
        self._with_text = settings.records_text
        self._background = settings.background
        self._clock = clock
        self._source = random.Random()
        self._waiting: deque[GivenAnswer] = deque(maxlen=_MOST_WAITING)
        self._run: ColdRun | None = None
        self._first: ColdRun | None = None
        """The first run, if the current one is the second."""
        self._next_s = 0.0
        self._verdicts = FIFOCache[str, Verdict](_MOST_TOLD)
        self.totals = AuditTotals()

    def draw(self) -> bool:
        """Whether to sample an answer that begins now."""
        return self._rate > 0 and why_quiet(self._background) is None and self._source.random() < self._rate

    def add(self, request: RunningRequest) -> None:
        """Queue the answer of a request for audit if it was sampled. A full queue drops the oldest."""
        sampler = request.live.sampler if request.live is not None else None
        if sampler is None or not sampler.is_audited or len(sampler.logprobs) != len(request.generated):
            return
        if len(self._waiting) == _MOST_WAITING:
            self.give_up()
        job = replace(request.job, watch=None, sampling=replace(request.job.sampling, seed=sampler.seed))
        tokens, logprobs, outcome = request.generated, sampler.logprobs, request.outcome(self._clock())
        answer = GivenAnswer(job=job, tokens=tuple(tokens), logprobs=tuple(logprobs), outcome=outcome)
        self._waiting.append(answer)

    @property
    def due_in_s(self) -> float | None:
        """Seconds until there is something to do if the server stays idle; None: never."""
        return max(0.0, self._next_s - self._clock()) if self._waiting else None

    def hurry(self) -> None:
        """Make the next step due at once."""
        self._next_s = 0.0

    def give_up(self) -> bool:
        """Free the memory of the current run, which restarts later. False if there is none."""
        if self._run is None:
            return False
        self._stop(self._run)
        self._run = self._first = None
        return True

    def step(self) -> GivenAnswer | None:
        """Compute a chunk of the current answer. Returns the answer if it turns out to differ from a cold run."""
        finding = self._advance()
        if finding is None:
            return None
        answer = finding.answer
        summary = f"audit of {answer.job.id}: {finding.verdict}, log-probabilities within {finding.worst:.2g}"
        if finding.verdict is not Verdict.DIFFERENT:
            log.info("%s", summary)
            return None
        log.error(
            "%s. The answer differs from a cold run, so its path is dropped from memory and disk. "
            "Please report this: %s",
            summary,
            _report_of(finding, self._runner.loaded, with_text=self._with_text),
        )
        return answer

    def _advance(self) -> AuditFinding | None:
        """Returns the finding once an answer is complete."""
        if self.due_in_s != 0:
            return None
        if why_quiet(self._background) is not None:
            self.give_up()
            self._next_s = self._clock() + _RETRY_S
            return None
        answer, started_s = self._waiting[0], self._clock()
        finding: AuditFinding | None = None
        try:
            if self._run is None and not self._begin(answer, chunk=self._chunk):
                self._next_s = started_s + _RETRY_S
                self._waiting.rotate(-1)
                return None
            assert self._run is not None
            self._run.step()
            self._count()
            finding = self._judge(answer) if self._run.is_over else None
        except Exception:
            log.exception("the audit of %s failed", answer.job.id)
            self.give_up()
            self._waiting.popleft()
        self._next_s = self._clock() + (self._clock() - started_s) * (1 / _SHARE - 1)
        return finding

    def _begin(self, answer: GivenAnswer, *, chunk: int) -> bool:
        length = len(answer.job.prompt) + len(answer.tokens)
        if not self._memory.fits(self._runner.most_live_nbytes(length, chunk=chunk)):
            return False
        self._run = ColdRun(self._runner, answer, chunk=chunk)
        return True

    def _judge(self, answer: GivenAnswer) -> AuditFinding | None:
        """Judge a complete run; starts a second run, and returns None, if the answer seems to be wrong."""
        run, first = self._run, self._first
        assert run is not None
        self._stop(run)
        self._run = None
        is_same = run.worst <= self._tolerance
        gap = max((other.gap for other in run.others), default=0.0)
        rounding: float | None = None
        if first is None and (not is_same or gap > self._tolerance):
            self._first = run
            # Another chunk length changes the order of summation. Two cold runs must agree that the answer is wrong.
            if not self._begin(answer, chunk=max(1, self._chunk // 3)):
                # No memory for it now: repeat both later.
                self._first = None
            return None
        if first is not None:
            rounding = rounding_between(first, run)
            worst, gap = min(first.worst, run.worst), min(gap, max((o.gap for o in first.others), default=0.0))
            most = max(self._tolerance, _TIMES_ROUNDING * rounding)
            is_fault = worst > most or gap > most
        else:
            worst, is_fault = run.worst, False
        verdict = Verdict.DIFFERENT if is_fault else Verdict.NEAR_TIE if run.others else Verdict.SAME
        self._first = None
        self._waiting.popleft()
        self._note(answer, verdict, worst)
        return AuditFinding(answer=answer, verdict=verdict, worst=worst, others=tuple(run.others), rounding=rounding)

    def _note(self, answer: GivenAnswer, verdict: Verdict, worst: float) -> None:
        self._verdicts[answer.job.id] = verdict
        before = self.totals
        self.totals = replace(
            before,
            num_checked=before.num_checked + 1,
            num_different=before.num_different + (verdict is Verdict.DIFFERENT),
            num_near_ties=before.num_near_ties + (verdict is Verdict.NEAR_TIE),
            worst=max(before.worst, worst),
            verdicts=dict(self._verdicts),
        )

    def _stop(self, run: ColdRun) -> None:
        run.stop()
        self._count()

    def _count(self) -> None:
        self._memory.measure(Account.SEQUENCES, max(0, self._runner.live_nbytes))


def _tolerance(runner: Runner, *, kv_bits: int | None) -> float:
    """The tolerance for the model's logits dtype and KV format."""
    if kv_bits is not None:
        return _TOLERANCE_KV
    logit_nbytes = runner.footprint.logits // runner.loaded.vocab_size
    return _TOLERANCE if logit_nbytes >= 4 else _TOLERANCE_16_BIT


def _report_of(finding: AuditFinding, loaded: LoadedModel, *, with_text: bool) -> str:
    """Everything needed to reproduce the difference, as JSON; tokens only if `with_text`."""
    answer, outcome = finding.answer, finding.answer.outcome
    job, first = answer.job, next(iter(finding.others), None)
    packages = ("mlx-reprise", "mlx", "mlx-lm")
    report: dict[str, object] = {
        "job": job.id,
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "architecture": loaded.architecture,
        "layers": [str(kind) for kind in loaded.blueprint.layout.kinds],
        "has_snapshots": loaded.blueprint.layout.has_snapshots,
        "versions": {name: version(name) for name in packages},
        "sampling": asdict(job.sampling),
        "prompt_tokens": len(job.prompt),
        "prompt_sha256": sha256(job.prompt.tokens.tobytes()).hexdigest(),
        "answer_tokens": len(answer.tokens),
        "reused": outcome.num_reused,
        "settled": outcome.num_settled,
        "loaded": outcome.num_loaded,
        "awaited": outcome.num_awaited,
        "boundaries": [[boundary.position, str(boundary.kind)] for boundary in job.prompt.boundaries],
        "worst": finding.worst,
        "rounding": finding.rounding,
        "first_other_token": None if first is None else asdict(first),
        "num_other_tokens": len(finding.others),
    }
    if with_text:
        report |= {"prompt": job.prompt.tokens.tolist(), "answer": list(answer.tokens)}
    return json.dumps(report, default=str)

"""The work of the engine thread: requests in, steps of the scheduler done, events out.

`Worker.step` reads from top to bottom: schedule, execute, store, finish. Nothing that a request does wrong leaves it:
whatever raises ends that request, with its reason, and the others go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from reprise.cache.lookup import Match
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.audit import Verdict
from reprise.core.backend import Counts, Held, Lookup, Status
from reprise.core.clock import Clock, monotonic
from reprise.core.errors import EngineFailed, OutOfMemory, RepriseError, memory_too_small
from reprise.core.events import Event, Finished, FinishReason, Progress, Started
from reprise.core.follow import bound_for, budget_within
from reprise.core.inspection import WHOLE_TREE, Inspection, TreePart
from reprise.core.job import Job, Purpose
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.record import Reason
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens, join_tokens
from reprise.disk.tier import DiskTier
from reprise.drafts.benefit import PASS_SIZES
from reprise.drafts.drafter import Draft, Drafts
from reprise.engine import memory as device_memory
from reprise.engine.batching import TOKEN_BY_TOKEN, reason_to_run_alone
from reprise.engine.cold_run import GivenAnswer
from reprise.engine.load import LoadedModel
from reprise.engine.machine import read_machine
from reprise.engine.records import RecordEncoder
from reprise.engine.runner import SHARES_FROM, LiveSequence, Runner, TokenFailure, TokenResult
from reprise.engine.score import PromptScorer
from reprise.loop.admission import Gate
from reprise.loop.audit import Audit, AuditSample, report_of
from reprise.loop.disk import open_disk
from reprise.loop.inspection import inspect_idle, inspect_memory, inspect_request, inspect_tree
from reprise.loop.requests import (
    Admission,
    Decoding,
    Ended,
    Preempted,
    Prefilling,
    RunningRequest,
    Waiting,
)
from reprise.loop.scheduler_state import scheduler_state
from reprise.loop.sequences import SequencePool, initial_decode_slots
from reprise.loop.settled import SettledSpans
from reprise.memory import Account, Memory
from reprise.plan.checkpoints import interval_tokens, make_plan
from reprise.schedule.decide import decide
from reprise.schedule.limits import SchedulerLimits, Speed
from reprise.schedule.order import is_auxiliary_request
from reprise.schedule.queue_bound import queue_wait_s
from reprise.schedule.sharing import common_prefix_lengths
from reprise.schedule.step import Group, Slice, Step

log = logging.getLogger("reprise.loop")

_COMPACT_ENTRIES = 8192
"""Entries that one idle step copies at most, so that an arrival waits for little."""

_LONGEST_NAP_S = 3600.0
"""A clock may be told to wait for so long on every platform."""

_PINNED_SHARE = 2
"""Pins keep this part of the budget at most, so that there is always room for what nobody pinned."""

_TOLERANCE, _TOLERANCE_16_BIT, _TOLERANCE_KV = 0.01, 0.5, 1.0
"""Log-probability by which a cold run may differ without a second look: in float32, in 16 bits, with quantized KV."""

_LEAST_TOKENS = 512
"""A server that has no room for the state of so many is not worth starting."""

_CHAT_TOKENS = 1024
"""Beside a prompt longer than this, a short one that shares nothing is an auxiliary request."""

Result = Slice | TokenResult | TokenFailure
"""What a pass did for one request."""


class Worker:
    """All state of the engine thread. Every method is called on it."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        gate: Gate,
        *,
        shares_from: int = SHARES_FROM,
        disk_block: int | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        """`disk_block`: see `open_disk`; `wake` has the loop call `step`, and may be called on any thread."""
        alone = reason_to_run_alone(loaded)
        if alone is not None:
            log.info("%s runs one sequence at a time: %s", loaded.name, alone)
        layout = loaded.blueprint.layout
        chunk = 1 if loaded.architecture in TOKEN_BY_TOKEN else settings.prefill_chunk
        self._clock = clock
        self._gate = gate
        self._uses_cache = settings.has_prefix_cache
        self.runner = Runner(loaded, can_batch=alone is None, shares_from=shares_from)
        least = self.runner.footprint.live(_LEAST_TOKENS, chunk=min(chunk, _LEAST_TOKENS))
        self.memory = Memory(_budget(settings, loaded, least=least))
        self.cache = PrefixCache(layout, memory=self.memory, clock=clock)
        self.sequences = SequencePool(self.runner, self.cache, self.memory, chunk=chunk)
        self.audit = Audit(
            self.runner,
            self.memory,
            rate=0.0 if settings.is_audit_off or not self._uses_cache else settings.audit_rate,
            chunk=chunk,
            tolerance=_tolerance(self.runner.footprint.logits // loaded.vocab_size, kv_bits=settings.kv_bits),
            clock=clock,
        )
        self._records_text = settings.records_text
        self.memory.reclaim_from(
            self.audit.give_up,
            self.sequences.share_duplicates,
            self.cache.evict_one,
            self.sequences.close_idle,
            self._unpin_first,
        )
        device_memory.bound_free_buffers(self.memory.budget)
        footprint = self.runner.footprint
        self._interval = interval_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full)
        self._limits = SchedulerLimits(
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            prefill_chunk=chunk,
            min_chunk=min(16, chunk),
            max_stall_s=settings.max_stall_ms / 1000,
            can_batch=self.runner.can_batch,
            resumes_anywhere=layout.resumes_anywhere,
        )
        self.requests: dict[str, RunningRequest] = {}
        """By id, in the order of arrival. For others to look at."""
        self._counts: Counter[str] = Counter()
        self._saved_s = 0.0
        self._settled = SettledSpans()
        self._speed = Speed()
        self._is_compact = True
        """Whether nothing was stored since the small segments of the cache were joined."""
        self.drafts = _drafts(self.runner, settings.drafts)
        """None: nothing is drafted."""
        disk = open_disk(settings, loaded, footprint, block=disk_block)
        self.disk = DiskTier(
            disk,
            self.cache,
            sizes=footprint,
            sequences=self.sequences,
            new_encoder=RecordEncoder,
            max_stall_s=self._limits.max_stall_s,
            wake=wake,
        )
        contexts = [c for c in (settings.max_context, loaded.context) if c is not None]
        gate.limits = self._limits
        gate.context = min(contexts, default=None)
        gate.needed = lambda position: footprint.live(position, chunk=1)
        gate.budget = self.memory.budget

    # A step.

    def step(self) -> None:
        """Ask the scheduler what to do next, do it, store what was computed, and finish what is complete."""
        if self.sequences.is_broken:
            self.reset_cache()
        self._match_loaded(self.disk.advance())
        step = self._schedule()
        if step is None:
            self._tidy()
        else:
            self._come_and_go(step)
            for request, result in self._execute(step):
                self._run_isolated(request, lambda request, result=result: self._take(request, result))
        self.disk.write()

    def _schedule(self) -> Step | None:
        """What the scheduler says; None if nobody is there who could run."""
        present = [r for r in self.requests.values() if not r.is_loading and not self._awaits_row(r)]
        if not present:
            return None
        state = scheduler_state(present, self.sequences, self._speed, self.cache.layout, now_s=self._clock())
        step = decide(state, self._limits)
        assert not step.is_idle, "requests are there, and nothing runs"
        return step

    def _awaits_row(self, request: RunningRequest) -> bool:
        """Whether another computes the logits behind this very prompt: it waits for those, and computes nothing."""
        phase = request.phase
        if not isinstance(phase, Waiting) or phase.row is not None or not self._keeps_row(request):
            return False
        leaders = (self.requests.get(leader) for leader in request.common_prefix_lengths)
        return any(
            leader is not None
            and leader.may_sample_at_once
            and not leader.is_loading
            and not leader.has_ended
            and request.is_repeat_of(leader)
            for leader in leaders
        )

    def _keeps_row(self, request: RunningRequest) -> bool:
        """Whether the logits behind the request's prompt are kept when it samples its first token."""
        footprint = self.runner.footprint
        return (
            self._uses_cache
            and request.may_sample_at_once
            and self.cache.rows.admits(footprint.logits + footprint.snapshot)
        )

    def _come_and_go(self, step: Step) -> None:
        """Stop settling, commit what others can go on from, and admit those whose turn it is."""
        for job_id in step.give_up:
            self.cancel(job_id)
        for job_id in step.commit:
            self._run_isolated(self.requests[job_id], self._store_progress)
        for job_id in step.admit:
            self._run_isolated(self.requests[job_id], self._admit)

    def _execute(self, step: Step) -> Iterator[tuple[RunningRequest, Result]]:
        """Run the passes of this step. What is yielded is stored and finished before the next pass."""
        if step.prefill:
            yield from self._prefill(step.prefill)
        if step.decode:
            started_s = self._clock()
            for group in step.decode:
                yield from self._decode(group)
            self.sequences.measure()
            self._speed = self._speed.after_decode(self._clock() - started_s)

    def _take(self, request: RunningRequest, result: Result) -> None:
        """Store and finish what one request got from a pass."""
        match result:
            case Slice():
                self._after_slice(request, result)
            case TokenResult():
                self._after_tokens(request, result)
            case TokenFailure(error=error):
                raise error

    def _tidy(self) -> None:
        """There is nothing to do: join small segments."""
        if self.requests:
            return  # Those that are there wait for the disk.
        # First, so that a compaction that raises is not tried for ever.
        self._is_compact = True
        copied = self.cache.compact(max_entries=_COMPACT_ENTRIES)
        self._is_compact = copied == 0
        if copied == 0:
            device_memory.give_back()
            if log.isEnabledFor(logging.DEBUG):
                self.cache.check()
            self._audit()

    def _audit(self) -> None:
        """Compute a part of an answer again; if it was wrong, drop the path that it came from, and say so."""
        finding = self.audit.step()
        if finding is None:
            return
        answer = finding.sample.answer
        told = f"audit of {answer.job.id}: {finding.verdict}, log-probabilities within {finding.worst:.2g}"
        if finding.verdict is not Verdict.DIFFERENT:
            log.info("%s", told)
            return
        log.error(
            "%s. The answer is not what a cold run computes, so its path is dropped from memory and disk. "
            "Please report this: %s",
            told,
            report_of(finding, self.runner.loaded, with_text=self._records_text),
        )
        tokens = join_tokens(answer.job.prompt.tokens, as_tokens(answer.tokens))
        # What is on disk below a wrong state is wrong as well, and nothing tells it apart.
        self.disk.clear(answer.job.namespace)
        self.cache.drop_path(tokens, namespace=answer.job.namespace)

    # Requests arrive, are matched and admitted.

    def arrive(self, job: Job, sink: Callable[[Event], None], arrived_s: float) -> None:
        """Queue a job."""
        request = RunningRequest(job=job, sink=sink, arrived_s=arrived_s)
        others = {other.id: other.job.prompt.tokens for other in self._sharers(job)}
        has_chats = any(len(other.job.prompt) > _CHAT_TOKENS for other in self.requests.values() if not other.is_settle)
        self.requests[job.id] = request
        if self.drafts is not None and job.purpose is Purpose.GENERATE:
            request.drafts = self.drafts.start(job.prompt.tokens, namespace=job.namespace, prediction=job.prediction)
        if not request.is_settle:
            self._counts.update(requests=1)
        try:
            request.common_prefix_lengths = common_prefix_lengths(job.prompt.tokens, others)
            self.match(request)
            request.first_resume_at = request.position
            known = max(request.position, self.disk.reach(request))
            request.is_auxiliary = is_auxiliary_request(
                prompt_len=len(job.prompt), resume_at=known, has_chats=has_chats
            )
        except Exception as error:
            self._fail(request, error)
            return
        if request.position == len(job.prompt) and job.purpose is not Purpose.GENERATE:
            self._note_admission(request, request.position)
            self._keep_pins(request)
            self._finish(request, FinishReason.DONE)

    def _sharers(self, job: Job) -> list[RunningRequest]:
        """Those whose computed prefixes the job could use. Without a cache there is nothing to hand them over."""
        if not self._uses_cache or job.prompt_logprobs is not None:
            return []
        return [request for request in self.requests.values() if request.namespace == job.namespace]

    def match(self, request: RunningRequest) -> Match:
        """Look the request's prompt up, and note where it could resume if it waits."""
        match = self.cache.match(request.prompt.tokens, namespace=request.namespace)
        if not self._uses_cache:
            request.reason = Reason.CACHE_OFF
        elif isinstance(request.phase, Waiting):
            request.phase.row = self.cache.row_at(match) if request.may_sample_at_once else None
            limit = len(request.prompt) if request.phase.row is not None else request.reusable
            request.phase.resume_at = self.cache.resume_at(match, limit=limit)
            request.stored = max(request.stored, request.phase.resume_at)
            if request.admission is None:
                request.matched = match.length
        return match

    def match_followers(self, leader: RunningRequest) -> None:
        """Look those up anew that wait and share something with this request."""
        for other in self.requests.values():
            if isinstance(other.phase, Waiting) and (
                leader.id in other.common_prefix_lengths or other.id in leader.common_prefix_lengths
            ):
                self.match(other)

    def _match_loaded(self, request_ids: Sequence[str]) -> None:
        """Look those up anew for which the disk was read."""
        for request in [self.requests[request_id] for request_id in request_ids]:
            self._run_isolated(request, self._match_with_followers)

    def _match_with_followers(self, request: RunningRequest) -> None:
        if request.loading_since_s is not None:
            seconds = self._clock() - request.loading_since_s
            request.loading_s, request.loading_since_s = request.loading_s + seconds, None
            self._speed = self._speed.after_load(request.loaded, seconds)
        self.match(request)
        self.match_followers(request)

    def _admit(self, request: RunningRequest) -> None:
        """Start a request that waited, where the cache can resume it."""
        if request.reusable == request.end and self.disk.begin(request):
            request.loading_since_s = self._clock()
            return  # It is admitted when what the disk has of it is there.
        waiting = request.phase
        assert isinstance(waiting, Waiting), request.phase
        prompt, match = request.prompt, self.match(request)
        resume_at, row = waiting.resume_at, waiting.row
        # One that was preempted comes back: what is told of it is how it began.
        is_new = request.admission is None
        if self._uses_cache and is_new:
            request.continues = match.continues
            request.reason = self._reason(request, resume_at, was_lost=self.cache.was_lost(match, resume_at))
        is_branch = match.continues is not None and match.length < len(prompt)
        plan = make_plan(
            prompt,
            layout=self.cache.layout,
            resume_at=resume_at,
            end=request.end,
            branch_at=match.length if is_branch else None,
            interval=self._interval,
            has_row=row is not None,
        )
        lease = self.cache.lease(match, resume_at, is_request=not request.is_settle)
        try:
            reserve = len(prompt) + initial_decode_slots(request.job)
            live = self.sequences.start(match, resume_at, reserve=reserve)
        except Exception:
            self.cache.release(lease)
            raise
        live.scorer = self._scorer(request)
        request.enter(Prefilling(live=live, lease=lease, plan=plan, preempted=waiting.preempted))
        request.checkpoints = plan.positions
        self.sequences.measure()
        self._keep_pins(request)
        if is_new:
            self._note_admission(request, resume_at)
            self._gate.admitted(request.id)
            self._emit(request, Started(reused=resume_at, total=len(prompt)))
        if resume_at < request.end:
            return
        if row is not None:
            request.enter(Decoding(live=live, lease=lease, plan=plan))
            self._take(request, self.runner.sample_from(live, request.job, row, is_audited=self.audit.draw()))
        elif request.job.purpose is Purpose.GENERATE:
            self._begin_decode(request)
        else:
            # Another request has computed all of it while this one waited.
            self._finish(request, FinishReason.DONE)

    def _note_admission(self, request: RunningRequest, resume_at: int) -> None:
        # Some of it may have been evicted again.
        loaded = min(request.loaded, resume_at)
        # What another request computed meanwhile was waited for all the same.
        found = min(resume_at, request.first_resume_at + loaded)
        # Before anything was computed nobody knows how long it takes.
        computing_s = self._speed.prefill_s(0, found) if self._speed.by_depth else 0.0
        request.admission = Admission(
            at_s=self._clock(),
            reused=resume_at,
            settled=self._settled.within(request.prompt.tokens, resume_at),
            loaded=loaded,
            saved_s=max(0.0, computing_s - request.loading_s),
        )
        self._counts.update(loaded=loaded)

    def _scorer(self, request: RunningRequest) -> PromptScorer | None:
        is_wanted = request.job.prompt_logprobs is not None and request.scored < len(request.job.prompt)
        return PromptScorer(request.job, start=request.scored) if is_wanted else None

    @staticmethod
    def _reason(request: RunningRequest, resume_at: int, *, was_lost: bool) -> Reason:
        """Why what lies behind `resume_at` is computed, as far as the cache knows."""
        if request.job.prompt_logprobs is not None:
            return Reason.PROMPT_LOGPROBS
        if request.matched == 0:
            return Reason.EVICTED if was_lost else Reason.COLD
        if resume_at >= request.end:
            return Reason.NOTHING_NEW
        if was_lost:
            return Reason.EVICTED
        if request.continues is not None:
            return Reason.BRANCHED
        return Reason.NEW_TOKENS if resume_at >= request.matched else Reason.NO_SNAPSHOT

    # Prefill.

    def _prefill(self, slices: Sequence[Slice]) -> Iterator[tuple[RunningRequest, Result]]:
        """One pass over slices of one length, as far as there is room."""
        num = len(slices[0])
        fitting = self._preempt_until_fit(
            [self.requests[piece.id] for piece in slices], lambda lives: self.sequences.reserve_to_prefill(lives, num)
        )
        by_id = {request.id: request for request in fitting}
        slices = [piece for piece in slices if piece.id in by_id]
        if not slices:
            return
        started_s = self._clock()
        chunks = [by_id[piece.id].prompt.tokens[piece.start : piece.stop] for piece in slices]
        if self._run_pass(fitting, lambda lives: self.runner.prefill(lives, chunks)) is None:
            return
        self._speed = self._speed.after_prefill(num * len(slices), self._clock() - started_s, position=slices[0].start)
        self._gate.speed = self._speed
        self.sequences.measure()
        for piece in slices:
            self._counts.update({"settled" if by_id[piece.id].is_settle else "prefilled": len(piece)})
            yield by_id[piece.id], piece

    def _after_slice(self, request: RunningRequest, piece: Slice) -> None:
        """Store the checkpoint that the slice ends at, and begin to decode or finish where the prompt ends."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        scored = phase.live.scorer.give() if phase.live.scorer is not None else None
        if scored is not None:
            request.scored = scored.start + len(scored.tokens)
            self._emit(request, scored)
        if piece.is_checkpoint and not self.cache.layout.resumes_anywhere:
            self._store(request, piece.stop, phase.plan.kind_at(piece.stop))
        if phase.preempted is None:
            self._emit(request, Progress(position=piece.stop, total=len(request.job.prompt)))
        if request.drafts is not None:
            request.drafts.read_prompt(min(piece.stop, len(request.job.prompt)))
        if piece.stop < request.end:
            return
        if request.job.purpose is Purpose.GENERATE:
            self._begin_decode(request)
            return
        self._store(request, piece.stop, request.end_kind)
        self._note_settled(request)
        self._finish(request, FinishReason.DONE)

    # Decode.

    def _begin_decode(self, request: RunningRequest) -> None:
        """The prompt is there: the next pass samples."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        if request.decode_began_s is None:
            request.decode_began_s = self._clock()
        if phase.preempted is None:
            footprint = self.runner.footprint
            keeps_row = self._keeps_row(request)
            keeps_row = keeps_row and self.cache.has_room_for_row(footprint.logits, snapshot=footprint.snapshot)
            self.runner.begin_decode(phase.live, request.job, keeps_row=keeps_row, is_audited=self.audit.draw())
        else:
            pending = int(phase.preempted.prompt.tokens[-1])
            self.runner.resume_decode(phase.live, phase.preempted.sampler, pending=pending)
        request.enter(Decoding(live=phase.live, lease=phase.lease, plan=phase.plan))

    def _decode(self, group: Group) -> Iterator[tuple[RunningRequest, Result]]:
        """A token for each sequence of a group, as far as there is room."""
        # A prefill slice of the same step may have failed one of them, or have preempted it.
        there = [self.requests[job_id] for job_id in group.ids if job_id in self.requests]
        decoding = [request for request in there if isinstance(request.phase, Decoding)]
        decoding = self._preempt_until_fit(decoding, self.sequences.reserve_to_decode)
        if len(decoding) == 1 and self._is_context_full(decoding[0]):
            self._run_isolated(decoding[0], self._stop_for_memory)
            return
        by_live = {id(request.live): request for request in decoding}
        for result in self._next_tokens(decoding) if decoding else ():
            request = by_live[id(result.live)]
            assert isinstance(request.phase, Decoding), request.phase
            request.phase.group = group.key
            yield request, result

    def _next_tokens(self, group: Sequence[RunningRequest]) -> Sequence[TokenResult | TokenFailure]:
        """One pass over a group: a token for each, or several for one alone, where a draft of them is worth it."""
        draft = self._draft(group)
        started_s = self._clock()
        results = self._run_pass(
            group, lambda lives: self.runner.decode(lives, draft=draft.tokens.tolist() if draft is not None else ())
        )
        for result in results if results is not None and len(group) == 1 else ():
            if group[0].drafts is not None and isinstance(result, TokenResult):
                group[0].drafts.note(
                    draft if result.num_drafted > 0 else None,
                    num_fed=result.num_fed,
                    num_tokens=len(result.sampled),
                    seconds=self._clock() - started_s,
                )
        return results if results is not None else ()

    def _draft(self, group: Sequence[RunningRequest]) -> Draft | None:
        """What an answer probably goes on with, where that is worth verifying; nobody else decodes meanwhile."""
        request = group[0]
        drafts, live = request.drafts, request.live
        if drafts is None or live is None or request.first_token_s is None:
            # The first token comes alone: what is behind the prompt is kept for exact repeats.
            return None
        drafts.read_prompt(len(request.job.prompt))
        if sum(isinstance(other.phase, Decoding) for other in self.requests.values()) > 1:
            return None
        most = request.job.max_tokens - len(request.generated) - 1
        if self._gate.context is not None:
            most = min(most, self._gate.context - len(request.job.prompt) - len(request.generated) - 1)
        num_fed = 1 + len(live.unfed)
        draft = drafts.propose(num_fed=num_fed, most=most)
        if draft is None or not self.sequences.fits_draft(live, num_fed + len(draft.tokens)):
            return None
        return draft

    def _after_tokens(self, request: RunningRequest, result: TokenResult) -> None:
        """Tell the tokens, and finish if the last one ends the answer."""
        now_s = self._clock()
        is_first = request.first_token_s is None
        if request.first_token_s is None:
            assert isinstance(request.phase, Decoding), request.phase
            request.first_token_s = now_s
            # The prompt's last token is fed with the pass that samples the first of the answer.
            self._counts.update(prefilled=0 if request.phase.plan.has_row else 1)
        tokens = [sampled.token for sampled in result.sampled]
        request.generated += tokens
        if request.drafts is not None:
            request.drafts.accept(tokens)
        self._counts.update(generated=len(tokens))
        for sampled in result.sampled:
            self._emit(request, sampled)
        context, length = self._gate.context, len(request.job.prompt) + len(request.generated)
        is_at_end = context is not None and length >= context
        reason = FinishReason.LENGTH if result.reason is None and is_at_end else result.reason
        if is_first and reason is None:
            self._store_for_repeats(request)
        if reason is not None:
            self._speed = self._speed.after_generation(now_s - request.first_token_s)
            self._complete(request, reason)

    def _complete(self, request: RunningRequest, reason: FinishReason) -> None:
        """Store an answer that is whole, and finish."""
        assert isinstance(request.phase, Decoding), request.phase
        if request.phase.lease is not None:
            self.cache.note_answer(request.phase.lease, len(request.generated))
        self._store_progress(request)
        tokens = request.tokens_to(request.position)
        self._note_for_audit(request)
        self._finish(request, reason)
        try:
            # However busy the server is: its next turn is restored from few segments.
            self.cache.compact_path(tokens, namespace=request.namespace)
        except Exception:
            # The answer is there, and each step leaves the books right: it stays as it is.
            log.exception("what a chat has stored could not be joined")

    def _note_for_audit(self, request: RunningRequest) -> None:
        sampler = request.live.sampler if request.live is not None else None
        if sampler is None or not sampler.is_audited or len(sampler.logprobs) != len(request.generated):
            return
        job, outcome = request.job, request.outcome(self._clock())
        job = replace(job, watch=None, sampling=replace(job.sampling, seed=sampler.seed))
        answer = GivenAnswer(job=job, tokens=tuple(request.generated), logprobs=tuple(sampler.logprobs))
        self.audit.add(AuditSample(answer=answer, outcome=outcome))

    # Store.

    def _store_progress(self, request: RunningRequest) -> None:
        """Store what the request has computed so far."""
        phase = request.phase
        if not isinstance(phase, Prefilling | Decoding):
            return
        self.runner.catch_up(phase.live)
        if request.position <= phase.plan.resume_at:
            return
        is_decoding = isinstance(phase, Decoding)
        self._store(request, request.position, BoundaryKind.GENERATION_END if is_decoding else BoundaryKind.INTERVAL)
        self._note_settled(request)

    def _store_for_repeats(self, request: RunningRequest) -> None:
        """The first token is there: store the state behind the prompt for exact repeats where it is gone with the next.

        Where every position is resumable, that is only for those who wait for it.
        """
        if request.live is None or request.live.prompt_row is None:
            return
        is_awaited = any(other.is_waiting and other.is_repeat_of(request) for other in self.requests.values())
        if is_awaited or not self.cache.layout.resumes_anywhere:
            # Not for the disk, which keeps no logits: there the position before serves as well.
            self._commit(request, request.position, BoundaryKind.PROMPT_END)
            self.match_followers(request)

    def _store(self, request: RunningRequest, position: int, kind: BoundaryKind) -> None:
        """Put what the request has computed up to `position`, where it stands, into the cache."""
        if not self._uses_cache:
            return
        self._commit(request, position, kind)
        self.disk.note(request, position, kind)
        self.match_followers(request)

    def _commit(self, request: RunningRequest, position: int, kind: BoundaryKind) -> None:
        assert request.live is not None and position == request.position, (request.id, position, request.position)
        committed = self.cache.commit(
            request.tokens_to(position),
            self.runner.source(request.live),
            kind=kind,
            namespace=request.namespace,
            is_auxiliary=request.is_auxiliary,
            overrides_admission=request.overrides_admission,
            stable_at=request.job.prompt.stable_at,
        )
        self._keep_pins(request)
        request.num_stored += committed.tokens
        request.stored = min(position, len(request.job.prompt))
        self._is_compact = False
        row, end = request.live.prompt_row, len(request.job.prompt)
        if row is not None and position >= end:
            request.live.prompt_row = None
            self.sequences.measure()
            self.cache.keep_row(request.tokens_to(end), row, namespace=request.namespace)

    def _note_settled(self, request: RunningRequest) -> None:
        """A settle is over or given up: a later request is told how much of what it reuses was computed by it."""
        if request.is_settle and isinstance(request.phase, Prefilling):
            self._settled.add(request.job.prompt.tokens, request.phase.plan.resume_at, request.position)

    def _keep_pins(self, request: RunningRequest) -> None:
        """Pin what the client marked, as far as it is stored: new, or there before and asked for again.

        The time of each begins when it is found there first, and does not begin anew as the job goes on.
        """
        cache, now_s, owner = self.cache, self._clock(), request.job.owner
        num_before = cache.pins.num_changes
        for position, seconds in request.pins.items():
            if position <= request.position:
                until = request.pinned_until.get(position, now_s + seconds)
                if cache.pin(request.tokens_to(position), until=until, namespace=request.namespace, owner=owner):
                    request.pinned_until[position] = until
        retained_at, seconds = request.retained_at, request.job.retain_for_s
        if retained_at is not None and seconds is not None and retained_at <= request.position:
            until = request.retained_until if request.retained_until is not None else now_s + seconds
            if cache.retain(request.tokens_to(retained_at), until=until, namespace=request.namespace, owner=owner):
                request.retained_until = until
        if cache.pins.num_changes > num_before and self.memory.budget is not None:
            num = cache.pins.keep_within(self.memory.budget // _PINNED_SHARE)
            if num > 0:
                log.warning("%d pins gave way: pins keep half of --cache-bytes at most", num)
        prompt = request.job.prompt
        if request.pin is None and request.job.purpose is Purpose.PREFILL and len(prompt) in request.pinned_until:
            # Now, before it may be over.
            request.pin = cache.pin_of(prompt.tokens, namespace=request.namespace)

    # Too little memory.

    def _preempt_until_fit(
        self, requests: Sequence[RunningRequest], reserve: Callable[[list[LiveSequence]], bool]
    ) -> list[RunningRequest]:
        """Those of `requests` that can take their next step: the youngest of all that run wait where there is no room.

        The last one that runs goes on whatever it takes.
        """
        going = list(requests)
        while going and not reserve([request.live for request in going if request.live is not None]):
            running = [request for request in self.requests.values() if request.is_running]
            if len(running) == 1:
                break
            youngest = max(running, key=lambda request: (request.is_settle, request.arrived_s))
            self._run_isolated(youngest, self._preempt)
            going = [request for request in going if request.is_running]
        return going

    def _preempt(self, request: RunningRequest) -> None:
        """Give the request's state up, to be computed again when there is room; what the cache can keep is kept."""
        assert request.live is not None
        log.info("request %s waits for memory at token %d", request.id, request.position)
        self._store_progress(request)
        sampler = self.runner.pause(request.live)
        preempted = request.preempted
        if sampler is not None:
            prompt = Prompt(tokens=request.tokens, boundaries=request.job.prompt.boundaries)
            preempted = Preempted(prompt=prompt, sampler=sampler)
        self._release(request, Waiting(preempted=preempted))
        request.stored = 0
        self.match(request)
        self._counts.update(paused=1)

    def _is_context_full(self, request: RunningRequest) -> bool:
        """Whether nothing else is there to give way, and its next token has no room: its memory is its context."""
        others = (other for other in self.requests.values() if other is not request and other.is_running)
        is_alone = next(others, None) is None
        # Of the configured budget: what other programs need at this moment ends no answer.
        return (
            request.live is not None
            and is_alone
            and not self.sequences.fits_next_token(request.live, budget=self._gate.budget)
        )

    def _stop_for_memory(self, request: RunningRequest) -> None:
        """What it has is an answer, if any."""
        if not request.generated:
            raise OutOfMemory("There is no room for the first token of an answer. Give --cache-bytes more memory.")
        self._complete(request, FinishReason.LENGTH)

    def _unpin_first(self) -> bool:
        has_gone = self.cache.pins.unpin_first()
        if has_gone:
            log.warning("a pin gave way: running requests had no room otherwise")
        return has_gone

    def set_budget(self, nbytes: int, *, returns_buffers: bool = False) -> None:
        """Keep within this budget from now on; what exceeds it is reclaimed. `returns_buffers`: to the system, too."""
        if nbytes != self.memory.budget:
            # The gate keeps the configured one: what fits that is served, alone if it must be, and not refused because
            # other programs need memory at this moment.
            device_memory.bound_free_buffers(nbytes)
            self.memory.resize(nbytes)
        if returns_buffers:
            device_memory.give_back()

    # Ending: each request for itself, whatever goes wrong, and with all that it holds given back.

    def cancel(self, job_id: str) -> None:
        """End the job; what it computed stays in the cache."""
        request = self.requests.get(job_id)
        if request is not None:
            self._run_isolated(request, self._store_progress)
            self._run_isolated(request, lambda request: self._finish(request, FinishReason.CANCELLED))

    def cancel_all(self) -> None:
        for job_id in list(self.requests):
            self.cancel(job_id)

    def fail_all(self, error: RepriseError) -> None:
        """End all jobs with `error`, and keep nothing of them: their state is not to be trusted."""
        for request in list(self.requests.values()):
            self._discard_state(request)
            self._fail(request, error)

    def _run_isolated(self, request: RunningRequest, action: Callable[[RunningRequest], None]) -> None:
        """Do something for a request; if that raises, it fails alone."""
        if isinstance(request.phase, Ended):
            return
        try:
            action(request)
        except Exception as error:
            self._fail(request, error)

    def _run_pass(
        self,
        requests: Sequence[RunningRequest],
        run: Callable[[list[LiveSequence]], Sequence[TokenResult | TokenFailure]],
    ) -> Sequence[TokenResult | TokenFailure] | None:
        """One pass over several sequences. If it raises, the state of all of them is lost, and all fail: then None."""
        lives = [request.live for request in requests if request.live is not None]
        assert len(lives) == len(requests)
        try:
            return run(lives)
        except Exception as error:
            log.exception("a pass over %d sequences failed", len(requests))
            # All of them before the first one fails, which may make room with what they hold.
            for request in requests:
                self._discard_state(request)
            for request in requests:
                self._fail(request, error)
            return None

    def _fail(self, request: RunningRequest, error: Exception) -> None:
        """The request has failed. What is no error of ours becomes one, with a sentence for its client."""
        if device_memory.is_out_of_memory(error):
            shown: RepriseError = OutOfMemory(
                "There was not enough memory for this request. Shorten it, or lower --cache-bytes or --max-batch."
            )
            self._relieve(request)
        elif isinstance(error, RepriseError):
            shown = error
        else:
            log.error("request %s failed", request.id, exc_info=error)
            shown = EngineFailed(f"The request failed in the engine: {type(error).__name__}: {error}")
        self._finish(request, FinishReason.FAILED, shown)

    def _finish(self, request: RunningRequest, reason: FinishReason, error: RepriseError | None = None) -> None:
        """The request is over: give back what it holds, forget it, and tell its client."""
        outcome = request.outcome(self._clock())
        del self.requests[request.id]
        if request.drafts is not None:
            request.drafts.end()
        self._release(request, Ended())
        if request.job.purpose is Purpose.GENERATE:
            self._saved_s += outcome.saved_s
        if not request.is_settle:
            self._counts.update(
                prompt=outcome.prompt if request.admission is not None else 0,
                reused=outcome.reused,
                finished=int(error is None and reason is not FinishReason.CANCELLED),
                cancelled=int(reason is FinishReason.CANCELLED),
                failed=int(error is not None),
            )
        self._gate.ended(request.id)
        self._emit(request, Finished(reason=reason, outcome=outcome, error=error))

    def _release(self, request: RunningRequest, phase: Waiting | Ended) -> None:
        """Give back what the request holds, and enter `phase`. Whatever goes wrong, its client and the gate wait."""
        before, position, tokens = request.phase, request.position, request.tokens_to(request.position)
        request.enter(phase)
        if not isinstance(before, Prefilling | Decoding):
            self.match_followers(request)
            return
        request.reached = max(request.reached, position)
        try:
            if before.lease is not None:
                self.cache.release(before.lease)
            # After that, since it stays idle for what the cache still shares with it.
            self.sequences.end(before.live, tokens, namespace=request.namespace)
            self.sequences.measure()
            self.match_followers(request)
        except Exception:
            log.exception("what request %s held could not be given back; the cache is reset", request.id)
            self.sequences.drop(before.live)
            self.reset_cache()
        if self.sequences.is_broken:
            self.reset_cache()

    def _discard_state(self, request: RunningRequest) -> None:
        """The state of a sequence is not to be trusted any more; only what it shared before the failure is kept."""
        phase = request.phase
        if not isinstance(phase, Prefilling | Decoding):
            return
        request.enter(Waiting())
        try:
            if phase.lease is not None:
                self.cache.release(phase.lease)
            # All that it was given or has computed: a checkpoint of this very run may have shared as well.
            self.sequences.discard(phase.live, request.tokens, namespace=request.namespace)
        except Exception:
            log.exception("what request %s shared is lost; the cache is reset", request.id)
            self.reset_cache()

    def reset_cache(self) -> None:
        """Nobody knows any more what the cache holds: it holds nothing, and what runs goes on without it."""
        for request in self.requests.values():
            if isinstance(request.phase, Prefilling | Decoding):
                request.phase.lease = None
        self.cache.reset()
        self.sequences.reset()

    def _relieve(self, request: RunningRequest) -> None:
        """There was too little memory for this request: make what room there is for its next try."""
        try:
            self.memory.reserve(self.sequences.estimate(len(request.prompt)))
        except Exception:
            log.exception("making room failed; the cache is reset")
            self.reset_cache()
        device_memory.give_back()

    def _emit(self, request: RunningRequest, event: Event) -> None:
        """Tell the request's client."""
        try:
            request.sink(event)
        except Exception:
            # A sink that is gone (its event loop closed, say) must not hold up the others.
            log.debug("the sink of %s raised", request.id, exc_info=True)

    # What the thread asks and says.

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def is_empty(self) -> bool:
        """Whether no job is there but those that settle."""
        return all(request.is_settle for request in self.requests.values())

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        runs = any(not request.is_loading for request in self.requests.values())
        # Small segments are joined when no job is there, and not while one waits for the disk.
        idles = not self.requests and (not self._is_compact or self.audit.due_in_s == 0)
        return runs or idles or self.disk.due_in_s == 0

    @property
    def wakes_in_s(self) -> float | None:
        """When there will be something to do or to tell if nothing comes: to write, or a pin that ends. None: never."""
        until = self.cache.pins.total().until
        naps = [max(0.0, until - self._clock())] if until != float("inf") else []
        due_in_s = self.disk.due_in_s
        naps += [due_in_s] if due_in_s is not None else []
        audit_in_s = self.audit.due_in_s if not self.requests else None
        naps += [audit_in_s] if audit_in_s is not None else []
        return min([_LONGEST_NAP_S, *naps]) if naps else None

    def lookup(self, prompt: Prompt, *, namespace: str) -> Lookup:
        """What this prompt would find if it came now. Changes nothing. O(length of the match)."""
        job = Job(id="lookup", prompt=prompt, namespace=namespace, max_tokens=1)
        asked = RunningRequest(job=job, sink=lambda event: None, arrived_s=self._clock())
        matched = held = on_disk = 0
        if self._uses_cache:
            match = self.cache.match(prompt.tokens, namespace=namespace)
            limit = asked.end if self.cache.row_at(match) is None else len(prompt)
            matched, held = match.length, self.cache.resume_at(match, limit=limit)
            on_disk = self.disk.would_read_to(asked, held=held)
        resume_at, num_loaded = max(held, on_disk), max(0, on_disk - held)
        others = [request for request in self.requests.values() if not request.is_settle]
        queue_s = queue_wait_s(
            num_running=sum(request.is_running for request in others),
            num_waiting=sum(request.is_waiting for request in others),
            num_left=sum(max(0, r.end - r.position) for r in others if not isinstance(r.phase, Decoding)),
            limits=self._limits,
            speed=self._speed,
        )
        # Before the disk was read once: as fast as the tokens are computed.
        load_speed = self._speed.load_tokens_per_s
        return Lookup(
            num_prompt=len(prompt),
            matched=max(matched, on_disk),
            resume_at=resume_at,
            num_loaded=num_loaded,
            queue_s=queue_s,
            load_s=self._speed.prefill_s(held, resume_at) if load_speed is None else num_loaded / load_speed,
            prefill_s=self._speed.prefill_s(resume_at, len(prompt))
            + (0 if held == len(prompt) else self._speed.decode_s),
        )

    def status(self) -> Status:
        """All but what is on disk, which changes while the loop sleeps."""
        pinned, stats = self.cache.pins.total(), self.cache.stats
        phases = Counter(type(request.phase) for request in self.requests.values())
        return Status(
            is_idle=len(self.requests) == 0,
            queued=phases[Waiting],
            prefilling=phases[Prefilling],
            decoding=phases[Decoding],
            counts=Counts(**self._counts, saved_s=self._saved_s, evictions=stats.num_evictions),
            audit=self.audit.totals,
            held=Held(
                budget=self.memory.budget if self.memory.budget is not None else 0,
                kv=stats.kv_nbytes,
                snapshots=stats.snapshot_nbytes,
                live=self.memory.nbytes(Account.SEQUENCES),
                logits=self.memory.nbytes(Account.LOGITS),
                pinned=pinned.nbytes,
                pins=pinned.num,
                tokens=stats.num_tokens,
                index=4 * stats.num_tokens + 512 * stats.num_nodes,
                evicted_by_reason=stats.evictions,
            ),
            drafts=self.drafts.status() if self.drafts is not None else None,
        )

    def inspect(self, *, max_nodes: int = 1000, part: TreePart = WHOLE_TREE) -> Inspection:
        """What is there now, with the `max_nodes` nodes of a part of the tree that were used last. O(those)."""
        now_s = self._clock()
        return Inspection(
            requests=tuple(inspect_request(request, now_s=now_s) for request in self.requests.values()),
            num_inside=self._gate.num_inside,
            idle=tuple(map(inspect_idle, self.sequences.idle)),
            num_sequences=self.runner.num_sequences,
            tree=inspect_tree(
                self.cache, self.disk.cache, self.requests.values(), max_nodes=max_nodes, now_s=now_s, part=part
            ),
            memory=inspect_memory(self.memory, self.runner.footprint, weights_nbytes=self.runner.loaded.nbytes),
            disk=self.disk.stats(),
            reads=self.disk.reads(),
            num_unwritten=self.disk.num_unwritten,
        )

    def clear_cache(self, namespace: str | None = None, *, owner: str | None = None) -> None:
        """Drop what no running request uses, from memory and disk: of one namespace, or of all.

        Where an `owner` is named, what others have pinned stays in memory.
        """
        self.disk.clear(namespace)
        if self.drafts is not None:
            self.drafts.clear(namespace)
        self.cache.clear(namespace, owner=owner)
        device_memory.give_back()

    def shutdown(self) -> None:
        """Give all memory back now, and not when Python finds what refers to itself."""
        self.disk.close()
        self.audit.give_up()
        self.reset_cache()
        self.memory.reclaim_from()
        device_memory.give_back()

    def check(self) -> None:
        """AssertionError unless all books balance, those of running sequences too."""
        self.cache.check()
        self.memory.check({Account.SEQUENCES: self.runner.live_nbytes})


def _drafts(runner: Runner, mode: str) -> Drafts | None:
    """Who makes drafts for a model; None where they are off, or where it cannot verify them."""
    if mode == "off" or not runner.can_verify:
        return None
    sizes = PASS_SIZES if mode == "auto" else runner.exact_sizes(PASS_SIZES)
    if mode == "exact":
        log.info("drafts are verified in passes of %s tokens, which equal single steps", ", ".join(map(str, sizes)))
    if max(sizes, default=1) == 1:
        log.warning("no pass over several tokens equals single steps on this device: --drafts exact is --drafts off")
        return None
    return Drafts(rewinds=runner.loaded.blueprint.rewinds, sizes=sizes)


def _tolerance(logit_nbytes: int, *, kv_bits: int | None) -> float:
    """How far rounding goes, by the size of a logit and of KV."""
    if kv_bits is not None:
        return _TOLERANCE_KV
    return _TOLERANCE if logit_nbytes >= 4 else _TOLERANCE_16_BIT


def _budget(settings: Settings, loaded: LoadedModel, *, least: int) -> int:
    """Bytes for the prefix cache and live sequences together. Raises LoadFailed where that is less than `least`."""
    if settings.cache_bytes is not None:
        wanted = settings.cache_bytes.of(device_memory.device_bytes())
    else:
        wanted = device_memory.default_budget(loaded.nbytes)
    if settings.memory is None:
        return wanted
    # What loading has left behind is nobody's.
    device_memory.give_back()
    process = device_memory.process_nbytes()
    bound = settings.memory.of(read_machine().total)
    budget = min(wanted, budget_within(bound, process))
    if budget < least:
        raise memory_too_small(loaded.name, bound=bound, needed=bound_for(process, least))
    return budget

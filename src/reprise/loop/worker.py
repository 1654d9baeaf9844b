"""The work of the engine thread: requests in, steps of the scheduler done, events out.

`Worker.step` reads from top to bottom: schedule, execute, store, finish. Nothing that a request does wrong leaves it:
whatever raises ends that request, with its reason, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from reprise.cache.node import SegmentSizes
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.clock import Clock, monotonic
from reprise.core.collector import collect_all
from reprise.core.errors import OutOfMemory, RepriseError, no_room_for_requests
from reprise.core.events import Event, FinishReason, Progress, Started
from reprise.core.job import Job, Purpose
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens, join_tokens
from reprise.disk.tier import DiskTier
from reprise.engine import memory as device_memory
from reprise.engine.load import LoadedModel
from reprise.engine.records import RecordEncoder
from reprise.engine.runner import SHARES_FROM, Runner, TokenFailure, TokenResult
from reprise.loop.admission import Gate
from reprise.loop.audit import Audit
from reprise.loop.disk import open_disk
from reprise.loop.executor import Executor, make_drafts
from reprise.loop.preemption import Preemption
from reprise.loop.prefixes import RequestPrefixes
from reprise.loop.request_table import RequestTable
from reprise.loop.requests import Decoding, Prefilling, RunningRequest
from reprise.loop.scheduler_state import scheduler_limits, scheduler_state
from reprise.loop.sequences import SequencePool
from reprise.memory import Account, Memory, SharedMemory
from reprise.schedule.decide import decide
from reprise.schedule.state import Group, Slice, Step

log = logging.getLogger("reprise.loop")

_COMPACT_ENTRIES = 8192
"""Entries that one step joins at most, so that others wait for little."""

_SEGMENT_NBYTES, _LEAST_SEGMENT = 32 << 20, 64
"""Bytes of a stored segment at most, which is what cutting or joining it copies in one step; and tokens at least."""

_LONGEST_NAP_S = 3600.0
"""A clock may be told to wait for so long on every platform."""

_LEAST_TOKENS = 512
"""A server that has no room for the state of so many is not worth starting."""

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
        can_batch: bool,
        shared: SharedMemory | None = None,
        shares_from: int = SHARES_FROM,
        disk_block: int | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        """`shared`: the memory of all models, None: this is the only one. `disk_block`: see `open_disk`; `wake` has the
        loop call `step`, and may be called on any thread."""
        self._clock = clock
        self._gate = gate
        self.runner = Runner(loaded, can_batch=can_batch, shares_from=shares_from)
        self._is_loaded = True
        self.num_others, self.is_closed = 0, False
        """See `SchedulerState`."""
        footprint = self.runner.footprint
        context = min((c for c in (settings.max_context, loaded.context) if c is not None), default=None)
        self.limits = scheduler_limits(self.runner, settings)
        chunk = self.limits.prefill_chunk
        least = footprint.live(_LEAST_TOKENS, chunk=min(chunk, _LEAST_TOKENS))
        if shared is None:
            self.memory = Memory(device_memory.cache_budget(settings, loaded, least=least))
        else:
            if shared.state_budget is not None and shared.state_budget < least:
                raise no_room_for_requests(loaded.name, room=shared.state_budget, least=least)
            self.memory = Memory(shared=shared)
        largest = max(footprint.by_kind.values(), default=1)
        sizes = SegmentSizes()
        sizes = replace(sizes, longest=max(_LEAST_SEGMENT, min(sizes.longest, _SEGMENT_NBYTES // largest)))
        self._max_compacted = max(1, min(_COMPACT_ENTRIES, _SEGMENT_NBYTES // largest))
        self.cache = PrefixCache(loaded.blueprint.layout, memory=self.memory, sizes=sizes, clock=clock)
        self.sequences = SequencePool(self.runner, self.cache, self.memory, chunk=chunk)
        self.requests = RequestTable(self.sequences, gate, clock=clock)
        self.executor = Executor(self.sequences, context=context, clock=clock)
        self.drafts = make_drafts(self.runner, settings.drafts)
        """None: nothing is drafted."""
        self._allowance = StepAllowance(self.limits.max_stall_s, clock=clock)
        self.disk = DiskTier(
            open_disk(settings, loaded, footprint, block=disk_block),
            self.cache,
            sizes=footprint,
            sequences=self.sequences,
            new_encoder=RecordEncoder,
            allowance=self._allowance,
            prefill_s=self._prefill_s,
            wake=wake,
        )
        self.prefixes = RequestPrefixes(
            self.requests, self.sequences, self.disk, is_on=settings.has_prefix_cache, clock=clock
        )
        self.preemption = Preemption(self.requests, self.prefixes, self.sequences)
        self.audit = Audit(self.runner, self.memory, settings, chunk=chunk, clock=clock)
        self.memory.reclaim_from(self.audit.give_up, *self.sequences.reclaimers, self.prefixes.unpin_first)
        executor = self.executor
        self.memory.evict_from(self.cache, token_s=lambda: 1 / executor.speed.prefill_tokens_per_s)
        device_memory.bound_free_buffers(self.memory.budget)
        gate.open(
            self.limits,
            context=context,
            budget=self.memory.budget,
            needed=lambda position: footprint.live(position, chunk=1),
        )

    # A step: schedule, execute, store, finish.

    def step(self) -> None:
        """Ask the scheduler what to do next, do it, store what was computed, and finish what is complete."""
        if self.sequences.is_broken:
            self.requests.reset_cache()
        decodes = any(isinstance(request.phase, Decoding) for request in self.requests.values())
        self._allowance.renew(
            decode_s=self.executor.speed.decode_s if decodes else 0.0, num_sharing=1 + self.num_others
        )
        for request, seconds in self.prefixes.take_loaded():
            self.executor.note_load(request.loaded, seconds)
        for request in [request for request in self.requests.values() if request.is_restoring]:
            self.requests.run_isolated(request, self._restore)
        step = self._schedule()
        if step is None:
            self._tidy()
        else:
            self._come_and_go(step)
            for request, result in self._execute(step):
                self.requests.run_isolated(request, lambda request, result=result: self._take(request, result))
        self.disk.write()

    def _schedule(self) -> Step | None:
        """What the scheduler says; None if nobody is there who could run."""
        present = self.prefixes.present()
        if not present:
            return None
        # Beside the streams, a prefill slice has what is left of the longest gap.
        speed = self.executor.speed
        speed = replace(speed, decode_s=speed.decode_s + self._allowance.spent_s)
        state = scheduler_state(present, self.sequences, speed, self.cache.layout, now_s=self._clock())
        if self.num_others > 0 or self.is_closed:
            state = replace(state, num_others=self.num_others, is_closed=self.is_closed)
        step = decide(state, self.limits)
        may_wait = self.num_others > 0 or self.is_closed or any(r.is_restoring for r in present)
        assert may_wait or not step.is_idle, "requests are there, and nothing runs"
        return step

    def _come_and_go(self, step: Step) -> None:
        """Stop settling, commit what others can go on from, and admit those whose turn it is."""
        for job_id in step.give_up:
            self.cancel(job_id)
        for job_id in step.commit:
            self.requests.run_isolated(self.requests[job_id], self.prefixes.store_progress)
        for job_id in step.admit:
            self.requests.run_isolated(self.requests[job_id], self._admit)

    def _execute(self, step: Step) -> Iterator[tuple[RunningRequest, Result]]:
        """Run the passes of this step. What is yielded is stored and finished before the next pass."""
        if step.prefill:
            yield from self._prefill(step.prefill)
        if step.decode:
            started_s = self._clock()
            for group in step.decode:
                yield from self._decode(group)
            self.sequences.measure()
            self.executor.note_decode(self._clock() - started_s)

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
        """There is nothing to do: join small segments, and audit answers when none is left."""
        if len(self.requests) > 0:
            return  # Those that are there wait for the disk.
        if self.cache.compact(max_entries=self._max_compacted) > 0:
            return
        device_memory.give_back()
        if log.isEnabledFor(logging.DEBUG):
            self.cache.check()
        wrong = self.audit.step()
        if wrong is not None:
            # What is on disk below a wrong state is wrong as well, and nothing tells it apart.
            self.disk.clear(wrong.job.namespace)
            tokens = join_tokens(wrong.job.prompt.tokens, as_tokens(wrong.tokens))
            self.cache.drop_path(tokens, namespace=wrong.job.namespace)

    # Requests arrive and are admitted.

    def arrive(self, job: Job, sink: Callable[[Event], None], arrived_s: float) -> None:
        """Queue a job."""
        request = RunningRequest(job=job, sink=sink, arrived_s=arrived_s)
        self.requests.add(request)
        if self.drafts is not None and job.purpose is Purpose.GENERATE:
            request.drafts = self.drafts.start(job.prompt.tokens, namespace=job.namespace, prediction=job.prediction)
        self.requests.run_isolated(request, self._look_up)

    def _look_up(self, request: RunningRequest) -> None:
        """See how far the prompt of a new request is known; if that is all it wants, it is over."""
        self.prefixes.look_up(request)
        if request.position == len(request.job.prompt) and not request.samples:
            self._note_admission(request, request.position)
            self.prefixes.keep_pins(request)
            self.requests.finish(request, FinishReason.DONE)

    def _admit(self, request: RunningRequest) -> None:
        """Start a request that waited, where the cache can resume it."""
        if self.prefixes.is_on_disk(request):
            return  # It is admitted when what the disk has of it is there.
        self.prefixes.start(request)
        resume_at = request.position
        if request.admission is None:
            self._note_admission(request, resume_at)
            self._gate.admitted(request.id)
            self.requests.emit(request, Started(reused=resume_at, total=len(request.prompt)))
        self._restore(request)

    def _restore(self, request: RunningRequest) -> None:
        """Copy what the request resumes from, as far as this step may; when all is there, it goes on."""
        if not self.prefixes.restore(request, self._allowance):
            return
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        if phase.row is not None:
            self._take(request, self.executor.sample_from(request, phase.row, is_audited=self.audit.draw()))
        elif request.position >= request.end:
            # Where it samples nothing, another request has computed all of it while this one waited.
            self._begin_decode(request) if request.samples else self.requests.finish(request, FinishReason.DONE)

    def _note_admission(self, request: RunningRequest, resume_at: int) -> None:
        request.admission = self.prefixes.admission_of(request, resume_at, self.executor.speed)
        self.requests.counts.update(num_loaded=request.admission.num_loaded)

    # Prefill.

    def _prefill(self, slices: Sequence[Slice]) -> Iterator[tuple[RunningRequest, Result]]:
        """One pass over slices of one length, as far as there is room."""
        num = len(slices[0])
        fitting = self.preemption.until_fit(
            [self.requests[piece.id] for piece in slices], lambda lives: self.sequences.reserve_to_prefill(lives, num)
        )
        by_id = {request.id: request for request in fitting}
        slices = [piece for piece in slices if piece.id in by_id]
        if not slices:
            return
        try:
            self.executor.prefill(fitting, slices)
        except Exception as error:
            self.requests.fail_together(fitting, error)
            return
        self._gate.speed = self.executor.speed
        self.sequences.measure()
        for piece in slices:
            self.requests.note_prefilled(by_id[piece.id], len(piece))
            yield by_id[piece.id], piece

    def _after_slice(self, request: RunningRequest, piece: Slice) -> None:
        """Store the checkpoint that the slice ends at, and begin to decode or finish where the prompt ends."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        scored = phase.live.scorer.give() if phase.live.scorer is not None else None
        if scored is not None:
            request.scored = scored.start + len(scored.tokens)
            self.requests.emit(request, scored)
        if piece.is_checkpoint and not self.cache.layout.resumes_anywhere:
            self.prefixes.store(request, piece.stop, phase.plan.kind_at(piece.stop))
        if phase.preempted is None:
            self.requests.emit(request, Progress(position=piece.stop, total=len(request.job.prompt)))
        if request.drafts is not None:
            request.drafts.read_prompt(min(piece.stop, len(request.job.prompt)))
        if piece.stop < request.end:
            return
        if request.samples:
            self._begin_decode(request)
            return
        self.prefixes.store(request, piece.stop, request.end_kind)
        self.prefixes.note_settled(request)
        self.requests.finish(request, FinishReason.DONE)

    # Decode.

    def _begin_decode(self, request: RunningRequest) -> None:
        """The prompt is there: the next pass samples."""
        is_new = request.preempted is None
        keeps_row = is_new and self.prefixes.reserve_row(request)
        self.executor.begin_decode(request, keeps_row=keeps_row, is_audited=is_new and self.audit.draw())

    def _decode(self, group: Group) -> Iterator[tuple[RunningRequest, Result]]:
        """A token for each sequence of a group, as far as there is room."""
        # A prefill slice of the same step may have failed one of them, or have preempted it.
        there = [self.requests[job_id] for job_id in group.ids if self.requests.get(job_id) is not None]
        decoding = [request for request in there if isinstance(request.phase, Decoding)]
        decoding = self.preemption.until_fit(decoding, self.sequences.reserve_to_decode)
        if len(decoding) == 1 and self.preemption.is_context_full(decoding[0], budget=self._gate.budget):
            self.requests.run_isolated(decoding[0], self._stop_for_memory)
            return
        if not decoding:
            return
        is_alone = sum(isinstance(request.phase, Decoding) for request in self.requests.values()) == 1
        by_live = {id(request.live): request for request in decoding}
        try:
            results = self.executor.decode(decoding, is_alone=is_alone)
        except Exception as error:
            self.requests.fail_together(decoding, error)
            return
        for result in results:
            request = by_live[id(result.live)]
            assert isinstance(request.phase, Decoding), request.phase
            request.phase.group = group.key
            yield request, result

    def _after_tokens(self, request: RunningRequest, result: TokenResult) -> None:
        """Tell the tokens, and finish if the last one ends the answer."""
        now_s = self._clock()
        is_first = request.first_token_s is None
        if request.first_token_s is None:
            assert isinstance(request.phase, Decoding), request.phase
            request.first_token_s = now_s
            # The prompt's last token is fed with the pass that samples the first of the answer.
            self.requests.counts.update(num_prefilled=0 if request.phase.plan.has_row else 1)
        tokens = [sampled.token for sampled in result.sampled]
        request.generated += tokens
        if request.drafts is not None:
            request.drafts.accept(tokens)
        self.requests.counts.update(num_generated=len(tokens))
        for sampled in result.sampled:
            self.requests.emit(request, sampled)
        context, length = self._gate.context, len(request.job.prompt) + len(request.generated)
        is_at_end = context is not None and length >= context
        reason = FinishReason.LENGTH if result.reason is None and is_at_end else result.reason
        if reason is not None:
            self.executor.note_generation(now_s - request.first_token_s)
            self._complete(request, reason)
        elif is_first:
            self.prefixes.store_for_repeats(request)

    def _complete(self, request: RunningRequest, reason: FinishReason) -> None:
        """Store an answer that is whole, and finish."""
        assert isinstance(request.phase, Decoding), request.phase
        if request.phase.lease is not None:
            self.cache.note_answer(request.phase.lease, len(request.generated))
        self.prefixes.store_progress(request)
        tokens = request.tokens_to(request.position)
        self.audit.add(request)
        self.requests.finish(request, reason)
        try:
            # However busy the server is: its next turn is restored from few segments.
            self.cache.compact_path(tokens, namespace=request.namespace, max_entries=self._max_compacted)
        except Exception:
            # The answer is there, and each step leaves the books right: it stays as it is.
            log.exception("could not merge what a chat has stored")

    def _stop_for_memory(self, request: RunningRequest) -> None:
        """What it has is an answer, if any."""
        if not request.generated:
            raise OutOfMemory("There is no room for the first token of an answer. Raise --cache-bytes.")
        self._complete(request, FinishReason.LENGTH)

    def set_budget(self, nbytes: int, *, returns_buffers: bool = False) -> None:
        """Keep within this budget from now on; what exceeds it is reclaimed. `returns_buffers`: to the system, too."""
        if nbytes != self.memory.budget:
            # The gate keeps the configured one: what fits that is served, alone if it must be, and not refused because
            # other programs need memory at this moment.
            device_memory.bound_free_buffers(nbytes)
            self.memory.resize(nbytes)
        if returns_buffers:
            device_memory.give_back()

    # What the thread is asked to end, to forget, and when it has work.

    def cancel(self, job_id: str) -> None:
        """End the job; what it computed stays in the cache."""
        request = self.requests.get(job_id)
        if request is not None:
            self.requests.run_isolated(request, self.prefixes.store_progress)
            self.requests.run_isolated(request, lambda r: self.requests.finish(r, FinishReason.CANCELLED))

    def cancel_all(self) -> None:
        for request in list(self.requests.values()):
            self.cancel(request.id)

    def fail_all(self, error: RepriseError) -> None:
        """End all jobs with `error`, and keep nothing of them: their state is not to be trusted."""
        self.requests.fail_together(list(self.requests.values()), error)

    @property
    def is_empty(self) -> bool:
        """Whether no job is there but those that settle."""
        return all(request.is_settle for request in self.requests.values())

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        runs = any(not request.is_loading for request in self.requests.values())
        # Small segments are joined when no job is there, and not while one waits for the disk.
        idles = len(self.requests) == 0 and (not self.cache.is_compact or self.audit.due_in_s == 0)
        return runs or idles or self.disk.due_in_s == 0

    @property
    def wakes_in_s(self) -> float | None:
        """When there will be something to do or to tell if nothing comes: to write, or a pin that ends. None: never."""
        until = self.cache.pins.total().until
        audits = self._is_loaded and len(self.requests) == 0
        dues = [self.disk.due_in_s, self.audit.due_in_s if audits else None]
        dues += [max(0.0, until - self._clock()) if until != float("inf") else None]
        naps = [due_s for due_s in dues if due_s is not None]
        return min([_LONGEST_NAP_S, *naps]) if naps else None

    def _prefill_s(self, start: int, stop: int) -> float | None:
        """How long the positions ``[start, stop)`` of a prompt take; None before anything was computed."""
        speed = self.executor.speed
        return speed.prefill_s(start, stop) if speed.by_depth else None

    def clear_cache(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None] | None:
        """Drop what no running request uses, from memory and disk: of one namespace, or of all.

        Where an `owner` is named, what others have pinned stays in memory. Gives when all of it has gone from the disk.
        """
        cleared = self.disk.clear(namespace)
        if self.drafts is not None:
            self.drafts.clear(namespace)
        self.cache.clear(namespace, owner=owner)
        device_memory.give_back()
        return cleared

    def load(self, loaded: LoadedModel) -> None:
        """The weights are here again."""
        assert loaded.fingerprint == self.runner.loaded.fingerprint, "what is stored is of another model"
        self.runner.loaded, self._is_loaded = loaded, True

    def unload(self) -> None:
        """Give the weights up. Nobody runs; what is stored stays, and can be used again with weights like these."""
        for request in list(self.requests.values()):
            if request.is_settle:
                self.cancel(request.id)
        assert not self.requests.running, "what runs needs the weights"
        self.audit.give_up()
        self._is_loaded = False
        self.runner.loaded = self.runner.loaded.without_weights()
        # The thread gives back what that frees, when it has counted it.
        collect_all()

    def shutdown(self) -> None:
        """Give all memory back now, and not when Python finds what refers to itself."""
        self.disk.close()
        self.audit.give_up()
        self.requests.reset_cache()
        self.memory.disconnect()
        device_memory.give_back()

    def check(self) -> None:
        """AssertionError unless all books balance, those of running sequences too."""
        self.cache.check()
        self.memory.check({Account.SEQUENCES: self.runner.live_nbytes})

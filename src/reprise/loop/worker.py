"""The engine thread's work for one model: requests in, steps executed, events out.

`Worker.step` reads from top to bottom: schedule, execute, store, finish. An exception in a request's part of a step
ends only that request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from weakref import ref

from reprise.cache.node import SegmentSizes
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.clock import Clock, monotonic
from reprise.core.errors import OutOfMemory, RepriseError, no_room_for_requests
from reprise.core.events import Event, FinishReason, Progress, Started
from reprise.core.failpoints import Failpoint, reach
from reprise.core.job import Job, Purpose
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens, join_tokens
from reprise.disk.store.cache import DiskCache
from reprise.drafts.drafter import EARLIER_TOKENS
from reprise.engine import memory as device_memory
from reprise.engine.memory import collect_all
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.image_features import MOST_KEPT_NBYTES, FeatureCache
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import SHARES_FROM, Runner, TokenFailure, TokenResult, quantised_footprint
from reprise.loop.admission import Gate, PromptRoom
from reprise.loop.audit import Audit
from reprise.loop.draft_trial import DraftTrial, make_drafts, never_drafted
from reprise.loop.embedding import EmbeddingQueue
from reprise.loop.executor import Executor
from reprise.loop.head_drafts import DraftingHead
from reprise.loop.preemption import Preemption
from reprise.loop.prefixes import RequestPrefixes
from reprise.loop.request_table import RequestTable
from reprise.loop.requests import Decoding, Prefilling, RunningRequest
from reprise.loop.scheduler_state import scheduler_limits, scheduler_state, unseen_images
from reprise.loop.sequences import SEGMENT_NBYTES, SequencePool
from reprise.loop.threads import THIS_THREAD
from reprise.loop.tier import DiskTier
from reprise.memory import Account, Memory, SharedMemory
from reprise.plan.checkpoints import fallback_tokens
from reprise.schedule.decide import decide
from reprise.schedule.state import Slice, Step

log = logging.getLogger("reprise.loop")

_LEAST_SEGMENT = 64
"""The fewest tokens of a stored segment."""

_LONGEST_NAP_S = 3600.0
"""The longest timeout of a wait, which every platform supports."""

_MEASURED = 128
"""The tokens of the pass that is measured when a model is loaded."""

_LEAST_TOKENS = 512
"""The budget must have room for the state of this many tokens."""

Result = Slice | TokenResult | TokenFailure
"""What a pass did for one request."""


class Worker:
    """The state of one model on the engine thread, on which every method is called."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        gate: Gate,
        *,
        can_batch: bool,
        shared: SharedMemory | None = None,
        shares_from: int = SHARES_FROM,
        disk: DiskCache | None,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        """`shared`: the memory shared by all models, whose owner charges weights to
        it; None: this is the only one.
        `wake`: makes the loop call `step`; thread-safe."""
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
        least = self.runner.most_live_nbytes(_LEAST_TOKENS, chunk=min(chunk, _LEAST_TOKENS))
        self.drafts = make_drafts(
            self.runner,
            settings.drafts,
            earlier=lambda namespace: (
                [] if self.disk.cache is None else self.disk.cache.newest_texts(namespace, most=EARLIER_TOKENS)
            ),
        )
        """None: nothing is drafted."""
        if shared is None:
            self.memory = Memory(shared=SharedMemory(device_memory.cache_budget(settings, loaded, least=least)))
        else:
            if shared.state_budget is not None and shared.state_budget < least:
                raise no_room_for_requests(loaded.name, room=shared.state_budget, least=least)
            self.memory = Memory(shared=shared)
        largest = max(footprint.by_kind.values(), default=1)
        sizes = SegmentSizes(
            longest=max(_LEAST_SEGMENT, min(SegmentSizes().longest, SEGMENT_NBYTES // largest)),
            fallback=fallback_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full),
        )
        most = MOST_KEPT_NBYTES if settings.has_prefix_cache else 0
        self.runner.features = FeatureCache(
            self.memory,
            most_nbytes=most,
            row_nbytes=0 if loaded.vision is None else loaded.vision.sight.row_nbytes,
        )
        self.cache = PrefixCache(loaded.blueprint.layout, memory=self.memory, sizes=sizes, clock=clock)
        self.memory.kept_for_passes = device_memory.kept_for_passes(
            settings,
            weights_nbytes=loaded.nbytes if shared is None else shared.weights_nbytes,
            budget=self.memory.budget,
        )
        self.sequences = SequencePool(self.runner, self.cache, self.memory, chunk=chunk)
        self.requests = RequestTable(self.sequences, gate, clock=clock)
        self.executor = Executor(self.sequences, context=context, clock=clock)
        self.head = (
            None
            if self.drafts is None or loaded.head is None or not loaded.head.is_there
            else DraftingHead(
                sequences=self.sequences,
                drafts=self.drafts,
                facts=loaded.head,
                price=self.executor.price_to_guess,
                background=settings.background,
                clock=clock,
            )
        )
        """None: the model has no head, or nothing is drafted."""
        self._trial = (
            None if self.drafts is None else DraftTrial(self.runner, self.memory, self.drafts, settings, clock=clock)
        )
        self._allowance = StepAllowance(self.limits.max_stall_s, clock=clock)
        self.disk = DiskTier(
            disk,
            self.sequences,
            allowance=self._allowance,
            prefill_s=self._prefill_s,
            wake=wake,
        )
        self.prefixes = RequestPrefixes(
            self.requests,
            self.sequences,
            self.disk,
            is_on=settings.has_prefix_cache,
            last_slice=self.limits.last_slice,
            clock=clock,
        )
        self.preemption = Preemption(self.requests, self.prefixes, self.sequences)
        self.audit = Audit(self.runner, self.memory, settings, chunk=chunk, clock=clock)
        # Not this worker, which would refer to itself.
        runner = self.runner
        self.embedding = EmbeddingQueue(
            lambda: runner.loaded,
            self.memory,
            max_queue=settings.max_queue,
            stall_s=self.limits.max_stall_s,
            note=self.requests.counts.update,
            clock=clock,
        )
        """Empty if the model makes text."""
        kept, features = self.embedding.kept, runner.features
        first = (self._give_up_trial, self.audit.give_up, kept.release_one, features.release_one)
        self.memory.reclaim_from(*first, *self.sequences.reclaimers, self.prefixes.unpin_first)
        executor = self.executor
        self.memory.evict_from(self.cache, token_s=lambda: 1 / executor.speed.prefill_tokens_per_s)
        device_memory.bound_free_buffers(self.memory.budget)
        self._measure_a_pass()
        gate.open(self.limits, context=context, room=self._prompt_room(settings))

    def _measure_a_pass(self) -> None:
        """Measure what a pass takes, before the first request arrives."""
        loaded, num = self.runner.loaded, min(_MEASURED, self.limits.prefill_chunk)
        needed = self.runner.most_live_nbytes(num, chunk=num)
        # A model in parts is measured by its requests: here not all of its ranks may have started.
        if loaded.embedder is not None or loaded.room_elsewhere is not None or not self.memory.fits(needed):
            return
        try:
            self.executor.try_a_pass(num)
            if loaded.vision is not None:
                self.runner.try_tower()
        except Exception:
            log.exception("a pass before the first request failed")
        self.sequences.measure()

    def _prompt_room(self, settings: Settings) -> PromptRoom:
        runner, executor, memory, least = self.runner, self.executor, self.memory, self.limits.min_chunk
        quantised = None if settings.kv_bits is not None else quantised_footprint(runner.loaded.model, runner.footprint)
        advice = "raise --cache-bytes" if settings.cache_bytes is not None else "raise --memory"
        if settings.cache_bytes is settings.memory is None:
            advice = "serve a smaller or more heavily quantized model"
        return PromptRoom(
            budget=self.memory.budget,
            states=lambda position: runner.most_live_nbytes(position, chunk=1),
            quantised=None
            if quantised is None
            else lambda position: runner.most_live_nbytes(position, chunk=1, footprint=quantised),
            features=runner.features.most_nbytes_of_one,
            passes=lambda position: memory.of_pass(executor.price.of(least, position)),
            tower=runner.features.tower_nbytes,
            pixels_per_row=runner.features.pixels_per_row,
            advice=advice,
        )

    # A step: schedule, execute, store, finish.

    def step(self) -> None:
        """Decide what to do, do it, store what was computed, and finish what is complete."""
        assert THIS_THREAD.is_engine
        reach(Failpoint.STEP, self)
        if len(self.embedding) > 0:
            self.embedding.step(num_others=self.num_others, is_closed=self.is_closed)
            return
        if self._trial is not None and len(self.requests) > 0:
            self._trial.postpone()
        if self.sequences.is_broken:
            self.requests.reset_cache()
        decodes = any(isinstance(request.phase, Decoding) for request in self.requests.values())
        busy_s = self.executor.speed.decode_s + self._tower_s() if decodes else 0.0
        self._allowance.renew(decode_s=busy_s, num_sharing=1 + self.num_others)
        for request, seconds in self.prefixes.take_loaded():
            self.executor.speed = self.executor.speed.after_load(request.reading.num_loaded, seconds)
        for request in [request for request in self.requests.values() if request.is_restoring]:
            self.requests.run_isolated(request, self._restore)
        step = self._schedule()
        if step is None:
            self._tidy()
        else:
            self._apply_changes(step)
            for request, result in self._execute(step):
                self.requests.run_isolated(request, lambda request, result=result: self._take(request, result))
        self.disk.write()
        reach(Failpoint.STEPPED, self)

    def _schedule(self) -> Step | None:
        """The scheduler's decision; None if no request can run."""
        present = self.prefixes.present()
        if not present:
            return None
        # A prefill slice gets what decode and restores leave of the longest gap.
        speed = self.executor.speed
        if self._allowance.spent_s > 0:
            speed = replace(speed, decode_s=speed.decode_s + self._allowance.spent_s)
        layout, price = self.cache.layout, self.executor.price
        state = scheduler_state(present, self.sequences, speed, layout, now_s=self._clock(), price=price)
        if self.num_others > 0 or self.is_closed:
            state = replace(state, num_others=self.num_others, is_closed=self.is_closed)
        step = decide(state, self.limits)
        if step.is_idle:
            may_wait = self.num_others > 0 or self.is_closed or any(r.is_restoring for r in present)
            assert may_wait, "there are requests, and nothing runs"
        return step

    def _apply_changes(self, step: Step) -> None:
        """Stop settling jobs, commit what others can resume from, and admit requests."""
        for job_id in step.give_up:
            self.cancel(job_id)
        for job_id in step.commit:
            self.requests.run_isolated(self.requests[job_id], self.prefixes.store_progress)
        for job_id in step.admit:
            self.requests.run_isolated(self.requests[job_id], self._admit)

    def _execute(self, step: Step) -> Iterator[tuple[RunningRequest, Result]]:
        """Run the passes of this step. What is yielded is stored and finished before the next pass."""
        if step.encode is not None:
            self.requests.run_isolated(self.requests[step.encode], self._encode)
        if step.prefill:
            yield from self._prefill(step.prefill)
        if step.decode:
            started_s = self._clock()
            for group in step.decode:
                # The prefill of the same step may have failed or preempted some of them.
                there = [self.requests[job_id] for job_id in group.ids if self.requests.get(job_id) is not None]
                yield from self._decode(there, key=group.key)
            self.sequences.measure()
            self.executor.speed = self.executor.speed.after_decode(self._clock() - started_s)

    def _take(self, request: RunningRequest, result: Result) -> None:
        """Process what one request got from a pass."""
        match result:
            case Slice():
                self._after_slice(request, result)
            case TokenResult():
                self._after_tokens(request, result)
            case TokenFailure(error=error):
                raise error

    def _tidy(self) -> None:
        """Idle work: compact the tree, then audit answers."""
        if len(self.requests) > 0:
            return  # They wait for the disk.
        if self.cache.compact(max_entries=self.sequences.max_compacted) > 0:
            return
        if self._trial is not None and self._is_loaded and self._trial.due_in_s == 0:
            if self._trial.step():
                self.drafts = self.head = None
            self.sequences.measure()
            return
        device_memory.give_back()
        if log.isEnabledFor(logging.DEBUG):
            self.cache.check()
        wrong = self.audit.step()
        if wrong is not None:
            # Records computed from a wrong state are wrong too, and cannot be identified.
            self.disk.clear(wrong.job.namespace)
            tokens = join_tokens(wrong.job.prompt.tokens, as_tokens(wrong.tokens))
            self.cache.drop_path(tokens, namespace=wrong.job.namespace)

    @property
    def is_tried(self) -> bool:
        """Whether it is known which passes may verify drafts."""
        return self._trial is None or self._trial.due_in_s is None

    @property
    def drafting(self) -> str | None:
        """What is known of drafts on this device, for /health; None: they are off."""
        return never_drafted(self.runner) if self._trial is None else self._trial.verdict

    def _give_up_trial(self) -> bool:
        return self._trial is not None and self._trial.give_up()

    # Requests arrive and are admitted.

    def arrive(self, job: Job, sink: Callable[[Event], None], arrived_s: float) -> None:
        """Queue a job."""
        assert THIS_THREAD.is_engine
        request = RunningRequest(job=job, sink=sink, arrived_s=arrived_s)
        self.requests.add(request)
        if self.drafts is not None and job.purpose is Purpose.GENERATE:
            request.drafts = self.drafts.start(
                job.prompt.tokens,
                namespace=job.namespace,
                prediction=job.prediction,
                computed=None if self.head is None else self.head.follow(request),
            )
        self.requests.run_isolated(request, self._look_up)

    def _look_up(self, request: RunningRequest) -> None:
        """Look up the prompt of a new request; finish it if it needs no answer and everything is stored."""
        self.prefixes.look_up(request)
        if request.position == len(request.job.prompt) and not request.samples:
            self._note_admission(request, request.position)
            self.prefixes.keep_pins(request)
            self.requests.finish(request, FinishReason.DONE)

    def _admit(self, request: RunningRequest) -> None:
        """Admit a waiting request at its resume position."""
        if self.prefixes.is_on_disk(request):
            return  # It is admitted once its records were read.
        # Room for its state is not made of what it needs.
        self._hold_images(request)
        self.prefixes.start(request)
        resume_at = request.position
        if request.stats.admission is None:
            self._note_admission(request, resume_at)
            self._gate.admitted(request.id)
            self.requests.emit(request, Started(num_reused=resume_at, total=len(request.prompt)))
        self._restore(request)

    def _restore(self, request: RunningRequest) -> None:
        """Continue the restore of a request, within the step's allowance; once complete, the request continues."""
        if not self.prefixes.restore(request, self._allowance):
            return
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        if phase.row is not None:
            self._take(request, self.executor.sample_from(request, phase.row, is_audited=self.audit.draw()))
        elif request.position >= request.end:
            # A request without an answer gets here if another one computed all of it while it waited.
            self._begin_decode(request) if request.samples else self.requests.finish(request, FinishReason.DONE)

    def _note_admission(self, request: RunningRequest, resume_at: int) -> None:
        request.stats.admission = self.prefixes.admission_of(request, resume_at, self.executor.speed)
        self.requests.counts.update(num_loaded=request.stats.admission.num_loaded)

    # Prefill.

    def _prefill(self, slices: Sequence[Slice]) -> Iterator[tuple[RunningRequest, Result]]:
        """One pass over slices of equal length, as far as memory allows."""
        there = [request for piece in slices if (request := self.requests.get(piece.id)) is not None]
        # Room for an image may have been made of it.
        running = {request.id for request in there if request.is_running}
        slices = [piece for piece in slices if piece.id in running]
        if not slices:
            return
        for piece in slices:
            self._hold_images(self.requests[piece.id])
        num, deepest = len(slices[0]), max(piece.start for piece in slices)

        def reserve(lives: Sequence[LiveSequence]) -> bool:
            nbytes = self.memory.of_pass(self.executor.price_to_prefill(lives, num, deepest))
            return self.memory.reserve(self.runner.growth(lives, num) + nbytes)

        fitting = self.preemption.until_fit([self.requests[piece.id] for piece in slices], reserve)
        by_id = {request.id: request for request in fitting}
        slices = [piece for piece in slices if piece.id in by_id]
        if not slices:
            return
        if slices[0].samples:
            yield from self._sample_with(fitting[0], slices[0])
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

    def _tower_s(self) -> float:
        """What the tower will take for the next image of a request that prefills: the most of them."""
        prefilling = [request for request in self.requests.values() if isinstance(request.phase, Prefilling)]
        ahead = [images[0] for r in prefilling if (images := unseen_images(r, self.runner.features))]
        return max((self.executor.speed.tower_s(len(image.span)) for image in ahead), default=0.0)

    def _hold_images(self, request: RunningRequest) -> None:
        ahead = [each for each in request.prompt.images if each.span.stop > request.position]
        self.runner.features.hold(ahead, holder=request.id)

    def _encode(self, request: RunningRequest) -> None:
        """Run the tower for the next image of a request."""
        image = unseen_images(request, self.runner.features)[0]
        num = len(image.span)

        def reserve(_: Sequence[LiveSequence]) -> bool:
            return self.runner.features.make_room(num)

        if not self.preemption.until_fit([request], reserve):
            return
        stats, foreseen_s, started_s = request.stats, self.executor.speed.tower_s(num), self._clock()
        self.runner.encode(image.image, holder=request.id)
        seconds = self._clock() - started_s
        self.executor.speed = self.executor.speed.after_tower(num, seconds)
        stats.num_images_encoded += 1
        stats.tower_s += seconds
        stats.tower_foreseen_s += foreseen_s

    def _sample_with(self, request: RunningRequest, piece: Slice) -> Iterator[tuple[RunningRequest, Result]]:
        """The pass over a last slice, which gives the answer's first token."""
        started_s, executor = self._clock(), self.executor
        self.requests.run_isolated(request, self._begin_decode)
        for each, result in self._decode([request], key=None):
            executor.speed = executor.speed.after_prefill(len(piece), self._clock() - started_s, position=piece.start)
            # Its last token is counted with the first of its answer.
            self.requests.note_prefilled(each, len(piece) - 1)
            self._note_progress(each, piece.stop)
            yield each, result
        self.sequences.measure()

    def _after_slice(self, request: RunningRequest, piece: Slice) -> None:
        """Commit at the checkpoint where the slice ends; at the end of the prompt, start to decode or finish."""
        phase = request.phase
        assert isinstance(phase, Prefilling), phase
        scored = phase.live.scorer.give() if phase.live.scorer is not None else None
        if scored is not None:
            request.scored = scored.start + len(scored.tokens)
            self.requests.emit(request, scored)
        if piece.is_checkpoint and not self.cache.layout.resumes_anywhere:
            self.prefixes.store(request, piece.stop, phase.plan.kind_at(piece.stop))
        if phase.preempted is None:
            self._note_progress(request, piece.stop)
        if request.drafts is not None:
            # All of it before the first token, not between two.
            whole = len(request.job.prompt)
            request.drafts.read_prompt(whole if piece.stop >= request.end else min(piece.stop, whole))
        if piece.stop < request.end:
            return
        if request.samples:
            self._begin_decode(request)
            return
        self.prefixes.store(request, piece.stop, request.end_kind)
        self.prefixes.note_settled(request)
        self.requests.finish(request, FinishReason.DONE)

    def _note_progress(self, request: RunningRequest, position: int) -> None:
        self.requests.emit(request, Progress(position=position, total=len(request.job.prompt)))

    # Decode.

    def _begin_decode(self, request: RunningRequest) -> None:
        """Start to decode: the next pass samples."""
        is_new = request.preempted is None
        keeps_row = is_new and self.prefixes.reserve_row(request)
        self.executor.begin_decode(request, keeps_row=keeps_row, is_audited=is_new and self.audit.draw())

    def _decode(self, group: Sequence[RunningRequest], *, key: int | None) -> Iterator[tuple[RunningRequest, Result]]:
        """A token for each request of a group that still decodes, as far as memory allows. `key`: of the group."""
        decoding, fits = [request for request in group if isinstance(request.phase, Decoding)], False

        def reserve(lives: Sequence[LiveSequence]) -> bool:
            nonlocal fits
            nbytes = self.memory.of_pass(self.executor.price_to_decode(lives))
            fits = self.memory.reserve(self.runner.growth_to_decode(lives) + nbytes)
            return fits

        decoding = self.preemption.until_fit(decoding, reserve)
        is_last = len(decoding) == 1 and not fits
        if is_last and self.preemption.is_context_full(decoding[0], budget=self._gate.room.budget):
            self.requests.run_isolated(decoding[0], self._stop_for_memory)
            return
        if not decoding:
            return
        num_decoding = sum(isinstance(request.phase, Decoding) for request in self.requests.values())
        is_alone = len(decoding) == num_decoding
        by_live = {id(request.live): request for request in decoding}
        try:
            results = self.executor.decode(decoding, is_alone=is_alone)
        except Exception as error:
            self.requests.fail_together(decoding, error)
            return
        for result in results:
            request = by_live[id(result.live)]
            assert isinstance(request.phase, Decoding), request.phase
            request.phase.group = key
            yield request, result

    def _after_tokens(self, request: RunningRequest, result: TokenResult) -> None:
        """Emit the tokens, and finish if the last one ends the answer."""
        now_s = self._clock()
        is_first = request.stats.first_token_s is None
        if request.stats.first_token_s is None:
            assert isinstance(request.phase, Decoding), request.phase
            request.stats.first_token_s = now_s
            # The prompt's last token is fed by the pass that samples the first token.
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
            self.executor.speed = self.executor.speed.after_generation(now_s - request.stats.first_token_s)
            self._complete(request, reason)
        elif is_first:
            self.prefixes.store_for_repeats(request)

    def _complete(self, request: RunningRequest, reason: FinishReason) -> None:
        """Store a complete answer, and finish."""
        assert isinstance(request.phase, Decoding), request.phase
        if request.phase.lease is not None:
            self.cache.note_answer(request.phase.lease, len(request.generated))
        self.prefixes.store_progress(request)
        tokens = request.tokens_to(request.position)
        self.audit.add(request)
        self.requests.finish(request, reason)
        try:
            # Even on a busy server, so that the next turn is restored from few segments.
            self.cache.compact_path(tokens, namespace=request.namespace, max_entries=self.sequences.max_compacted)
        except Exception:
            # The answer is stored, and every step of compaction leaves the tree consistent.
            log.exception("cannot compact the stored path of a chat")

    def _stop_for_memory(self, request: RunningRequest) -> None:
        """End the answer with what it has; raises OutOfMemory if that is nothing."""
        if not request.generated:
            raise OutOfMemory("There is no room for the first token of an answer. Raise --cache-bytes.")
        self._complete(request, FinishReason.LENGTH)

    def set_budget(self, nbytes: int, *, returns_buffers: bool = False) -> None:
        """Set the memory budget, reclaiming what exceeds it. `returns_buffers`: also return free ones to the system."""
        assert THIS_THREAD.is_engine
        if nbytes != self.memory.budget:
            # The gate keeps the configured budget: what fits that is served, if necessary alone, and not refused for a
            # temporary need of other programs.
            device_memory.bound_free_buffers(nbytes)
            self.memory.resize(nbytes)
        if returns_buffers:
            device_memory.give_back()

    # Cancelling, clearing, loading; and whether there is work.

    def cancel(self, job_id: str) -> None:
        """Cancel the job; what it computed stays in the cache."""
        assert THIS_THREAD.is_engine
        request = self.requests.get(job_id)
        if request is not None:
            self.requests.run_isolated(request, self.prefixes.store_progress)
            self.requests.run_isolated(request, self.prefixes.note_cancelled)
            self.requests.run_isolated(request, lambda r: self.requests.finish(r, FinishReason.CANCELLED))

    def fail_all(self, error: RepriseError) -> None:
        """Fail all jobs and discard their state, which can no longer be trusted."""
        self.requests.fail_together(list(self.requests.values()), error)
        self.embedding.fail_all(error)

    @property
    def is_empty(self) -> bool:
        """Whether there are only settling jobs, or none."""
        return len(self.embedding) == 0 and all(request.is_settle for request in self.requests.values())

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        runs = len(self.embedding) > 0 or any(not request.is_loading for request in self.requests.values())
        # Idle work needs an empty table: a job that waits for the disk prevents it.
        idles = len(self.requests) == 0 and (not self.cache.is_compact or 0 in self._idle_dues)
        return runs or idles or self.disk.due_in_s == 0

    @property
    def wakes_in_s(self) -> float | None:
        """Seconds until there is something to do without a command (a write, a pin that expires); None: never."""
        until = self.cache.pins.total().until
        idles = self._is_loaded and len(self.requests) == 0
        dues = [self.disk.due_in_s, *(self._idle_dues if idles else ())]
        dues += [max(0.0, until - self._clock()) if until != float("inf") else None]
        naps = [due_s for due_s in dues if due_s is not None]
        return min([_LONGEST_NAP_S, *naps]) if naps else None

    @property
    def _idle_dues(self) -> tuple[float | None, ...]:
        """Seconds until idle work is due; None: never."""
        trial = self._trial if self._is_loaded else None
        return self.audit.due_in_s, None if trial is None else trial.due_in_s

    def _prefill_s(self, start: int, stop: int) -> float | None:
        """How long the positions ``[start, stop)`` of a prompt take; None before anything was computed."""
        speed = self.executor.speed
        return speed.prefill_s(start, stop) if speed.by_depth else None

    def clear_cache(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None] | None:
        """Drop what no running request uses, from memory and disk: of one namespace, or of all. Ends its settling jobs.

        Where an `owner` is named, what others have pinned stays in memory. The future is resolved once the disk has
        none of it.
        """
        assert THIS_THREAD.is_engine
        for request in list(self.requests.values()):
            if request.is_settle and namespace in (None, request.namespace):
                self.cancel(request.id)
        cleared = self.disk.clear(namespace)
        if self.drafts is not None:
            self.drafts.clear(namespace)
        self.cache.clear(namespace, owner=owner)
        # Features are found by digests, which do not say whose they are; others' are encoded again if they are needed.
        self.runner.features.release_unneeded()
        if (vision := self.runner.loaded.vision) is not None:
            vision.reader.forget_prepared()
        self.embedding.clear(namespace)
        device_memory.give_back()
        return cleared

    def load(self, loaded: LoadedModel) -> None:
        """Use these weights, after an `unload`."""
        assert THIS_THREAD.is_engine
        assert loaded.fingerprint == self.runner.loaded.fingerprint, "the cache is of another model"
        self.runner.loaded, self._is_loaded = loaded, True

    def unload(self) -> None:
        """Drop the weights while no request runs. The cache stays, for weights with the same fingerprint."""
        assert THIS_THREAD.is_engine
        for request in list(self.requests.values()):
            if request.is_settle:
                self.cancel(request.id)
        assert not self.requests.running, "running requests need the weights"
        self.embedding.drop_unwanted()
        self.audit.give_up()
        self._give_up_trial()
        weights = ref(self.runner.loaded.model)
        self._is_loaded = False
        self.runner.loaded = self.runner.loaded.without_weights()
        # The engine thread returns the freed memory to the system.
        collect_all(weights)

    def shutdown(self) -> None:
        """Free all memory now, in spite of reference cycles."""
        assert THIS_THREAD.is_engine
        self.disk.close()
        self.audit.give_up()
        self._give_up_trial()
        self.requests.reset_cache()
        self.runner.features.clear()
        self.embedding.clear()
        self.memory.disconnect()
        device_memory.give_back()

    def check(self) -> None:
        """AssertionError unless all accounts are right, including running sequences and what is read from disk."""
        assert THIS_THREAD.is_engine
        self.cache.check()
        self.memory.check({Account.SEQUENCES: self.runner.live_nbytes})
        self.runner.features.check()
        self.embedding.check()
        self.disk.check()

"""The work of the engine thread: jobs in, steps of the scheduler done, events out."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from reprise.cache.store import PrefixCache
from reprise.core.backend import Counts, Held, Status
from reprise.core.errors import RepriseError
from reprise.core.events import Event, FinishReason, Started
from reprise.core.job import Job, Purpose
from reprise.core.record import Reason
from reprise.core.settings import Settings
from reprise.engine import memory
from reprise.engine.batching import TOKEN_BY_TOKEN, reason_to_run_alone
from reprise.engine.load import LoadedModel
from reprise.engine.runner import LENDS_FROM, Runner
from reprise.engine.score import PromptScorer
from reprise.loop.admission import Gate
from reprise.loop.commits import Commits
from reprise.loop.disk import Disk, open_disk
from reprise.loop.ends import Ends
from reprise.loop.parked import Parked
from reprise.loop.passes import Passes
from reprise.loop.picture import picture_of
from reprise.loop.pinning import Pinning
from reprise.loop.pressure import Pressure
from reprise.loop.room import Room, answer_room
from reprise.loop.settled import SettledSpans
from reprise.loop.stored import Stored
from reprise.loop.task import Phase, Task
from reprise.plan.checkpoints import interval_tokens, make_plan
from reprise.schedule.decide import decide
from reprise.schedule.limits import Limits
from reprise.schedule.order import is_side_request
from reprise.schedule.sharing import relate

log = logging.getLogger("reprise.loop")

_COMPACT_ENTRIES = 8192
"""Entries that one idle step copies at most, so that an arrival waits for little."""

_LONGEST_NAP_S = 3600.0
"""A clock may be told to wait for so long on every platform."""


class Worker:
    """All state of the engine thread. Every method is called on it."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        gate: Gate,
        *,
        lends_from: int = LENDS_FROM,
        disk_block: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`disk_block`: see `open_disk`; `wake` has the loop call `step`, and may be called on any thread."""
        self._settings = settings
        self._gate = gate
        alone = reason_to_run_alone(loaded)
        if alone is not None:
            log.info("%s runs one sequence at a time: %s", loaded.name, alone)
        self.runner = Runner(loaded, can_batch=alone is None, lends_from=lends_from)
        layout = loaded.blueprint.layout
        budget = settings.cache_bytes.of(memory.device_bytes()) if settings.cache_bytes is not None else None
        self.cache = PrefixCache(layout, budget=budget if budget is not None else memory.default_budget(loaded.nbytes))
        self._parked = Parked(self.runner, self.cache)
        self.pinning = Pinning(self.cache)
        memory.bound_free_buffers(self.cache.budget)
        footprint = self.runner.footprint
        self._interval = interval_tokens(checkpoint_nbytes=footprint.checkpoint, kv_nbytes_per_token=footprint.full)
        chunk = 1 if loaded.architecture in TOKEN_BY_TOKEN else settings.prefill_chunk
        self._limits = Limits(
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            prefill_chunk=chunk,
            min_chunk=min(16, chunk),
            max_stall_s=settings.max_stall_ms / 1000,
            can_batch=self.runner.can_batch,
            resumes_anywhere=layout.resumes_anywhere,
        )
        self._room = Room(self.runner, self.cache, self._parked, chunk=chunk)
        self._tasks: dict[str, Task] = {}
        self._settled = SettledSpans()
        self._counts: Counter[str] = Counter()
        self._stored = Stored(self.cache, self._tasks, is_used=settings.has_prefix_cache)
        self._ends = Ends(
            runner=self.runner,
            cache=self.cache,
            parked=self._parked,
            room=self._room,
            gate=gate,
            tasks=self._tasks,
            counts=self._counts,
            stored=self._stored,
        )
        disk = open_disk(settings, loaded, footprint, block=disk_block)
        self.disk = Disk(
            disk,
            self.cache,
            runner=self.runner,
            room=self._room,
            parked=self._parked,
            stored=self._stored,
            max_stall_s=settings.max_stall_ms / 1000,
            wake=wake,
        )
        self._commits = Commits(
            runner=self.runner,
            cache=self.cache,
            stored=self._stored,
            settled=self._settled,
            pinning=self.pinning,
            disk=self.disk,
            is_used=settings.has_prefix_cache,
        )
        pressure = Pressure(
            runner=self.runner,
            room=self._room,
            ends=self._ends,
            commits=self._commits,
            stored=self._stored,
            tasks=self._tasks,
            counts=self._counts,
        )
        self._passes = Passes(
            runner=self.runner,
            cache=self.cache,
            room=self._room,
            gate=gate,
            ends=self._ends,
            commits=self._commits,
            pressure=pressure,
            tasks=self._tasks,
            counts=self._counts,
        )
        contexts = [c for c in (settings.max_context, loaded.context) if c is not None]
        gate.limits = self._limits
        gate.context = min(contexts, default=None)
        gate.needed = lambda position: footprint.live(position, chunk=1)
        gate.budget = self.cache.budget

    # What the loop asks.

    @property
    def is_empty(self) -> bool:
        """Whether no job is there but those that settle."""
        return all(task.is_settle for task in self._tasks.values())

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    @property
    def has_work(self) -> bool:
        # Small pieces are joined when no job is there, and not while one waits for the disk.
        return self._runs or (not self._tasks and not self._commits.is_compact) or self.disk.due_in_s == 0

    @property
    def wakes_in_s(self) -> float | None:
        """When there will be something to do or to tell if nothing comes: to write, or a pin that ends. None: never."""
        until = self.pinning.kept().until
        naps = [max(0.0, until - time.monotonic())] if until != float("inf") else []
        due_in_s = self.disk.due_in_s
        naps += [due_in_s] if due_in_s is not None else []
        return min([_LONGEST_NAP_S, *naps]) if naps else None

    @property
    def _runs(self) -> bool:
        """Whether there is a task that does not wait for the disk."""
        return any(not task.is_loading for task in self._tasks.values())

    def set_clock(self) -> None:
        """Tell the cache what time it is."""
        self.cache.now_s = time.monotonic()

    def status(self) -> Status:
        """All but what is on disk, which changes while the loop sleeps."""
        self.set_clock()
        kept = self.pinning.kept()
        phases = [task.phase for task in self._tasks.values()]
        ledger = self.cache.ledger
        return Status(
            is_idle=len(self._tasks) == 0,
            queued=phases.count(Phase.WAITING),
            prefilling=phases.count(Phase.PREFILLING),
            decoding=phases.count(Phase.DECODING),
            counts=Counts(**self._counts, evictions=ledger.evictions),
            held=Held(
                budget=self.cache.budget if self.cache.budget is not None else 0,
                kv=ledger.kv,
                snapshots=ledger.snapshots,
                live=self.cache.reserved,
                pinned=kept.nbytes,
                pins=kept.num,
                tokens=ledger.tokens,
                index=4 * ledger.tokens + 512 * ledger.num_nodes,
                evicted_by_reason=dict(ledger.evicted_by_reason),
            ),
        )

    # Commands.

    def arrive(self, job: Job, sink: Callable[[Event], None], arrived_s: float) -> None:
        """Queue a job."""
        # Without a cache there is nothing through which one could use what another computed.
        # Nor has a job that reuses nothing.
        reuses = self._settings.has_prefix_cache and job.prompt_logprobs is None
        sharers = self._tasks.values() if reuses else ()
        others = {t.id: t.job.prompt.tokens for t in sharers if t.job.namespace == job.namespace}
        task = Task(job=job, sink=sink, arrived_s=arrived_s)
        self._tasks[job.id] = task
        try:
            task.shares = relate(job.prompt.tokens, others)
            self._stored.match(task)
        except Exception as error:
            self._ends.fail(task, error)
            return
        task.first_resume_at = task.resume_at
        chats = any(len(t.job.prompt) > 1024 for t in self._tasks.values() if t is not task and not t.is_settle)
        known = max(task.resume_at, self.disk.reach(task))
        task.is_side = is_side_request(prompt_len=len(job.prompt), resume_at=known, has_chats=chats)
        if job.purpose is not Purpose.SETTLE:
            self._counts.update(requests=1)
        if task.resume_at == len(job.prompt):
            task.admitted_s = time.monotonic()
            task.reused = task.resume_at
            self.pinning.keep(task)
            self._ends.end(task, FinishReason.DONE)

    def cancel(self, job_id: str) -> None:
        """End the job; what it computed stays in the cache."""
        task = self._tasks.get(job_id)
        if task is not None:
            self._ends.guarded([task], self._commits.progress)
        if task is not None and task.phase is not Phase.ENDED:
            self._ends.end(task, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        for job_id in list(self._tasks):
            self.cancel(job_id)

    def fail_all(self, error: RepriseError) -> None:
        """End all jobs with `error`, and keep nothing of them: their state is not to be trusted."""
        for task in list(self._tasks.values()):
            self._ends.lose(task)
            self._ends.fail(task, error)

    def forget(self) -> None:
        """Give all memory back now, and not when Python finds what refers to itself."""
        self.disk.close()
        self._ends.start_anew()
        memory.give_back()

    def set_budget(self, nbytes: int, *, returns_buffers: bool = False) -> None:
        """Keep within this budget from now on; what exceeds it is evicted, least worth first."""
        if returns_buffers:
            memory.give_back()
        if nbytes == self.cache.budget:
            return
        self.cache.budget = self._gate.budget = nbytes
        memory.bound_free_buffers(nbytes)
        self._room.make(0)
        if returns_buffers:
            memory.give_back()

    def clear_cache(self, namespace: str | None = None) -> None:
        self.disk.clear(namespace)
        self.cache.clear(namespace)
        memory.give_back()

    # Steps.

    def step(self) -> None:
        """Ask the scheduler and do what it says; with nothing to do, join small pieces."""
        if self._parked.is_spoilt:
            self._ends.start_anew()
        self.set_clock()
        self.disk.advance()
        self._work()
        self.disk.write()

    def _work(self) -> None:
        if not self._tasks:
            self._tidy()
        if not self._runs:
            return
        runs = [task for task in self._tasks.values() if not task.is_loading]
        step = decide(picture_of(runs, self._room, self._passes.speed, self.cache.layout), self._limits)
        assert not step.is_idle, "jobs are there, and nothing runs"
        for job_id in step.give_up:
            self.cancel(job_id)
        for job_id in step.commit:
            self._ends.guarded([self._tasks[job_id]], self._commits.progress)
        for job_id in step.admit:
            self._ends.guarded([self._tasks[job_id]], self._admit)
        if step.prefill:
            self._passes.prefill(step.prefill)
        if step.decode:
            self._passes.decode(step.decode)

    # Matching and admission.

    def _admit(self, task: Task) -> None:
        if task.reusable == task.end and self.disk.begin(task):
            return  # It is admitted when what the disk has of it is there.
        # One that was paused comes back: what is told of it is how it began.
        is_new = task.admitted_s is None
        prompt = task.prompt
        match = self.cache.match(prompt.tokens, namespace=task.job.namespace)
        if self._settings.has_prefix_cache:
            task.resume_at = self.cache.resume_at(match, limit=task.reusable)
        if self._settings.has_prefix_cache and is_new:
            task.matched, task.continues = match.length, match.continues
            task.reason = self._reason(task, self.cache.was_lost(match, task.resume_at))
        task.lease = self.cache.lease(match, task.resume_at, is_request=not task.is_settle)
        reserve = len(prompt) + answer_room(task.job)
        task.live = self._room.start(match, task.resume_at, reserve=reserve)
        task.live.scorer = self._scorer(task)
        self._room.charge()
        is_branch = match.continues is not None and match.length < len(prompt)
        task.plan = make_plan(
            prompt,
            layout=self.cache.layout,
            resume_at=task.resume_at,
            end=task.end,
            branch_at=match.length if is_branch else None,
            interval=self._interval,
        )
        task.stored = max(task.stored, task.resume_at)
        self.pinning.keep(task)
        if is_new:
            task.admitted_s = time.monotonic()
            task.reused = task.resume_at
            # Some of it may have been evicted again.
            task.loaded = min(task.loaded, task.resume_at)
            self._counts.update(loaded=task.loaded)
            task.settled = self._settled.within(prompt.tokens, task.resume_at)
            self._gate.admitted(task.id)
            self._ends.emit(task, Started(reused=task.resume_at, total=len(prompt)))
        if task.resume_at < task.end:
            task.move(Phase.PREFILLING)
        elif task.job.purpose is Purpose.GENERATE:
            self._passes.begin_decode(task)
        else:
            # Another job has computed all of it while this one waited.
            self._ends.end(task, FinishReason.DONE)

    def _scorer(self, task: Task) -> PromptScorer | None:
        is_wanted = task.job.prompt_logprobs is not None and task.scored < len(task.job.prompt)
        return PromptScorer(task.job, start=task.scored) if is_wanted else None

    def _reason(self, task: Task, was_lost: bool) -> Reason:
        if task.job.prompt_logprobs is not None:
            return Reason.PROMPT_LOGPROBS
        if task.matched == 0:
            return Reason.EVICTED if was_lost else Reason.COLD
        if task.resume_at >= task.end:
            return Reason.NOTHING_NEW
        if was_lost:
            return Reason.EVICTED
        if task.continues is not None:
            return Reason.BRANCHED
        return Reason.NEW_TOKENS if task.resume_at >= task.matched else Reason.NO_SNAPSHOT

    # When there is nothing to do.

    def _tidy(self) -> None:
        # First, so that a compaction that raises is not tried for ever.
        self._commits.is_compact = True
        copied = self.cache.compact(max_entries=_COMPACT_ENTRIES)
        self._commits.is_compact = copied == 0
        if copied == 0:
            memory.give_back()
            if log.isEnabledFor(logging.DEBUG):
                self.cache.check()

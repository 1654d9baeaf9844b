"""Passes over the model: prefill slices and decode steps, and what follows from what they give."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from reprise.cache.store import PrefixCache
from reprise.core.errors import OutOfMemory
from reprise.core.events import FinishReason, Progress
from reprise.core.job import Purpose
from reprise.engine.runner import Broken, Picked, Runner
from reprise.loop.admission import Gate
from reprise.loop.commits import Commits
from reprise.loop.ends import Ends
from reprise.loop.pressure import Pressure
from reprise.loop.room import Room
from reprise.loop.task import Phase, Task
from reprise.schedule.limits import Speed
from reprise.schedule.step import Group, Slice

log = logging.getLogger("reprise.loop")


class Passes:
    """Runs what the scheduler decided for `tasks`, by id. A pass that raises fails those in it, and nobody else."""

    def __init__(
        self,
        *,
        runner: Runner,
        cache: PrefixCache,
        room: Room,
        gate: Gate,
        ends: Ends,
        commits: Commits,
        pressure: Pressure,
        tasks: Mapping[str, Task],
        counts: Counter[str],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._room = room
        self._gate = gate
        self._ends = ends
        self._commits = commits
        self._pressure = pressure
        self._tasks = tasks
        self._counts = counts
        self.speed = Speed()
        """What passes took so far."""

    # Prefill.

    def prefill(self, slices: Sequence[Slice]) -> None:
        """One pass over slices of one length, as far as there is room, and the first token where a prompt ends."""
        num = len(slices[0])
        tasks = self._pressure.with_room(
            [self._tasks[piece.id] for piece in slices], lambda lives: self._room.make_for_prefill(lives, num)
        )
        slices = [piece for piece in slices if any(task.id == piece.id for task in tasks)]
        if not tasks:
            return
        started_s = time.monotonic()
        chunks = [task.prompt.tokens[piece.start : piece.stop] for task, piece in zip(tasks, slices, strict=True)]
        if self._ends.guarded_pass(tasks, lambda lives: self._runner.prefill(lives, chunks)) is None:
            return
        seconds = time.monotonic() - started_s
        self.speed = self.speed.after_prefill(num * len(slices), seconds, position=slices[0].start)
        self._gate.speed = self.speed
        self._room.charge()
        for task, piece in zip(tasks, slices, strict=True):
            if task.is_settle:
                self._counts.update(settled=len(piece))
            else:
                self._counts.update(prefilled=len(piece))
            self._ends.guarded([task], lambda task, piece=piece: self._after_slice(task, piece))

    def _after_slice(self, task: Task, piece: Slice) -> None:
        assert task.plan is not None and task.live is not None
        scored = task.live.scorer.give() if task.live.scorer is not None else None
        if scored is not None:
            task.scored = scored.start + len(scored.tokens)
            self._ends.emit(task, scored)
        if piece.is_checkpoint and not self._cache.layout.resumes_anywhere:
            self._commits.store(task, piece.stop, task.plan.kind_at(piece.stop))
        if task.paused is None:
            self._ends.emit(task, Progress(position=piece.stop, total=len(task.job.prompt)))
        if piece.stop < task.end:
            return
        if task.job.purpose is Purpose.GENERATE:
            self.begin_decode(task)
            return
        self._commits.store(task, piece.stop, task.end_kind)
        self._commits.note_settled(task)
        self._ends.end(task, FinishReason.DONE)

    def begin_decode(self, task: Task) -> None:
        """The prompt is there: the next pass samples."""
        assert task.live is not None
        if task.paused is None:
            self._runner.begin_decode(task.live, task.job)
        else:
            self._runner.go_on(task.live, task.paused.decoder, pending=int(task.paused.prompt.tokens[-1]))
            task.paused = None
        task.move(Phase.DECODING)

    # Decode.

    def decode(self, groups: Sequence[Group]) -> None:
        """A token for each sequence of each group, as far as there is room."""
        started_s = time.monotonic()
        for group in groups:
            # A prefill slice of the same step may have failed one of them, or have had it paused.
            tasks = [self._tasks[i] for i in group.ids if i in self._tasks and self._tasks[i].phase is Phase.DECODING]
            tasks = self._pressure.with_room(tasks, self._room.make_for_decode)
            if len(tasks) == 1 and self._pressure.is_full(tasks[0]):
                self._ends.guarded(tasks, self._stop_for_room)
                continue
            if not tasks:
                continue
            results = self._ends.guarded_pass(tasks, self._runner.decode)
            if results is None:
                continue
            by_live = {id(task.live): task for task in tasks}
            for task in tasks:
                task.group = group.key
            for result in results:
                task = by_live[id(result.live)]
                self._ends.guarded([task], lambda task, result=result: self._after_token(task, result))
        self._room.charge()
        self.speed = self.speed.after_decode(time.monotonic() - started_s)

    def _after_token(self, task: Task, result: Picked | Broken) -> None:
        if isinstance(result, Broken):
            raise result.error
        if task.first_token_s is None:
            task.first_token_s = time.monotonic()
            if task.live is not None and not task.generated:
                self._counts.update(prefilled=1)
        task.generated.append(result.sampled.token)
        self._counts.update(generated=1)
        self._ends.emit(task, result.sampled)
        context = self._gate.context
        reason = result.reason
        if reason is None and context is not None and len(task.job.prompt) + len(task.generated) >= context:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.speed = self.speed.after_generation(time.monotonic() - task.first_token_s)
            self._complete(task, reason)

    def _stop_for_room(self, task: Task) -> None:
        """There will be no room for its next token: its memory is its context. What it has is an answer, if any."""
        if not task.generated:
            raise OutOfMemory("There is no room for the first token of an answer. Give --cache-bytes more memory.")
        self._complete(task, FinishReason.LENGTH)

    def _complete(self, task: Task, reason: FinishReason) -> None:
        if task.lease is not None:
            self._cache.note_answer(task.lease, len(task.generated))
        self._commits.progress(task)
        tokens = task.tokens_to(task.position)
        self._ends.end(task, reason)
        try:
            # However busy the server is: its next turn is restored from few pieces.
            self._cache.compact_path(tokens, namespace=task.job.namespace)
        except Exception:
            # The answer is there, and each step leaves the books right: it stays as it is.
            log.exception("what a chat has stored could not be joined")

"""How tasks end: each for itself, whatever goes wrong, and with all that it holds given back."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from reprise.cache.store import PrefixCache
from reprise.core.errors import EngineFailed, OutOfMemory, RepriseError
from reprise.core.events import Event, Finished, FinishReason
from reprise.core.tokens import as_tokens, join_tokens
from reprise.engine import memory
from reprise.engine.runner import Broken, Live, Picked, Runner
from reprise.loop.admission import Gate
from reprise.loop.parked import Parked
from reprise.loop.room import Room
from reprise.loop.stored import Stored
from reprise.loop.task import Phase, Task

log = logging.getLogger("reprise.loop")


class Ends:
    """Every way in which one of `tasks`, by id, ends. `counts` are the totals of the loop (`core.backend.Counts`)."""

    def __init__(
        self,
        *,
        runner: Runner,
        cache: PrefixCache,
        parked: Parked,
        room: Room,
        gate: Gate,
        tasks: dict[str, Task],
        counts: Counter[str],
        stored: Stored,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._parked = parked
        self._room = room
        self._gate = gate
        self._stored = stored
        self._tasks = tasks
        self._counts = counts

    def guarded(self, tasks: Sequence[Task], action: Callable[[Task], None]) -> None:
        """Do something for each task; one that raises fails alone."""
        for task in tasks:
            if task.phase is Phase.ENDED:
                continue
            try:
                action(task)
            except Exception as error:
                self.fail(task, error)

    def guarded_pass(
        self, tasks: Sequence[Task], run: Callable[[list[Live]], Sequence[Picked | Broken]]
    ) -> Sequence[Picked | Broken] | None:
        """One pass over whole groups. If it raises, the state of all of them is lost, and all fail: then None."""
        lives = [task.live for task in tasks if task.live is not None]
        assert len(lives) == len(tasks)
        try:
            return run(lives)
        except Exception as error:
            log.exception("a pass over %d sequences failed", len(tasks))
            # All of them before the first one fails, which may make room with what they hold.
            for task in tasks:
                self.lose(task)
            for task in tasks:
                self.fail(task, error)
            return None

    def lose(self, task: Task) -> None:
        """The state of a sequence is not to be trusted any more; only what it lent before the failure is kept."""
        if task.live is None:
            return
        # Before anybody has it lend what the cache holds of its path: nobody could read that.
        self._room.ended(task.live)
        try:
            # All that it was given or has computed: a checkpoint of this very run may have lent as well.
            tokens = join_tokens(task.job.prompt.tokens, as_tokens(task.generated))
            self._parked.recall(task.live, tokens, namespace=task.job.namespace)
        except Exception:
            log.exception("what request %s lent is lost; the cache starts anew", task.id)
            self.start_anew()
        self._runner.drop(task.live)
        task.live = None

    def start_anew(self) -> None:
        """Nobody knows any more what the cache holds: it holds nothing, and what runs goes on without it."""
        for task in self._tasks.values():
            task.lease = None
        self._cache.forget()
        self._parked.forget()
        self._cache.reserved = self._runner.live_nbytes

    def fail(self, task: Task, error: Exception) -> None:
        """The task has failed. What is no error of ours becomes one, with a sentence for its client."""
        if memory.is_out_of_memory(error):
            shown: RepriseError = OutOfMemory(
                "There was not enough memory for this request. Shorten it, or lower --cache-bytes or --max-batch."
            )
            self._relieve(task)
        elif isinstance(error, RepriseError):
            shown = error
        else:
            log.error("request %s failed", task.id, exc_info=error)
            shown = EngineFailed(f"The request failed in the engine: {type(error).__name__}: {error}")
        self.end(task, FinishReason.FAILED, shown)

    def end(self, task: Task, reason: FinishReason, error: RepriseError | None = None) -> None:
        """The task is over: forget it, give back what it holds, and tell its client."""
        outcome = task.outcome(time.monotonic())
        task.move(Phase.ENDED)
        del self._tasks[task.id]
        self.let_go(task)
        if not task.is_settle:
            self._counts.update(
                prompt=outcome.prompt if task.admitted_s is not None else 0,
                reused=outcome.reused,
                finished=int(error is None and reason is not FinishReason.CANCELLED),
                cancelled=int(reason is FinishReason.CANCELLED),
                failed=int(error is not None),
            )
        self._gate.ended(task.id)
        self.emit(task, Finished(reason=reason, outcome=outcome, error=error))

    def let_go(self, task: Task) -> None:
        """Give back what the task holds. Whatever goes wrong, it ends: its client waits, and so does the gate."""
        live, lease, tokens = task.live, task.lease, task.tokens_to(task.position)
        task.live = task.lease = None
        try:
            if live is not None:
                self._room.ended(live)
            if lease is not None:
                self._cache.release(lease)
            # After that, since it is parked for what the cache still has on loan.
            if live is not None:
                self._parked.end(live, tokens, namespace=task.job.namespace)
            self._room.charge()
            self._stored.match_followers(task)
        except Exception:
            log.exception("what request %s held could not be given back; the cache starts anew", task.id)
            if live is not None:
                self._runner.drop(live)
            self.start_anew()
        if self._parked.is_spoilt:
            self.start_anew()

    def _relieve(self, task: Task) -> None:
        """There was too little memory for this task: make what room there is for its next try."""
        try:
            self._room.make(self._room.needed(len(task.prompt)))
        except Exception:
            log.exception("making room failed; the cache starts anew")
            self.start_anew()
        memory.give_back()

    def emit(self, task: Task, event: Event) -> None:
        """Tell the task's client."""
        try:
            task.sink(event)
        except Exception:
            # A sink that is gone (its event loop closed, say) must not hold up the others.
            log.debug("the sink of %s raised", task.id, exc_info=True)

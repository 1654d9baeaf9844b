"""Too little memory for all that run: who has to wait for it, and what of it is kept meanwhile."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens, join_tokens
from reprise.engine.runner import Live, Runner
from reprise.loop.commits import Commits
from reprise.loop.ends import Ends
from reprise.loop.room import Room
from reprise.loop.stored import Stored
from reprise.loop.task import Paused, Phase, Task

log = logging.getLogger("reprise.loop")


class Pressure:
    """Has the youngest of `tasks` wait where there is no room for the next step of all, and the last one go on."""

    def __init__(
        self,
        *,
        runner: Runner,
        room: Room,
        ends: Ends,
        commits: Commits,
        stored: Stored,
        tasks: Mapping[str, Task],
        counts: Counter[str],
    ) -> None:
        self._runner = runner
        self._room = room
        self._ends = ends
        self._commits = commits
        self._stored = stored
        self._tasks = tasks
        self._counts = counts

    def with_room(self, tasks: Sequence[Task], make: Callable[[list[Live]], bool]) -> list[Task]:
        """Those of `tasks` that can take their next step: the youngest of all that run wait where there is no room.

        The last one that runs goes on whatever it takes.
        """
        going = list(tasks)
        while going and not make([task.live for task in going if task.live is not None]):
            running = [task for task in self._tasks.values() if task.live is not None]
            if self._is_alone(running[0]):
                break
            youngest = max(running, key=lambda task: (task.is_settle, task.arrived_s))
            self._ends.guarded([youngest], self._pause)
            going = [task for task in going if task.live is not None]
        return going

    def _is_alone(self, task: Task) -> bool:
        return all(other is task for other in self._tasks.values() if other.live is not None)

    def is_full(self, task: Task) -> bool:
        """Whether nothing else is there to give way, and its next token has no room."""
        return task.live is not None and self._is_alone(task) and self._room.is_full(task.live)

    def _pause(self, task: Task) -> None:
        """Give the task's state up, to be computed again when there is room; what the cache can keep of it is kept."""
        assert task.live is not None
        log.info("request %s waits for memory at token %d", task.id, task.position)
        self._commits.progress(task)
        decoder = self._runner.pause(task.live)
        if decoder is not None:
            tokens = join_tokens(task.job.prompt.tokens, as_tokens(task.generated))
            task.paused = Paused(prompt=Prompt(tokens=tokens, boundaries=task.job.prompt.boundaries), decoder=decoder)
        task.reached = task.position
        task.move(Phase.WAITING)
        self._ends.let_go(task)
        task.stored = 0
        self._stored.match(task)
        self._counts.update(paused=1)

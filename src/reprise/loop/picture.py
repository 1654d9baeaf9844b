"""What the scheduler is told of the tasks: pure."""

from __future__ import annotations

import time
from collections.abc import Iterable

from reprise.core.kinds import Layout
from reprise.loop.room import Room
from reprise.loop.task import Phase, Task
from reprise.schedule.limits import Speed
from reprise.schedule.state import Decoding, Prefilling, State, Waiting

_WHOLE_FROM = 8
"""Before so many tokens recurrent state may have a shape of its own: the last tokens of an n-gram, of which few are
there yet."""


def picture_of(tasks: Iterable[Task], room: Room, speed: Speed, layout: Layout) -> State:
    """The state of all jobs, for `reprise.schedule.decide`."""
    tasks = list(tasks)
    waiting = [task for task in tasks if task.phase is Phase.WAITING]
    running = [task for task in tasks if task.phase is not Phase.WAITING]
    return State(
        now_s=time.monotonic(),
        waiting=tuple(_waiting(task, room) for task in waiting),
        prefilling=tuple(_prefilling(task, layout) for task in running if task.phase is Phase.PREFILLING),
        decoding=tuple(_decoding(task, layout) for task in running if task.phase is Phase.DECODING),
        speed=speed,
        # Who asks for room is only who waits.
        free_nbytes=room.free(running) if waiting else None,
    )


def _waiting(task: Task, room: Room) -> Waiting:
    num_prompt = len(task.prompt)
    return Waiting(
        id=task.id,
        arrived_s=task.arrived_s,
        prompt_len=num_prompt,
        resume_at=min(task.resume_at, num_prompt - 1),
        shares=task.shares,
        live_nbytes=room.needed_to_admit(num_prompt, task.resume_at),
        is_side=task.is_side,
        is_settle=task.is_settle,
    )


def _prefilling(task: Task, layout: Layout) -> Prefilling:
    assert task.plan is not None, task.id
    return Prefilling(
        id=task.id,
        arrived_s=task.arrived_s,
        position=task.position,
        end=task.end,
        checkpoints=task.plan.positions,
        stored=task.stored,
        shares=task.shares,
        can_batch=_can_batch(task.position, layout),
        is_side=task.is_side,
        is_settle=task.is_settle,
    )


def _decoding(task: Task, layout: Layout) -> Decoding:
    return Decoding(
        id=task.id,
        length=task.position,
        group=task.group,
        stored=task.stored,
        shares=task.shares,
        can_batch=_can_batch(task.position, layout),
    )


def _can_batch(position: int, layout: Layout) -> bool:
    """Whether a sequence that stands there can join others."""
    return position == 0 or position >= _WHOLE_FROM or not layout.has_snapshots

"""The gate: what is refused before it becomes work. Used from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from reprise.core.backend import Status
from reprise.core.errors import BadRequest, ContextTooLong, QueueFull, ShuttingDown, prompt_too_long
from reprise.core.job import Job, Purpose
from reprise.loop.sequences import initial_decode_slots
from reprise.schedule.limits import SchedulerLimits, Speed, retry_after_s


class Gate:
    """Counts the jobs inside and refuses those that cannot be served.

    The engine thread tells it the limits (once the model is loaded), the speed, and who was admitted or has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[str, Job] = {}
        self._waiting: set[str] = set()
        self._is_closed = False
        self.limits = SchedulerLimits()
        self.speed = Speed()
        self.context: int | None = None
        """The most positions of one sequence."""
        self.needed: Callable[[int], int] = lambda position: 0
        """The bytes of the buffers of a sequence that stands there."""
        self.budget: int | None = None

    def open(
        self, limits: SchedulerLimits, *, context: int | None, budget: int | None, needed: Callable[[int], int]
    ) -> None:
        """The model is loaded: these bounds hold."""
        self.limits, self.context, self.budget, self.needed = limits, context, budget, needed

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def enter(self, job: Job) -> None:
        """Raises ShuttingDown, QueueFull, ContextTooLong or BadRequest; otherwise the job is inside."""
        self._check_fits(job)
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("The server is shutting down. Try again when it is back.")
            if job.id in self._inside:
                raise BadRequest(f"A request with the id {job.id} is already running.", param="request_id")
            if job.purpose is not Purpose.SETTLE:
                num_left = sum(len(self._inside[i].prompt) for i in self._waiting)
                num_running = sum(j.purpose is not Purpose.SETTLE for j in self._inside.values()) - len(self._waiting)
                # Those that only have not been admitted yet do not wait: there is room for them.
                num_waiting = max(0, len(self._waiting) - max(0, self.limits.max_batch - num_running))
                wait_s = retry_after_s(num_waiting=num_waiting, num_left=num_left, limits=self.limits, speed=self.speed)
                if wait_s is not None:
                    raise QueueFull(
                        f"{num_waiting} requests are waiting, and the queue is full. "
                        f"Try again in about {wait_s} s, or start the server with a larger --max-queue.",
                        retry_after_s=wait_s,
                    )
                self._waiting.add(job.id)
            self._inside[job.id] = job

    def _check_fits(self, job: Job) -> None:
        length = len(job.prompt) + (1 if job.purpose is Purpose.GENERATE else 0)
        if self.context is not None and length > self.context:
            raise prompt_too_long(len(job.prompt), self.context)
        # What it gets from the start: its prompt, and room for the beginning of an answer.
        needed = self.needed(len(job.prompt) + initial_decode_slots(job))
        if self.budget is not None and needed > self.budget:
            raise ContextTooLong(
                f"The prompt has {len(job.prompt)} tokens, whose state takes {needed:,} bytes, but --cache-bytes is "
                f"{self.budget:,}. Shorten the conversation, or raise --cache-bytes.",
                param="messages",
            )

    def admitted(self, job_id: str) -> None:
        with self._lock:
            self._waiting.discard(job_id)

    def ended(self, job_id: str) -> None:
        with self._lock:
            self._waiting.discard(job_id)
            self._inside.pop(job_id, None)

    @property
    def num_inside(self) -> int:
        with self._lock:
            return len(self._inside)

    def is_inside(self, job_id: str) -> bool:
        with self._lock:
            return job_id in self._inside

    def adjust(self, status: Status) -> Status:
        """The status as it is now: a job that is inside counts, even before the engine thread has seen it."""
        with self._lock:
            return replace(status, is_idle=len(self._inside) == 0, is_closing=self._is_closed)

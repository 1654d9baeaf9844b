"""The gate: refuses jobs that cannot be served before they reach the engine thread. Thread-safe."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reprise.core.errors import BadRequest, ContextTooLong, QueueFull, ShuttingDown, prompt_too_long
from reprise.core.events import Event
from reprise.core.images import PromptImage
from reprise.core.job import Job, Purpose
from reprise.core.sizes import nbytes_text
from reprise.core.tokens import Span
from reprise.loop.sequences import initial_decode_slots
from reprise.schedule.state import SchedulerLimits, Speed, retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    """What prompts need of the memory for chats, and how much of it there is. Asked on any thread."""

    budget: int | None = None
    """None: unlimited."""
    states: Callable[[int], int] = lambda position: 0
    """Bytes of the buffers of a sequence at a position."""
    quantised: Callable[[int], int] | None = None
    """The same with `--kv-bits 8`; None: it has them already, or they cannot be quantised."""
    passes: Callable[[int], int] = lambda position: 0
    """Bytes that the last pass to a position takes of this memory, in the smallest chunk."""
    features: Callable[[Sequence[Span]], int] = lambda images: 0
    """Bytes of the features of images that a prompt needs at once."""
    tower: Callable[[int], int] = lambda num: 0
    """Bytes of this memory that the tower takes at its peak for an image with this number of tokens; 0: no tower."""
    pixels_per_row: int = 0
    """See `FeatureCache`."""
    advice: str = "raise --cache-bytes"

    def needed(self, position: int, images: Sequence[Span], states: Callable[[int], int] | None = None) -> int:
        """What a prompt takes up to a position: its states, one image's features, and the last pass or the tower."""
        dearest = max(self.passes(position), self.tower(max(map(len, images), default=0)))
        return (self.states if states is None else states)(position) + dearest + self.features(images)

    def longest(
        self, most: int, *, num_slots: int, images: Sequence[Span] = (), states: Callable[[int], int] | None = None
    ) -> int:
        """The longest prompt below `most` that fits with `num_slots` entries for its answer; 0: none."""
        if self.budget is None:
            return most
        fitting = bisect_right(range(most), self.budget, key=lambda num: self.needed(num + num_slots, images, states))
        return max(0, fitting - 1)

    def refusal(self, num_prompt: int, *, num_slots: int, images: Sequence[PromptImage] = ()) -> ContextTooLong | None:
        """Why a prompt can never be served, what would fit, and what helps; None: it fits."""
        spans = [each.span for each in images]
        needed = self.needed(num_prompt + num_slots, spans)
        if self.budget is None or needed <= self.budget:
            return None
        fitting, helps = list[str](), list[str]()
        longest = self.longest(num_prompt, num_slots=num_slots, images=spans)
        if longest > max(map(len, spans), default=-1):
            fitting.append(f"{longest:,} tokens would fit")
            helps.append("shorten the conversation")
        if self.quantised is not None:
            most = self.longest(num_prompt + 1, num_slots=num_slots, images=spans, states=self.quantised)
            fitting.append(f"{'it' if most == num_prompt else f'{most:,}'} with --kv-bits 8 (approximate)")
        if size := self._largest_image(num_prompt, num_slots, images):
            fitting.append(f"images of about {size} pixels would fit")
            helps.append("send smaller images")
        listed = ", ".join(fitting) or "its largest image does not fit"
        helps = ", ".join([*helps, f"or {self.advice}"]) if helps else self.advice
        return ContextTooLong(
            f"The prompt has {num_prompt:,} tokens, which need {nbytes_text(needed)} of the memory for chats, and that "
            f"is {nbytes_text(self.budget)}: {listed}. {helps[0].upper()}{helps[1:]}.",
            param="messages",
        )

    def _largest_image(self, num_prompt: int, num_slots: int, images: Sequence[PromptImage]) -> str:
        """The size to which its images would have to be reduced for a prompt to fit; "": none, or it is unknown."""
        assert self.budget is not None
        largest = max(images, key=lambda each: len(each.span), default=None)
        if largest is None or self.pixels_per_row == 0:
            return ""

        def needed(num: int) -> int:
            spans = [Span(0, min(num, len(each.span))) for each in images]
            less = sum(len(each.span) for each in images) - sum(map(len, spans))
            return self.needed(num_prompt - less + num_slots, spans)

        num = bisect_right(range(len(largest.span)), self.budget, key=needed) - 1
        unit, width, height = math.isqrt(self.pixels_per_row), largest.image.width, largest.image.height
        # Larger ones are scaled down by the processor as well.
        scale = math.sqrt(max(0, num) * min(self.pixels_per_row / (width * height), 1 / len(largest.span)))
        sides = [unit * int(side * scale / unit) for side in (width, height)]
        return f"{sides[0]} x {sides[1]}" if min(sides) > 0 else ""


class Gate:
    """Counts the jobs inside and refuses those that cannot be served.

    The engine thread sets the limits (once the model is loaded) and the speed, and reports admitted and ended jobs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[str, tuple[Job, Callable[[Event], None]]] = {}
        self._waiting: set[str] = set()
        self._is_closed = False
        self._has_unpublished = False
        self.limits = SchedulerLimits()
        self.speed = Speed()
        self.context: int | None = None
        """The most positions of one sequence."""
        self.room = PromptRoom()

    def open(self, limits: SchedulerLimits, *, context: int | None, room: PromptRoom) -> None:
        """Set the limits, once the model is loaded."""
        self.limits, self.context, self.room = limits, context, room

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def enter(self, job: Job, sink: Callable[[Event], None]) -> None:
        """Let a job in, whose events are for `sink`. Raises ShuttingDown, QueueFull, ContextTooLong or BadRequest."""
        self._check_fits(job)
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("The server is shutting down. Try again when it is back.")
            if job.id in self._inside:
                raise BadRequest(f"A request with the id {job.id} is already running.", param="request_id")
            if job.purpose is not Purpose.SETTLE:
                num_left = sum(len(self._inside[i][0].prompt) for i in self._waiting)
                num_requests = sum(each.purpose is not Purpose.SETTLE for each, _ in self._inside.values())
                num_running = num_requests - len(self._waiting)
                # Jobs for which there is a free row do not count as waiting.
                num_waiting = max(0, len(self._waiting) - max(0, self.limits.max_batch - num_running))
                wait_s = retry_after_s(num_waiting=num_waiting, num_left=num_left, limits=self.limits, speed=self.speed)
                if wait_s is not None:
                    raise QueueFull(
                        f"{num_waiting} requests are waiting, and the queue is full. "
                        f"Try again in about {wait_s} s, or start the server with a larger --max-queue.",
                        retry_after_s=wait_s,
                    )
                self._waiting.add(job.id)
            self._inside[job.id] = job, sink

    def _check_fits(self, job: Job) -> None:
        length = len(job.prompt) + (1 if job.purpose is Purpose.GENERATE else 0)
        if self.context is not None and length > self.context:
            raise prompt_too_long(len(job.prompt), self.context)
        # What is allocated at the start: the prompt, and room for the beginning of an answer.
        slots, images = initial_decode_slots(job), job.prompt.images
        refusal = self.room.refusal(len(job.prompt), num_slots=slots, images=images)
        if refusal is not None:
            raise refusal

    def admitted(self, job_id: str) -> None:
        with self._lock:
            self._waiting.discard(job_id)

    def ended(self, job_id: str) -> bool:
        """Let a job out. False if it is out already: its end was reported."""
        with self._lock:
            self._waiting.discard(job_id)
            self._has_unpublished = True
            return self._inside.pop(job_id, None) is not None

    def inside(self) -> list[tuple[Job, Callable[[Event], None]]]:
        """The jobs inside, each with its sink."""
        with self._lock:
            return list(self._inside.values())

    def published(self) -> None:
        """The engine's status counts every job that has ended."""
        with self._lock:
            self._has_unpublished = False

    @property
    def num_inside(self) -> int:
        with self._lock:
            return len(self._inside)

    def is_inside(self, job_id: str) -> bool:
        with self._lock:
            return job_id in self._inside

    @property
    def is_idle(self) -> bool:
        """Whether no job is inside, not even one that the engine thread has not seen yet, and all that ended are
        counted."""
        with self._lock:
            return len(self._inside) == 0 and not self._has_unpublished

    @property
    def is_closed(self) -> bool:
        return self._is_closed

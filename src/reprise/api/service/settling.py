"""Settling: computing the next turn's known prefix while the server is idle.

A settle waits in the engine's queue until nothing else is there, and is given up there when a request arrives. Here it
is decided which settles are worth having: none twice, none that a request has overtaken, and a bounded number.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock

from reprise.core.backend import Backend
from reprise.core.errors import RepriseError
from reprise.core.events import Event, Finished, FinishReason, Progress, Started
from reprise.core.job import Job, Purpose
from reprise.core.prompt import Prompt
from reprise.core.tokens import common_prefix

log = logging.getLogger(__name__)

_MAX_WAITING = 32


@dataclass(slots=True, kw_only=True, eq=False)
class _Settle:
    """One settle on its way. `spent`: the tokens computed before it was given up the last time."""

    job: Job
    attempt: int = 0
    spent: int = 0
    started_at: int = 0
    position: int = 0
    is_dropped: bool = False

    @property
    def computed(self) -> int:
        return self.spent + self.position - self.started_at


class Settling:
    """The settles of a server that are queued or running. Safe to use from several threads.

    Each computes at most `max_tokens` tokens and the rest of a prefill chunk. At most `max_waiting` wait, the latest.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_tokens: int,
        max_waiting: int = _MAX_WAITING,
        why_quiet: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`why_quiet`: why nothing is done in the background; None: it is."""
        assert max_tokens > 0 and max_waiting > 0, (max_tokens, max_waiting)
        self._backend = backend
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._why_quiet = why_quiet
        self._lock = Lock()
        self._settles: list[_Settle] = []
        self._num_forgotten = Counter[str]()

    def __len__(self) -> int:
        return len(self._settles)

    def begin(
        self,
        prompt: Prompt,
        *,
        request_id: str,
        namespace: str = "",
        owner: str = "",
        chat: str | None = None,
        calls_tool: bool | None = None,
        beside: str | None = None,
        as_of: int | None = None,
    ) -> None:
        """Queue a settle of `prompt`, which follows the answer to this request.

        `calls_tool`: whether that answer ends with a tool call. `beside`: the job that still writes it. `as_of`:
        `num_forgotten` of the namespace when the answer ended. If it has changed, nothing is queued.
        """
        if self._why_quiet() is not None:
            return
        job = Job(
            id=request_id,
            prompt=prompt,
            purpose=Purpose.SETTLE,
            namespace=namespace,
            owner=owner,
            chat=chat,
            follows=request_id,
            calls_tool=calls_tool,
            beside=beside,
        )
        with self._lock:
            if as_of not in (None, self.num_forgotten(namespace)):
                return
            if any(_begins_with(other.job, job) for other in self._settles):
                return
            # What is settled as part of this one need not be settled by itself.
            needless = [other for other in self._settles if _begins_with(job, other.job)]
            rest = [other for other in self._settles if other not in needless]
            self._drop([*needless, *rest[: max(0, len(rest) + 1 - self._max_waiting)]])
            self._submit(_Settle(job=job))

    def overtaken_by(self, job: Job) -> None:
        """A request computes its prompt: settles of what that begins with are of no more use."""
        with self._lock:
            self._drop([settle for settle in self._settles if _begins_with(job, settle.job)])

    def forget(self, namespace: str) -> None:
        """The cache of this namespace is about to be cleared: nothing of it is to come back by a settle."""
        with self._lock:
            self._num_forgotten[namespace] += 1
            self._drop([settle for settle in self._settles if settle.job.namespace == namespace])

    def num_forgotten(self, namespace: str) -> int:
        """How often `forget` was called for this namespace."""
        return self._num_forgotten[namespace]

    # With the lock held, since a settle that is given up may be queued again at the same time.

    def _drop(self, settles: list[_Settle]) -> None:
        for settle in settles:
            settle.is_dropped = True
            self._settles.remove(settle)
            self._backend.cancel(_job_id(settle))

    def _submit(self, settle: _Settle) -> None:
        try:
            self._backend.submit(replace(settle.job, id=_job_id(settle)), self._listener(settle))
        except RepriseError as error:
            log.debug("%s: not settled: %s", settle.job.id, error)
        else:
            self._settles.append(settle)

    def _listener(self, settle: _Settle) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            # On the engine thread: whatever is called here returns at once.
            with self._lock:
                match event:
                    case Started(num_reused=num_reused):
                        settle.started_at = settle.position = num_reused
                    case Progress(position=position):
                        settle.position = position
                        is_enough = settle.computed >= self._max_tokens or self._why_quiet() is not None
                        if is_enough and not settle.is_dropped:
                            self._drop([settle])
                    case Finished(reason=reason) if not settle.is_dropped:
                        self._settles.remove(settle)
                        if reason is FinishReason.CANCELLED:
                            self._go_on(settle)
                    case _:
                        pass

        return listen

    def _go_on(self, settle: _Settle) -> None:
        # A request came between. What was done is in the cache, and the rest can be done when it is gone.
        settle.spent, settle.started_at = settle.computed, settle.position
        settle.attempt += 1
        self._submit(settle)


def _job_id(settle: _Settle) -> str:
    attempt = f"-{settle.attempt}" if settle.attempt > 0 else ""
    return f"{settle.job.id}-settle{attempt}"


def _begins_with(job: Job, start: Job) -> bool:
    tokens, first = job.prompt.tokens, start.prompt.tokens
    return job.namespace == start.namespace and common_prefix(tokens, first) == len(first)

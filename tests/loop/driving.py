"""Drives an engine loop in tests: jobs in, answers out."""

import atexit
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from reprise.core.events import Event, Finished, Progress, Sampled
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.inspection import Inspection
from reprise.core.job import Job, Purpose, Sampling
from reprise.core.prompt import Boundary, Prompt
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import as_tokens
from reprise.engine.models.load import LoadedModel
from reprise.engine.running.runner import SHARES_FROM
from reprise.loop import EngineClient
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from tests.models.shared import loader
from tests.models.tiny import tiny_model

T = TypeVar("T")
GREEDY = Sampling(temperature=0)
PATIENCE_S = 300.0
"""Longer than anything takes on the slowest machine: who waits so long has found a bug."""
_END_S = 20.0

_ids = itertools.count()


@dataclass(eq=False)
class SubmittedJob:
    """A submitted job and what was heard of it."""

    job: Job
    events: list[Event] = field(default_factory=list[Event])
    kinds: set[type] = field(default_factory=set[type])
    heard: threading.Condition = field(default_factory=threading.Condition)
    on_event: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        with self.heard:
            self.events.append(event)
            # Who waits is woken by what it waits for, and not by each token.
            if type(event) not in self.kinds:
                self.kinds.add(type(event))
                self.heard.notify_all()
        if self.on_event is not None:
            self.on_event(event)

    def wait(self) -> "SubmittedJob":
        return self.wait_for(Finished)

    def wait_for(self, kind: type[Event]) -> "SubmittedJob":
        with self.heard:
            assert self.heard.wait_for(lambda: kind in self.kinds, PATIENCE_S), self.job.id
        return self

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Sampled)]

    @property
    def end(self) -> Finished:
        return next(event for event in self.events if isinstance(event, Finished))

    @property
    def computed(self) -> int:
        return self.end.outcome.num_prefilled

    @property
    def progress(self) -> list[int]:
        return [event.position for event in self.events if isinstance(event, Progress)]


class DrivenEngine:
    """An engine loop on a tiny model; checks the cache's books after every answer."""

    def __init__(
        self,
        model: str | Path,
        *,
        cache_bytes: int | None = None,
        shares_from: int = SHARES_FROM,
        disk_block: int | None = None,
        load: Callable[[], LoadedModel] | None = None,
        thread: EngineThread | None = None,
        nbytes: int = 0,
        **settings: Any,
    ) -> None:
        """`model`: the architecture of a tiny model, or a directory; `load` makes another one.

        `thread`: with other models, its own weights taking `nbytes`.
        """
        # What runs while idle is for tests that ask for it.
        settings.setdefault("is_audit_off", True)
        settings.setdefault("drafts", "off")
        self.settings = Settings(
            model=str(model if isinstance(model, Path) else tiny_model(model)),
            cache_bytes=Bytes(cache_bytes) if cache_bytes is not None else None,
            **settings,
        )
        load = loader(self.settings) if load is None else load
        self.loop = EngineClient(
            self.settings,
            load=load,
            thread=thread,
            nbytes=nbytes,
            shares_from=shares_from,
            disk_block=disk_block,
        )
        self.model = self.loop.start()
        # MLX aborts a process that ends before the engine's thread, and then nobody reads which test has failed.
        atexit.register(self.loop.close, now=True, timeout_s=_END_S)

    def close(self) -> None:
        atexit.unregister(self.loop.close)
        self.loop.close(timeout_s=PATIENCE_S)

    def submit(
        self,
        tokens: Sequence[int],
        *,
        num: int = 8,
        boundaries: Iterable[Boundary] = (),
        sampling: Sampling = GREEDY,
        on_event: Callable[[Event], None] | None = None,
        cancel_when: Callable[[SubmittedJob], bool] | None = None,
        purpose: Purpose = Purpose.GENERATE,
        **job: Any,
    ) -> SubmittedJob:
        """Send a job. `cancel_when` is asked at each of its events, from the first on: whoever asks after submitting
        may come too late on a busy machine."""
        running = SubmittedJob(
            Job(
                id=f"job-{next(_ids)}",
                prompt=Prompt(tokens=as_tokens(tokens), boundaries=tuple(sorted(boundaries))),
                purpose=purpose,
                max_tokens=num if purpose is Purpose.GENERATE else 0,
                sampling=sampling,
                **job,
            ),
            on_event=on_event,
        )
        if cancel_when is not None:
            assert on_event is None

            def cancel(event: Event) -> None:
                if cancel_when(running):
                    self.loop.cancel(running.job.id)

            running.on_event = cancel
        self.loop.submit(running.job, running)
        return running

    def submit_all(self, prompts: Iterable[Sequence[int]], **options: Any) -> list[SubmittedJob]:
        """Send jobs that are all there before the engine looks at the first."""
        return self.ask(lambda worker: [self.submit(prompt, **options) for prompt in prompts])

    def run(self, tokens: Sequence[int], **options: Any) -> SubmittedJob:
        running = self.submit(tokens, **options).wait()
        self.check()
        return running

    def cold(self, tokens: Sequence[int], **options: Any) -> list[int]:
        """The answer that nothing stored can have touched."""
        return self.run(tokens, namespace=f"cold-{next(_ids)}", **options).tokens

    def ask(self, question: Callable[[Worker], T]) -> T:
        """Something only the engine thread may look at."""
        answers: list[T] = []
        failures: list[Exception] = []
        done = threading.Event()

        def act(worker: Worker) -> None:
            try:
                answers.append(question(worker))
            except BaseException as error:
                failures.append(error if isinstance(error, Exception) else RuntimeError(error))
            done.set()

        self.loop.call(act)
        assert done.wait(PATIENCE_S)
        if failures:
            raise failures[0]
        return answers[0]

    def inspect(self) -> Inspection:
        return self.loop.inspect().result(PATIENCE_S)

    def check(self) -> None:
        self.ask(lambda worker: worker.check() if worker.head is not None else worker.cache.check())

    def num_leases(self) -> int:
        return self.ask(lambda worker: sum(root.num_leases for root in worker.cache.tree.roots.values()))


OUT_OF_MEMORY = "[malloc] Unable to allocate 68719476736 bytes."


def break_at(point: Failpoint, message: str = OUT_OF_MEMORY, *, after: int = 0) -> Callable[[], bool]:
    """Let this operation raise once, after it was reached `after` times. Returns whether it has raised."""
    calls = itertools.count()

    def fail(*what: object) -> None:
        if next(calls) == after:
            del ACTIONS[point]
            raise RuntimeError(message)

    ACTIONS[point] = fail
    return lambda: ACTIONS.get(point) is not fail

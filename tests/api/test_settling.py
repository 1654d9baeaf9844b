"""Which settles are queued, which are dropped, and which go on when a request came between. Without an engine."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

from reprise.api.service.settling import Settling
from reprise.core.backend import Backend, Status
from reprise.core.errors import ShuttingDown
from reprise.core.events import Event, Finished, FinishReason, Progress, Started
from reprise.core.job import Job
from reprise.core.outcome import Outcome
from reprise.core.pin import PinList
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens


@dataclass
class Queue:
    """A backend that runs nothing: the test tells what happens to the jobs in it."""

    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    sinks: dict[str, Callable[[Event], None]] = field(default_factory=dict[str, Callable[[Event], None]])
    cancelled: list[str] = field(default_factory=list[str])
    is_closed: bool = False

    def submit(self, job: Job, sink: Callable[[Event], None]) -> None:
        if self.is_closed:
            raise ShuttingDown("The server is shutting down.")
        assert job.id not in self.jobs
        self.jobs[job.id], self.sinks[job.id] = job, sink

    def cancel(self, job_id: str) -> bool:
        self.cancelled.append(job_id)
        return job_id in self.jobs

    def status(self) -> Status:
        return Status(is_idle=not self.jobs)

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> Future[None]:
        raise NotImplementedError

    def pins(self, namespace: str, *, owner: str = "") -> Future[PinList]:
        raise NotImplementedError

    def unpin(self, pin_id: str, *, namespace: str, owner: str = "") -> Future[bool]:
        raise NotImplementedError

    def compute(self, job_id: str, start: int, *positions: int) -> None:
        sink, total = self.sinks[job_id], len(self.jobs[job_id].prompt)
        sink(Started(num_reused=start, total=total))
        for position in positions:
            sink(Progress(position=position, total=total))

    def end(self, job_id: str, reason: FinishReason) -> None:
        job, sink = self.jobs.pop(job_id), self.sinks.pop(job_id)
        sink(Finished(reason=reason, outcome=Outcome(num_prompt=len(job.prompt))))


def prompt(*tokens: int) -> Prompt:
    return Prompt(tokens=as_tokens(tokens))


def job(*tokens: int, namespace: str = "") -> Job:
    return Job(id="request", prompt=prompt(*tokens), max_tokens=1, namespace=namespace)


def settling(*, max_tokens: int = 1000, max_waiting: int = 3) -> tuple[Settling, Queue]:
    queue = Queue()
    return Settling(cast(Backend, queue), max_tokens=max_tokens, max_waiting=max_waiting), queue


def test_a_settle_ends_where_the_machine_is_to_be_left_alone() -> None:
    queue, reasons = Queue(), [None, "It is hot."]
    settles = Settling(cast(Backend, queue), max_tokens=1000, why_quiet=lambda: reasons[0])
    settles.begin(prompt(1, 2, 3), request_id="a")
    queue.compute("a-settle", 0, 1)
    assert queue.cancelled == []
    reasons.pop(0)
    queue.compute("a-settle", 1, 2)
    assert queue.cancelled == ["a-settle"]
    settles.begin(prompt(4, 5), request_id="b")
    assert list(queue.jobs) == ["a-settle"]


def test_no_prefix_is_settled_twice() -> None:
    settles, queue = settling()
    settles.begin(prompt(1, 2, 3), request_id="a")
    settles.begin(prompt(1, 2, 3), request_id="b")
    settles.begin(prompt(1, 2), request_id="c")
    assert list(queue.jobs) == ["a-settle"]
    settles.begin(prompt(1, 2, 3), request_id="d", namespace="other")
    assert list(queue.jobs) == ["a-settle", "d-settle"]


def test_a_longer_one_takes_the_place_of_what_it_begins_with() -> None:
    settles, queue = settling()
    settles.begin(prompt(1, 2), request_id="a")
    settles.begin(prompt(1, 2, 3), request_id="b")
    assert queue.cancelled == ["a-settle"]
    assert len(settles) == 1


def test_a_request_that_computes_the_prefix_itself_ends_its_settle() -> None:
    settles, queue = settling()
    settles.begin(prompt(1, 2), request_id="a")
    settles.begin(prompt(1, 9), request_id="b")
    settles.overtaken_by(job(1, 2, 3, namespace="other"))
    assert queue.cancelled == []
    settles.overtaken_by(job(1, 2, 3))
    assert queue.cancelled == ["a-settle"]
    queue.end("a-settle", FinishReason.CANCELLED)
    assert list(queue.jobs) == ["b-settle"]


def test_one_that_was_given_up_goes_on_when_the_request_is_gone() -> None:
    settles, queue = settling()
    settles.begin(prompt(*range(9)), request_id="a")
    queue.compute("a-settle", 2, 5)
    queue.end("a-settle", FinishReason.CANCELLED)
    assert list(queue.jobs) == ["a-settle-1"]
    queue.compute("a-settle-1", 5, 9)
    queue.end("a-settle-1", FinishReason.DONE)
    assert len(settles) == 0
    assert queue.cancelled == []


def test_the_bound_counts_all_attempts_together() -> None:
    settles, queue = settling(max_tokens=6)
    settles.begin(prompt(*range(20)), request_id="a")
    queue.compute("a-settle", 2, 5)
    queue.end("a-settle", FinishReason.CANCELLED)
    queue.compute("a-settle-1", 5, 7)
    assert queue.cancelled == []
    queue.compute("a-settle-1", 5, 8)
    assert queue.cancelled == ["a-settle-1"]
    queue.end("a-settle-1", FinishReason.CANCELLED)
    assert queue.jobs == {}


def test_the_oldest_gives_way_when_many_wait() -> None:
    settles, queue = settling(max_waiting=3)
    for number in range(5):
        settles.begin(prompt(number, 7), request_id=str(number))
    assert queue.cancelled == ["0-settle", "1-settle"]
    assert len(settles) == 3


def test_what_fails_or_is_refused_is_forgotten() -> None:
    settles, queue = settling()
    settles.begin(prompt(1), request_id="a")
    queue.end("a-settle", FinishReason.FAILED)
    assert len(settles) == 0
    settles.begin(prompt(2), request_id="b")
    queue.is_closed = True
    queue.end("b-settle", FinishReason.CANCELLED)
    settles.begin(prompt(3), request_id="c")
    assert len(settles) == 0


def test_nothing_that_was_cleared_comes_back_by_a_settle() -> None:
    settles, queue = settling()
    settles.begin(prompt(1, 2), request_id="a")
    settles.begin(prompt(1, 2), request_id="b", namespace="other")
    as_of = settles.num_forgotten("")
    settles.forget("")
    assert queue.cancelled == ["a-settle"]
    queue.end("a-settle", FinishReason.CANCELLED)
    settles.begin(prompt(1, 3), request_id="c", as_of=as_of)
    assert list(queue.jobs) == ["b-settle"], "neither what was queued nor what was still being rendered"
    settles.begin(prompt(1, 3), request_id="d", as_of=settles.num_forgotten(""))
    settles.begin(prompt(1, 4), request_id="e", namespace="other", as_of=0)
    assert list(queue.jobs) == ["b-settle", "d-settle", "e-settle"], "nor is another namespace affected"

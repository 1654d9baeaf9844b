"""Less memory than wanted: what can never fit is refused, the rest gives way or waits, a failure costs only itself."""

import gc
import itertools
import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import httpx
import pytest

from reprise.core.errors import ContextTooLong, OutOfMemory
from reprise.core.events import Event, Finished, FinishReason, Progress, Started
from reprise.core.failpoints import Failpoint
from reprise.core.job import Job, Purpose
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.loop.requests import Prefilling, RunningRequest
from reprise.loop.worker import Worker
from reprise.plan.checkpoints import Plan
from tests.api.leaving import asking
from tests.holding import active_memory, settled_memory
from tests.loop.driving import PATIENCE_S, DrivenEngine, break_at
from tests.loop.test_reuse import words
from tests.soak.house import house

ARCHITECTURES = ["llama", "gemma3_text", "qwen3_5", "mamba2"]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request: pytest.FixtureRequest) -> Iterator[DrivenEngine]:
    engine = DrivenEngine(request.param, max_batch=4)
    yield engine
    engine.close()


class Peak:
    """The most that the books were over the budget, seen at every event."""

    def __init__(self, engine: DrivenEngine) -> None:
        self._worker: Worker = engine.ask(lambda worker: worker)
        self.most = 0
        self.at_once = 0

    def __call__(self, event: Event) -> None:
        cache = self._worker.cache
        assert cache.memory.budget is not None
        self.most = max(self.most, cache.memory.held - cache.memory.budget)
        self.at_once = max(self.at_once, sum(task.live is not None for task in self._worker.requests.values()))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5"])
def test_what_can_never_fit_is_refused_before_it_becomes_work(architecture: str) -> None:
    engine = DrivenEngine(architecture, cache_bytes=1_000_000)
    try:
        each = engine.ask(lambda worker: worker.runner.footprint.full)
        with pytest.raises(ContextTooLong, match="Shorten the conversation, or raise --cache-bytes"):
            engine.submit(words(800, 1_000_000 // each + 1))
        assert engine.loop.status().counts.num_requests == 0
        assert engine.inspect().num_inside == 0
    finally:
        engine.close()


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5"])
def test_the_store_gives_way_and_then_new_requests_wait(architecture: str) -> None:
    """Room for about two and a half of six requests, and a store that is full already."""
    measured = DrivenEngine(architecture)
    footprint = measured.ask(lambda worker: worker.runner.footprint)
    measured.close()
    length = 400
    budget = 5 * (footprint.at(length + 256) + footprint.full * 256) // 2
    engine = DrivenEngine(architecture, cache_bytes=budget, prefill_chunk=128)
    try:
        for i in range(6):
            engine.run(words(810 + i, length), purpose=Purpose.PREFILL)
        evicted = engine.loop.status().counts.num_evictions
        prompts = [words(820 + i, length) for i in range(6)]
        peak = Peak(engine)
        answers = [each.wait() for each in engine.submit_all(prompts, num=8, on_event=peak)]
        assert all(answer.end.error is None for answer in answers)
        assert 1 < peak.at_once < 6
        # One chunk's growth: its entries in all layers, and the steps in which buffers grow.
        assert peak.most <= (128 + 2 * 256) * sum(footprint.by_kind.values()) + footprint.snapshot
        assert engine.loop.status().counts.num_evictions > evicted
        engine.check()
        assert engine.num_leases() == 0
        # The books of a cold run are the same: nothing was forgotten.
        assert [answer.tokens for answer in answers] == [engine.cold(prompt, num=8) for prompt in prompts]
    finally:
        engine.close()


def test_what_a_running_request_was_promised_is_not_free() -> None:
    engine = DrivenEngine("llama", cache_bytes=10_000_000)
    try:

        def taken(worker: Worker) -> tuple[int, int]:
            """By a request that holds nothing yet; and what it needs."""
            live = worker.runner.begin()
            job = Job(
                id="new", prompt=Prompt(tokens=as_tokens(words(840, 300))), purpose=Purpose.GENERATE, max_tokens=8
            )
            task = RunningRequest(job=job, sink=lambda event: None, arrived_s=0.0)
            task.enter(Prefilling(live=live, lease=None, plan=Plan(resume_at=0, end=299)))
            before, after = worker.sequences.available([]), worker.sequences.available([task])
            worker.runner.drop(live)
            assert before is not None and after is not None
            return before - after, worker.sequences.estimate(300)

        promised, needed = engine.ask(taken)
        assert promised == needed > 0
    finally:
        engine.close()


@pytest.mark.parametrize("phase", [Failpoint.PREFILL, Failpoint.DECODE])
def test_out_of_memory_ends_those_it_hits_and_nobody_else(
    engine: DrivenEngine, phase: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    # What is logged here is kept with its stack, and with all that the stack refers to.
    caplog.set_level(logging.CRITICAL, logger="reprise.loop")
    prompts = [words(830 + i, 120 + 40 * i) for i in range(3)]
    cold = [engine.cold(prompt) for prompt in prompts]
    engine.loop.clear()
    before = engine.ask(lambda worker: active_memory())
    has_raised = break_at(phase, after=1 if phase is Failpoint.PREFILL else 3)
    answers = [each.wait() for each in engine.submit_all(prompts)]
    assert has_raised()
    hit = [answer for answer in answers if answer.end.error is not None]
    assert hit
    assert all(isinstance(answer.end.error, OutOfMemory) for answer in hit)
    assert all(answer.tokens == cold[i] for i, answer in enumerate(answers) if answer.end.error is None)
    engine.check()
    assert engine.num_leases() == 0
    held = engine.loop.status().held
    active = engine.ask(lambda worker: settled_memory()) - before
    assert active == pytest.approx(held.kv_nbytes + held.snapshot_nbytes + held.live_nbytes, abs=150_000)
    # And the loop goes on.
    assert [engine.run(prompt).tokens for prompt in prompts] == cold


def test_out_of_memory_in_a_pass_that_runs_ahead(engine: DrivenEngine) -> None:
    prompt = words(840, 60)
    cold = engine.cold(prompt)
    break_at(Failpoint.RUN_AHEAD, "std::bad_alloc", after=2)
    failed = engine.run(prompt)
    assert isinstance(failed.end.error, OutOfMemory)
    assert failed.tokens == cold[: len(failed.tokens)]
    assert engine.run(prompt).tokens == cold


def test_clients_hear_of_it_as_507_and_of_the_impossible_as_400() -> None:
    with house("llama", cache_bytes=1_000_000, settles=False) as server, httpx.Client(base_url=server.url) as client:
        ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
        break_at(Failpoint.DECODE, after=2)
        failed = client.post("/v1/chat/completions", json=ask)
        assert failed.status_code == 507
        assert failed.json()["error"]["code"] == "out_of_memory"
        assert client.post("/v1/chat/completions", json=ask).status_code == 200
        long = {**ask, "messages": [{"role": "user", "content": "hello " * 3000}]}
        refused = client.post("/v1/chat/completions", json=long)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_with_a_short_patience_gets_its_answer_after_some_tries() -> None:
    """It waits for three chunks of its prompt. Each try goes on where the last one stopped, over HTTP."""
    with house("llama", prefill_chunk=64, settles=False) as server:
        body = {
            "messages": [{"role": "user", "content": "The bees came back in spring, and we counted them. " * 60}],
            "max_tokens": 4,
            "temperature": 0,
        }
        starts: list[int] = []
        is_answered: queue.SimpleQueue[bool] = queue.SimpleQueue()
        left: defaultdict[str, threading.Event] = defaultdict(threading.Event)

        num_chunks: Counter[str] = Counter()

        def listen(job: Job, event: Event) -> None:
            num_chunks[job.id] += isinstance(event, Progress)
            if isinstance(event, Started):
                starts.append(event.num_reused)
            elif isinstance(event, Progress) and num_chunks[job.id] == 3:
                is_answered.put(False)
                # The next chunk takes until the server has noticed.
                assert left[job.id].wait(PATIENCE_S)
            elif isinstance(event, Finished) and event.reason is not FinishReason.CANCELLED:
                is_answered.put(True)

        server.recorder.heard = listen
        server.recorder.cancelled = lambda job_id: left[job_id].set()
        for _ in range(100):
            with asking(server.url, "/v1/chat/completions", body) as connection:
                if is_answered.get(timeout=PATIENCE_S):
                    assert connection.getresponse().status == 200
                    break
            wait_until_idle(server.engine)
        else:
            raise AssertionError("it never came")
        server.recorder.heard = lambda job, event: None
        # Each try begins behind the one before it, and the first at nothing.
        assert len(starts) > 2
        assert starts[0] == 0
        assert all(earlier < later for earlier, later in itertools.pairwise(starts))
        num_tries = len(starts)
        kept = server.recorder.kept[-1]
        assert kept.tokens == server.engine.cold(kept.job.prompt.tokens.tolist(), num=4)
        assert [each.end.reason for each in server.recorder.kept if each.end] == [
            *[FinishReason.CANCELLED] * (num_tries - 1),
            FinishReason.LENGTH,
        ]


def wait_until_idle(engine: DrivenEngine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not engine.loop.status().is_idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_has_ended_is_gone_at_once(tmp_path: Path) -> None:
    # What refers to itself waits for the collector, which would stop the next engine's streams.
    found: list[ref[Worker]] = []
    places: tuple[dict[str, Any], ...] = ({}, {"disk_directory": str(tmp_path)})
    gc.disable()
    try:
        for where in places:
            engine = DrivenEngine("qwen3_5", **where)
            engine.run(words(1, 40), num=3)
            engine.ask(lambda worker: found.append(ref(worker)))
            engine.close()
        assert [each() for each in found] == [None, None]
    finally:
        gc.enable()

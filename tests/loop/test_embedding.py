"""Embeddings on the engine thread: batches, repeats, pieces between which others run, and how each job ends."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from numpy.testing import assert_allclose

from reprise.core.backend import WeightsState
from reprise.core.embedding import EmbeddingInput, EmbeddingJob, EmbeddingResult
from reprise.core.errors import EngineFailed, OutOfMemory, QueueFull, ShuttingDown
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens
from reprise.engine.models.load import LoadedModel, load_model
from reprise.loop import EngineClient
from reprise.loop.embedding import EmbeddingQueue, VectorCache, key_of
from reprise.loop.engine_thread import EngineThread
from reprise.loop.worker import Worker
from reprise.memory import Account, Memory, SharedMemory
from reprise.schedule.models import ModelLimits
from tests.loop.driving import break_at
from tests.models.embedders import embedder
from tests.models.tiny import tiny_model


@cache
def _model(name: str = "bert") -> LoadedModel:
    return load_model(str(embedder(name)))


def _input(*tokens: int) -> EmbeddingInput:
    return EmbeddingInput(tokens=as_tokens([2, *tokens, 3]))


def _job(number: int, *inputs: EmbeddingInput, namespace: str = "") -> EmbeddingJob:
    return EmbeddingJob(id=f"job-{number}", inputs=inputs, namespace=namespace)


@dataclass
class _ClockedQueue:
    """A queue with a clock that moves when it is told."""

    loaded: LoadedModel
    max_queue: int = 8
    budget: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    now_s: float = 0.0
    tick_s: float = 0.0

    def __post_init__(self) -> None:
        self.memory = Memory(self.budget)
        self.queue = EmbeddingQueue(
            lambda: self.loaded,
            self.memory,
            max_queue=self.max_queue,
            stall_s=0.1,
            note=self.counts.update,
            clock=self._clock,
        )
        self.memory.reclaim_from(self.queue.kept.release_one)

    def _clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def add(self, job: EmbeddingJob) -> "Future[EmbeddingResult]":
        answer: Future[EmbeddingResult] = Future()
        self.queue.add(job, answer, self.now_s)
        self.queue.check()
        return answer

    def steps(self, *, num_others: int = 0, most: int = 1000) -> int:
        """Until nothing waits; how many steps it took."""
        num = 0
        while len(self.queue) > 0:
            self.queue.step(num_others=num_others)
            self.queue.check()
            num += 1
            assert num <= most
        return num


def _alone(given: EmbeddingInput, name: str = "bert") -> np.ndarray:
    one = _ClockedQueue(_model(name))
    answer = one.add(_job(0, given))
    one.steps()
    return answer.result().vectors[0]


def test_jobs_of_several_lengths_share_passes_and_get_what_they_get_alone() -> None:
    one = _ClockedQueue(_model())
    jobs = [_job(n, *[_input(*range(10, 11 + n + i)) for i in range(3)]) for n in range(4)]
    answers = [one.add(job) for job in jobs]
    assert one.steps() == 1
    for job, answer in zip(jobs, answers, strict=True):
        assert answer.result().num_passes == 1
        for given, vector in zip(job.inputs, answer.result().vectors, strict=True):
            assert_allclose(vector, _alone(given), atol=1e-5)


def test_an_exact_repeat_computes_nothing() -> None:
    one = _ClockedQueue(_model())
    first = one.add(_job(0, _input(10, 11)))
    one.steps()
    again = one.add(_job(1, _input(10, 11), _input(10, 12)))
    one.steps()
    assert first.result().num_repeated == 0 and again.result().num_repeated == 4
    assert (again.result().vectors[0] == first.result().vectors[0]).all()
    # Both are counted as other prompts are.
    assert one.counts["num_prompt"] == 12 and one.counts["num_reused"] == 4 and one.counts["num_prefilled"] == 8
    whole = one.add(_job(2, _input(10, 11)))
    assert whole.done() and whole.result().num_passes == 0


def test_the_same_input_twice_at_a_time_is_computed_once() -> None:
    one = _ClockedQueue(_model())
    jobs = [one.add(_job(0, _input(10), _input(10))), one.add(_job(1, _input(10)))]
    one.steps()
    assert [job.result().num_repeated for job in jobs] == [3, 3]
    assert one.counts["num_prefilled"] == 3


def test_no_namespace_is_answered_with_what_another_one_computed() -> None:
    one = _ClockedQueue(_model())
    for namespace in ("a", "b"):
        answer = one.add(_job(0, _input(10), namespace=namespace))
        assert not answer.done()
        one.steps()
        assert answer.result().num_repeated == 0
    one.queue.clear("a")
    assert not one.add(_job(1, _input(10), namespace="a")).done()
    assert one.add(_job(2, _input(10), namespace="b")).done()


def test_of_a_pair_the_segments_count() -> None:
    tokens = as_tokens([2, 10, 3, 11, 3])
    keys = {key_of(EmbeddingInput(tokens=tokens, num_first=first)) for first in (None, 2, 3)}
    assert len(keys) == 3


def test_beside_others_a_pass_is_cut_between_layers() -> None:
    """A step lasts as long as others may wait, and no longer: each look at the clock takes a second here."""
    one = _ClockedQueue(_model(), tick_s=1.0)
    answer = one.add(_job(0, _input(*range(10, 40))))
    # Two layers, and what makes a vector of them.
    assert one.steps(num_others=1) == 3
    assert_allclose(answer.result().vectors[0], _alone(_input(*range(10, 40))), atol=1e-5)
    alone = _ClockedQueue(_model(), tick_s=1.0)
    alone.add(_job(0, _input(*range(10, 40))))
    assert alone.steps() == 1


def test_beside_others_a_pass_has_few_tokens_and_a_decoder_is_cut_between_them() -> None:
    long = EmbeddingInput(tokens=as_tokens(np.arange(300) % 200 + 10))
    one = _ClockedQueue(_model("qwen3"), tick_s=1.0)
    answer = one.add(_job(0, long))
    # 64 tokens at a time before its speed is known; then they are joined, and pooled.
    assert one.steps(num_others=1) == 7
    assert_allclose(answer.result().vectors[0], _alone(long, "qwen3"), atol=1e-5)
    batch = _ClockedQueue(_model(), tick_s=1.0)
    batch.add(_job(0, *[_input(*range(10 + n, 40 + n)) for n in range(8)]))
    batch.steps(num_others=1)
    assert batch.counts["num_prefilled"] == 8 * 32


def test_a_later_job_does_not_starve_the_one_that_waits() -> None:
    """Inputs of like length go together, but the one that came first is always among them."""
    one = _ClockedQueue(_model())
    first = one.add(_job(0, _input(*range(10, 55))))
    others = [one.add(_job(1 + n, *[_input(n + 10, each) for each in range(100, 290)])) for n in range(6)]
    one.queue.step(num_others=0)
    assert first.done()
    one.steps()
    assert all(other.done() for other in others)


def test_what_nobody_waits_for_is_not_computed() -> None:
    one = _ClockedQueue(_model())
    gone, stays = one.add(_job(0, _input(10))), one.add(_job(1, _input(11)))
    assert gone.cancel()
    one.steps()
    assert stays.result().num_tokens == 3
    assert one.counts["num_prefilled"] == 3 and one.counts["num_cancelled"] == 1


def test_a_full_queue_refuses() -> None:
    one = _ClockedQueue(_model(), max_queue=1)
    first, second = one.add(_job(0, _input(10))), one.add(_job(1, _input(11)))
    assert isinstance(second.exception(), QueueFull)
    one.steps()
    assert first.exception() is None


def test_where_there_is_no_room_the_job_fails_and_the_next_is_served() -> None:
    one = _ClockedQueue(_model(), budget=10_000)
    large = one.add(_job(0, _input(*range(10, 50))))
    small = one.add(_job(1, _input(10)))
    one.steps()
    assert isinstance(large.exception(), OutOfMemory) and small.exception() is None


def test_what_has_no_room_together_is_computed_in_parts_for_which_nothing_else_goes() -> None:
    one = _ClockedQueue(_model(), budget=200_000)
    one.queue.kept = VectorCache(one.memory, most_nbytes=1)
    asked: list[int] = []
    one.memory.reclaim_from(lambda: asked.append(1) is not None)
    large = one.add(_job(0, *[_input(*range(10, 50), n) for n in range(60, 100)]))
    one.steps()
    assert 1 < large.result().num_passes < 40 and not asked


@pytest.mark.parametrize(("num_others", "after_s"), [(0, 0.0), (1, 60.0)])
def test_what_has_no_room_waits_while_others_answer_for_a_while(num_others: int, after_s: float) -> None:
    one = _ClockedQueue(_model(), budget=20_000)
    answer = one.add(_job(0, _input(*range(10, 400))))
    one.queue.step(num_others=1)
    one.queue.check()
    assert not answer.done() and one.queue.num_in_pass == 0
    one.now_s += after_s
    one.queue.step(num_others=num_others)
    assert isinstance(answer.exception(), OutOfMemory)


def test_what_else_a_failed_job_asked_for_is_not_computed() -> None:
    one = _ClockedQueue(_model(), budget=20_000)
    failed = one.add(_job(0, _input(*range(10, 400)), _input(11)))
    one.queue.step(num_others=0)
    assert isinstance(failed.exception(), OutOfMemory)
    answer = one.add(_job(1, _input(12)))
    one.steps()
    assert answer.result().num_passes == 1
    assert [one.queue.kept.find("", key_of(_input(token))) is not None for token in (11, 12)] == [False, True]


def test_what_is_to_be_unloaded_begins_no_pass() -> None:
    one = _ClockedQueue(_model())
    answer = one.add(_job(0, _input(10)))
    one.queue.step(num_others=0, is_closed=True)
    assert not answer.done() and one.queue.num_in_pass == 0 and one.queue.waits_since_s == 0.0
    one.steps()
    assert answer.done()


def test_a_pass_that_nobody_waits_for_any_longer_goes_with_its_jobs() -> None:
    one = _ClockedQueue(_model(), max_queue=1, tick_s=1.0)
    answer = one.add(_job(0, _input(*range(10, 40))))
    one.queue.step(num_others=1)
    assert one.queue.num_in_pass == 1, "a piece of it is computed"
    answer.cancel()
    assert one.queue.num_in_pass == 0
    # Nor does it fill the queue.
    again = one.add(_job(1, _input(11)))
    one.steps()
    assert again.result().num_passes == 1 and one.queue.kept.find("", key_of(_input(*range(10, 40)))) is None


def test_no_job_fails_for_another_in_its_pass() -> None:
    one = _ClockedQueue(_model())

    def refuse(inputs: Sequence[EmbeddingInput]) -> None:
        if any(99 in given.tokens for given in inputs):
            raise ValueError("broken")

    ACTIONS[Failpoint.EMBED] = refuse
    jobs = [one.add(_job(n, _input(10), _input(token))) for n, token in enumerate((20, 99, 21))]
    while len(one.queue) > 0:
        one.queue.step(num_others=0)
        one.queue.check()
    assert [isinstance(job.exception(), EngineFailed) for job in jobs] == [False, True, False]
    assert_allclose(jobs[0].result().vectors[1], _alone(_input(20)), atol=1e-5)


def test_a_pass_that_fails_ends_its_jobs_alone() -> None:
    one = _ClockedQueue(_model())
    break_at(Failpoint.EMBED)
    broken = one.add(_job(0, _input(10)))
    one.steps()
    assert isinstance(broken.exception(), EngineFailed)
    fine = one.add(_job(1, _input(10)))
    one.steps()
    assert fine.exception() is None


def test_vectors_are_charged_bounded_and_the_oldest_go_first() -> None:
    memory = Memory(None)
    cache = VectorCache(memory, most_nbytes=1000)
    vector = np.ones(25, dtype=np.float32)
    for number in range(5):
        cache.keep("", bytes([number]), vector)
        cache.find("", b"\0")
        cache.check()
    assert memory.nbytes(Account.EMBEDDINGS) == cache.nbytes <= 1000
    assert cache.find("", b"\0") is not None and cache.find("", b"\1") is None and cache.find("", b"\4") is not None
    while cache.release_one():
        cache.check()
    assert memory.nbytes(Account.EMBEDDINGS) == 0


def test_a_vector_for_which_there_is_no_room_is_not_kept() -> None:
    memory = Memory(250)
    cache = VectorCache(memory)
    cache.keep("", b"a", np.ones(100, dtype=np.float32))
    assert cache.find("", b"a") is None and memory.nbytes(Account.EMBEDDINGS) == 0


# On the engine thread.


@contextmanager
def _engines(
    *names: str,
    keep_alive_s: float | None = None,
    budget: int | None = None,
    limits: ModelLimits | None = None,
    max_stall_ms: int = 100,
) -> Iterator[list[EngineClient]]:
    thread = EngineThread(SharedMemory(budget), limits=limits)
    folders = {name: tiny_model(name) if name == "llama" else embedder(name) for name in names}
    clients = [
        EngineClient(
            Settings(model=str(folder), max_stall_ms=max_stall_ms),
            thread=thread,
            name=name,
            nbytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            keep_alive_s=keep_alive_s,
        )
        for name, folder in folders.items()
    ]
    try:
        clients[0].start()
        yield clients
    finally:
        for client in clients:
            client.close(now=True, timeout_s=60)


def _until(holds: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(3000):
        if holds():
            return
        waiting.wait(0.01)
    raise AssertionError("it never came")


def test_an_embedder_is_loaded_for_a_request_and_unloaded_when_idle() -> None:
    with _engines("llama", "bert", keep_alive_s=0.1) as (_, client):
        assert client.status().weights is WeightsState.UNLOADED
        client.ready().result(60)
        vector = client.embed(_job(0, _input(10))).result(60).vectors[0]
        assert_allclose(vector, _alone(_input(10)), atol=1e-5)
        _until(lambda: client.status().weights is WeightsState.UNLOADED)
        # A job that comes meanwhile loads it; what was computed is still there.
        again = client.embed(_job(1, _input(10), _input(11))).result(60)
        assert again.num_repeated == 3
        assert client.status().num_loads == 2 and client.status().counts.num_requests == 2


def test_an_embedder_makes_room_for_another_model() -> None:
    nbytes = (embedder("bert") / "model.safetensors").stat().st_size
    with _engines("bert", "bert-cls", budget=int(1.8 * nbytes)) as (first, second):
        second.ready().result(60)
        assert first.status().weights is WeightsState.UNLOADED
        assert second.embed(_job(0, _input(10))).result(60).num_tokens == 3
        assert second.status().is_idle


def test_an_embedder_that_has_answered_those_it_was_loaded_for_gives_way_at_once() -> None:
    nbytes = (embedder("bert") / "model.safetensors").stat().st_size
    limits = ModelLimits(most_nbytes=int(1.8 * nbytes), turn_s=600.0, arrival_s=600.0)
    with _engines("bert", "bert-cls", budget=3 * nbytes, limits=limits) as clients:
        for turn, client in itertools.product(range(3), clients):
            if turn == 0:
                client.ready().result(60)
            assert client.embed(_job(turn, _input(10 + turn))).result(60).num_tokens == 3
        assert [client.status().num_loads for client in clients] == [3, 3]


@pytest.mark.parametrize("wants", ["another model", "its memory"])
def test_an_embedder_that_always_has_jobs_gives_way(wants: str) -> None:
    room = max((folder / "model.safetensors").stat().st_size for folder in (embedder("bert"), tiny_model("llama")))
    limits = ModelLimits(most_nbytes=room + 1000, turn_s=0.1, arrival_s=0.1)
    with _engines("llama", "bert", budget=room + (64 << 20), limits=limits) as (other, client):
        client.ready().result(60)
        is_over, numbers = threading.Event(), itertools.count()

        def ask() -> None:
            while not is_over.is_set():
                number = next(numbers)
                given = [_input(*range(10, 40), 50 + number % 100, 50 + each) for each in range(20)]
                client.embed(_job(number, *given, namespace=str(number))).result(60)

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for each in asking:
            each.start()
        _until(lambda: next(numbers) > 20)
        try:
            (other.ready() if wants == "another model" else client.dismiss()).result(20)
        finally:
            is_over.set()
            for each in asking:
                each.join()


def test_weights_go_though_a_pass_on_them_was_given_up() -> None:
    with _engines("llama", "bert", max_stall_ms=1) as (_, client):
        client.ready().result(60)
        seen: Future[tuple[int, int]] = Future()

        def unload(worker: Worker) -> None:
            answer: Future[EmbeddingResult] = Future()
            worker.embedding.add(_job(0, _input(*[7] * 400)), answer, 0.0)
            worker.embedding.step(num_others=1)
            num = worker.embedding.num_in_pass
            answer.cancel()
            worker.unload()
            seen.set_result((num, len(worker.embedding)))

        client.call(unload)
        # The pass, which holds the model, goes with its job.
        assert seen.result(60) == (1, 0)


def test_what_was_given_up_loads_nothing() -> None:
    room = max((folder / "model.safetensors").stat().st_size for folder in (embedder("bert"), tiny_model("llama")))
    limits = ModelLimits(most_nbytes=room + 1000, turn_s=0.1, arrival_s=0.1)
    with _engines("llama", "bert", budget=room + (64 << 20), limits=limits) as (other, client):
        client.ready().result(60)
        other.ready().result(60)
        held = threading.Event()
        other.call(lambda worker: held.wait(60))
        given_up = [client.embed(_job(0, _input(10))), client.ready()]
        for each in given_up:
            each.cancel()
        held.set()
        # Longer than the other one is kept for a request.
        threading.Event().wait(0.4)
        assert client.status().weights is WeightsState.UNLOADED and client.status().num_loads == 1


def test_what_waits_when_the_server_stops_hears_of_it() -> None:
    with _engines("bert") as (client,):
        held = threading.Event()
        client.call(lambda worker: held.wait(60))
        answer = client.embed(_job(0, _input(10)))
        assert not client.status().is_idle
        closing = threading.Thread(target=client.close, kwargs={"now": True, "timeout_s": 60})
        closing.start()
        held.set()
        closing.join()
        assert isinstance(answer.exception(60), ShuttingDown) or answer.result().num_tokens == 3
        with pytest.raises(ShuttingDown):
            client.embed(_job(1, _input(10)))


def test_clearing_drops_vectors_and_the_accounts_are_right() -> None:
    with _engines("bert") as (client,):
        client.embed(_job(0, _input(10))).result(60)
        client.clear().result(60)
        assert client.embed(_job(1, _input(10))).result(60).num_repeated == 0
        checked: Future[None] = Future()

        def check(worker: Worker) -> None:
            worker.check()
            checked.set_result(None)

        client.call(check)
        checked.result(60)


def test_a_chat_model_says_that_it_makes_none() -> None:
    with _engines("llama") as (client,):
        assert isinstance(client.embed(_job(0, _input(10))).exception(60), EngineFailed)

"""A lookup says where a request would resume and from what, and leaves no trace."""

import threading

import pytest

from reprise.core.backend import Lookup
from reprise.core.events import Sampled
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.loop.inspection import status_of
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine
from tests.loop.restarts import Restarts, disk_of, words


def looked_up(engine: DrivenEngine, tokens: list[int], namespace: str = "") -> Lookup:
    return engine.loop.lookup(Prompt(tokens=as_tokens(tokens)), namespace=namespace).result()


def trace(worker: Worker) -> list[object]:
    """All that a lookup could have changed in the tree, the policy, the order of eviction and the queue."""
    cache = worker.cache
    nodes: list[object] = [
        (n.start, n.tokens.tobytes(), n.last_use, n.num_uses, n.last_visit, n.first_visit, n.num_leases)
        for n in cache.tree.nodes()
    ]
    scores: list[object] = [
        (c.position, c.last_use, c.num_uses, cache.order.policy.score(cache.order.candidate(c)))
        for c in cache.tree.checkpoints()
    ]
    return [*nodes, *scores, cache.tree.clock, cache.order.num_entries, len(worker.requests), status_of(worker)]


@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text"])
def test_it_says_where_the_next_request_resumes_and_changes_nothing(model: str) -> None:
    engine = DrivenEngine(model)
    prompt = words(1, 300)
    cold = looked_up(engine, prompt)
    assert (cold.num_matched, cold.resume_at, cold.num_loaded, cold.queue_s) == (0, 0, 0, 0.0)
    answer = engine.run(prompt)
    for asked in ([*prompt, *answer.tokens, *words(2, 40)], prompt, [*prompt[:150], *words(3, 30)], words(4, 20)):
        before = engine.ask(trace)
        found = looked_up(engine, asked)
        assert looked_up(engine, asked, namespace="other").resume_at == 0
        assert engine.ask(trace) == before
        outcome = engine.run(asked).end.outcome
        assert (found.num_matched, found.resume_at) == (outcome.num_matched, outcome.num_reused), asked[:3]
    engine.close()


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
def test_after_a_restart_it_says_what_the_disk_would_give_and_reads_nothing(start: Restarts, model: str) -> None:
    engine = start(model)
    prompt = words(1, 300)
    prompt = [*prompt, *engine.run(prompt).tokens, *words(2, 20)]
    engine = start(model)
    found = looked_up(engine, prompt)
    assert disk_of(engine).read_nbytes == 0
    outcome = engine.run(prompt).end.outcome
    assert found.resume_at == found.num_loaded == outcome.num_loaded == outcome.num_reused > 250
    assert outcome.loading_s > 0 and outcome.queued_s >= outcome.loading_s
    # What was measured now is what the next one is told.
    engine = start(model)
    engine.run(prompt[:-1])
    assert looked_up(engine, [*prompt, 5]).num_loaded == 0


def test_who_waits_is_in_the_estimate() -> None:
    engine = DrivenEngine("llama", max_batch=1)
    engine.run(words(1, 200))
    gate, is_sampling = threading.Event(), threading.Event()

    def hold(event: object) -> None:
        if isinstance(event, Sampled) and not is_sampling.is_set():
            is_sampling.set()
            assert gate.wait(60)

    first = engine.submit(words(5, 200), num=2, on_event=hold)
    assert is_sampling.wait(60)
    second = engine.submit(words(6, 200), num=2)
    asking = engine.loop.lookup(Prompt(tokens=as_tokens(words(7, 50))), namespace="")
    gate.set()
    found = asking.result()
    assert found.queue_s > 0 and found.prefill_s > 0
    first.wait(), second.wait()
    engine.close()


def test_where_nothing_is_cached_nothing_is_found() -> None:
    engine = DrivenEngine("llama", has_prefix_cache=False)
    engine.run(words(1, 100))
    assert looked_up(engine, words(1, 100)).num_matched == 0
    engine.close()


def test_seconds_saved_are_those_of_the_measured_speed() -> None:
    engine = DrivenEngine("llama")
    prompt = words(1, 400)
    first = engine.run(prompt).end.outcome
    assert first.saved_s == 0
    again = engine.run([*prompt, 3, 4]).end.outcome
    speed = looked_up(engine, words(9, again.num_reused)).prefill_s
    assert 0 < again.saved_s <= speed * 1.0001
    assert engine.loop.status().counts.saved_s == pytest.approx(again.saved_s)
    spans = again.queued_s - again.loading_s, again.loading_s, again.prefill_s - again.first_pass_s, again.first_pass_s
    assert min(spans) >= 0 and again.ttft_s == pytest.approx(sum(spans))
    engine.close()

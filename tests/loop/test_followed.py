"""Rank 0 decides and the others follow: what a follower holds is what the engine holds, whatever the engine does."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from reprise.cluster.ranks.links import RanksFailed
from reprise.cluster.ranks.operations import OPERATIONS, QUEUE_PART
from reprise.core.events import FinishReason, Scored
from reprise.core.settings import Settings
from reprise.loop.worker import Worker
from tests.loop.driving import DrivenEngine
from tests.loop.following import LeaderAndFollower
from tests.loop.random_chats import RandomChats, Seen
from tests.loop.test_audit import audited
from tests.models.shared import loader
from tests.models.tiny import tiny_model
from tests.soak.lengths import times

Start = Callable[..., tuple[DrivenEngine, LeaderAndFollower]]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[DrivenEngine] = []

    def begin(architecture: str, **options: Any) -> tuple[DrivenEngine, LeaderAndFollower]:
        load = loader(Settings(model=str(tiny_model(architecture))))
        assert load is not None
        following = LeaderAndFollower(load)
        engine = DrivenEngine(architecture, load=following, shares_from=32, **options)
        engines.append(engine)
        return engine, following

    yield begin
    for engine in engines:
        engine.close()


def _run(engine: DrivenEngine, architecture: str, *, seed: int, num_bursts: int, has_room: bool) -> Seen:
    oracle = DrivenEngine(architecture, has_prefix_cache=False, max_batch=1)
    try:
        return RandomChats(engine, oracle, seed, has_room=has_room).run(num_bursts)
    finally:
        oracle.close()


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "qwen3_5"])
def test_a_follower_holds_what_the_engine_holds(start: Start, architecture: str) -> None:
    """With room for all; `test_a_follower_never_differs` has little."""
    engine, following = start(architecture, drafts="always")
    seen = _run(engine, architecture, seed=1, num_bursts=12, has_room=True)
    assert seen.reused > 0 and seen.compared > 0
    num = engine.ask(lambda worker: following.check())
    engine.loop.clear().result(60)
    # What the engine has let go, the follower has let go too; what failed in this test may be kept with its log.
    assert engine.ask(lambda worker: following.check()) < num


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "qwen3_5", "gemma3_text", "mamba2"])
def test_a_follower_never_differs(start: Start, architecture: str) -> None:
    engine, following = start(architecture, cache_bytes=600_000, drafts="always")
    for seed in range(times(3)):
        _run(engine, architecture, seed=seed, num_bursts=14, has_room=False)
        assert engine.ask(lambda worker: following.check()) > 0


@pytest.mark.matrix
def test_every_operation_is_run_by_a_follower(start: Start) -> None:
    names: set[str] = set()
    for architecture, seed in (("llama", 1), ("qwen3_5", 2)):
        engine, following = start(architecture, cache_bytes=600_000, drafts="always")
        _run(engine, architecture, seed=seed, num_bursts=10, has_room=False)
        num = engine.ask(lambda worker, following=following: following.check())
        engine.loop.clear().result(60)
        assert engine.ask(lambda worker, following=following: following.check()) < num
        names |= following.names
    # Those of the disk are seen in `test_disk_on_ranks.py`.
    of_disk = {name for name, function in OPERATIONS.items() if function.__module__ == "reprise.engine.running.records"}
    assert set(OPERATIONS) - of_disk - {QUEUE_PART} - names <= {
        "Runner.begin_move",
        "Runner.drop",
        "PackedSegment.cut",
        "PackedSegment.join",
    }


def test_answers_are_audited_on_all_ranks(start: Start) -> None:
    engine, following = start("qwen3_5", is_audit_off=False, audit_rate=1.0)
    tokens = [5, *range(40)]
    engine.run(tokens, num=6)
    engine.run([*tokens, 7, 8, 9], num=6)
    totals = audited(engine, 2)
    assert (totals.num_checked, totals.num_different) == (2, 0)
    engine.ask(lambda worker: following.check())


@pytest.mark.matrix
def test_scores_and_exact_drafts_are_computed_on_all_ranks(start: Start) -> None:
    engine, following = start("llama", drafts="exact")
    prompt = [5, *range(60)]
    scored = engine.run(prompt, num=1, prompt_logprobs=2)
    assert any(isinstance(event, Scored) for event in scored.events)
    engine.ask(lambda worker: following.check())


def test_a_copy_that_fails_here_fails_one_request(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, following = start("llama")
    prompt = list(range(60))
    expected = engine.run(prompt, num=4).tokens

    def fail_once(worker: Worker) -> None:
        def fail(*positional: object, **named: object) -> object:
            monkeypatch.undo()
            raise MemoryError("no room")

        monkeypatch.setattr("reprise.engine.running.runner.Restoration", fail)

    engine.ask(fail_once)
    failed = engine.submit([*prompt, 7, 8], num=4).wait()
    assert failed.end.reason is FinishReason.FAILED
    assert engine.run(prompt, num=4).tokens == expected
    engine.ask(lambda worker: following.check())
    assert following.failures == []


def test_a_pass_that_fails_here_ends_the_group(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may wait in it for ever."""
    engine, following = start("llama")
    prompt = list(range(40))
    engine.run(prompt, num=4)

    def fail(*positional: object, **named: object) -> None:
        raise RuntimeError("the device is gone")

    num = [0]
    really = mx.eval

    def eval_or_fail(*arrays: Any) -> None:
        # The follower's comes first, and is computed.
        num[0] += 1
        really(*arrays) if num[0] % 2 else fail()

    engine.ask(lambda worker: monkeypatch.setattr("reprise.engine.running.runner.mx.eval", eval_or_fail))
    failed = engine.submit([5, *prompt], num=4).wait()
    monkeypatch.undo()
    assert isinstance(failed.end.error, RanksFailed) and len(following.failures) == 1
    assert "a pass failed on rank 0 (RuntimeError: the device is gone)" in str(failed.end.error)


def test_a_follower_notices_that_it_differs(start: Start) -> None:
    engine, following = start("llama")
    engine.run(list(range(20)), num=4)
    engine.run(list(range(5, 12)), num=4)

    def spoil(worker: Worker) -> None:
        assert following.follower is not None
        objects = following.follower.objects
        objects[min(objects)], objects[max(objects)] = objects[max(objects)], objects[min(objects)]

    engine.ask(spoil)
    with pytest.raises(RuntimeError, match="do not hold the same objects"):
        engine.ask(lambda worker: following.check())

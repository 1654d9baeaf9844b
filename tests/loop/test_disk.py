"""A restart is warm: what one engine computed, the next one on the same directory does not compute again."""

import random
import threading
import time
from pathlib import Path

import pytest

from bench.tiny.build import build_model
from reprise.core.errors import DiskUnusable
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Purpose
from reprise.core.outcome import Reason
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.sizes import Bytes
from reprise.engine.running.runner import SHARES_FROM
from reprise.loop import sequences, write_behind
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import BLOCK, Restarts, disk_cache, disk_of, words
from tests.models.tiny import CONFIGS


@pytest.mark.parametrize("shares_from", [SHARES_FROM, 50])
@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_the_next_turn_after_a_restart_computes_what_is_new(
    start: Restarts, monkeypatch: pytest.MonkeyPatch, model: str, shares_from: int
) -> None:
    if shares_from == 50:
        # Lent from the start: what is read goes straight into sequences.
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
    engine = start(model, shares_from=shares_from)
    prompt = words(1, 200)
    for turn in range(3):
        answer = engine.run(prompt)
        assert answer.tokens == engine.cold(prompt)
        assert answer.computed == (200 if turn == 0 else 13), turn
        assert answer.end.outcome.num_loaded == (0 if turn == 0 else answer.end.outcome.num_reused), turn
        # The last token of an answer was sampled, but not fed.
        prompt = [*prompt, *answer.tokens, *words(20 + turn, 12)]
        engine = start(model, shares_from=shares_from)


def test_a_path_on_disk_without_a_snapshot_below_the_match_is_not_called_nothing(start: Restarts) -> None:
    engine = start()
    prompt = words(1, 200)
    engine.run(prompt)
    engine = start()
    edited = [*prompt[:180], *words(2, 30)]
    answer = engine.run(edited)
    assert answer.computed == len(edited) and answer.tokens == engine.cold(edited)
    assert (answer.end.outcome.reason, answer.end.outcome.num_matched) == (Reason.NO_SNAPSHOT, 180)
    # What a template writes in front of every chat is no match.
    other = [*prompt[:10], *words(3, 200)]
    assert engine.run(other).end.outcome.reason is not Reason.NO_SNAPSHOT


@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text", "mamba2"])
def test_what_the_memory_has_of_a_prompt_is_not_read_again(start: Restarts, model: str) -> None:
    engine = start(model)
    shared = words(2, 150)
    boundary = [Boundary(150, BoundaryKind.SYSTEM)]
    long = [*shared, *words(21, 160)]
    answer = engine.run(long, boundaries=boundary)
    turn = [*long, *answer.tokens, 5, 6, 7]
    engine = start(model)
    branch = [*shared, *words(22, 30)]
    first = engine.run(branch, boundaries=boundary)
    assert first.computed == 30 and first.end.outcome.num_loaded == 150
    assert first.tokens == engine.cold(branch)
    read = disk_of(engine).read_nbytes
    second = engine.run(turn)
    assert second.computed == 4, "the last token of an answer was sampled, but not fed"
    assert second.end.outcome.num_loaded == second.end.outcome.num_reused - 150
    assert second.tokens == engine.cold(turn)
    if model == "llama":
        # 318 positions, of which the four blocks below 150 were not read again.
        assert disk_of(engine).read_nbytes - read < 1.3 * read


@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text", "mamba2"])
def test_what_is_read_for_a_chat_leaves_another_with_the_same_system_prompt_to_be_written(
    start: Restarts, model: str
) -> None:
    system = words(14, 100)

    def turn(prompt: list[int]) -> list[Boundary]:
        return [Boundary(len(system), BoundaryKind.SYSTEM), Boundary(len(prompt) - 3, BoundaryKind.STABLE)]

    one, other = [*system, *words(15, 100)], [*system, *words(16, 100)]
    start(model).run(one, boundaries=turn(one))
    engine = start(model)
    other = [*other, *engine.run(other, boundaries=turn(other)).tokens, *words(17, 10)]
    # Its reasoning was stripped: the stable position is read.
    one = [*one[:-3], *words(18, 100)]
    assert engine.run(one, boundaries=turn(one)).end.outcome.num_reused == 197
    engine = start(model)
    answer = engine.run(other, boundaries=turn(other))
    assert (answer.computed, answer.tokens) == (11, engine.cold(other)), "the last token of an answer was not fed"


def test_requests_for_one_prefix_read_it_once(start: Restarts) -> None:
    engine = start()
    shared = words(3, 300)
    boundary = [Boundary(300, BoundaryKind.SYSTEM)]
    engine.run([*shared, 1], boundaries=boundary)
    engine = start()
    jobs = [engine.submit([*shared, *words(30 + i, 20)], boundaries=boundary) for i in range(6)]
    for i, job in enumerate(jobs):
        assert job.wait().computed == 20
        assert job.tokens == engine.cold([*shared, *words(30 + i, 20)])
    held = disk_of(engine)
    assert held.read_nbytes < 1.2 * held.nbytes


def test_others_go_on_while_files_are_read(start: Restarts) -> None:
    engine = start()
    prompt = words(4, 400)
    answer = engine.run(prompt)
    engine = start()
    jobs = [engine.submit(words(40 + i, 100)) for i in range(3)]
    jobs.append(engine.submit([*prompt, *answer.tokens, 1, 2]))
    cancelled = engine.submit([*prompt, *answer.tokens, 3, 4])
    engine.loop.cancel(cancelled.job.id)
    for job in jobs:
        assert job.wait().tokens == engine.cold(job.job.prompt.tokens.tolist())
    assert jobs[-1].computed == 3
    cancelled.wait()
    assert engine.num_leases() == 0


def test_namespaces_are_apart_and_a_clear_lasts(start: Restarts) -> None:
    engine = start()
    prompt = words(5, 200)
    for namespace in ("", "one", "two"):
        turn = [*prompt, *engine.run(prompt, namespace=namespace).tokens, 1]
    engine.loop.clear("one").result(120)
    engine = start()
    computed = [engine.run(turn, namespace=namespace).computed for namespace in ("", "one", "two", "three")]
    assert computed == [2, len(turn), 2, len(turn)]
    engine.loop.clear().result(120)
    assert disk_of(engine).num_files == 0
    engine = start()
    assert all(engine.run(turn, namespace=namespace).computed == len(turn) for namespace in ("", "one", "two"))


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text", "mamba2"])
def test_damaged_files_are_computed_again(
    start: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, model: str, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
    engine = start(model)
    prompt = words(6, 300)
    prompt = [*prompt, *engine.run(prompt).tokens, 1]
    engine.close()
    files = sorted(tmp_path.rglob("*.kv"))
    source = random.Random(7)
    damaged = source.sample(files, len(files) // 3)
    for number, file in enumerate(damaged):
        data = bytearray(file.read_bytes())
        # Some in their headers, which is seen when opening, and others anywhere, which is seen when they are read.
        data[source.randrange(64 if number % 2 == 0 else len(data))] ^= 1 << source.randrange(8)
        file.write_bytes(data)
    engine = start(model)
    answer = engine.run(prompt)
    assert answer.tokens == engine.cold(prompt)
    # What stands on a block that was found to be damaged when opening is not met.
    assert 0 < disk_of(engine).num_quarantined <= len(damaged)
    # What was computed again is written again, and what was damaged behind it as well.
    engine = start(model)
    assert engine.run([*prompt, *answer.tokens, 1]).computed == 2


@pytest.mark.matrix
def test_another_model_and_another_kv_format_find_nothing(start: Restarts, tmp_path: Path) -> None:
    prompt = words(8, 200)
    build_model(tmp_path / "wide", {**CONFIGS["llama"], "head_dim": 32}, vocab_size=512)
    engine = start(tmp_path / "wide")
    prompt = [*prompt, *engine.run(prompt).tokens, 1]
    assert start("llama").run(prompt).computed == len(prompt)
    for bits in (4, 8):
        options = {"kv_bits": bits, "kv_group_size": 32}
        assert start(tmp_path / "wide", **options).run(prompt).computed == len(prompt)
        engine = start(tmp_path / "wide", **options)
        turn = [*prompt, *engine.cold(prompt), 1]
        answer = engine.run(turn)
        assert (answer.computed, answer.tokens) == (2, engine.cold(turn)), "quantised entries come back"
    assert start(tmp_path / "wide").run(prompt).end.outcome.num_loaded > 0


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
def test_a_small_budget_takes_what_fits(start: Restarts, model: str) -> None:
    """What is read counts, and what does not fit is computed."""
    engine = start(model)
    prompts = [words(100 + i, 250) for i in range(4)]
    prompts = [[*prompt, *engine.run(prompt).tokens, 1, 2] for prompt in prompts]
    need = engine.ask(lambda worker: worker.runner.most_live_nbytes(600, chunk=256))
    engine = start(model, cache_bytes=2 * need)
    jobs = [engine.submit(prompt) for prompt in prompts * 2]
    for job in jobs:
        assert job.wait().end.error is None
    engine.check()
    big = start(model)
    assert [job.tokens for job in jobs] == [big.cold(prompt) for prompt in prompts] * 2


def test_an_engine_that_is_cut_off_has_written_what_it_had(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a close: what was stored stands in files soon, and the lock is the process's own."""
    monkeypatch.setattr(write_behind, "SOON_S", 0.1)
    engine = start()
    prompt = words(10, 200)
    answer = engine.run(prompt)
    deadline = time.monotonic() + PATIENCE_S
    while engine.ask(lambda worker: worker.disk.due_in_s) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert engine.ask(lambda worker: disk_cache(worker).flush(PATIENCE_S))
    assert disk_of(engine).num_files > 200 // BLOCK
    engine = start()
    assert engine.run([*prompt, *answer.tokens, 1]).computed == 2


def test_the_status_tells_what_was_written_while_the_loop_sleeps(
    start: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hold(directory: object) -> None:
        assert goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(write_behind, "SOON_S", 0.0)
    monkeypatch.setitem(ACTIONS, Failpoint.DISK_BEGIN, hold)
    engine = start()
    engine.run(words(13, 200))
    while engine.ask(lambda worker: worker.has_work or worker.wakes_in_s is not None):
        time.sleep(0.01)
    assert disk_of(engine).queued_nbytes > 0
    goes_on.set()
    deadline = time.monotonic() + PATIENCE_S
    while disk_of(engine).queued_nbytes > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert disk_of(engine).num_files > 0


def test_a_directory_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskUnusable, match="--disk-bytes"):
        DrivenEngine("qwen3_5", disk_bytes=Bytes(1000), disk_directory=str(tmp_path / "small"))


def test_a_beginning_that_was_computed_ahead_is_there_after_a_restart(start: Restarts) -> None:
    engine = start()
    prompt = words(11, 120)
    engine.run(prompt, purpose=Purpose.PREFILL)
    engine = start()
    answer = engine.run([*prompt, 1, 2, 3])
    assert (answer.computed, answer.end.outcome.reason) == (3, Reason.NEW_TOKENS)


def test_nothing_is_written_without_a_prefix_cache(start: Restarts, tmp_path: Path) -> None:
    start(has_prefix_cache=False).run(words(12, 200))
    start(has_prefix_cache=False)
    assert not (tmp_path / "disk").exists()

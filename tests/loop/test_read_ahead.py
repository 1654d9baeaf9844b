"""Reading from the disk while others wait, run and leave: within the budget, counted once, and never for ever."""

import errno
import threading
from collections.abc import Iterator

import pytest

from reprise.core import allowance
from reprise.core.errors import EngineFailed
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.kinds import KvKind
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.tokens import Span
from reprise.engine.running import records
from reprise.engine.running.records import RestoringSequence
from reprise.loop import read_ahead, sequences, tier
from reprise.loop.tier import DiskTier
from reprise.loop.worker import Worker
from reprise.memory import Account
from tests.loop.driving import DrivenEngine
from tests.loop.restarts import BLOCK, Restarts, bound_steps_of_reading, disk_cache, disk_of, words
from tests.matrix import now_and_later, rows_now_and_later

_GRACE_S = 120.0


class HeldDisk:
    """A disk that gives nothing, or the first records alone, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on, self.is_held = threading.Event(), threading.Event()
        self.num_given = 0
        """How many records it still gives before that."""

        def held(directory: object, key: bytes) -> None:
            self.num_given -= 1
            if self.num_given < 0:
                self.is_held.set()
                assert self.goes_on.wait(_GRACE_S)

        monkeypatch.setitem(ACTIONS, Failpoint.DISK_READ, held)
        # However long a test takes, this disk does not count as one that hangs.
        monkeypatch.setattr(read_ahead, "STALLED_S", 10 * _GRACE_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    disk = HeldDisk(monkeypatch)
    yield disk
    disk.goes_on.set()


def next_turn(engine: DrivenEngine, prompt: list[int]) -> list[int]:
    return [*prompt, *engine.run(prompt).tokens, 1, 2]


def wait_until_loading(engine: DrivenEngine, num: int) -> None:
    """Until so many jobs wait for the disk."""
    for _ in range(1000):
        if engine.ask(lambda worker: sum(task.is_loading for task in worker.requests.values())) == num:
            return
    raise AssertionError("nothing is being read")


@pytest.mark.matrix
@pytest.mark.parametrize("shares_from", now_and_later([50], [10**6]))
@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text"])
def test_many_large_prompts_at_once_are_read_once_each_and_within_the_budget(
    start: Restarts, monkeypatch: pytest.MonkeyPatch, model: str, shares_from: int
) -> None:
    engine = start(model)
    turns = [next_turn(engine, words(100 + i, 400)) for i in range(4)]
    live = engine.ask(lambda worker: worker.runner.most_live_nbytes(len(turns[0]) + 256, chunk=256))
    path = engine.ask(lambda worker: worker.runner.footprint.at(len(turns[0])))
    engine = start(model, cache_bytes=live + path + path // 2, shares_from=shares_from)
    over: list[int] = []

    def stepping(worker: Worker) -> None:
        available = worker.memory.available
        assert available is not None
        over.append(-available)

    ACTIONS[Failpoint.STEP] = stepping
    if shares_from == 50:
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
    jobs = engine.submit_all(turns)
    assert [job.wait().computed for job in jobs] == [3] * 4
    assert max(over) <= 0
    assert disk_of(engine).read_nbytes <= disk_of(engine).nbytes, "nothing is read for nothing"
    engine.check()
    big = start(model)
    assert [job.tokens for job in jobs] == [big.cold(turn) for turn in turns]


def test_the_loop_sleeps_while_all_wait_for_the_disk(start: Restarts, held: HeldDisk) -> None:
    engine = start()
    turn = next_turn(engine, words(1, 200))
    engine = start()
    job = engine.submit(turn)
    wait_until_loading(engine, 1)
    # Something is stored whose segments could be joined while nobody is there.
    engine.run(words(2, 200))

    def is_asleep(worker: Worker) -> bool:
        while worker.disk.write(is_closing=True):
            pass  # Nothing is due to be written.
        return not worker.has_work and worker.wakes_in_s is not None

    assert engine.ask(is_asleep)
    held.goes_on.set()
    assert job.wait().computed == 3


def test_a_disk_that_hangs_makes_nobody_wait_for_ever(
    start: Restarts, held: HeldDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    turn = next_turn(engine, words(3, 200))
    monkeypatch.setattr(read_ahead, "STALLED_S", 0.05)
    bound_steps_of_reading()
    engine = start()
    answer = engine.run(turn)
    assert (answer.computed, answer.end.outcome.num_loaded) == (len(turn), 0)
    assert answer.tokens == engine.cold(turn)
    # Nor is it asked again for a while.
    other = engine.run(turn, namespace="other")
    assert other.computed == len(turn)
    held.goes_on.set()
    engine.check()
    assert engine.ask(lambda worker: worker.memory.nbytes(Account.INCOMING)) == 0


def test_what_could_not_be_read_and_another_computed_is_not_told_as_loaded(start: Restarts) -> None:
    engine = start()
    turn = next_turn(engine, words(4, 300))
    engine = start()
    # Seen when opening, gone when it is read.
    for file in start.directory.rglob("*.kv"):
        file.unlink()
    jobs = engine.submit_all([turn, turn])
    outcomes = [job.wait().end.outcome for job in jobs]
    assert sorted(outcome.num_prefilled for outcome in outcomes) == [0, len(turn)]
    assert [outcome.num_loaded for outcome in outcomes] == [0, 0]
    assert sorted(outcome.num_awaited for outcome in outcomes) == [0, len(turn)]
    assert engine.loop.status().counts.num_loaded == 0


def test_what_is_being_read_counts_also_when_parked_buffers_are_given_up(start: Restarts, held: HeldDisk) -> None:
    engine = start("llama", shares_from=50)
    turn = next_turn(engine, words(5, 300))
    engine = start("llama", shares_from=50, cache_bytes=10_000_000)
    engine.run(words(6, 200))
    job = engine.submit(turn)
    wait_until_loading(engine, 1)

    def free_before_and_after(worker: Worker) -> list[int | None]:
        worker.memory.measure(Account.INCOMING, 100_000)
        worker.sequences.measure()
        before = worker.memory.available
        worker.sequences.close_idle()
        after = worker.memory.available
        worker.requests.reset_cache()
        return [before, after, worker.memory.available]

    before, after, anew = engine.ask(free_before_and_after)
    assert before is not None and after is not None and before <= after <= 9_900_000 and anew == 9_900_000
    held.goes_on.set()
    assert job.wait().tokens == engine.cold(turn)


def test_what_is_read_and_not_committed_is_recounted(start: Restarts, held: HeldDisk) -> None:
    engine = start("llama")
    turn = next_turn(engine, words(15, 300))
    engine = start("llama")
    job = engine.submit(turn)
    wait_until_loading(engine, 1)
    engine.ask(Worker.check)

    def miscount(worker: Worker) -> None:
        worker.memory.measure(Account.INCOMING, 1)
        with pytest.raises(AssertionError):
            worker.check()
        worker.memory.measure(Account.INCOMING, 0)

    engine.ask(miscount)
    held.goes_on.set()
    assert job.wait().tokens == engine.cold(turn)


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
@pytest.mark.parametrize(
    ("ending", "is_large"),
    rows_now_and_later(
        [("clear", True), ("fail", True)],
        [("cancel", False), ("anew", False), ("cancel", True), ("clear", False), ("anew", True), ("fail", False)],
    ),
)
def test_whatever_happens_while_something_is_read_leaves_nothing_behind(
    start: Restarts, held: HeldDisk, monkeypatch: pytest.MonkeyPatch, *, model: str, ending: str, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
    engine = start(model)
    shared = next_turn(engine, words(7, 300))
    engine = start(model)
    jobs = [engine.submit([*shared, i]) for i in range(3)]
    wait_until_loading(engine, 3)
    match ending:
        case "cancel":
            for job in jobs[:2]:
                engine.loop.cancel(job.job.id)
        case "clear":
            engine.loop.clear().result(_GRACE_S)
        case "anew":
            engine.ask(lambda worker: worker.requests.reset_cache())
        case _:
            engine.ask(lambda worker: worker.fail_all(EngineFailed("a step broke")))
    held.goes_on.set()
    for i, job in enumerate(jobs):
        job.wait()
        if ending == "clear":
            assert job.end.outcome.num_loaded == 0
        if ending in ("clear", "anew") or (ending == "cancel" and i == 2):
            assert job.tokens == engine.cold([*shared, i])
        else:
            assert job.tokens == []
    assert engine.num_leases() == 0
    shown = engine.inspect()
    assert (shown.memory.incoming_nbytes, shown.reads) == (0, ())
    assert engine.run([*shared, 9]).tokens == engine.cold([*shared, 9])


def test_what_was_read_before_a_clear_is_not_used_after_it(start: Restarts, held: HeldDisk) -> None:
    engine = start("llama")
    turn = next_turn(engine, words(14, 300))
    engine = start("llama")
    held.num_given = 4
    job = engine.submit(turn)
    assert held.is_held.wait(_GRACE_S)
    engine.loop.clear().result(_GRACE_S)
    held.goes_on.set()
    assert job.wait().end.outcome.num_loaded == 0
    assert job.tokens == engine.cold(turn)


def test_an_answer_goes_on_while_another_prompt_is_read(start: Restarts, held: HeldDisk) -> None:
    engine = start()
    turn = next_turn(engine, words(8, 200))
    engine = start()
    waiting = engine.submit(turn)
    wait_until_loading(engine, 1)
    assert len(engine.run(words(9, 100), num=20).tokens) == 20
    assert waiting.events == []
    held.goes_on.set()
    assert waiting.wait().computed == 3


@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text", "gpt_oss"])
def test_a_large_path_is_taken_over_in_small_steps_and_copied_once(
    start: Restarts, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
    monkeypatch.setattr(allowance, "TAKEN_AT_ONCE", 1)
    monkeypatch.setattr(records, "COPIED_TOGETHER", 1)
    engine = start(model)
    turn = next_turn(engine, words(11, 400))
    engine = start(model)
    each = engine.ask(lambda worker: worker.runner.footprint.full)
    steps: list[int] = []
    work = RestoringSequence.work

    def working(target: RestoringSequence) -> int:
        nbytes = work(target)
        steps[-1] += nbytes
        return nbytes

    ACTIONS[Failpoint.DISK_ADVANCE] = lambda: steps.append(0)
    monkeypatch.setattr(RestoringSequence, "work", working)
    copied: list[int] = []
    ACTIONS[Failpoint.BEGIN_RESTORE] = lambda position, keeps_full: keeps_full or copied.append(position)
    answer = engine.run(turn)
    assert (answer.computed, answer.end.outcome.num_loaded, copied) == (3, len(turn) - 3, [])
    # A part: a record, or one layer of it with the room for all of this layer's entries.
    assert len(steps) > len(turn) // BLOCK and max(steps) <= (len(turn) + 2 * 256 + BLOCK) * each
    assert answer.tokens == engine.cold(turn)
    engine.check()


def test_what_follows_a_part_in_memory_is_joined_a_part_at_a_time(
    start: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("llama")
    shared = words(12, 150)
    turn = next_turn(engine, [*shared, *words(13, 400)])
    engine = start("llama")
    engine.run([*shared, 1])
    monkeypatch.setattr(read_ahead, "COMMITTED_AT_ONCE", 1)
    joined: list[int] = []
    segment = records.RecordSource.segment

    def joining(source: records.RecordSource, kind: KvKind, span: Span) -> object:
        joined.append(len(span))
        return segment(source, kind, span)

    monkeypatch.setattr(records.RecordSource, "segment", joining)
    answer = engine.run(turn)
    assert (answer.computed, answer.end.outcome.num_loaded) == (3, answer.end.outcome.num_reused - 150)
    assert len(joined) >= 400 // BLOCK and max(joined) <= 2 * BLOCK
    assert answer.tokens == engine.cold(turn)
    engine.check()


def test_a_shared_beginning_is_read_for_all_who_wait_for_it(start: Restarts, held: HeldDisk) -> None:
    engine = start()
    system = words(10, 200)
    boundary = [Boundary(200, BoundaryKind.SYSTEM)]
    engine.run([*system, 1], boundaries=boundary)
    engine = start()
    jobs = [engine.submit([*system, *words(60 + i, 70)], boundaries=boundary) for i in range(3)]
    wait_until_loading(engine, 3)
    held.goes_on.set()
    outcomes = [job.wait().end.outcome for job in jobs]
    assert [(o.num_reused, o.num_prefilled, o.num_loaded, o.num_awaited) for o in outcomes] == [(200, 70, 200, 0)] * 3


def test_a_full_disk_does_not_hold_up_the_end(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = DiskTier.write
    refused: list[DiskTier] = []

    def writing(disk: DiskTier, *, is_closing: bool = False) -> bool:
        is_written = write(disk, is_closing=is_closing)
        if is_closing and not is_written:
            refused.append(disk)
            assert len(refused) < 100, "it waits for a disk that takes nothing"
        return is_written

    monkeypatch.setitem(ACTIONS, Failpoint.DISK_BEGIN, full)
    monkeypatch.setattr(DiskTier, "write", writing)
    # Else a test could not tell.
    monkeypatch.setattr(tier, "LAST_WRITES_S", 10 * _GRACE_S)
    engine = start()
    engine.run(words(70, 200))
    engine.ask(lambda worker: worker.disk.write(is_closing=True))
    assert engine.ask(lambda worker: disk_cache(worker).flush(_GRACE_S) and disk_cache(worker).is_paused())
    engine.run(words(71, 200))
    assert engine.ask(lambda worker: worker.disk.num_unwritten) > 0
    refused.clear()
    engine.loop.close(timeout_s=_GRACE_S)
    assert engine.loop.stack() == "", "its thread has ended"
    assert len(refused) == 1

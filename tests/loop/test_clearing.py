"""What a clear does on the engine thread: it waits for no file and no lock, and no settle goes on."""

from concurrent.futures import Future
from pathlib import Path

from reprise.core.events import Event, FinishReason, Progress
from reprise.core.job import Purpose
from reprise.disk.folders.lease import file_lock
from reprise.loop.worker import Worker
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import BLOCK, Restarts, disk_cache, disk_of, words
from tests.loop.several import on_disk, serving


def test_streams_run_while_a_clear_waits_for_a_lock_that_another_holds(tmp_path: Path, start: Restarts) -> None:
    engine = start("llama")
    chat = words(1, 3 * BLOCK)
    engine.run(chat, num=1)
    engine.ask(_write_all)
    assert disk_of(engine).num_files > 0
    with file_lock(tmp_path / "disk" / "lock"):
        clearing = engine.loop.clear("")
        # As the audit does where an answer was wrong.
        engine.ask(lambda worker: worker.disk.clear(""))
        for _ in range(2):
            assert engine.run(chat, num=30, namespace="b").end.error is None
        assert not clearing.done()
    clearing.result(PATIENCE_S)
    runs = start("llama").ask(lambda worker: [disk_cache(worker).runs(each) for each in ("", "b")])
    assert runs[0] == [] and runs[1] != []


def _write_all(worker: Worker) -> None:
    worker.disk.hurry()
    while worker.disk.write():
        pass
    assert disk_cache(worker).flush(PATIENCE_S)


def test_a_clear_ends_the_settles_of_its_namespace() -> None:
    engine = DrivenEngine("llama", prefill_chunk=16)
    clearing: list[Future[None]] = []

    def clear(event: Event) -> None:
        if isinstance(event, Progress) and not clearing:
            clearing.append(engine.loop.clear("a"))

    running = engine.submit(words(2, 4000), purpose=Purpose.SETTLE, namespace="a", on_event=clear)
    beside = engine.submit(words(3, 40), purpose=Purpose.SETTLE, namespace="b")
    assert running.wait().end.reason is FinishReason.CANCELLED
    assert beside.wait().end.reason is FinishReason.DONE
    clearing[0].result(PATIENCE_S)
    assert engine.loop.status().held.num_tokens == 40
    engine.close()


def test_streams_run_while_another_model_waits_for_the_disk(tmp_path: Path) -> None:
    with serving("llama", "qwen3_5", **on_disk(tmp_path)) as (here, other):
        cold = here.run(words(4, 40), num=1)
        with file_lock(tmp_path / "lock"):
            waiting = other.loop.ready()
            for seed in range(5, 8):
                assert here.run(words(seed, 40), num=30).end.error is None
            assert not waiting.done() and cold.end.error is None
        waiting.result(PATIENCE_S)
        assert other.run(words(4, 40), num=1).end.error is None

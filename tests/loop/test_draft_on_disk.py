"""What the draft model has computed is on disk, too: read after a restart, cleared with the rest, never waited for."""

import random
import shutil
import threading
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise.core.events import Event, Sampled
from reprise.core.job import Purpose
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.sizes import Bytes
from reprise.disk import read_ahead
from reprise.disk.folders.model_directory import ModelDirectory
from reprise.disk.sparing import COUNT
from tests.loop.driving import GREEDY, PATIENCE_S, DrivenEngine
from tests.loop.restarts import BLOCK, disk_of
from tests.loop.test_draft_model import PAIRS, draft_always, num_drafted, status
from tests.loop.test_drafts import SAMPLED
from tests.loop.test_reuse import words
from tests.models.shared import nearly


def started(directory: Path, architecture: str, draft: str, **settings: Any) -> DrivenEngine:
    """An engine on this directory, whose draft model always drafts."""
    given: dict[str, Any] = {"disk_directory": str(directory), "disk_bytes": Bytes(1 << 30), "prefill_chunk": 256}
    engine = DrivenEngine(
        architecture,
        load_draft_model=partial(nearly, draft, 0.0),
        drafts="auto",
        disk_block=BLOCK,
        **(given | settings),
    )
    engine.ask(draft_always)
    return engine


def draft_folder(engine: DrivenEngine) -> Path:
    """Where the draft model's records lie."""
    model = engine.ask(lambda worker: worker.draft_model)
    assert model is not None and model.disk.cache is not None
    found = model.disk.cache.directory
    assert isinstance(found, ModelDirectory)
    return found.folder


def run_until_loaded(engine: DrivenEngine, prompt: list[int], *, namespace: str = "") -> dict[int, list[int]]:
    """Ask until the draft model's prefix was read while an answer was being written. Returns the answers."""
    answers: dict[int, list[int]] = {}
    for question in range(400, 430):
        answers[question] = engine.run([*prompt, question], num=60, namespace=namespace).tokens
        if status(engine).num_loaded > 0:
            return answers
    raise AssertionError("nothing was read")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("architecture", "draft"),
    [("llama", "qwen3_5"), ("qwen3_5", "llama"), ("gemma3_text", "gemma3_text"), ("llama", "mamba2")],
)
def test_after_a_restart_the_draft_model_reads_its_prefix(tmp_path: Path, architecture: str, draft: str) -> None:
    prompt = words(1200, 300)
    with closing(started(tmp_path, architecture, draft)) as first:
        answer = first.run(prompt, num=40, boundaries=[Boundary(290, BoundaryKind.STABLE)]).tokens
        assert status(first).num_loaded == 0 and num_drafted(first) > 0
    following = [*prompt, *answer, 5, 6]
    with closing(started(tmp_path, architecture, draft)) as second:
        answers = run_until_loaded(second, following)
        now = status(second)
        # Up to the last token of the answer that it was fed: the pass that ended it may have taken a whole draft.
        assert now.num_loaded >= len(prompt) + len(answer) - 32
        assert now.num_loaded == now.num_reused
        # The rest of that, the three tokens that are new, and those of this answer.
        assert now.num_prefilled <= len(following) + 1 + 60 - now.num_loaded
        second.check()
    with closing(DrivenEngine(architecture)) as plain:
        for question, found in answers.items():
            assert plain.cold([*following, question], num=60) == found


@pytest.mark.matrix
def test_what_is_cleared_is_gone_from_its_disk(tmp_path: Path) -> None:
    prompt = words(1210, 300)
    with closing(started(tmp_path, "llama", "gemma3_text")) as first:
        for namespace in ("mine", "theirs"):
            first.run(prompt, num=20, namespace=namespace, boundaries=[Boundary(290, BoundaryKind.STABLE)])
    with closing(started(tmp_path, "llama", "gemma3_text")) as second:
        folder = draft_folder(second)
        num_files = len(list(folder.rglob("*.kv")))
        assert num_files > 0
        second.loop.clear("mine").result(PATIENCE_S)
        assert 0 < len(list(folder.rglob("*.kv"))) < num_files
        second.run([*prompt, 7], num=60, namespace="mine")
        assert (status(second).num_loaded, status(second).num_reused) == (0, 0)
        run_until_loaded(second, prompt, namespace="theirs")
        second.loop.clear().result(PATIENCE_S)
        assert list(folder.rglob("*.kv")) == []
        assert disk_of(second).num_files == 0
        second.check()


def test_both_are_counted_and_fit_the_directory_together(tmp_path: Path) -> None:
    with closing(started(tmp_path, "llama", "gemma3_text")) as first:
        first.run(words(1220, 300), num=20)
        folder = draft_folder(first)
    with closing(started(tmp_path, "llama", "gemma3_text")) as second:
        own = sum(file.stat().st_size for file in folder.rglob("*.kv"))
        everything = sum(file.stat().st_size for file in tmp_path.rglob("*.kv"))
        assert 0 < own < everything
        count = (tmp_path / COUNT).stat().st_size
        assert (disk_of(second).nbytes, disk_of(second).others_nbytes) == (everything, count)
        shown = second.inspect().disk
        assert shown is not None and shown.nbytes == everything


def test_an_answer_goes_on_while_its_draft_model_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(1230, 300)
    with closing(started(tmp_path, "llama", "gemma3_text")) as first:
        first.run(prompt, num=20, boundaries=[Boundary(290, BoundaryKind.STABLE)])
        folder = draft_folder(first)
    goes_on = threading.Event()
    read = ModelDirectory.read

    def held(directory: ModelDirectory, *given: object) -> object:
        assert directory.folder != folder or goes_on.wait(PATIENCE_S)
        return read(directory, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelDirectory, "read", held)
    monkeypatch.setattr(read_ahead, "STALLED_S", 10 * PATIENCE_S)
    with closing(started(tmp_path, "llama", "gemma3_text")) as second:
        model = second.ask(lambda worker: worker.draft_model)
        assert model is not None
        seen: list[tuple[int, bool, int]] = []

        def squeeze(event: Event) -> None:
            # On the engine's thread, as who needs the room is.
            if isinstance(event, Sampled) and model.disk.reads() and not seen:
                seen.append((len(model.disk.reads()), model.give_up(), len(model.disk.reads())))

        for question in range(400, 420):
            assert len(second.submit([*prompt, question], num=60, on_event=squeeze).wait().tokens) == 60
            if seen:
                break
        goes_on.set()
        # Whoever needs the room gets what is being read, too.
        assert seen == [(1, True, 0)]
        assert status(second).num_loaded == 0
        second.check()


def test_what_is_settled_is_read_where_it_is_on_disk(tmp_path: Path) -> None:
    prompt = words(1240, 300)
    with closing(started(tmp_path, "llama", "qwen3_5")) as first:
        first.run(prompt, num=20, boundaries=[Boundary(290, BoundaryKind.STABLE)])
    # More than that is not computed ahead.
    with closing(started(tmp_path, "llama", "qwen3_5", max_settle=100)) as second:
        second.run(words(1241, 20), num=10)
        second.run([*prompt[:290], *words(1242, 30)], purpose=Purpose.SETTLE)
        now = status(second)
        assert (now.num_loaded, now.num_settled) == (290, 30)
        second.check()
    # Also if nothing is left to compute.
    with closing(started(tmp_path, "llama", "qwen3_5")) as third:
        third.run(words(1241, 20), num=10)
        third.run(prompt[:290], purpose=Purpose.SETTLE)
        now = status(third)
        assert (now.num_loaded, now.num_settled) == (290, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_chats_over_restarts_are_answered_as_without(tmp_path: Path, pair: tuple[str, str], seed: int) -> None:
    """With settles, edits, cancelled answers, clears, little memory, and processes one after the other."""
    rng = random.Random(seed)
    architecture, draft = pair
    chats = [words(1300 + 10 * seed + i, 120) for i in range(2)]
    with closing(DrivenEngine(architecture)) as plain, ExitStack() as running:
        room = plain.ask(lambda worker: 4 * worker.runner.most_live_nbytes(600, chunk=256))
        engine: DrivenEngine | None = None
        for turn in range(8):
            if engine is None or rng.random() < 0.3:
                running.close()
                cache_bytes = rng.choice([None, room])
                engine = started(tmp_path, architecture, draft, cache_bytes=cache_bytes)
                running.enter_context(closing(engine))
            number, num = rng.randrange(len(chats)), rng.choice([1, 9, 24, 40])
            prompt, sampling = chats[number], rng.choice([GREEDY, SAMPLED])
            boundaries = [Boundary(len(prompt) - 3, BoundaryKind.STABLE)]
            expected = plain.run(prompt, num=num, sampling=sampling).tokens
            stop_at = rng.choice([None, None, 5])
            answer = engine.submit(
                prompt,
                num=num,
                sampling=sampling,
                boundaries=boundaries,
                cancel_when=None if stop_at is None else lambda r, n=stop_at: len(r.tokens) >= n,
            ).wait()
            assert answer.tokens == expected[: len(answer.tokens)]
            assert stop_at is not None or len(answer.tokens) == len(expected)
            chats[number] = [*prompt[:-3], *expected, *words(1400 + turn, rng.choice([3, 20, 60]))]
            if rng.random() < 0.5:
                settle = engine.submit(chats[number][:-3], purpose=Purpose.SETTLE)
                if rng.random() < 0.5:
                    settle.wait()
            if rng.random() < 0.15:
                engine.loop.clear().result(PATIENCE_S)
            if rng.random() < 0.2:
                chats[number] = chats[number][: len(chats[number]) // 2]
            engine.check()


@pytest.mark.matrix
def test_in_a_full_directory_a_draft_model_takes_its_share_and_nothing_of_the_models(tmp_path: Path) -> None:
    def chat(engine: DrivenEngine, numbers: range) -> None:
        for number in numbers:
            engine.run(words(1260 + number, 150), num=20)

    def main_files() -> set[Path]:
        return {file for file in tmp_path.rglob("*.kv") if draft not in file.parents}

    # The two models are as large as each other.
    with closing(started(tmp_path, "llama", "llama")) as engine:
        chat(engine, range(2))
        draft = draft_folder(engine)
    of_draft = sum(file.stat().st_size for file in draft.rglob("*.kv"))
    of_model = sum(file.stat().st_size for file in main_files())
    assert of_draft > 0
    shutil.rmtree(tmp_path)
    disk_bytes = of_model * 2
    # Again with the file that counts what was written, which the first wrote when it closed: it takes room as well.
    for numbers in (range(6), range(5, 6)):
        with closing(
            DrivenEngine("llama", disk_block=BLOCK, disk_directory=str(tmp_path), disk_bytes=Bytes(disk_bytes))
        ) as engine:
            chat(engine, numbers)
    full = main_files()
    with closing(started(tmp_path, "llama", "llama", disk_bytes=Bytes(disk_bytes))) as engine:
        # A repeat: the model has nothing to write, its draft model has.
        chat(engine, range(5, 6))
        engine.check()
    assert full <= main_files()
    with closing(started(tmp_path, "llama", "llama", disk_bytes=Bytes(disk_bytes))) as engine:
        chat(engine, range(6, 20))
        engine.check()
    assert sum(file.stat().st_size for file in draft.rglob("*.kv")) <= disk_bytes / 2
    assert sum(file.stat().st_size for file in main_files()) >= disk_bytes / 2 - of_model


def test_a_directory_too_small_for_the_draft_model_is_the_models_alone(tmp_path: Path) -> None:
    least = 40_000
    with closing(started(tmp_path, "llama", "qwen3_5", disk_bytes=Bytes(least))) as engine:
        model = engine.ask(lambda worker: worker.draft_model)
        assert model is not None and model.disk.cache is None
        assert engine.ask(lambda worker: worker.disk.cache) is not None
        assert len(engine.run(words(1250, 100), num=20).tokens) == 20

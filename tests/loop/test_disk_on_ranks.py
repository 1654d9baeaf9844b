"""The disk cache where each rank has its own part of each record: all have it, verified, or nobody reads it."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from reprise.cluster.ranks.operations import OPERATIONS
from reprise.cluster.ranks.shards import ShardKeeper
from reprise.core.sizes import Bytes
from reprise.disk.records.format import encode, read_record
from reprise.loop import sequences, write_behind
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.following import LeaderAndFollower
from tests.loop.rank_restarts import RankRestarts
from tests.loop.restarts import disk_cache, words
from tests.matrix import now_and_later, rows_now_and_later

ARCHITECTURES = ["llama", "gpt_oss", "qwen3_5"]

_MOST_CHECKS = 1000
"""However long a thread that has read something takes to let go of it."""

Start = Callable[..., tuple[DrivenEngine, LeaderAndFollower]]


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[RankRestarts]:
    restarts = RankRestarts(tmp_path)
    yield restarts
    restarts.end()


@pytest.fixture
def start(restarts: RankRestarts) -> Start:
    def begin(architecture: str = "llama", **options: Any) -> tuple[DrivenEngine, LeaderAndFollower]:
        engine = restarts(architecture, **options)
        assert restarts.following is not None
        return engine, restarts.following

    return begin


def _keeper(following: LeaderAndFollower) -> ShardKeeper:
    assert following.follower is not None and following.follower.shards is not None
    return following.follower.shards


def _keys(engine: DrivenEngine, following: LeaderAndFollower) -> tuple[set[bytes], set[bytes]]:
    """What each of the two has on disk, when all is written."""
    keeper = _keeper(following)
    assert engine.ask(lambda worker: disk_cache(worker).flush(PATIENCE_S)) and keeper.flush(PATIENCE_S)
    return engine.ask(lambda worker: disk_cache(worker).all_keys()), keeper.disk.all_keys()


def _files(directory: Path) -> dict[str, Path]:
    return {file.stem: file for file in directory.rglob("*.kv")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_large", now_and_later([True], [False]))
def test_after_a_restart_of_all_ranks_only_what_is_new_is_computed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, is_large: bool
) -> None:
    if is_large:
        # What is read goes straight into sequences.
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0)
    prompt = words(1, 200)
    engine, _ = start(architecture)
    answer = engine.run(prompt, num=6).tokens
    engine, following = start(architecture)
    assert _files(tmp_path / "0").keys() == _files(tmp_path / "1").keys() != set()
    longer = [*prompt, *answer, 1, 2, 3]
    again = engine.run(longer, num=6)
    # The last token of an answer is not fed.
    assert again.computed == 4
    assert again.tokens == engine.cold(longer, num=6)
    engine.ask(lambda worker: following.check())
    _wait_until_nothing_is_kept(engine, following)
    ours, theirs = _keys(engine, following)
    assert ours == theirs
    engine.ask(lambda worker: disk_cache(worker).check())
    _keeper(following).disk.check()


@pytest.mark.parametrize(
    ("architecture", "harm"),
    rows_now_and_later([("qwen3_5", "it is damaged")], [("llama", "it is missing"), ("gpt_oss", "it is another one")]),
)
def test_a_part_that_one_rank_cannot_use_is_used_by_none(
    start: Start, tmp_path: Path, architecture: str, harm: str
) -> None:
    prompt = words(2, 200)
    engine, _ = start(architecture)
    turn = [*prompt, *engine.run(prompt, num=6).tokens, 3]
    engine, following = start(architecture)
    theirs = _files(tmp_path / "1")
    assert theirs
    # While the servers run: they know of all of it.
    for key, file in theirs.items():
        match harm:
            case "it is missing":
                file.unlink()
            case "it is damaged":
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)
            case _:
                _rewrite(file)
        assert key in _files(tmp_path / "0")
    again = engine.run(turn, num=6)
    assert again.computed == len(turn) and again.tokens == engine.cold(turn, num=6)
    engine.ask(lambda worker: following.check())
    # It was removed everywhere, and is written again.
    engine, following = start(architecture)
    ours, mine = _keys(engine, following)
    assert ours == mine
    assert engine.run([*turn, *again.tokens, 4], num=1).computed == 2


def _rewrite(file: Path) -> None:
    """Verified, of the same tokens, and not of the same form."""
    content = file.read_bytes()
    record = read_record(BytesIO(content), len(content))
    about = {**record.about, "segments": [*record.about["segments"], *record.about["segments"]]}
    file.write_bytes(b"".join(encode(replace(record, about=about)).chunks))


def test_every_operation_of_the_disk_is_run_by_a_follower(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    prompt = words(1, 100)
    for is_large in (False, False, True):
        monkeypatch.setattr(sequences, "LARGE_NBYTES", 0 if is_large else 1 << 30)
        engine, following = start("qwen3_5")
        prompt = [*prompt, *engine.run(prompt, num=2).tokens, 1]
        engine.close()
        names |= following.names
    of_disk = {name for name, function in OPERATIONS.items() if function.__module__ == "reprise.engine.running.records"}
    assert len(of_disk) > 8
    assert of_disk - names <= {"RecordSource.give_up", "RestoringSequence.give_up"}


def test_what_one_rank_lacks_at_the_start_goes_everywhere(start: Start, tmp_path: Path) -> None:
    engine, _ = start()
    prompts = [words(seed, 100) for seed in range(3)]
    for prompt in prompts:
        engine.run(prompt, num=2)
    engine, following = start()
    num = len(_keys(engine, following)[0])
    engine.close()
    following.end()
    lost = sorted(_files(tmp_path / "0"))
    for name in lost[:2]:
        _files(tmp_path / "0")[name].unlink()
    for name in lost[2:4]:
        _files(tmp_path / "1")[name].unlink()
    engine, following = start()
    ours, theirs = _keys(engine, following)
    assert ours == theirs and len(ours) == num - 4


def test_clearing_removes_the_parts_of_all_ranks(start: Start, tmp_path: Path) -> None:
    engine, following = start()
    engine.run(words(1, 100), num=2)
    engine.run(words(2, 100), num=2, namespace="other")
    engine, following = start()
    both = len(_files(tmp_path / "1"))
    engine.loop.clear("other").result(PATIENCE_S)
    assert 0 < len(_files(tmp_path / "1")) < both
    assert _files(tmp_path / "0").keys() == _files(tmp_path / "1").keys()
    # What is still to be written goes too.
    engine.run(words(3, 100), num=2)
    engine.loop.clear().result(PATIENCE_S)
    assert _files(tmp_path / "0") == _files(tmp_path / "1") == {}
    assert _keys(engine, following) == (set(), set())


@pytest.mark.matrix
@pytest.mark.parametrize("which", now_and_later(["ours"], ["theirs"]))
def test_the_least_limit_of_all_ranks_holds_on_each(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(write_behind, "SOON_S", 0.0)
    most = 400_000
    limits: dict[str, Any] = {"disk_bytes": Bytes(most)} if which == "ours" else {"their_bytes": most}
    engine, following = start(**limits)
    for seed in range(12):
        engine.run(words(seed, 200), num=2)
    due_s = time.monotonic() + PATIENCE_S
    while engine.ask(lambda worker: worker.disk.num_unwritten) > 0:
        assert time.monotonic() < due_s
    ours, theirs = _keys(engine, following)
    if which == "ours":
        # The other rank has room, and removes what it is told to.
        assert ours == theirs
    assert ours & theirs
    for rank in ("0", "1"):
        assert sum(file.stat().st_size for file in (tmp_path / rank).rglob("*.kv")) <= most
    engine.ask(lambda worker: disk_cache(worker).check())
    assert engine.run([*words(11, 200), 1], num=1).computed < 20


@pytest.mark.matrix
def test_a_rank_whose_disk_does_not_answer_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = words(1, 200)
    engine, following = start()
    engine.run(prompt, num=2)
    engine, following = start()

    def reads_nothing(number: int, key: bytes) -> None:
        pass

    monkeypatch.setattr(_keeper(following), "read", reads_nothing)
    engine.ask(lambda worker: monkeypatch.setattr(following.shards, "answered_within_s", 0.1))
    again = engine.run([*prompt, 3], num=4)
    assert again.computed == len(prompt) + 1 and again.tokens == engine.cold([*prompt, 3], num=4)
    monkeypatch.undo()
    # Nothing was found to be missing.
    engine, following = start()
    assert engine.run([*prompt, 4], num=4).computed <= 2


class HeldReads:
    """What rank 0 asks the other rank to read, which waits until it is let go."""

    def __init__(self, keeper: ShardKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
        self._really = keeper.read
        self._held: list[tuple[int, bytes]] = []
        self._asked = threading.Event()
        self._is_held = True
        monkeypatch.setattr(keeper, "read", self._read)

    def _read(self, number: int, key: bytes) -> None:
        if not self._is_held:
            self._really(number, key)
            return
        self._held.append((number, key))
        self._asked.set()

    def wait(self) -> None:
        assert self._asked.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._is_held = False
        for number, key in self._held:
            self._really(number, key)


def test_nothing_is_restored_before_all_ranks_have_read_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = start()
    prompt = [*words(1, 200)]
    prompt += [*engine.run(prompt, num=2).tokens, 1]
    engine, following = start()
    held = HeldReads(_keeper(following), monkeypatch)
    running = engine.submit(prompt, num=2)
    held.wait()
    # Others go on meanwhile.
    assert engine.run(words(2, 20), num=4).computed == 20
    assert running.events == []
    held.let_go()
    assert running.wait().computed == 2
    engine.ask(lambda worker: following.check())


def test_what_was_read_for_nothing_is_dropped_on_all_ranks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = words(1, 300)
    engine, _ = start()
    engine.run(prompt, num=2)
    engine, following = start()
    held = HeldReads(_keeper(following), monkeypatch)
    running = engine.submit([*prompt, 3], num=2)
    held.wait()
    engine.loop.cancel(running.job.id)
    running.wait()
    held.let_go()
    _wait_until_nothing_is_kept(engine, following)


def _wait_until_nothing_is_kept(engine: DrivenEngine, following: LeaderAndFollower) -> None:
    """Each check tells the other rank what nobody holds any more."""
    for _ in range(_MOST_CHECKS):
        assert _keeper(following).flush(PATIENCE_S)
        if _keeper(following).num_read == 0:
            return
        engine.ask(lambda worker: following.check())
    raise AssertionError("something is kept for ever")


def test_ranks_may_have_one_directory(start: Start, tmp_path: Path) -> None:
    prompt = words(1, 200)
    options = {"disk_directory": str(tmp_path / "1")}
    engine, _ = start(**options)
    engine.run(prompt, num=2)
    engine, following = start(**options)
    assert sorted(
        len(list(folder.rglob("*.kv"))) > 0 for folder in (tmp_path / "1").glob("?*" * 8) if folder.is_dir()
    ) == [True, True]
    assert engine.run([*prompt, 1], num=2).computed <= 2
    engine.ask(lambda worker: following.check())


def test_a_disk_that_a_rank_cannot_use_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file")
    with pytest.raises(Exception, match="Rank 1: Cannot use the cache directory"):
        start()

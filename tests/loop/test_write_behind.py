"""Writing to the disk: nothing twice, a part at a time, and what can still be written when something has gone."""

from functools import partial

import pytest

from reprise.cache.lookup import checkpoint_at
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.failpoints import ACTIONS, Failpoint
from reprise.core.job import Purpose
from reprise.core.kinds import Full, KvKind
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.sizes import Bytes
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.disk.store import index
from reprise.loop import disk, write_behind
from reprise.loop.worker import Worker
from tests.loop.restarts import BLOCK, Restarts, disk_cache, disk_of, words
from tests.zoo.load import of_zoo
from tests.zoo.sizes import VOCAB, WINDOW

_PATIENCE_S = 120.0


def write(worker: Worker) -> bool:
    """Take one step of writing, and let it come to the disk. False if nothing is left to do."""
    is_left = worker.disk.write(is_closing=True)
    assert disk_cache(worker).flush(_PATIENCE_S)
    return is_left


def write_all(worker: Worker) -> int:
    """Write what is noted; gives the number of steps."""
    num = 0
    while write(worker):
        num += 1
    return num


@pytest.fixture(autouse=True)
def written_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "SOON_S", 3600.0)


@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text"])
def test_no_entry_is_written_twice_but_those_behind_the_last_whole_block(start: Restarts, model: str) -> None:
    engine = start(model)
    spans: list[tuple[int, int]] = []

    def encoding(layers: KvKind, span: Span) -> None:
        if isinstance(layers, Full):
            spans.append((span.start, span.stop))

    ACTIONS[Failpoint.ENCODE] = encoding
    prompt = words(1, 100)
    for turn in range(8):
        stable = Boundary(len(prompt) - 3, BoundaryKind.STABLE)
        answer = engine.run(prompt, boundaries=[stable])
        engine.ask(write_all)
        prompt = [*prompt, *answer.tokens, *words(10 + turn, 30)]
    whole = [span for span in spans if span[1] - span[0] == BLOCK]
    assert whole == [(at, at + BLOCK) for at in range(0, whole[-1][1], BLOCK)]
    tails = [span for span in spans if span not in whole]
    # Where the template is stable and where the answer ends; one of them may be where a block ends, and have none.
    assert len(tails) == len(set(tails)) <= 2 * 8
    assert engine.ask(write_all) == 0


@pytest.mark.parametrize("model", ["llama", "qwen3_5", "gemma3_text", "gpt_oss"])
def test_a_record_is_copied_in_parts(start: Restarts, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    engine = start(model)
    monkeypatch.setattr(write_behind, "COPIED_AT_ONCE", 3000)
    monkeypatch.setattr(write_behind, "SECTION_NBYTES", 1000)
    prompt = words(2, 150)
    turn = [*prompt, *engine.run(prompt).tokens, 1, 2]
    num_steps = engine.ask(write_all)
    assert num_steps > 2 * disk_of(engine).num_files
    engine = start(model)
    answer = engine.run(turn)
    assert (answer.computed, answer.tokens) == (3, engine.cold(turn))


@pytest.mark.parametrize("model", ["llama", "qwen3_5"])
def test_of_a_chat_that_will_not_go_on_only_what_others_begin_with_is_written(
    start: Restarts, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    engine = start(model)

    def never(cache: PrefixCache, tokens: Tokens, *, namespace: str) -> bool:
        return False

    monkeypatch.setattr(PrefixCache, "expects_return", never)
    prompt = words(2, 150)
    engine.run(prompt, boundaries=[Boundary(80, BoundaryKind.SYSTEM), Boundary(140, BoundaryKind.STABLE)])
    engine.ask(write_all)
    monkeypatch.undo()
    engine = start(model)
    assert engine.run([*prompt, 1]).computed == 151 - 80


@pytest.mark.parametrize("is_on_disk_alone", [False, True])
@pytest.mark.parametrize("model", ["qwen3_5", "mamba2", "gemma3_text"])
def test_where_chats_parted_is_there_after_a_restart(start: Restarts, model: str, *, is_on_disk_alone: bool) -> None:
    """No boundary of the template is there: only that two chats had it in common says that more will."""
    engine = start(model)
    shared = words(8, 100)
    chats = [[*shared, *words(80 + i, 50)] for i in range(3)]
    for chat in chats[:2]:
        assert engine.run(chat, boundaries=[Boundary(147, BoundaryKind.STABLE)]).computed == 150
        if is_on_disk_alone:
            engine = start(model)
    engine = start(model)
    answer = engine.run(chats[2])
    assert (answer.computed, answer.tokens) == (50, engine.cold(chats[2]))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_chunk_begins_on_disk_where_it_does_in_memory(start: Restarts, *, is_restarted: bool) -> None:
    begin = partial(start, "llama", load=of_zoo("llama4"))
    prompt = [token % VOCAB for token in words(9, 150)]
    engine = begin()
    engine.run(prompt)
    if is_restarted:
        engine = begin()
    branch = [*prompt[:70], *prompt[30:60]]
    answer = engine.run(branch)
    assert (answer.computed, answer.tokens) == (100 - 70 // WINDOW * WINDOW, engine.cold(branch))


def test_a_path_is_hashed_once_however_many_positions_it_is_written_for(
    start: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("llama", load=of_zoo("llama4"))
    prompt = [token % VOCAB for token in words(9, 40 * WINDOW)]
    engine.run(prompt)
    hashed: list[int] = []
    block_key = index.block_key

    def hashing(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(len(tokens) // index.TOKEN_NBYTES)
        return block_key(parent, tokens)

    monkeypatch.setattr(index, "block_key", hashing)
    assert engine.ask(write_all) > 40, "a chunk begins in many places"
    assert sum(hashed) <= len(prompt)


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_a_position_that_was_evicted_while_its_path_is_written_leaves_the_others(
    start: Restarts, num_steps: int
) -> None:
    engine = start("qwen3_5")
    prompt = words(3, 300)
    running = engine.run(prompt, boundaries=[Boundary(200, BoundaryKind.SYSTEM)])

    def evict_in_between(worker: Worker) -> None:
        for _ in range(num_steps):
            assert write(worker)
        match = worker.cache.match(as_tokens(prompt))
        checkpoint = checkpoint_at(match.walk, 200)
        assert checkpoint is not None
        for other in worker.cache.tree.checkpoints():
            if other is not checkpoint:
                worker.cache.pins.pin(other, until=float("inf"))
        while checkpoint.is_in_tree:
            assert worker.cache.evict_one()
        worker.cache.check()

    engine.ask(evict_in_between)
    engine.ask(write_all)
    engine = start("qwen3_5")
    assert engine.run([*prompt, *running.tokens, 1, 2]).computed == 3


@pytest.mark.matrix
def test_a_path_whose_end_was_evicted_is_written_as_far_as_it_goes(start: Restarts) -> None:
    engine = start("llama")
    prompt = words(4, 3000)
    running = engine.run(prompt)

    def evict(worker: Worker) -> int:
        while (length := worker.cache.match(as_tokens(prompt)).length) == 3000:
            assert worker.cache.evict_one()
        return length

    length = engine.ask(evict)
    assert 0 < length < 3000
    engine = start("llama")
    turn = [*prompt, *running.tokens, 1, 2]
    assert engine.run(turn).computed == len(turn) - length


def test_a_path_that_the_disk_has_no_room_for_is_not_copied_to_its_end(
    start: Restarts,
) -> None:
    engine = start("llama", disk_bytes=Bytes(100_000))
    copied: list[int] = []
    ACTIONS[Failpoint.ENCODE] = lambda layers, span: copied.append(len(span))
    prompt = words(5, 2000)
    engine.run(prompt)
    engine.ask(write_all)
    held = disk_of(engine)
    assert 0 < held.num_files < 2000 // BLOCK // 2 and held.nbytes <= held.budget_nbytes
    # The one for which there was no room, and the first that would stand on it.
    assert len(copied) == held.num_files + 2


def test_files_are_of_fewer_tokens_where_entries_are_large(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start("llama", disk_block=None)
    each = engine.ask(lambda worker: worker.runner.footprint.full)
    blocks = [engine.ask(lambda worker: disk_cache(worker).block)]
    for num in (200, 10):
        monkeypatch.setattr(disk, "FILE_NBYTES", num * each)
        engine = start("llama", disk_block=None)
        blocks.append(engine.ask(lambda worker: disk_cache(worker).block))
    assert blocks == [512, 128, 64]


def test_the_last_answer_is_computed_again_after_a_restart_without_its_question(start: Restarts) -> None:
    engine = start("qwen3_5")
    prompt = words(6, 200)
    stable = Boundary(len(prompt) - 3, BoundaryKind.STABLE)
    engine.run(prompt, boundaries=[stable])
    # The answer without its thinking, computed ahead: where the next turn resumes, not a regenerate.
    settled = [*prompt[:-3], *words(7, 20)]
    engine.run(settled, purpose=Purpose.SETTLE)
    engine = start("qwen3_5")
    assert engine.run([*settled, 1, 2]).computed == 2
    engine = start("qwen3_5")
    again = engine.run(prompt, boundaries=[stable])
    assert again.computed == 3


def test_the_steps_of_a_quick_tool_loop_are_not_all_written(start: Restarts) -> None:
    engine = start("qwen3_5")
    prompt = words(8, 90)
    for step in range(5):
        prompt = [*prompt, *words(9 + step, 20)]
        engine.run(prompt, boundaries=[Boundary(len(prompt) - 3, BoundaryKind.STABLE)], num=1)
    engine.ask(write_all)
    blocks = len(prompt) // BLOCK
    # The last two stable positions, and where the last answer ends.
    assert disk_of(engine).num_files <= blocks + 3

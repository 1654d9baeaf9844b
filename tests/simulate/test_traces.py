import json
from pathlib import Path

import pytest

from reprise.core.errors import BadRequest
from reprise.core.prompt import BoundaryKind
from reprise.lab.simulate import Granularity
from reprise.lab.simulate.traces import block_tokens, read_trace, text_tokens
from reprise.replay.payloads import Sizes
from reprise.replay.store import Replay


def write_blocks(path: Path, requests: list[tuple[list[int], int]]) -> Path:
    lines = [{"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": ids} for ids, n in requests]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_blocks_become_tokens_that_depend_on_the_hash_alone(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "t.jsonl", [([1, 2], 1000), ([1, 3], 700)])
    first, second = read_trace(path)
    assert len(first.prompt) == first.num_tokens == 1000
    assert (first.prompt.tokens[:512] == second.prompt.tokens[:512]).all()
    assert (first.prompt.tokens[512:700] != second.prompt.tokens[512:]).any()
    assert (first.prompt.tokens == block_tokens([1, 2], 512)[:1000]).all()
    assert first.shareable == 512, "the cut block is like no other"
    assert [(b.position, b.kind) for b in first.prompt.boundaries] == [(512, BoundaryKind.STABLE)]


def test_one_token_for_a_block_gives_the_same_hits(tmp_path: Path) -> None:
    # The block that a prompt ends in has a hash of its own.
    requests = [
        ([0, *range(n * 10 + 1, n * 10 + 1 + at), 1000 + 10 * at + n], 512 * (at + 1) + 100)
        for at in range(6)
        for n in range(5)
    ]
    path = write_blocks(tmp_path / "t.jsonl", requests)
    for budget in (20_000, None):
        reused: list[list[int]] = []
        for granularity, unit in ((Granularity.TOKEN, 1), (Granularity.BLOCK, 512)):
            replay = Replay(policy="lru", budget=budget, sizes=Sizes(full=1), unit=unit)
            reused.append([replay.take(request) for request in read_trace(path, granularity=granularity)])
            replay.cache.check()
            assert replay.tally.prompt == sum(n for _, n in requests)
        if budget is None:
            assert reused[0] == reused[1]
        assert sum(reused[0]) == pytest.approx(sum(reused[1]), rel=0.2)


def test_an_exact_repeat_computes_one_token(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "t.jsonl", [([1, 2], 1000), ([1, 2], 1000)])
    for granularity, unit in ((Granularity.TOKEN, 1), (Granularity.BLOCK, 512)):
        replay = Replay(policy="cost", budget=None, sizes=Sizes(full=1), unit=unit)
        assert [replay.take(request) for request in read_trace(path, granularity=granularity)] == [0, 999]


def test_token_prompts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        {"tokens": [1, 2, 3], "answer": [4], "boundaries": [[2, "system"]]},
        {"tokens": [1, 2, 3, 4, 5], "is_side": True},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    first, second = read_trace(path)
    assert first.answer is not None and first.answer.tolist() == [4]
    assert first.prompt.boundaries[0].position == 2
    assert second.is_auxiliary and second.answer is None
    replay = Replay(policy="cost", budget=None, sizes=Sizes(full=1))
    assert [replay.take(first), replay.take(second)] == [0, 4]


def test_dialogues_make_a_request_for_each_answer(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traj = [
        {"role": "system", "content": "Be brief, and never guess."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look_up"}}]},
        {"role": "tool", "content": "Paris"},
        {"role": "assistant", "content": "It is Paris."},
    ]
    path.write_text(json.dumps([{"traj": traj}, {"messages": traj[:3]}]))
    requests = list(read_trace(path))
    assert len(requests) == 3
    assert len(requests[1].prompt) > len(requests[0].prompt)
    assert [b.kind for b in requests[0].prompt.boundaries] == [BoundaryKind.SYSTEM, BoundaryKind.STABLE]
    replay = Replay(policy="cost", budget=None, sizes=Sizes(full=1))
    reused = [replay.take(request) for request in requests]
    answered = requests[0].answer
    assert answered is not None
    assert reused[1] == len(requests[0].prompt) + len(answered), "the tool loop goes on from what was generated"
    assert reused[2] == len(requests[2].prompt) - 1


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "hello"}',
        "[1, 2",
        "not json",
        '{"tokens": ["a"]}',
        '{"tokens": [99999999999]}',
        '{"tokens": ' + 100_000 * "[",
        '{"tokens": [1], "boundaries": [[1, "x"]]}',
        '{"hash_ids": [1, 2, 3], "input_length": 5}',
        '{"hash_ids": [1], "input_length": Infinity}',
        '{"hash_ids": [1], "input_length": 5, "output_length": -1}',
        "\udcff\udcfe",
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"tokens": [1, 2]}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(BadRequest, match=r"t\.jsonl:2: invalid request"):
        list(read_trace(path))


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"tokens": [1, 2]}', encoding="utf-8-sig")
    assert [request.num_tokens for request in read_trace(path)] == [2]


@pytest.mark.parametrize("text", ["[1, 2", 100_000 * "[", '[{"x": 1}]', '[{"messages": [{"role": "user"}, 3]}]'])
def test_what_is_no_list_of_dialogues_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(BadRequest, match="dialogues"):
        list(read_trace(path))


def test_text_tokens_are_stable() -> None:
    assert text_tokens("abcdefgh").tolist() == text_tokens("abcd").tolist() + text_tokens("efgh").tolist()
    assert len(text_tokens("")) == 0

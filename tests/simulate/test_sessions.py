"""Recorded agent sessions: what is read, in which order, and what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from reprise.core.errors import BadRequest
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import common_prefix
from reprise.lab.bench.replay import calls_of_sessions
from reprise.lab.simulate.sessions import holds_sessions, read_sessions


def record(t: float, ids: list[Any], num: int, *, out: int = 64, stop: str = "tool_use") -> dict[str, Any]:
    return {"t": t, "in": num, "out": out, "hash_ids": ids, "stop": stop, "api_time": 1.0}


def session(name: str, *requests: dict[str, Any], tools: int = 128, system: int = 64) -> dict[str, Any]:
    about = {"models": ["m"], "block_size": 64, "tool_tokens": tools, "system_tokens": system}
    return {"id": name, **about, "requests": list(requests)}


LOOP = session(
    "loop",
    record(0, [[1, 4]], 260),
    record(5, [[1, 6], 9], 450, stop="end_turn"),
    record(9000, [[1, 5], 20, 21], 470, stop=""),
    {"t": 3.0, "type": "subagent", "models": ["s"], "requests": [record(0, [[30, 31]], 140)]},
)
OTHER = session("other", record(0, [[1, 5]], 320), record(2, [[1, 6]], 384))


def written(file: Path, *sessions: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    return file


def test_prompts_grow_and_the_trace_shows_where_they_go_on(tmp_path: Path) -> None:
    first, _, second, last = read_sessions(written(tmp_path / "s.jsonl", LOOP))
    a, b, c = (request.prompt.tokens for request in (first, second, last))
    assert (first.unit, first.num_tokens, len(a), len(b), len(c)) == (64, 260, 4, 7, 7)
    assert (common_prefix(a, b), common_prefix(b, c)) == (4, 5)
    assert first.answer is not None and first.answer.tolist() == b[4:5].tolist(), "the next prompt repeats the answer"
    assert second.answer is not None and len(second.answer) == 1, "where it does not, the answer is like nothing else"
    stable = [request.prompt.stable_at for request in (first, second, last)]
    assert stable == [4, 5, 7], "stable up to where the next prompt parts from this one"
    assert [request.calls_tool for request in (first, second, last)] == [True, False, None]


def test_sessions_of_one_model_share_tools_and_system_prompt(tmp_path: Path) -> None:
    other_system = session("third", *OTHER["requests"], system=100)
    path = written(tmp_path / "s.jsonl", LOOP, OTHER, other_system)
    firsts = [request.prompt for request in read_sessions(path, num_live=3) if request.at_s == 0]
    assert common_prefix(firsts[0].tokens, firsts[1].tokens) == 3
    assert common_prefix(firsts[1].tokens, firsts[2].tokens) == 2, "the tools alone"
    assert (3, BoundaryKind.SYSTEM) in [(mark.position, mark.kind) for mark in firsts[0].boundaries]


def test_sessions_take_turns_and_long_pauses_are_cut(tmp_path: Path) -> None:
    path = written(tmp_path / "s.jsonl", LOOP, OTHER, session("last", record(0, [[1, 5]], 320)))
    both = [(request.at_s, request.num_tokens) for request in read_sessions(path, num_live=2)]
    assert both == [(0, 260), (0, 320), (2, 384), (3, 140), (3, 320), (5, 450), (1205, 470)]
    alone = [request.at_s for request in read_sessions(path)]
    assert alone == [0, 3, 5, 1205, 1206, 1208, 1209], "one begins when the one before has ended"


def test_a_folder_of_files_and_a_compressed_file(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(LOOP, indent=1))
    with gzip.open(folder / "b.json.gz", "wt") as file:
        json.dump(OTHER, file)
    assert holds_sessions(folder) and holds_sessions(folder / "a.json") and holds_sessions(folder / "b.json.gz")
    whole = written(tmp_path / "s.jsonl", LOOP, OTHER)
    assert [t.num_tokens for t in read_sessions(folder)] == [t.num_tokens for t in read_sessions(whole)]


def test_beside_sessions_a_folder_has_notes(tmp_path: Path) -> None:
    written(tmp_path / "a.json", LOOP)
    (tmp_path / "cache_hit_rates.txt").write_text("97 %")
    (tmp_path / "._a.json").write_bytes(bytes(16))
    (tmp_path / "older").mkdir()
    assert len(list(read_sessions(tmp_path))) == 4


def test_hashes_that_are_global_tell_what_sessions_share(tmp_path: Path) -> None:
    other = session("other", record(0, [[1, 2], [50, 52]], 320), tools=512)
    both = [one | {"hash_id_scope": "global"} for one in (LOOP, other, session("third", record(0, [[70, 74]], 320)))]
    path = written(tmp_path / "s.jsonl", *both)
    first, second, third = (t.prompt.tokens for t in read_sessions(path, num_live=3) if t.at_s == 0)
    assert common_prefix(first, second) == 2, "as its numbers say, though their tools are not equally long"
    assert common_prefix(first, third) == 0, "as its numbers say, though their tools are equally long"
    path = written(tmp_path / "t.jsonl", LOOP, other)
    first, second = (t.prompt.tokens for t in read_sessions(path, num_live=2) if t.at_s == 0)
    assert common_prefix(first, second) == 0


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(LOOP), encoding="utf-8-sig")
    assert holds_sessions(path) and len(list(read_sessions(path))) == 4


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        "null",
        '{"block_size": 64, "requests": {"a": 1}}',
        '{"block_size": 64, "requests": [1]}',
        '{"block_size": 0, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}',
        '{"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [[1]]}]}',
        '{"block_size": 64, "requests": [{"t": NaN, "in": 64, "out": 1, "hash_ids": [1]}]}',
        '{"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [[1, 100000000000000]]}]}',
        '{"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1000000000000000, "hash_ids": [1]}]}',
        '{"block_size": 64, "requests": [{"t": 0}]}',
        '{"block_size": 64, "requests": [{"t": 0, "in": 640, "out": 1, "hash_ids": [[1, 3]]}]}',
        '{"block_size": 64, "requests": 7}',
        '{"block_size": 64, "requests": [',
    ],
)
def test_what_is_no_session_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(OTHER) + "\n" + text + "\n")
    with pytest.raises(BadRequest, match=r"s\.jsonl:2: not a recorded session"):
        list(read_sessions(path))


@pytest.mark.parametrize("end", [-40, -8])
def test_a_compressed_file_that_was_damaged_is_refused(tmp_path: Path, end: int) -> None:
    path = tmp_path / "s.json.gz"
    whole = gzip.compress(json.dumps(session("a", *(record(at, [[1, 4]], 260) for at in range(400)))).encode())
    damaged = bytes(byte ^ 0x55 for byte in whole[60:100])
    for content in (whole[:end], whole[:60] + damaged + whole[100:], b"not compressed"):
        path.write_bytes(content)
        said = CliRunner().invoke(app, ["simulate", str(path)])
        assert said.exit_code == 2 and "s.json.gz:1: not a recorded session" in said.output.replace("\n", "")


def test_the_commands_read_them(tmp_path: Path) -> None:
    path = written(tmp_path / "s.jsonl", LOOP, OTHER)
    said = CliRunner().invoke(app, ["simulate", str(path), "--live", "2", "--tokens", "1k", "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)[0]["requests"] == 6
    calls = calls_of_sessions(path, num_live=2)
    assert [call.line["input_length"] for call in calls][:2] == [260, 320]
    assert not holds_sessions(written(tmp_path / "t.jsonl", {"input_length": 64, "hash_ids": [1]}))


def test_what_shrinking_prompts_cost_is_counted_by_reason_beside_the_least(tmp_path: Path) -> None:
    prompts = (
        [[1, 40]],
        [[1, 60]],
        [[1, 55], [70, 77]],
        [[1, 20], [80, 104]],
        [[1, 5], [110, 112]],
        [[1, 4], [120, 139]],
    )
    lengths = (40, 60, 63, 45, 8, 24)
    sized = enumerate(zip(prompts, lengths, strict=True))
    records = [record(10 * at, [*ids], 64 * n, out=1) for at, (ids, n) in sized]
    path = written(tmp_path / "s.jsonl", session("a", *records, tools=0, system=0))
    changes = [request.change for request in read_sessions(path)]
    assert changes == ["first", "grown", "end edited", "context cleared", "compacted", "earlier edited"]
    options = ["--tokens", "1k", "--policy", "cost,infinite"]
    said = CliRunner().invoke(app, ["simulate", str(path), *options, "--json"])
    cost = next(result for result in json.loads(said.stdout) if result["policy"] == "cost")
    least = {tally["change"]: (tally["requests"], tally["least"]) for tally in cost["changes"]}
    assert least["grown"] == (1, 20 * 64) and least["compacted"] == (1, 3 * 64), "blocks that nothing had before"
    assert all(tally["computed"] >= tally["least"] for tally in cost["changes"])
    assert "compacted" in CliRunner().invoke(app, ["simulate", str(path), *options]).stdout

"""A recorded file, replayed: the same counts as the server that recorded it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from reprise.lab.bench.replay import NAME, ReplayBench, read_recording
from reprise.lab.bench.sides import OFF, ON, BenchFailed
from tests.api.real_server import real_server
from tests.benchmark.beside import InProcess
from tests.matrix import now_and_later

SYSTEM = {"role": "system", "content": "Answer in plain words, and name what you are not sure of. " * 6}


def recorded(file: Path, architecture: str, *, with_text: bool) -> list[dict[str, Any]]:
    """A chat of three turns, and a completion, on a server that recorded them."""
    settings: dict[str, Any] = {"record_file": str(file), "records_text": with_text, "settles": False}
    with real_server(architecture, **settings) as client:
        messages: list[dict[str, Any]] = [SYSTEM]
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question number {turn}: what came before it, and why?"})
            body = {"messages": messages, "max_tokens": 4, "temperature": 0, "model": "tiny", "stream": turn == 1}
            body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            response = client.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            messages.append({"role": "assistant", "content": f"Answer {turn}."})
        client.post("/v1/completions", json={"prompt": "One two three " * 30, "max_tokens": 2}).raise_for_status()
        body = {"messages": messages[:2], "max_tokens": 3, "model": "any"}
        client.post("/v1/messages", json={**body, "messages": messages[1:2]})
    return [json.loads(line) for line in file.read_text().splitlines()]


def replayed(file: Path, architecture: str, *, is_fast: bool) -> ReplayBench:
    calls, num_dropped = read_recording(file)
    assert num_dropped == 0
    sides = (
        InProcess(ON, architecture, accepts_any_model=True),
        InProcess(OFF, architecture, accepts_any_model=True, has_prefix_cache=False),
    )
    bench = ReplayBench(calls=calls, sides=sides, minutes=5, is_fast=is_fast, tell=lambda text: None)
    bench.hold()
    return bench


@pytest.mark.matrix
@pytest.mark.parametrize("is_fast", now_and_later([True], [False]))
def test_with_bodies_the_counts_are_those_of_the_server_that_recorded(tmp_path: Path, is_fast: bool) -> None:
    lines = recorded(tmp_path / "trace.jsonl", "qwen3_5", with_text=True)
    bench = replayed(tmp_path / "trace.jsonl", "qwen3_5", is_fast=is_fast)
    on, off = bench.runs
    assert (on.workload, on.side, off.side) == (NAME, ON, OFF)
    assert [reply.num_prompt for reply in on.replies] == [line["input_length"] for line in lines]
    assert [reply.num_computed for reply in on.replies] == [line["prefilled"] for line in lines]
    assert sum(line["reused"] for line in lines) > 0
    assert off.num_computed == sum(line["input_length"] for line in lines)
    assert bench.notes == []


@pytest.mark.matrix
def test_without_bodies_lengths_and_shared_blocks_are_the_same(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "trace.jsonl", "llama", with_text=False)
    bench = replayed(tmp_path / "trace.jsonl", "llama", is_fast=True)
    on, _ = bench.runs
    assert [reply.num_prompt for reply in on.replies] == [line["input_length"] for line in lines]
    assert [reply.num_generated for reply in on.replies] == [line["output_length"] for line in lines]
    for reply, line in zip(on.replies, lines, strict=True):
        assert reply.num_cached is not None
        # Blocks are shared or not: at most one less than what the text shared.
        assert line["reused"] - line["block_tokens"] <= reply.num_cached <= line["reused"] + line["block_tokens"]


def test_what_is_no_recording_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for text, sentence in (
        ("", "contains no requests"),
        ('{"a": 1}\n', ":1: not a line"),
        ("[]\n", ":1: not a line"),
        ("no\n", ":1: not a line"),
    ):
        file = tmp_path / "trace.jsonl"
        file.write_text(text)
        with pytest.raises(BenchFailed, match=sentence):
            read_recording(file)
        told = CliRunner().invoke(app, ["bench", "--replay", str(file)])
        assert told.exit_code == 2
        assert sentence in told.output
        assert "Traceback" not in told.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workload", "nonsense"], "Unknown workload 'nonsense'"),
        (["--html", "/nowhere/report.html"], "there is no directory /nowhere"),
        pytest.param(["/nowhere/model", "--minutes", "0.1"], "reuse o", marks=pytest.mark.matrix),
    ],
)
def test_what_cannot_be_is_one_sentence(words: list[str], sentence: str) -> None:
    told = CliRunner().invoke(app, ["bench", *words])
    assert told.exit_code == 2
    assert sentence in told.output
    assert "Traceback" not in told.output


@pytest.mark.soak
def test_the_whole_command_beside_mlx_lm(tmp_path: Path) -> None:
    words = ["bench", "--size", "0.03", "--repeats", "1", "--minutes", "10", "--vs", "mlx-lm"]
    files = ["--html", str(tmp_path / "bench.html"), "--json", str(tmp_path / "bench.json")]
    told = CliRunner().invoke(app, [*words, *files])
    assert told.exit_code == 0, told.output
    numbers = json.loads((tmp_path / "bench.json").read_text())
    assert numbers["sides"] == [ON, OFF, "mlx-lm"]
    computed = {(row["workload"], row["side"]): row["num_computed"]["middle"] for row in numbers["summary"]}
    assert len(computed) == 21
    assert all(computed[workload, ON] <= num for (workload, _), num in computed.items())
    assert all(numbers["memory"][side] for side in numbers["sides"])
    assert numbers["head"]["layers"] == "1 × recurrent state, 1 × full attention"
    assert "reprise bench --minutes 10 --vs mlx-lm --size 0.03 --repeats 1 --seed 0" in told.output

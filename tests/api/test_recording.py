"""`--record`: a line for each request, that a simulation reads and nobody else does; what is lost is told."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.api.service.exchange import Record
from reprise.api.service.replay import blocks_of
from reprise.api.watch.recording import Recorder
from reprise.core.errors import LoadFailed
from reprise.core.prompt import Prompt
from reprise.core.tokens import as_tokens
from reprise.lab.simulate import Granularity
from reprise.lab.simulate.traces import read_trace
from tests.api.real_server import real_server

SYSTEM = {"role": "system", "content": "Answer in plain words, and name what you are not sure of. " * 4}


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 3, "temperature": 0, **more}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def records_of(client: httpx.Client, num: int) -> list[dict[str, Any]]:
    """The records of the requests that were answered, oldest first: each is written just after its answer."""
    for _ in range(1000):
        records = client.get("/v1/cache/requests").json()["data"][::-1]
        answered = [record for record in records if record["ended"] != "refused"]
        if len(answered) == num:
            return answered
        time.sleep(0.01)
    raise AssertionError(answered)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The file of a server that kept bodies, and the server's own records, oldest first."""
    file = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    with real_server("qwen3_5", record_file=str(file), records_text=True, settles=False) as client:
        for text in ("Hello!", "Hello again!"):
            client.post("/v1/chat/completions", json=body(text)).raise_for_status()
        with client.stream("POST", "/v1/chat/completions", json=body("And now?", stream=True)) as response:
            response.read()
        pretty = json.dumps({"prompt": ["One two", "three four"], "max_tokens": 2}, indent=2)
        headers = {"Content-Type": "application/json"}
        client.post("/v1/completions", content=pretty, headers=headers).raise_for_status()
        assert client.post("/v1/chat/completions", json={"messages": "no"}).status_code == 400
        return file, records_of(client, 5)


def test_each_request_is_a_line_with_the_servers_own_counts(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    file, records = recorded
    lines = lines_of(file)
    assert len(lines) == len(records) == 5
    told = {(r["api"], r["prompt_tokens"], r["reused"], r["prefilled"], r["generated"], r["ended"]) for r in records}
    names = ("api", "input_length", "reused", "prefilled", "output_length", "ended")
    assert {tuple(line[name] for name in names) for line in lines} == told
    assert all(line["snapshot_nbytes"] > 0 and line["token_nbytes"] > 0 for line in lines)
    assert lines[1]["reused"] > 0
    # Blocks of the system prompt are the same, the last ones are not.
    assert lines[0]["hash_ids"][0] == lines[1]["hash_ids"][0]
    assert lines[0]["hash_ids"][-1] != lines[1]["hash_ids"][-1]


def test_bodies_are_kept_once_for_each_http_request(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    lines = lines_of(recorded[0])
    assert lines[0]["body"] == body("Hello!")
    assert lines[2]["body"] == body("And now?", stream=True)
    assert [line["path"] for line in lines] == ["/v1/chat/completions"] * 3 + ["/v1/completions"] * 2
    assert [line["call"] for line in lines] == [1, 2, 3, 4, 4]
    arrived = [line["arrived_s"] for line in lines]
    assert arrived == sorted(arrived)


def test_the_file_is_its_owners_and_a_trace(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    file, records = recorded
    assert file.stat().st_mode & 0o777 == 0o600
    for granularity in Granularity:
        requests = list(read_trace(file, granularity=granularity))
        assert sorted(r.num_tokens for r in requests) == sorted(record["prompt_tokens"] for record in records)
        assert requests[0].prompt.boundaries != ()


def test_without_leave_no_text_is_kept_and_a_second_server_appends(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.touch(mode=0o644)
    for _ in range(2):
        with real_server(record_file=str(file)) as client:
            client.post("/v1/chat/completions", json=body("Hello!")).raise_for_status()
    first, second = lines_of(file)
    assert "body" not in first and "Hello" not in file.read_text()
    assert first["hash_ids"] == second["hash_ids"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="Cannot write"):
        Recorder(tmp_path / "nowhere" / "trace.jsonl", with_text=False)


def record() -> Record:
    return Record(
        id="one",
        api="chat",
        model="tiny",
        created=1.0,
        namespace="",
        ended="stop",
        outcomes=(),
        blocks=blocks_of(Prompt(tokens=as_tokens(range(4000)))),
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_full_disk_is_a_warning_once_and_no_failed_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reprise")
    recorder = Recorder(Path("/dev/full"), with_text=False)
    for _ in range(3):
        recorder.request_ended(record())
    recorder.close()
    assert (recorder.num_written, recorder.num_dropped) == (0, 3)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert "No space left" in caplog.messages[0]
    assert "3 dropped" in caplog.messages[1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_the_metrics_say_how_many_lines_are_missing() -> None:
    with real_server(record_file="/dev/full") as client:
        assert "reprise_unrecorded_requests_total 0.0" in client.get("/metrics").text
        client.post("/v1/chat/completions", json=body("Hello!")).raise_for_status()
        for _ in range(1000):
            health = client.get("/health").json()
            if health["unrecorded"] == 1:
                break
            time.sleep(0.01)
        assert (health["recorded"], health["unrecorded"]) == (0, 1)
        assert "reprise_unrecorded_requests_total 1.0" in client.get("/metrics").text


def test_who_reads_slowly_costs_lines_that_are_counted_and_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "reprise")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    recorder = Recorder(pipe, with_text=False, max_waiting=4)
    # The pipe and the queue hold less than this, and nobody reads yet.
    for _ in range(400):
        recorder.request_ended(record())
    assert recorder.num_dropped > 0
    os.set_blocking(reading, True)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(reading, 1 << 16), b"")))
    reader.start()
    recorder.request_ended(record())
    recorder.close()
    reader.join()
    os.close(reading)
    lines = [json.loads(line) for line in b"".join(read).splitlines()]
    assert len(lines) == recorder.num_written
    assert recorder.num_written + recorder.num_dropped == 401
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    # What is missing is told in the file, too, unless nothing came after it.
    assert sum(line.get("dropped", 0) for line in lines) <= recorder.num_dropped

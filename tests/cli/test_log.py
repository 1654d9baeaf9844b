"""What a server says of itself: the banner, a quiet log, a log of JSON lines."""

import json
import subprocess
import sys
import time

import httpx
import pytest

from tests.models.tiny import tiny_model


def serve(*words: str) -> tuple[str, str]:
    """Start a server, ask it once, end it; its output and its log."""
    command = [sys.executable, "-m", "reprise.cli.main", "serve", str(tiny_model("qwen3_5")), "--port", "0", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = line.split(" at ")[1].split()[0]
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        while not httpx.get(f"{url}/health").json()["idle"]:
            time.sleep(0.01)
    finally:
        server.terminate()
        _, log = server.communicate(timeout=60)
    assert server.returncode == 0, log
    return line, log


@pytest.mark.matrix
def test_a_log_of_json_lines_begins_with_the_banner() -> None:
    line, log = serve("--log-format", "json")
    assert line.startswith("Serving qwen3_5 at http://127.0.0.1:")
    records = [json.loads(one) for one in log.splitlines()]
    messages = [record["message"] for record in records]
    assert all({"time", "level", "logger", "message"} <= set(record) for record in records)
    assert any("recurrent state" in message and "full attention" in message for message in messages)
    assert any("chats of" in message for message in messages)
    assert any("reprise launch claude|codex" in message for message in messages)
    assert any("4 tokens" in message or "answered" in message or "chatcmpl" in message for message in messages)


@pytest.mark.matrix
def test_a_quiet_server_says_where_it_is_and_no_more() -> None:
    line, log = serve("--quiet")
    assert line.startswith("Serving qwen3_5 at ")
    assert log == ""

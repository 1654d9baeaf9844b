"""What a server says of itself: the banner, a quiet log, a log of JSON lines."""

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from reprise.cli.log import JsonLines, TextLines, configure_logging
from reprise.cluster.ranks.links import RanksFailed
from reprise.core.errors import EngineFailed
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api
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
    assert any(message.startswith("drafts: tried once") for message in messages)
    assert any("reprise launch claude|codex" in message for message in messages)
    assert any("4 tokens" in message or "answered" in message or "chatcmpl" in message for message in messages)


@pytest.fixture
def reprise_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("reprise")
    level = logger.level
    yield logger
    logger.setLevel(level)


@pytest.mark.anyio
@pytest.mark.parametrize("is_terminal", [False, True])
async def test_no_client_writes_a_line_of_the_log(
    reprise_logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_terminal: bool,
) -> None:
    # Those of pytest would keep `configure_logging` from adding its own.
    monkeypatch.setattr(logging.root, "handlers", list[logging.Handler]())
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    configure_logging(Settings(model=MODEL))
    async with api() as served:
        assert (await served.client.get("/v1/x%0a2026 ERROR%1b[2J%E2%80%A8reprise: forged")).status_code == 404
        ask = {"model": "x\nERROR forged", "messages": [{"role": "user", "content": "Hi"}]}
        assert (await served.client.post("/v1/chat/completions", json=ask)).status_code == 404
        # As is the sentence of an error in a traceback, which may quote a client.
        try:
            raise ValueError("quoted\n2026 ERROR reprise: forged \x9b2J")
        except ValueError as error:
            reprise_logger.error("failed", exc_info=error)
    log = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err)
    assert log.count("forged") >= 3
    assert not any(line.startswith(("2026 ERROR", "ERROR")) for line in log.splitlines()), log
    assert not {"\x1b", "\x9b"} & set(log), log


@pytest.mark.parametrize("formatter", [TextLines("%(message)s"), JsonLines()])
def test_an_error_that_explains_itself_has_no_traceback(formatter: logging.Formatter) -> None:
    def logged(failure: Exception) -> str:
        try:
            raise failure from ValueError("[ring] connection to a peer was lost")
        except Exception as error:
            trace = (type(error), error, error.__traceback__)
            return formatter.format(logging.LogRecord("any", logging.ERROR, "", 0, "3 requests failed", (), trace))

    lost = logged(RanksFailed("Rank 1 has ended. Restart the server."))
    assert "Rank 1 has ended. Restart the server." in lost and "Traceback" not in lost and "[ring]" not in lost
    assert "Traceback" in logged(EngineFailed("A pass failed."))


@pytest.mark.matrix
def test_a_quiet_server_says_where_it_is_and_no_more() -> None:
    line, log = serve("--quiet")
    assert line.startswith("Serving qwen3_5 at ")
    assert log == ""

"""Real agents, unmodified and headless, where they are installed: `@anthropic-ai/claude-code` and `@openai/codex`.

The engine is a fake one that answers by a script: what is tested is that an agent's requests are understood, and that
from the second request on they differ from what was computed only by the new messages.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reprise.api.records import Record
from reprise.api.run import ServerThread
from reprise.api.service import ChatService
from reprise.core.job import Job
from reprise.core.settings import Settings
from tests.api.fake_backend import FakeBackend
from tests.api.servers import EOS, MODEL, make_service
from tests.chat.text_models import text_model

RUN_S = 120
NEW_TOKENS = 400
"""What a turn of a tool loop may bring: the call, its result, and what the agent says around it."""


@dataclass(frozen=True, kw_only=True)
class AgentServer:
    url: str
    service: ChatService

    def records(self) -> list[Record]:
        """The records of all requests, oldest first."""
        while not self.service.is_idle:
            time.sleep(0.01)
        page, _ = self.service.records.page(namespace="", limit=50)
        return list(page)[::-1]


def reading(tool: str, arguments: Mapping[str, Any]) -> Callable[[Job], list[int]]:
    """A model that calls this tool once, if it has it, and then tells what it found."""

    def script(job: Job) -> list[int]:
        prompt = text_model().decode(job.prompt.tokens.tolist())
        call = json.dumps({"name": tool, "arguments": arguments})
        calls = f'"{tool}"' in prompt and "<tool_response>" not in prompt
        said = f"I look.\n<tool_call>\n{call}\n</tool_call>" if calls else "The file says hello."
        return text_model().encode(f"<think>\nHm.\n</think>\n\n{said}{EOS}")

    return script


@contextmanager
def agent_server(script: Callable[[Job], list[int]]) -> Generator[AgentServer]:
    backend = FakeBackend(script=script)
    settings = Settings(model=MODEL, accepts_any_model=True, settles=False)
    service = make_service(backend, settings=settings, context=None)
    server = ServerThread(service, settings)
    try:
        yield AgentServer(url=server.url, service=service)
    finally:
        server.stop()
        backend.stop()


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What an agent writes, run in `folder` with nothing of this machine's configuration."""
    executable = shutil.which(command[0])
    if executable is None:
        pytest.skip(f"{command[0]} is not installed")
    (folder / "a.txt").write_text("hello\n")
    home = folder.parent / f"{folder.name}-home"
    home.mkdir(exist_ok=True)
    plain = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
    made = subprocess.run(
        [executable, *command[1:]],
        cwd=folder,
        env=plain | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def assert_reuse(records: list[Record]) -> None:
    assert len(records) >= 2
    assert all(record.error is None for record in records)
    for record in records[1:]:
        assert record.outcomes[0].prefilled < NEW_TOKENS, (record.outcomes, record.explanation)


def test_claude_code(tmp_path: Path):
    with agent_server(reading("Read", {"file_path": str(tmp_path / "a.txt")})) as server:
        said = run(
            ["claude", "-p", "What does a.txt say?", "--allowedTools", "Read"],
            tmp_path,
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="local",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="local",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
        )
        records = server.records()
    assert "The file says hello." in said
    assert_reuse(records)


CODEX = """\
model = "local"
model_provider = "reprise"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.reprise]
name = "Reprise"
base_url = "{url}/v1"
wire_api = "responses"
"""


def test_codex(tmp_path: Path):
    with agent_server(reading("exec_command", {"cmd": "cat a.txt"})) as server:
        configuration = tmp_path.parent / f"{tmp_path.name}-codex"
        configuration.mkdir()
        (configuration / "config.toml").write_text(CODEX.format(url=server.url))
        said = run(
            ["codex", "exec", "--skip-git-repo-check", "What does a.txt say?"],
            tmp_path,
            CODEX_HOME=str(configuration),
        )
        records = server.records()
    assert "The file says hello." in said
    assert_reuse(records)

"""Agents and client libraries, unmodified, with an image: it stays in the prompt as the chat goes on.

The words of the model are given, and the engine computes nothing: what is looked at are the prompts. An agent that
changes an image's bytes, its place or what stands before it from one request to the next would pay for it each time.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from reprise.chat.images import shown
from reprise.cli.agents import AGENTS, ServerAddress
from reprise.core.job import Job, Purpose
from reprise.core.prompt import BoundaryKind
from reprise.core.settings import Settings
from reprise.core.tokens import common_prefix
from tests.agents.packages import installed, python_with
from tests.agents.recording import ExchangeRecorder, recording, write
from tests.agents.test_real_agents import CLAUDE, PACKAGES, run
from tests.agents.test_real_clients import AI_SDK, CLIENTS, PYPI
from tests.api.fake_backend import FakeBackend
from tests.api.server_thread import ServerThread
from tests.api.servers import MODEL, make_service
from tests.chat.seeing import seeing
from tests.pictures import png

pytestmark = pytest.mark.agents

TASK = "What is on a.png?"
ANSWER = "It is red."
TOOL_TURN = "<|im_start|>tool\n"
CONTEXT = 262_144


class SeenRequests:
    """A server of a model that sees, whose words are given: calls of a tool, one after the other, and an answer."""

    def __init__(self) -> None:
        self.text = seeing()
        self.calls: list[Mapping[str, object]] = []
        self.tool = ""
        self.backend = FakeBackend(script=self.says)
        settings = Settings(model=MODEL, accepts_any_model=True)
        service = make_service(self.backend, settings=settings, text=self.text, context=CONTEXT)
        self.server = ServerThread(service, settings)
        self.address = ServerAddress(url=self.server.url, api_key="none", model="tiny", context=CONTEXT, sees=True)

    def says(self, job: Job) -> list[int]:
        text = shown(job.prompt.tokens, self.text.decode, images=job.prompt.images)
        number = text.count(TOOL_TURN)
        if number >= len(self.calls) or f'"{self.tool}"' not in text:
            return self.text.encode(f"{ANSWER}<|im_end|>")
        call = json.dumps({"name": self.tool, "arguments": self.calls[number]})
        return self.text.encode(f"<tool_call>{call}</tool_call><|im_end|>")

    def prompts(self, num: int) -> list[Job]:
        """The prompts of the task, in order, with an image in the last `num` of them."""
        jobs = [job for job in self.backend.of(Purpose.GENERATE) if job.prompt.images]
        assert len(jobs) >= num
        return jobs[-num:]

    def close(self) -> None:
        self.server.stop()
        self.backend.stop()


@pytest.fixture(scope="module")
def programs() -> Path:
    return installed("agents", PACKAGES) / "node_modules"


@pytest.fixture
def recorder() -> Iterator[ExchangeRecorder | None]:
    with recording() as made:
        yield made


@pytest.fixture
def seen(recorder: ExchangeRecorder | None) -> Iterator[SeenRequests]:
    made = SeenRequests()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(png(48, 32))
    (tmp_path / "a.txt").write_text("hello from the file\n")
    return tmp_path


def assert_goes_on(before: Job, after: Job) -> None:
    """The later prompt has all of the earlier one that its template says will stay, and the image in its place."""
    stable = [b.position for b in before.prompt.boundaries if b.kind is BoundaryKind.STABLE]
    shared = common_prefix(before.prompt.tokens, after.prompt.tokens)
    assert shared >= min(stable)
    assert before.prompt.images[0].span == after.prompt.images[0].span
    assert before.prompt.images[0].image == after.prompt.images[0].image
    assert shared >= before.prompt.images[-1].span.stop


def keep(recorder: ExchangeRecorder | None, name: str, version: str, seen: SeenRequests, folder: Path) -> None:
    calls = json.loads(json.dumps(seen.calls).replace(str(folder), "/project"))
    answers = [{"reasoning": None, "content": None, "calls": [{"name": seen.tool, "arguments": c}]} for c in calls]
    answers.append({"reasoning": None, "content": ANSWER, "calls": []})
    write(recorder, name, source=f"{version}, recorded and trimmed: an image", answers=answers, tool=seen.tool)


def test_claude_code_reads_an_image(
    seen: SeenRequests,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    seen.tool = "Read"
    seen.calls = [{"file_path": str(folder / "a.png")}, {"file_path": str(folder / "a.txt")}]
    told = run(
        ["node", str(programs / CLAUDE), "-p", TASK, "--allowedTools", "Read", "--output-format", "json"],
        folder,
        tmp_path_factory.mktemp("home"),
        **AGENTS["claude"].command(seen.address).variables,
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
        DISABLE_AUTOUPDATER="1",
        IS_SANDBOX="1",
    )
    assert json.loads(told)["result"] == ANSWER
    assert_goes_on(*seen.prompts(2))
    keep(recorder, "claude_code_2_1_330", "Claude Code 2.1.330", seen, folder)


def test_codex_is_given_an_image(
    seen: SeenRequests,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    seen.tool = "exec_command"
    seen.calls = [{"cmd": "cat a.txt"}]
    home = tmp_path_factory.mktemp("home")
    (home / ".codex").mkdir()
    quiet = "check_for_update_on_startup = false\n[analytics]\nenabled = false\n"
    (home / ".codex" / "config.toml").write_text(AGENTS["codex"].edited(quiet, seen.address))
    codex = [str(programs / ".bin" / "codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    told = run([*codex, "-i", str(folder / "a.png"), "--", TASK], folder, home)
    assert ANSWER in told
    assert_goes_on(*seen.prompts(2))
    keep(recorder, "codex_0_169", "Codex 0.169.0", seen, folder)


def test_opencode_reads_an_image(
    seen: SeenRequests,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    seen.tool = "read"
    seen.calls = [{"filePath": str(folder / "a.txt")}]
    (folder / "opencode.json").write_text(json.dumps({"autoupdate": False, "share": "disabled"}))
    told = run(
        [
            str(next(programs.glob("opencode-linux-*/bin/opencode"), programs / ".bin" / "opencode")),
            *("run", TASK, "-f", str(folder / "a.png")),
        ],
        folder,
        tmp_path_factory.mktemp("home"),
        **AGENTS["opencode"].command(seen.address).variables,
    )
    assert ANSWER in told
    assert_goes_on(*seen.prompts(2))
    keep(recorder, "opencode_1_18_33", "OpenCode 1.18.33", seen, folder)


LIBRARIES = [
    ("langchain", "langchain_image.py", ""),
    ("pydantic-ai", "pydantic_ai_image.py", "openai"),
    ("pydantic-ai", "pydantic_ai_image.py", "anthropic"),
    ("ollama", "ollama_image.py", ""),
    *(("ai-sdk", "ai_sdk_image.mjs", provider) for provider in ("openai", "chat", "compatible", "anthropic")),
]


@pytest.mark.parametrize("client", LIBRARIES, ids=lambda client: "-".join(client[::2]))
def test_a_library_goes_on_about_an_image(
    seen: SeenRequests, folder: Path, recorder: ExchangeRecorder | None, client: tuple[str, str, str]
) -> None:
    library, script, provider = client
    file = CLIENTS / script
    if library == "ai-sdk":
        project = installed("ai-sdk", AI_SDK)
        (project / script).write_text(file.read_text())
        command = ["node", str(project / script)]
    else:
        command = [str(python_with(library, PYPI[library])), str(file)]
    told = run([*command, seen.server.url, str(folder / "a.png"), *([provider] if provider else [])], folder, folder)
    assert told.strip() == ANSWER
    assert_goes_on(*seen.prompts(2))
    name = "_".join(filter(None, (library.replace("-", "_"), provider)))
    answers = [{"reasoning": None, "content": ANSWER, "calls": []}] * 2
    write(recorder, name, source=f"{library}, recorded and trimmed: an image", answers=answers)

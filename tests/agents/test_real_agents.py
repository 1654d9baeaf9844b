"""Claude Code, Codex and OpenCode, unmodified, from the npm registry, on a small task against the real server.

The model is tiny and its words are given (`tests/workloads/scripted.py`): it calls a tool to read a file, and then says
what is in it. All else is real: the agents' own requests, prompts of 20,000 to 40,000 tokens, tools that run.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from bench.tiny.build import QWEN3_5, build_model
from reprise.chat.answer import Answer, ToolCall
from reprise.cli.agents import AGENTS, ServerAddress
from reprise.core.job import Job
from tests.agents.packages import installed
from tests.agents.recording import ExchangeRecorder, recording, write
from tests.workloads.serving import Serving, serving, spoken

pytestmark = pytest.mark.agents

PACKAGES = {"@anthropic-ai/claude-code": "2.1.332", "@openai/codex": "0.171.0", "opencode-ai": "1.18.33"}
# What its installation would otherwise make an executable of.
CLAUDE = Path("@anthropic-ai") / "claude-code" / "cli-wrapper.cjs"
TASK = "What does a.txt say?"
RUN_S = 300


@pytest.fixture(scope="module")
def programs() -> Path:
    return installed("agents", PACKAGES) / "node_modules"


@pytest.fixture(scope="module")
def recorder() -> Iterator[ExchangeRecorder | None]:
    with recording() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, recorder: ExchangeRecorder | None) -> Iterator[Serving]:
    model = tmp_path_factory.mktemp("agent-model")
    sizes = {"max_position_embeddings": 262144, "hidden_size": 64, "intermediate_size": 128}
    build_model(model, {**QWEN3_5, "text_config": {**QWEN3_5["text_config"], **sizes}}, vocab_size=2048)
    with serving(model, accepts_any_model=True) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the agent works: a folder with one file."""
    (tmp_path / "a.txt").write_text("hello from the file\n")
    return tmp_path


def run(command: list[str], folder: Path, home: Path, **names: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **names}
    made = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return made.stdout


def run_claude(programs: Path, at: ServerAddress, folder: Path, home: Path, *options: str, task: str = TASK) -> str:
    """Claude Code with a task, as `reprise launch` would start it. Returns what it prints: JSON."""
    return run(
        ["node", str(programs / CLAUDE), "-p", task, "--output-format", "json", *options],
        folder,
        home,
        **AGENTS["claude"].command(at).variables,
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
        DISABLE_AUTOUPDATER="1",
        IS_SANDBOX="1",
    )


def calls_once(
    server: Serving, arguments: dict[str, dict[str, object]], *, answer: str = "It says hello."
) -> Callable[[Job], str]:
    """Says a call of the first of these tools that the prompt has, and when its result is there, `answer`."""

    def says(job: Job) -> str:
        text = server.service.served.text.decode(job.prompt.tokens)
        names = [name for name in arguments if f'"{name}"' in text]
        if "<tool_response>" in text[text.rfind("<|im_start|>user") :] or not names:
            return spoken(Answer(content=answer, reasoning="That was all."))
        call = ToolCall(id="call", name=names[0], arguments=json.dumps(arguments[names[0]]))
        return spoken(Answer(content=None, reasoning="I should read it.", tool_calls=(call,)))

    return says


def address(server: Serving) -> ServerAddress:
    """What `reprise launch` would give an agent."""
    return ServerAddress(url=str(server.client.base_url).rstrip("/"), api_key="none", model="tiny", context=262144)


def keep(
    recorder: ExchangeRecorder | None, name: str, version: str, tool: str, arguments: Mapping[str, object]
) -> None:
    """Record the loop that just ran."""
    call = {"name": tool, "arguments": arguments}
    answers = [
        {"reasoning": "I should read it.", "content": None, "calls": [call]},
        {"reasoning": "That was all.", "content": "It says hello.", "calls": []},
    ]
    write(recorder, name, source=f"{version}, recorded and trimmed: a tool loop", answers=answers, tool=tool)


def check_reuse(server: Serving, api: str) -> None:
    """From the second request on only what is new was computed."""
    server.wait_until_idle()
    records = [r for r in server.client.get("/v1/cache/requests").json()["data"] if r["api"] == api][::-1]
    assert len(records) >= 2
    assert all(record["error"] is None for record in records)
    first, second = records[:2]
    assert first["prefilled"] > 10_000
    new = second["prompt_tokens"] - first["prompt_tokens"]
    # The generation prompt of the first is not part of the second.
    assert second["prefilled"] <= new + 8
    print(f"\n{api}: {second['prefilled']:,} of {second['prompt_tokens']:,} tokens computed")


def test_claude_code(
    server: Serving,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    server.engine.says = calls_once(server, {"Read": {"file_path": str(folder / "a.txt")}})
    home = tmp_path_factory.mktemp("home")
    told = run_claude(programs, address(server), folder, home, "--allowedTools", "Read", "--max-turns", "4")
    result = json.loads(told)
    assert result["result"] == "It says hello."
    assert result["num_turns"] == 2
    check_reuse(server, "messages")
    newest = server.client.get("/v1/cache/requests").json()["data"][0]
    # `reprise launch` has switched off the billing header, which changes on every request.
    assert not any("billing" in note for note in newest["notes"])
    keep(recorder, "claude_code_2_1_330", "Claude Code 2.1.330", "Read", {"file_path": "/project/a.txt"})


def starts_agents(server: Serving, path: Path, *, task: int) -> Callable[[Job], str]:
    """Starts a sub-agent, and another when that has ended; each reads the file, and answers."""

    def says(job: Job) -> str:
        text = server.service.served.text.decode(job.prompt.tokens)
        num = text.count("<tool_response>\n")
        is_parent = TASK in text
        if num == (2 if is_parent else 1):
            return spoken(Answer(content="It says hello.", reasoning="That was all."))
        if not is_parent:
            call = ToolCall(id="call", name="Read", arguments=json.dumps({"file_path": str(path)}))
        else:
            name = next(name for name in ("Agent", "Task") if f'"name": "{name}"' in text)
            arguments = {"description": f"Part {num}", "prompt": f"Part {num} of {task}: read the file."}
            arguments |= {"subagent_type": "general-purpose", "run_in_background": False}
            call = ToolCall(id="call", name=name, arguments=json.dumps(arguments))
        return spoken(Answer(content=None, reasoning="I should read it.", tool_calls=(call,)))

    return says


def waits_before(tools: str, at: ServerAddress, folder: Path) -> str:
    """Settings of Claude Code with which it starts these tools once the server has nothing left to do.

    However slow the machine is, there is time for what is computed ahead.
    """
    hook = folder / "wait.py"
    hook.write_text(
        "import json, time, urllib.request\n"
        f"while not json.load(urllib.request.urlopen({at.url + '/health'!r}))['idle']:\n"
        "    time.sleep(0.05)\n"
    )
    runs = {"type": "command", "command": shlex.join([sys.executable, str(hook)]), "timeout": 600}
    return json.dumps({"hooks": {"PreToolUse": [{"matcher": tools, "hooks": [runs]}]}})


def test_claude_code_with_sub_agents(
    server: Serving, programs: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They are told apart, and how they begin is computed once; later before the first of them is there."""
    for has_seen_one in (False, True):
        server.engine.says = starts_agents(server, folder / "a.txt", task=int(has_seen_one))
        # As if it were evicted: what the server has seen of this client it still knows.
        server.engine.clear()
        before = {record["id"] for record in server.client.get("/v1/cache/requests").json()["data"]}
        home = tmp_path_factory.mktemp("home")
        settings = waits_before("Agent|Task", address(server), folder)
        run_claude(programs, address(server), folder, home, "--allowedTools", "Read,Agent", "--settings", settings)
        server.wait_until_idle()
        records = [r for r in server.client.get("/v1/cache/requests").json()["data"] if r["id"] not in before][::-1]
        parent, one, other = (list(chat) for _, chat in groupby(sorted(records, key=agent_of), key=agent_of))
        if one[0]["created"] > other[0]["created"]:
            one, other = other, one
        assert len({record["session"] for record in records}) == 1
        assert [len(chat) for chat in (parent, one, other)] == [3, 2, 2]
        for chat in (parent, one, other):
            for last, record in pairwise(chat):
                assert record["prefilled"] <= record["prompt_tokens"] - last["prompt_tokens"] + 8
        counts = [(record["prefilled"], record["prompt_tokens"]) for record in (*parent, *one, *other)]
        print(f"\n{'then' if has_seen_one else 'first'}: {counts}")
        assert other[0]["reason"] == "branched"
        assert other[0]["prefilled"] <= other[0]["computed_at_best"] + 512, "a snapshot every 512 tokens"
        assert (one[0]["prefilled"] <= other[0]["prefilled"] + 512) == has_seen_one, one[0]


def agent_of(record: Mapping[str, str | None]) -> str:
    """Empty for the main agent, so that it comes first."""
    return record["agent"] or ""


CODEX_TOOLS: dict[str, dict[str, object]] = {
    "exec_command": {"cmd": "cat a.txt"},
    "shell": {"command": ["cat", "a.txt"]},
}


def run_codex(server: Serving, programs: Path, folder: Path, home: Path, *options: str) -> str:
    (home / ".codex").mkdir()
    quiet = "check_for_update_on_startup = false\n[analytics]\nenabled = false\n"
    (home / ".codex" / "config.toml").write_text(AGENTS["codex"].edited(quiet, address(server)))
    codex = [str(programs / ".bin" / "codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    return run([*codex, *options, TASK], folder, home)


def test_codex(
    server: Serving,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    server.engine.says = calls_once(server, CODEX_TOOLS)
    told = run_codex(server, programs, folder, tmp_path_factory.mktemp("home"))
    assert "It says hello." in told
    check_reuse(server, "responses")
    keep(recorder, "codex_0_169", "Codex 0.169.0", "exec_command", CODEX_TOOLS["exec_command"])


def test_codex_with_an_output_schema(
    server: Serving, programs: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server.client.delete("/v1/cache")
    before = {record["id"] for record in server.client.get("/v1/cache/requests").json()["data"]}
    # A call first, then the JSON: the request's grammar has to allow both (tests/api/test_output_and_tools.py).
    server.engine.says = calls_once(server, CODEX_TOOLS, answer='{"says":"hello"}')
    home = tmp_path_factory.mktemp("home")
    schema = home / "schema.json"
    says = {"type": "object", "properties": {"says": {"type": "string"}}, "required": ["says"]}
    schema.write_text(json.dumps(says | {"additionalProperties": False}))
    last = home / "last.txt"
    run_codex(
        server, programs, folder, home, "--output-schema", str(schema), "--output-last-message", str(last)
    )  # fmt: skip
    assert json.loads(last.read_text()) == {"says": "hello"}
    server.wait_until_idle()
    records = [r for r in server.client.get("/v1/cache/requests").json()["data"][::-1] if r["id"] not in before]
    first, second = records[:2]
    assert [record["ended"] for record in (first, second)] == ["tool_calls", "stop"]
    assert second["prefilled"] <= second["prompt_tokens"] - first["prompt_tokens"] + 8


def test_opencode(
    server: Serving,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    server.client.delete("/v1/cache")
    before = {record["id"] for record in server.client.get("/v1/cache/requests").json()["data"]}
    server.engine.says = calls_once(server, {"read": {"filePath": str(folder / "a.txt")}})
    (folder / "opencode.json").write_text(json.dumps({"autoupdate": False, "share": "disabled"}))
    made = AGENTS["opencode"].command(address(server))
    told = run(
        [str(next(programs.glob("opencode-linux-*/bin/opencode"), programs / ".bin" / "opencode")), "run", TASK],
        folder,
        tmp_path_factory.mktemp("home"),
        **made.variables,
    )
    assert "It says hello." in told
    server.wait_until_idle()
    records = server.client.get("/v1/cache/requests").json()["data"][::-1]
    # The chat's title is a request of its own, without tools.
    loop = [r for r in records if r["id"] not in before and r["api"] == "chat" and r["prompt_tokens"] > 5_000]
    first, second = loop[:2]
    assert second["prefilled"] <= second["prompt_tokens"] - first["prompt_tokens"] + 8
    print(f"\nopencode: {second['prefilled']:,} of {second['prompt_tokens']:,} tokens computed")
    keep(recorder, "opencode_1_18_33", "OpenCode 1.18.33", "read", {"filePath": "/project/a.txt"})

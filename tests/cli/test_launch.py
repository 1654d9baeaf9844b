"""`reprise launch`: what the agent's process gets, what its settings become, and that all of it can be taken back."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import Result
from ruamel.yaml import YAML
from typer.testing import CliRunner

from reprise.cli import launch as launch_module
from reprise.cli import server_url
from reprise.cli.agents import AGENTS, ServerAddress
from reprise.cli.main import app
from reprise.cli.settings_files import SettingsBackups, SettingsConflict
from tests.api.real_server import real_server
from tests.models.tiny import tiny_model

SERVER = ServerAddress(url="http://127.0.0.1:1234", api_key="key", model="tiny", context=4096)
FILES = {
    "claude": '{\n    "env": {"EDITOR": "vi"},   "theme":"dark"}',
    "codex": '# mine\nmodel = "gpt"  # the best\n\n[model_providers.other]\nname = "Other"\n',
    "opencode": '{"provider": {"other": {}}, "theme": "x"}\r\n',
    "qwen": '{"security": {"folderTrust": {"enabled": true}}}',
    "aider": "# mine\nmodel: gpt\ndark-mode: true",
    "pi": '{"providers": {"other": {"apiKey": "x"}}}',
    "crush": '{"options": {"debug": true}, "models": {"large": {"model": "a", "provider": "b"}}}',
    "continue": "# mine\nname: Ann\nversion: 2.0.0\nschema: v1\nmodels:\n  - name: Theirs\n    provider: x\n",
}
WITH_SETTINGS = {name: agent for name, agent in AGENTS.items() if agent.edited is not None}


def launch(home: Path, *words: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {
        "HOME": str(home),
        "PATH": f"{path}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(home / "state"),
        "ANTHROPIC_API_KEY": "of the user",
    }
    command = [sys.executable, "-m", "reprise.cli.main", "launch", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def here(home: Path, *words: str) -> Result:
    """The same in this process, which is quicker."""
    names = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    return CliRunner().invoke(app, ["launch", *words], env=names)


def test_settings_have_the_server_and_keep_the_rest() -> None:
    after = {name: AGENTS[name].edited(text, SERVER) for name, text in FILES.items()}
    claude = json.loads(after["claude"])
    assert claude["theme"] == "dark" and claude["env"]["EDITOR"] == "vi"
    assert claude["env"]["ANTHROPIC_BASE_URL"] == SERVER.url
    assert claude["env"]["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    codex = tomllib.loads(after["codex"])
    assert (codex["model"], codex["model_provider"], codex["model_context_window"]) == ("tiny", "reprise", 4096)
    assert set(codex["model_providers"]) == {"other", "reprise"}
    assert "# mine" in after["codex"] and "# the best" in after["codex"]
    opencode = json.loads(after["opencode"])
    assert set(opencode["provider"]) == {"other", "reprise"} and opencode["model"] == "reprise/tiny"
    qwen = json.loads(after["qwen"])
    assert set(qwen["security"]) == {"folderTrust", "auth"} and qwen["model"]["name"] == "tiny"
    assert after["aider"].splitlines()[:3] == ["# mine", 'model: "openai/tiny"', "dark-mode: true"]
    pi, crush, theirs = json.loads(after["pi"]), json.loads(after["crush"]), yaml_of(after["continue"])
    assert set(pi["providers"]) == {"other", "reprise"}
    assert pi["providers"]["reprise"]["models"] == [{"id": "tiny", "contextWindow": 4096, "maxTokens": 1024}]
    assert crush["options"] == {"debug": True} and crush["models"]["large"]["provider"] == "reprise"
    assert crush["providers"]["reprise"]["type"] == "openai-compat"
    assert "# mine" in after["continue"] and theirs["name"] == "Ann"
    assert [model["name"] for model in theirs["models"]] == ["Reprise", "Theirs"]  # type: ignore[attr-defined]
    for name, agent in WITH_SETTINGS.items():
        # From nothing, and once more: the same.
        assert agent.edited(agent.edited("", SERVER), SERVER) == agent.edited("", SERVER)
        assert agent.edited(after[name], SERVER) == after[name]


@pytest.mark.parametrize("text", ["[1]", '{"env": 1}', "{not json", '// a comment\n{"a": 1}'])
def test_what_cannot_be_read_is_not_changed(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is not|unexpected form"):
        AGENTS["claude"].edited(text, SERVER)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("codex", 'model_providers = {other = {name = "O"}}  # inline\n'),
        ("codex", 'model_providers.other.name = "O"  # dotted\n[tui]\na = 1\n'),
        (
            "codex",
            '[model_providers.reprise]\nname = "old"\n[tui]\na = 1  # mine\n[model_providers.other]\nname = "O"\n',
        ),
        ("codex", "[tui]\na = 1  # only a table\n"),
        ("aider", "{model: gpt, dark-mode: true}  # flow\n"),
        ("aider", "# block\nmodel: gpt  # mine\nread:\n  - a\n  - b: {c: d}\ntimeout: >-\n  9\n  9\n"),
        ("aider", "---\n# begun\nmodel: &m gpt\nweak-model: *m\nlint-cmd: [a, b]\n"),
        ("aider", "# only a comment"),
    ],
)
def test_every_form_of_a_settings_file_is_edited_and_keeps_its_comments(name: str, text: str) -> None:
    edited = AGENTS[name].edited(text, SERVER)
    for comment in re.findall(r"# .*", text):
        assert comment in edited
    assert AGENTS[name].edited(edited, SERVER) == edited
    if name == "codex":
        made, before = tomllib.loads(edited), tomllib.loads(text)
        assert made["model_providers"].pop("reprise")["name"] == "Reprise" and made["model"] == "tiny"
        before.get("model_providers", {}).pop("reprise", None)
        assert before == {key: made[key] for key in before}
    else:
        made, before = yaml_of(edited), yaml_of(text) or {}
        assert (made["model"], made["show-model-warnings"]) == ("openai/tiny", False)
        assert {
            key: made[key] for key in before if key not in ("model", "weak-model", "timeout")
        }.items() <= before.items()


def yaml_of(text: str) -> dict[str, object]:
    return YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("codex", "model = \n"),
        ("codex", 'model_providers = "x"\n'),
        ("aider", "model: a\n---\nmodel: b\n"),
        ("aider", "- a\n"),
        ("aider", "model: [\n"),
        ("aider", "a: 1\na: 2\n"),
    ],
)
def test_what_cannot_be_edited_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"it is|its tables|unexpected form"):
        AGENTS[name].edited(text, SERVER)


def test_pipes_and_damaged_backups_are_sentences(tmp_path: Path) -> None:
    pipe, file, kept = tmp_path / "pipe", tmp_path / "file", tmp_path / "kept"
    os.mkfifo(pipe)
    backups = SettingsBackups(kept)
    with pytest.raises(SettingsConflict, match="not a regular file"):
        backups.write("a", pipe, b"new")
    file.write_bytes(b"old")
    for damage in ("{", "[]", '{"path": 1}', '{"path": "x", "after": "", "mode": 1, "until": null, "before": "?"}'):
        backups.write("a", file, b"new")
        (kept / "a.json").write_text(damage)
        with pytest.raises(SettingsConflict, match="damaged"):
            backups.write("a", file, b"newer")
        # Once: the user is not locked out.
        backups.write("a", file, b"newer")
        backups.restore("a")


@pytest.mark.parametrize(
    "text",
    [
        '{\n  // mine "\n  "theme": "a // b",  /* c, } */\n}\n',
        '{ // mine\n "provider": {"other": {"x": [1, 2,],},}, "model": "old", // the best\n}',
        '{"provider": {"reprise": {"name": "old"}, /* end */ }, "small_model": "x",}',
        "// only a comment\n{}",
    ],
)
def test_settings_with_comments_are_edited_where_they_stand(text: str, tmp_path: Path) -> None:
    edited = AGENTS["opencode"].edited(text, SERVER)
    for comment in re.findall(r"// (?:mine|the|only)[^\n]*|/\*.*?\*/", text):
        assert comment in edited
    assert AGENTS["opencode"].edited(edited, SERVER) == edited
    assert edited.count('"reprise":') == 1 and '"model": "reprise/tiny"' in edited


def test_the_blocks_to_paste_are_what_launch_sets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    server = ServerAddress(url="http://127.0.0.1:8080", api_key="none", model="local")
    blocks = dict(re.findall(r"^## (.*?)\n.*?```\w+\n(.*?)```", page, re.MULTILINE | re.DOTALL))
    assert sorted(blocks["Claude Code"].splitlines()) == sorted(AGENTS["claude"].command(server).lines())
    assert tomllib.loads(blocks["Codex"]) == tomllib.loads(AGENTS["codex"].edited("", server))
    assert json.loads(blocks["OpenCode"]) == json.loads(AGENTS["opencode"].edited("", server))


def test_what_has_its_server_from_the_environment() -> None:
    copilot, vibe, openhands = (AGENTS[name].command(SERVER) for name in ("copilot", "vibe", "openhands"))
    assert copilot.variables["COPILOT_PROVIDER_BASE_URL"] == "http://127.0.0.1:1234/v1"
    assert copilot.variables["COPILOT_MODEL"] == "tiny"
    assert copilot.variables["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"] == "3072"
    (provider,), (model,) = (json.loads(vibe.variables[name]) for name in ("VIBE_PROVIDERS", "VIBE_MODELS"))
    assert model["provider"] == provider["name"] and model["alias"] == vibe.variables["VIBE_ACTIVE_MODEL"]
    assert vibe.variables[provider["api_key_env_var"]] == "key"
    assert (openhands.words[1], openhands.variables["LLM_MODEL"]) == ("--override-with-envs", "openai/tiny")


def test_codex_gets_toml_on_its_command_line() -> None:
    words = AGENTS["codex"].command(SERVER).words
    made = tomllib.loads("\n".join(words[2::2]))
    assert made["model_providers"]["reprise"]["base_url"] == "http://127.0.0.1:1234/v1"
    assert made["model_providers"]["reprise"]["env_key"] == "REPRISE_API_KEY"


@pytest.mark.parametrize("name", AGENTS)
def test_an_api_key_is_in_the_environment_and_not_in_arguments(name: str) -> None:
    agent, server = AGENTS[name], replace(SERVER, api_key="s3cret")
    command = agent.command(server)
    assert "s3cret" not in " ".join(command.words)
    if agent.needs_settings:
        assert agent.edited is not None and "s3cret" in agent.edited("", server)
    else:
        assert "s3cret" in " ".join(command.variables.values())


@pytest.mark.parametrize("url", ["192.0.2.1:9", "https://127.0.0.1:9", "127.0.0.1:9/below"])
def test_a_server_is_started_only_at_an_address_that_it_will_have(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "is_reprise_at", lambda url: False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a server was started"))
    refused = here(tmp_path, "--url", url, "--model", "m", "aider")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "`launch` starts one only on this machine" in refused.stderr


class EverLoadingHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"loading": {"seconds": 1.0, "bytes_read": 0, "bytes_total": 0}}')

    def log_message(self, *_: object) -> None: ...


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was started, and one that loads its model without an end."""
    sleeping: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def sleeper(command: list[str], **others: object) -> "subprocess.Popen[bytes]":
        assert command[command.index("--host") + 1] == "127.0.0.1"
        sleeping.append(start(["sleep", "100"]))
        return sleeping[-1]

    monkeypatch.setattr(subprocess, "Popen", sleeper)
    monkeypatch.setattr(launch_module, "START_S", 0.1)
    refused = here(tmp_path, "--url", "127.0.0.1:9", "--model", "m", "aider")
    assert (refused.exit_code, "did not answer" in refused.stderr) == (2, True), refused.stderr
    assert sleeping[0].poll() is not None
    monkeypatch.setattr(server_url, "LOADING_S", 0.1)
    with ThreadingHTTPServer(("127.0.0.1", 0), EverLoadingHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        refused = here(tmp_path, "--url", f"127.0.0.1:{server.server_port}", "aider")
        server.shutdown()
    assert (refused.exit_code, "has been loading" in refused.stderr) == (2, True), refused.stderr


def test_a_server_that_cannot_load_its_model_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered while it loaded, and it ends a moment after it answers no more."""
    health = iter([False, True])
    monkeypatch.setattr(launch_module, "is_reprise_at", lambda url: next(health, False))
    monkeypatch.setattr(launch_module, "wait_while_loading", lambda url: None)
    start = subprocess.Popen

    def failing(command: list[str], *, stdout: BinaryIO, **others: object) -> "subprocess.Popen[bytes]":
        return start(["sh", "-c", "sleep 0.3; echo 'reprise: MLX is not installed.'; exit 2"], stdout=stdout)

    monkeypatch.setattr(subprocess, "Popen", failing)
    refused = here(tmp_path, "--url", "127.0.0.1:9", "--model", "m", "aider")
    assert refused.exit_code == 2
    assert refused.stderr.endswith("The server did not start: MLX is not installed.\n"), refused.stderr


def test_running_printing_writing_and_undoing(tmp_path: Path) -> None:
    home, programs = tmp_path / "home", tmp_path / "bin"
    programs.mkdir()
    fake = programs / "claude"
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(3)\n"
    )
    fake.chmod(0o755)
    for name, agent in WITH_SETTINGS.items():
        if name != "qwen":
            file = home / agent.settings_path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(FILES[name].encode())
            file.chmod(0o640)
    with real_server("llama") as client:
        url = str(client.base_url)
        ran = launch(home, "--url", url, "claude", "--continue", "-p", "hi there", path=str(programs))
        assert ran.returncode == 3, ran.stderr
        words, environment = json.loads(ran.stdout)
        assert words == ["--continue", "-p", "hi there"]
        assert environment["ANTHROPIC_BASE_URL"] == url.rstrip("/")
        assert environment["ANTHROPIC_MODEL"] == client.get("/v1/models").json()["data"][0]["id"]
        assert "ANTHROPIC_API_KEY" not in environment
        printed = here(home, "--url", url, "claude", "--print").stdout
        shell = subprocess.run(
            ["/bin/sh", "-c", printed], env={"PATH": f"{programs}:/bin"}, capture_output=True, text=True, check=False
        )
        assert json.loads(shell.stdout)[1]["API_TIMEOUT_MS"] == environment["API_TIMEOUT_MS"]
        missing = here(home, "--url", url, "aider")
        assert (missing.exit_code, missing.stderr) == (
            2,
            "reprise: aider is not installed: uv tool install aider-chat\n",
        )
        lines = here(home, "--url", url, "pi", "--print").stdout.splitlines()
        remarks = [line.removeprefix("#") for line in lines[:-1]]
        assert remarks[0].startswith(f" in {home / '.pi/agent/models.json'}")
        assert "reprise" in json.loads("\n".join(remarks[1:]))["providers"] and lines[-1].startswith("pi --provider")
        unknown = here(home, "--url", url, "pi")
        assert unknown.exit_code == 2 and "`reprise launch pi --write` adds this one" in unknown.stderr
        unwritten = here(home, "--url", url, "copilot", "--write")
        assert unwritten.exit_code == 2 and "from its environment alone" in unwritten.stderr
        for name, agent in WITH_SETTINGS.items():
            file = home / agent.settings_path
            for _ in range(2):
                # Twice: what comes back is what the person had, not the first change.
                assert here(home, "--url", url, name, "--write").exit_code == 0
            assert "127.0.0.1" in file.read_text()
        # Now it knows the server, and is not installed.
        assert "pi is not installed" in here(home, "--url", url, "pi").stderr
    for name, agent in WITH_SETTINGS.items():
        file = home / agent.settings_path
        if name == "codex":
            ours = file.read_bytes()
            file.write_bytes(ours + b"# more\n")
            assert here(home, name, "--undo").exit_code == 2
            file.write_bytes(ours)
        assert here(home, name, "--undo").exit_code == 0
        if name == "qwen":
            assert not file.exists()
        else:
            assert (file.read_bytes(), file.stat().st_mode & 0o777) == (FILES[name].encode(), 0o640)
        assert here(home, name, "--undo").exit_code == 2


def test_a_server_that_loads_its_model_is_waited_for(tmp_path: Path) -> None:
    """Until it has, with what it says of how far it is; then the agent has its model's name."""
    loading = {"status": "loading", "loading": {"seconds": 3.2, "bytes_read": 10**9, "bytes_total": 4 * 10**9}}
    answers: list[tuple[int, object]] = [(503, loading)] * 3 + [(200, {"tokens_held": 0})]

    class HealthHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            if not self.path.startswith("/health"):
                status, body = 200, {"data": [{"id": "late"}]}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    fake = tmp_path / "aider"
    fake.write_text("#!/bin/sh\necho $AIDER_MODEL\n")
    fake.chmod(0o755)
    with ThreadingHTTPServer(("127.0.0.1", 0), HealthHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        ran = launch(tmp_path, "--url", f"127.0.0.1:{server.server_port}", "aider", path=str(tmp_path))
        server.shutdown()
    assert (ran.returncode, ran.stdout) == (0, "openai/late\n"), ran.stderr
    assert "1.0 GB of 4.0 GB loaded, 3 s" in ran.stderr and len(answers) == 1


def test_one_of_the_models_of_a_server_can_be_chosen(tmp_path: Path) -> None:
    class ModelListHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            models = [{"id": "main"}, {"id": "fast", "max_model_len": 4096}]
            body = {"tokens_held": 0} if self.path.startswith("/health") else {"data": models}
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), ModelListHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        words = ("--url", f"127.0.0.1:{server.server_port}", "--print")
        commented = tmp_path / ".config" / "opencode" / "opencode.jsonc"
        commented.parent.mkdir(parents=True)
        commented.write_text("{ // mine\n}")
        wrote = here(tmp_path, *words[:2], "--write", "opencode")
        ran = [here(tmp_path, *words, *named, "aider") for named in ((), ("--model", "fast"), ("--model", "slow"))]
        server.shutdown()
    assert wrote.exit_code == 0 and "// mine" in commented.read_text() and "reprise/main" in commented.read_text()
    assert "openai/main" in ran[0].stdout and "openai/fast" in ran[1].stdout
    assert ran[2].exit_code != 0 and "main, fast" in ran[2].stderr


@pytest.mark.matrix
def test_a_server_is_started_for_the_agent_and_ends_with_it(tmp_path: Path) -> None:
    fake = tmp_path / "aider"
    fake.write_text("#!/bin/sh\necho $AIDER_OPENAI_API_BASE $AIDER_MODEL $1\n")
    fake.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"127.0.0.1:{port}"
    refused = launch(tmp_path, "aider", "--url", url)
    assert (refused.returncode, "--model" in refused.stderr) == (2, True)
    model = str(tiny_model("llama"))
    ran = launch(tmp_path, "--url", url, "--model", model, "aider", "--yes", path=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [f"http://{url}/v1", f"openai/{Path(model).name}", "--yes"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)

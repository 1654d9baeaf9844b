"""What a server cannot be started with: one sentence on standard error and exit status 2."""

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from tests.models.tiny import tiny_model


def start(*words: str) -> "subprocess.CompletedProcess[str]":
    """The command in this process: a new one would import MLX for seconds."""
    done = CliRunner().invoke(app, words)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def model_of_a_strange_kind(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "perceptron"}))
    (directory / "model.safetensors").write_bytes((tiny_model("llama") / "model.safetensors").read_bytes())
    return directory


def assert_refused(result: "subprocess.CompletedProcess[str]", *named: str) -> None:
    assert result.returncode == 2, result
    assert result.stdout == ""
    sentence = result.stderr.strip()
    assert "\n" not in sentence, sentence
    assert sentence.startswith("reprise: ")
    assert sentence.endswith(".")
    for word in named:
        assert word in sentence


@pytest.mark.parametrize("make", ["missing", "empty", "file", "strange"])
def test_a_model_that_cannot_be_served(make: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if make == "missing":
        assert_refused(start("serve", str(tmp_path / "nowhere"), "--port", "0"), "nowhere", "directory")
    elif make == "empty":
        assert_refused(start("serve", str(tmp_path), "--port", "0"), "config.json")
    elif make == "file":
        (tmp_path / "model.gguf").touch()
        assert_refused(start("serve", str(tmp_path / "model.gguf"), "--port", "0"), "is a file")
    else:
        assert_refused(start("serve", str(model_of_a_strange_kind(tmp_path)), "--port", "0"), "perceptron")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == [], "said once"


@pytest.mark.parametrize(
    ("limit", "named"),
    [("-n 64", ("open only 64 files", "ulimit -Hn 4096")), ("-v 600000", ("614 MB", "ulimit -v"))],
)
def test_a_process_that_may_have_too_little(limit: str, named: tuple[str, ...]) -> None:
    words = [sys.executable, "-m", "reprise.cli.main", "serve", str(tiny_model("llama")), "--port", "0"]
    command = ["/bin/sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *words]
    assert_refused(subprocess.run(command, capture_output=True, text=True, timeout=120, check=False), *named)


def test_a_bound_that_the_model_does_not_fit() -> None:
    assert_refused(start("serve", str(tiny_model("llama")), "--port", "0", "--memory", "50MB"), "--memory", "needs")


def test_a_command_that_is_meant_is_named_before_any_is_imported() -> None:
    refused = start("simulat")
    assert refused.returncode == 2
    assert "No such command 'simulat'. Did you mean 'simulate'?" in refused.stderr


def test_a_port_in_use_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(start("serve", str(tmp_path), "--port", port), "in use", port)


def test_what_takes_seconds_to_import_comes_after_the_socket_and_the_first_line() -> None:
    code = """
import sys, types
from reprise.cli.main import app

def run_server(*_):
    print([name for name in ("mlx", "transformers", "fastapi", "uvicorn", "numpy", "httpx") if name in sys.modules])

sys.modules["reprise.cli.engines"] = types.SimpleNamespace(run_server=run_server)
app(["serve", "some/model", "--port", "0"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
    assert "starting at http://127.0.0.1:" in ran.stderr and "until some/model is loaded" in ran.stderr

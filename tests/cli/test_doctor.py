"""`reprise doctor` names what is missing, and how to mend it."""

import socket
from pathlib import Path

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from reprise.cli.process_limits import weights_nbytes
from tests.models.tiny import tiny_model


def doctor(*words: str) -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    result = CliRunner().invoke(app, ["doctor", "--port", port, *words])
    return result.exit_code, result.stdout


def test_a_machine_that_is_fine(tmp_path: Path) -> None:
    status, told = doctor(str(tiny_model("llama")), "--disk-cache", str(tmp_path / "new"), "--disk-bytes", "1MB")
    assert status == 0, told
    assert "wrong" not in told
    for subject in ("Python", "mlx-lm", "MLX", "memory", "open files", "disk cache", "model"):
        assert subject in told


@pytest.mark.matrix
def test_what_is_wrong_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata  # noqa: PLC0415

    real = metadata.version

    def version(name: str) -> str:
        return "0.20.0" if name == "mlx-lm" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, told = doctor(str(tmp_path), "--port", port, "--memory", "1KB")
    assert status == 1
    lines = [line for line in told.splitlines() if line.startswith("wrong")]
    assert {line.split()[1] for line in lines} == {"mlx-lm", "port", "model"}
    after = told.splitlines()[told.splitlines().index(lines[0]) + 1]
    assert after.lstrip().startswith("-> ") and "pip install " in after and "MLX" not in after
    assert "--port" in told and "*.safetensors" in told
    gone = doctor(str(tmp_path / "nowhere"))
    assert gone[0] == 1 and "does not exist" in gone[1]
    gone = doctor(str(tiny_model("llama")), "--draft-model", str(tmp_path / "nowhere"))
    assert gone[0] == 1 and "draft model" in gone[1]
    weights = weights_nbytes(tiny_model("llama"))
    both = doctor(str(tiny_model("llama")), "--draft-model", str(tiny_model("llama")), "--memory", str(2 * weights - 1))
    assert both[0] == 1 and "the weights alone take" in both[1]
    assert "the weights alone" not in doctor(str(tiny_model("llama")), "--memory", str(2 * weights - 1))[1]
    small = doctor(str(tiny_model("llama")), "--memory", "1KB")
    assert small[0] == 1 and "the weights alone take" in small[1]


def test_a_model_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    status, told = doctor("someone/absent")
    assert status == 0
    assert "note   model       someone/absent is neither an alias nor a local directory nor a complete model" in told
    assert "`reprise pull someone/absent`" in told


def test_a_disk_that_cannot_be_written() -> None:
    # Not even root writes there.
    status, told = doctor("--disk-cache", "/proc/reprise")
    assert status == 1
    assert "/proc is not writable" in told

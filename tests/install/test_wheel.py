"""The built wheel, installed into an environment of its own and run from elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.agents.packages import skip_without_registry
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.agents

ROOT = Path(__file__).parents[2]


def run(*words: str, folder: Path) -> str:
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ran = subprocess.run(words, cwd=folder, env=names, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


def test_the_wheel_serves_from_elsewhere(tmp_path: Path) -> None:
    skip_without_registry()
    python = str(tmp_path / "venv" / "bin" / "python")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), folder=tmp_path)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT), folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    extra = "[cpu]" if sys.platform == "linux" else ""
    run(*pip, "install", f"{wheel}{extra}", folder=tmp_path)
    reprise = str(tmp_path / "venv" / "bin" / "reprise")
    # No tree of ours is on its path.
    home = run(python, "-c", "import reprise; print(reprise.__file__)", folder=tmp_path).strip()
    assert home.startswith(str(tmp_path))
    assert "wrong" not in run(reprise, "doctor", "--port", "0", folder=tmp_path)
    assert json.loads(run(reprise, "demo", "--json", folder=tmp_path))
    command = [reprise, "serve", str(tiny_model("llama")), "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" at ")[1].split()[0]
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
            assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        finally:
            server.terminate()

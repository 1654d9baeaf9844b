"""Without MLX: each command is a sentence, with the line that installs it for this installation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.core.installation import Installation, install_line, mend_line

WITHOUT_MLX = """
import json, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name.partition(".")[0] == "mlx" else find(name, *where)
from typer.testing import CliRunner
from reprise.cli.main import app
ran = {words: CliRunner().invoke(app, words.split()) for words in json.loads(sys.argv[1])}
print(json.dumps({words: [each.exit_code, each.stdout, each.stderr] for words, each in ran.items()}))
"""


def test_every_command_without_mlx_is_a_sentence_that_names_the_line() -> None:
    commands = ["serve . --port 0 --quiet", "chat .", "pull a/b", "models", "rm a/b", "inspect .", "demo", "bench"]
    words = [sys.executable, "-c", WITHOUT_MLX, json.dumps([*commands, "doctor a/b --port 0", "config"])]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(ran.stdout.splitlines()[-1])
    line = mend_line()
    for command in commands:
        assert told[command] == [2, "", f"reprise: MLX is not installed. Install it with: {line}\n"]
    status, findings, _ = told["doctor a/b --port 0"]
    assert status == 1 and "MLX is not installed\n" in findings.replace("  ", "") and f"-> {line}" in findings
    assert told["config"][0] == 0


@pytest.mark.parametrize(
    ("receipt", "direct_url", "extra", "line"),
    # What an installer leaves in the environment, what the package was installed from, and the line.
    [
        ("uv-receipt.toml", None, "cpu", "uv tool install --force 'mlx-reprise[cpu]'"),
        (
            "uv-receipt.toml",
            {"url": "file:///a%20b/c", "dir_info": {"editable": True}},
            "cuda",
            "uv tool install --force --editable '/a b/c[cuda]'",
        ),
        ("pipx_metadata.json", {"url": "file:///c", "dir_info": {}}, "cpu", "pipx install --force '/c[cpu]'"),
        (
            "lib/python3.11/site-packages/pip",
            {"url": "https://host/r.git", "vcs_info": {"vcs": "git"}},
            "cuda",
            "PREFIX/bin/python -m pip install 'mlx-reprise[cuda] @ git+https://host/r.git'",
        ),
        ("pyvenv.cfg", None, "cpu", "uv pip install --python PREFIX/bin/python 'mlx-reprise[cpu]'"),
        ("pipx_metadata.json", None, None, "pipx install --force mlx-reprise"),
        # Not without MLX, which the installer would take away.
        ("uv-receipt.toml", None, "cpu,s3", "uv tool install --force 'mlx-reprise[cpu,s3]'"),
    ],
)
def test_the_line_is_that_of_the_installation(
    receipt: str, direct_url: dict[str, object] | None, extra: str | None, line: str, tmp_path: Path
) -> None:
    (tmp_path / receipt).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / receipt).touch()
    made = install_line(extra, Installation(prefix=tmp_path, direct_url=json.dumps(direct_url)))
    assert made == line.replace("PREFIX", str(tmp_path))

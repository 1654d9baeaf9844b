"""Clients as their users have them, at pinned versions: from npm and PyPI, kept in the user's cache."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from platformdirs import user_cache_path

_INSTALL_S = 900
_NPM_GIVES_UP_SOON = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=1000")
"""Where there is no network. By default it tries for minutes."""
_MISSING: dict[Path, str] = {}
"""Why packages could not be had. Whoever needs them too is told at once: without a network a try takes minutes."""


def installed(name: str, packages: Mapping[str, str]) -> Path:
    """A directory with these npm packages; skips the test, with the reason, where they cannot be had."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("needs node and npm: apt-get install npm, or brew install node")
    project = _directory(name)
    wanted = json.dumps({"name": name, "private": True, "dependencies": dict(packages)})
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *_NPM_GIVES_UP_SOON]
    return _made(project, wanted, [command], files={"package.json": wanted})


def python_with(name: str, packages: Sequence[str], *, without: Sequence[str] = ()) -> Path:
    """The interpreter of an environment of its own with these PyPI packages; skips where they cannot be had.

    `without`: what they depend on and do not need for what is tested, such as gigabytes of PyTorch.
    """
    project = _directory(name)
    python = project / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(project / "venv")]]
    files: dict[str, str] = {}
    if without:
        # Unlike pip, uv can leave something out.
        files["left_out.txt"] = "".join(f"{package} ; python_version < '3'\n" for package in without)
        uv = [str(python), "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        commands += [[*install, "uv"], [*uv, "--override", "left_out.txt", *packages]]
    else:
        commands.append([*install, *packages])
    _made(project, json.dumps([*sys.version_info[:2], *packages, *without]), commands, files=files)
    return python


def skip_without_registry() -> None:
    """Skip a test whose packages belong to it, where nothing can be downloaded from PyPI."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "hatchling"]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if ran.returncode != 0:
        pytest.skip(f"nothing can be downloaded from PyPI: {_reason(ran.stderr)}")


def _reason(said: str) -> str:
    """The line in which a package manager says what went wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it does not say why"]
    return next((line for line in lines if "failed" in line or "ERROR" in line), lines[-1])[:200]


def _directory(name: str) -> Path:
    project = user_cache_path("mlx-reprise-tests") / name
    project.mkdir(parents=True, exist_ok=True)
    return project


def _made(project: Path, wanted: str, commands: Sequence[Sequence[str]], *, files: Mapping[str, str]) -> Path:
    """The project, with the commands run unless they were for the same `wanted` before."""
    mark = project / "installed.json"
    if mark.exists() and mark.read_text() == wanted:
        return project
    if project in _MISSING:
        pytest.skip(_MISSING[project])
    for file, text in files.items():
        (project / file).write_text(text)
    for command in commands:
        try:
            ran = subprocess.run(
                command, cwd=project, capture_output=True, text=True, timeout=_INSTALL_S, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            _MISSING[project] = f"{project.name}: the packages were not installed in time"
            pytest.skip(_MISSING[project])
        if ran.returncode != 0:
            _MISSING[project] = f"{project.name}: the packages cannot be installed: {_reason(ran.stderr)}"
            pytest.skip(_MISSING[project])
    mark.write_text(wanted)
    return project


def source_of(package: str, version: str) -> Path:
    """The unpacked source package of PyPI; skips where it cannot be had."""
    project = _directory(f"{package}-source")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    archive = f"{package.replace('-', '_')}-{version}"
    unpack = ["tar", "-xzf", f"{archive}.tar.gz"]
    return _made(project, version, [[*command, f"{package}=={version}"], unpack], files={}) / archive

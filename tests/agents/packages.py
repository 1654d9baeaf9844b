"""Packages of the npm registry for tests, fetched once and kept in the user's cache."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from platformdirs import user_cache_path

_INSTALL_S = 240


def installed(name: str, packages: Mapping[str, str]) -> Path:
    """A directory with these packages; skips the test, with the reason, where they cannot be had."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("node and npm are not installed")
    project = user_cache_path("mlx-reprise-tests") / name
    project.mkdir(parents=True, exist_ok=True)
    wanted = json.dumps({"name": name, "private": True, "dependencies": dict(packages)})
    mark = project / "installed.json"
    if mark.exists() and mark.read_text() == wanted:
        return project
    (project / "package.json").write_text(wanted)
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        made = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install the packages in time")
    if made.returncode != 0:
        pytest.skip(f"npm cannot install the packages: {made.stderr.strip()[-200:]}")
    mark.write_text(wanted)
    return project

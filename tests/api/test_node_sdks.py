"""The Node packages `openai` and `@anthropic-ai/sdk`, unmodified, against a running server."""

import shutil
import subprocess
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from reprise.core.settings import Settings
from tests.api.servers import MODEL, running_server
from tests.api.test_anthropic_sdk import weather_forecast

pytestmark = pytest.mark.agents

SOURCE = Path(__file__).parent / "node"
INSTALL_S = 180
RUN_S = 60


@pytest.fixture(scope="module")
def node_project() -> Path:
    """A directory with the packages, which are fetched once and kept."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("needs node and npm: apt-get install npm, or brew install node")
    project = user_cache_path("mlx-reprise-tests") / "node"
    project.mkdir(parents=True, exist_ok=True)
    wanted = (SOURCE / "package.json").read_bytes()
    mark = project / "installed.json"
    if not mark.exists() or mark.read_bytes() != wanted:
        (project / "package.json").write_bytes(wanted)
        command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        try:
            made = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not install the packages in time")
        if made.returncode != 0:
            pytest.skip(f"npm cannot install the packages: {made.stderr.strip()[-200:]}")
        mark.write_bytes(wanted)
    shutil.copy(SOURCE / "clients.mjs", project)
    return project


def test_the_node_packages(node_project: Path):
    settings = Settings(model=MODEL, settles=False, api_keys=("secret",))
    with running_server(weather_forecast, settings=settings) as server:
        command = ["node", "clients.mjs", server.url, MODEL]
        made = subprocess.run(command, cwd=node_project, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert made.returncode == 0, made.stderr

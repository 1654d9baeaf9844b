"""The Node packages `openai` and `@anthropic-ai/sdk`, unmodified, against a running server."""

import shutil
import subprocess
from pathlib import Path

import pytest

from reprise.core.settings import Settings
from tests.agents.packages import installed
from tests.api.servers import MODEL, running_server
from tests.api.test_anthropic_sdk import weather_forecast

pytestmark = pytest.mark.agents

SOURCE = Path(__file__).parent / "node"
PACKAGES = {"@anthropic-ai/sdk": "1.11.0", "openai": "6.49.0"}
RUN_S = 60


@pytest.fixture(scope="module")
def node_project() -> Path:
    project = installed("node-sdks", PACKAGES)
    shutil.copy(SOURCE / "clients.mjs", project)
    return project


def test_the_node_packages(node_project: Path):
    settings = Settings(model=MODEL, settles=False, api_keys=("secret",))
    with running_server(weather_forecast, settings=settings) as server:
        command = ["node", "clients.mjs", server.url, MODEL]
        made = subprocess.run(command, cwd=node_project, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert made.returncode == 0, made.stderr

"""What asks for embeddings, unmodified and pinned, against a real server: each gets the vectors of transformers."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from numpy.testing import assert_allclose

from tests.agents.packages import python_with
from tests.api.real_server import server_of_several
from tests.models.embedders import texts

pytestmark = pytest.mark.agents

PYPI = {
    "ollama": ("ollama==0.6.3",),
    "langchain": ("langchain==1.4.7", "langchain-core==1.7.2", "langchain-openai==1.7.3"),
    "llama-index": ("llama-index-embeddings-openai-like==0.4.0",),
    "haystack": ("haystack-ai==3.4.1",),
}
_CLIENTS = Path(__file__).parent / "clients"
_RECORDED = json.loads((Path(__file__).parents[1] / "engine" / "embedders.json").read_text())
_RUN_S = 180


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with server_of_several("llama", "bert") as client:
        yield client


@pytest.mark.parametrize("name", list(PYPI))
def test_a_client_gets_the_vectors_of_its_texts(server: httpx.Client, name: str) -> None:
    python, script = python_with(name, PYPI[name]), _CLIENTS / f"{name.replace('-', '_')}_embed.py"
    command = [str(python), str(script), str(server.base_url).rstrip("/"), "bert", json.dumps(texts())]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DO_NOT_TRACK": "1"}
    environment |= {"HAYSTACK_TELEMETRY_ENABLED": "False"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    told = json.loads(made.stdout.splitlines()[-1])
    assert_allclose(told["vectors"], _RECORDED["bert"], atol=1e-5)
    assert_allclose(told["query"], _RECORDED["bert"][0], atol=1e-5)

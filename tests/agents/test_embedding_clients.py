"""Clients for embeddings and scores, unmodified and pinned, with a real server: they get what transformers gives."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from numpy.testing import assert_allclose

from tests.agents.packages import installed, python_with
from tests.api.real_server import server_of_several
from tests.models.embedders import texts

pytestmark = pytest.mark.agents

PYPI = {
    "ollama": ("ollama==0.6.3",),
    "langchain": ("langchain==1.4.7", "langchain-core==1.7.2", "langchain-openai==1.7.3"),
    "llama-index": ("llama-index-embeddings-openai-like==0.4.0",),
    "haystack": ("haystack-ai==3.4.1",),
}
CONTINUE = {"@continuedev/openai-adapters": "1.37.0"}
COHERE = ("cohere==7.3.1",)
_CLIENTS = Path(__file__).parent / "clients"
_RECORDED = json.loads((Path(__file__).parents[1] / "engine" / "embedders.json").read_text())
_RUN_S = 180


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with server_of_several("llama", "bert", "bert-rerank") as client:
        yield client


def told(*command: str) -> Any:
    """What a client's script printed, as JSON."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DO_NOT_TRACK": "1"}
    environment |= {"HAYSTACK_TELEMETRY_ENABLED": "False"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(PYPI))
def test_a_client_gets_the_vectors_of_its_texts(server: httpx.Client, name: str) -> None:
    python, script = python_with(name, PYPI[name]), _CLIENTS / f"{name.replace('-', '_')}_embed.py"
    _check(told(str(python), str(script), str(server.base_url).rstrip("/"), "bert", json.dumps(texts())))


def test_continue_gets_the_vectors_of_its_texts(server: httpx.Client) -> None:
    # Modules are looked for beside the script.
    script = Path(shutil.copy(_CLIENTS / "continue_embed.mjs", installed("continue", CONTINUE)))
    _check(told("node", str(script), str(server.base_url).rstrip("/"), "bert", json.dumps(texts())))


def _check(vectors: Any) -> None:
    assert_allclose(vectors["vectors"], _RECORDED["bert"], atol=1e-5)
    assert_allclose(vectors["query"], _RECORDED["bert"][0], atol=1e-5)


def test_cohere_gets_the_scores_of_its_documents(server: httpx.Client) -> None:
    query, documents = "the boat", list(texts())
    script = str(_CLIENTS / "cohere_rerank.py")
    url, python = str(server.base_url).rstrip("/"), str(python_with("cohere", COHERE))
    ranked = told(python, script, url, "bert-rerank", query, json.dumps(documents))
    scores = [score for (score,) in _RECORDED["bert-rerank"]]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:3]
    assert [index for index, _ in ranked] == best
    assert_allclose([score for _, score in ranked], [scores[index] for index in best], atol=1e-5)

"""A server for each tiny model, and one chat's end of it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.tiny.build import build_model
from reprise.lab.demo.oracle import Oracle
from tests.matrix import now_and_later
from tests.models.tiny import CONFIGS, tiny_model
from tests.workloads.serving import Serving, serving

LAYERS = ("qwen3_5", "gemma3_text", "llama", "gpt_oss")
"""Recurrent with full attention, windows with full attention, full attention, and windows of another make."""


@pytest.fixture(scope="session")
def models() -> Iterator[dict[str, Path]]:
    """Tiny models that all speak the thinking template with tools."""
    with tempfile.TemporaryDirectory(prefix="reprise-workloads-") as folder:
        # The tests' own gpt_oss speaks in channels and knows no tools.
        tagged = Path(folder) / "gpt_oss"
        build_model(tagged, CONFIGS["gpt_oss"], vocab_size=512)
        yield {name: tagged if name == "gpt_oss" else tiny_model(name) for name in LAYERS}


@pytest.fixture(scope="session", params=now_and_later(LAYERS[:2], LAYERS[2:]))
def running(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Serving]:
    with serving(models[request.param], settles=False) as server:
        yield server


@pytest.fixture
def server(running: Serving) -> Serving:
    """A server that knows nothing yet, and does not settle."""
    running.wait_until_idle()
    running.engine.clear()
    running.engine.served.clear()
    running.engine.oracle = Oracle()
    return running

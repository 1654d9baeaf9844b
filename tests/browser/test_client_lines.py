"""The lines that the page gives to paste, pasted: each client, as its users have it, gets an answer."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.tiny.build import QWEN3_5, build_model
from reprise.chat.answer import Answer
from tests.agents.packages import installed, python_with
from tests.agents.test_real_agents import CLAUDE, PACKAGES
from tests.workloads.serving import Serving, serving

pytestmark = [pytest.mark.browser, pytest.mark.agents]

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

PYPI = ("llm==0.36", "ollama==0.6.3", "openai==3.54.0")
NAME = "the model's"
"""A folder's name that a shell would read otherwise."""
ANSWER = "Yes, this one."
RUN_S = 300

OPENAI = """
import openai, sys
made = openai.OpenAI().chat.completions.create(model=sys.argv[1], messages=[{"role": "user", "content": "Hello"}])
print(made.choices[0].message.content)
"""
OLLAMA = """
import ollama, sys
print(ollama.chat(model=sys.argv[1], messages=[{"role": "user", "content": "Hello"}]).message.content)
"""


@dataclass(frozen=True, kw_only=True)
class Pasted:
    """What is typed behind the line, or in the shell where it was pasted. `says`: what then stands there."""

    behind: str = ""
    then: str = ""
    says: str = ANSWER
    is_agent: bool = False


CLIENTS: Mapping[str, Pasted] = {
    "curl": Pasted(),
    "OpenAI’s libraries": Pasted(then='python openai_client.py "$MODEL"'),
    "Ollama’s clients": Pasted(then='python ollama_client.py "$MODEL"'),
    "llm": Pasted(),
    "In a terminal": Pasted(behind=" --once", says="of waiting saved today"),
    "Claude Code": Pasted(behind=" -p Hello", is_agent=True),
    "Codex": Pasted(behind=" exec --skip-git-repo-check Hello", is_agent=True),
}


@pytest.fixture(scope="module", params=[(), ("a-key",)], ids=["open", "with a key"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = tmp_path_factory.mktemp("models") / NAME
    sizes = {"max_position_embeddings": 262144, "hidden_size": 64, "intermediate_size": 128}
    build_model(model, {**QWEN3_5, "text_config": {**QWEN3_5["text_config"], **sizes}}, vocab_size=2048)
    with serving(model, api_keys=request.param) as served:
        served.answer = Answer(content=ANSWER)
        yield served


@pytest.fixture(scope="module")
def lines(server: Serving) -> Mapping[str, str]:
    """By client, as they stand on the page."""
    keys = server.service.settings.api_keys
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page: Any = browser.new_page()
        page.goto(f"{server.client.base_url}/#connect")
        if keys:
            page.fill("#key", keys[0])
            page.press("#key", "Enter")
        page.wait_for_selector("#clients pre")
        found = page.eval_on_selector_all(
            ".client", "all => all.map(e => [e.querySelector('h3').textContent, e.querySelector('pre').textContent])"
        )
        browser.close()
    return {client: line.replace("YOUR_KEY", keys[0] if keys else "") for client, line in found}


def test_every_line_is_tried_but_one(lines: Mapping[str, str]) -> None:
    # Aider is a gigabyte: its variables and the form of its model's name are in its documentation.
    assert lines.keys() == CLIENTS.keys() | {"Aider"}
    assert f"aider --model openai/'{NAME.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'" in lines["Aider"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_pasted_line_works(client: str, server: Serving, lines: Mapping[str, str], tmp_path: Path) -> None:
    pasted = CLIENTS[client]
    (tmp_path / "openai_client.py").write_text(OPENAI)
    (tmp_path / "ollama_client.py").write_text(OLLAMA)
    programs = [python_with("client-lines", PYPI).parent, Path(sys.executable).parent]
    if pasted.is_agent:
        programs.append(commands(tmp_path))
    environment = {
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "MODEL": NAME,
        "COLUMNS": "200",
    }
    made = subprocess.run(
        ["bash", "-c", f"{lines[client]}{pasted.behind}\n{pasted.then}\n"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert made.returncode == 0 and pasted.says in made.stdout, (
        lines[client],
        made.stdout[-2000:],
        made.stderr[-2000:],
    )


def commands(folder: Path) -> Path:
    """A folder with the agents' commands, as an installation for all users makes them."""
    modules = installed("agents", PACKAGES) / "node_modules"
    there = folder / "bin"
    there.mkdir()
    (there / "claude").write_text(f'#!/bin/sh\nexec node "{modules / CLAUDE}" "$@"\n')
    (there / "claude").chmod(0o755)
    (there / "codex").symlink_to(modules / ".bin" / "codex")
    return there

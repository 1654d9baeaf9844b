"""Client libraries, unmodified and pinned, against the real server: a tool loop, and structured output beside tools.

Each runs in an environment of its own (`packages.py`), with a script of `clients/` that its documentation could have.
The model is tiny and its words are given: it calls the tool, then says what the tool said.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reprise.chat.answer import Answer, ToolCall
from reprise.core.job import Job
from tests.agents.packages import installed, python_with
from tests.agents.recording import ExchangeRecorder, recording, write
from tests.models.tiny import tiny_model
from tests.workloads.serving import Serving, serving, spoken

pytestmark = pytest.mark.agents

AI_SDK = {
    "ai": "7.0.173",
    "@ai-sdk/openai": "4.0.118",
    "@ai-sdk/openai-compatible": "3.0.92",
    "@ai-sdk/anthropic": "4.0.105",
    "zod": "4.6.7",
}
PYPI = {
    "ollama": ("ollama==0.6.3",),
    "anthropic": ("anthropic==2.12.0",),
    "openai-agents": ("openai-agents==0.24.0",),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "langchain": ("langchain==1.4.7", "langchain-core==1.7.2", "langchain-openai==1.7.3"),
    "instructor": ("instructor==1.17.0",),
    "lm-eval": ("lm-eval[api]==0.4.13",),
}
CLIENTS = Path(__file__).parent / "clients"
RUN_S = 180


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A client whose script runs a tool loop. `api`: what its requests are in the records."""

    name: str
    script: str
    api: str
    arguments: tuple[str, ...] = ()
    structure_calls: bool = True
    """Whether the tool is there, and called, in the structured request too."""

    @property
    def id(self) -> str:
        return "-".join((self.name, *self.arguments))


LOOPS = [
    Loop(name="ollama", script="ollama_loop.py", api="ollama", structure_calls=False),
    Loop(name="anthropic", script="anthropic_loop.py", api="messages", structure_calls=False),
    Loop(name="openai-agents", script="openai_agents_loop.py", api="responses", arguments=("responses",)),
    Loop(name="openai-agents", script="openai_agents_loop.py", api="chat", arguments=("chat",)),
    Loop(name="pydantic-ai", script="pydantic_ai_loop.py", api="chat", arguments=("openai",)),
    Loop(name="pydantic-ai", script="pydantic_ai_loop.py", api="messages", arguments=("anthropic",)),
    Loop(name="langchain", script="langchain_loop.py", api="chat"),
    Loop(name="ai-sdk", script="ai_sdk_loop.mjs", api="responses", arguments=("openai",)),
    Loop(name="ai-sdk", script="ai_sdk_loop.mjs", api="chat", arguments=("chat",)),
    Loop(name="ai-sdk", script="ai_sdk_loop.mjs", api="chat", arguments=("compatible",)),
    Loop(name="ai-sdk", script="ai_sdk_loop.mjs", api="messages", arguments=("anthropic",)),
]


@dataclass(eq=False)
class LookingModel:
    """The model's part: calls `look` once for each question, then says what it said, as JSON if that is asked for."""

    server: Serving
    calls: bool = True
    jobs: list[Job] = field(default_factory=list)

    def says(self, job: Job) -> str:
        self.jobs.append(job)
        text = self.server.service.served.text.decode(job.prompt.tokens)
        is_json = "As JSON" in text
        has_result = "hello from" in text[text.rfind("<|im_start|>user\n") - 400 :]
        if not has_result and '"look"' in text and (self.calls or not is_json):
            call = ToolCall(id="call", name="look", arguments='{"path": "a.txt"}')
            return spoken(Answer(content=None, reasoning="I should read it.", tool_calls=(call,)))
        content = '{"says": "hello"}' if is_json else "It says hello."
        return spoken(Answer(content=content, reasoning="That was all."))


@pytest.fixture(scope="module")
def recorder() -> Iterator[ExchangeRecorder | None]:
    with recording() as made:
        yield made


@pytest.fixture(scope="module")
def server(recorder: ExchangeRecorder | None) -> Iterator[Serving]:
    with serving(tiny_model("qwen3_5"), accepts_any_model=True, max_context=8192) as served:
        yield served


def run(name: str, script: str, *arguments: str) -> dict[str, Any]:
    """What the client's script printed."""
    environment: Mapping[str, str] = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DO_NOT_TRACK": "1"}
    path = CLIENTS / script
    if path.suffix == ".mjs":
        project = installed(name, AI_SDK)
        # Modules are looked for beside the script.
        copy = project / script
        copy.write_text(path.read_text())
        command = ["node", str(copy), *arguments]
    else:
        command = [str(python_with(name, PYPI[name])), str(path), *arguments]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.id)
def test_a_tool_loop_computes_what_is_new(server: Serving, loop: Loop, recorder: ExchangeRecorder | None) -> None:
    server.client.delete("/v1/cache")
    server.engine.says = LookingModel(server, calls=loop.structure_calls).says
    before = {record["id"] for record in _records(server)}
    told = run(loop.name, loop.script, str(server.client.base_url).rstrip("/"), *loop.arguments)
    server.wait_until_idle()
    records = [record for record in _records(server) if record["id"] not in before]
    errors = [record["error"] for record in records if record["ended"] in ("failed", "refused")]
    # Anthropic's tool runner tries a thread first, and sends the whole chat where there is none.
    assert [error for error in errors if "`thread`" not in error] == []
    first, second = [record for record in records if record["api"] == loop.api and record["ended"] != "refused"][:2]
    assert (told["answer"], first["ended"]) == ("It says hello.", "tool_calls")
    assert told["calls"] == 1
    assert told["structured"] == {"says": "hello"}
    # The generation prompt of the first is not part of the second.
    new = second["prompt_tokens"] - first["prompt_tokens"]
    assert second["prefilled"] <= new + 8, (first, second)
    print(f"\n{loop.id}: {second['prefilled']} of {second['prompt_tokens']} tokens computed")
    keep(recorder, loop)


def keep(recorder: ExchangeRecorder | None, loop: Loop) -> None:
    """Record the loop that just ran, with what the reader said."""
    call = {"name": "look", "arguments": {"path": "a.txt"}}
    asks = {"reasoning": "I should read it.", "content": None, "calls": [call]}
    tells = {"reasoning": "That was all.", "content": "It says hello.", "calls": []}
    answers: list[Mapping[str, Any]] = [asks, tells]
    if loop.structure_calls:
        answers += [asks, tells | {"content": '{"says": "hello"}'}]
    version = AI_SDK["ai"] if loop.name == "ai-sdk" else PYPI[loop.name][0].partition("==")[2]
    source = f"{loop.id} {version}, recorded and trimmed: a tool loop"
    write(recorder, loop.id.replace("-", "_"), source=source, answers=answers, tool="look")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON", "RESPONSES_TOOLS"])
def test_instructor(server: Serving, mode: str) -> None:
    call = ToolCall(id="call", name="Said", arguments='{"says": "hello"}')
    is_call = mode.endswith("TOOLS")
    answer = Answer(content=None, tool_calls=(call,)) if is_call else Answer(content='{"says": "hello"}')
    server.engine.says = lambda job: spoken(answer)
    told = run("instructor", "instructor_modes.py", str(server.client.base_url).rstrip("/"), mode)
    assert told["structured"] == {"says": "hello"}


def test_lm_eval(server: Serving) -> None:
    """Scores by its own tokens, one prompt at a time and forty together, against those of the API asked by hand."""
    server.engine.says = lambda job: "x."
    told = run("lm-eval", "lm_eval_scores.py", str(server.client.base_url).rstrip("/"))
    assert told["num"] == 40
    assert told["scores"] == pytest.approx(told["together"], abs=0.02)
    assert len(set(told["scores"])) > 1
    body = {"prompt": "Number 7 is a number.", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    logprobs = server.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    start = next(at for at, offset in enumerate(logprobs["text_offset"]) if offset >= len("Number 7 is"))
    assert told["scores"][7] == pytest.approx(sum(logprobs["token_logprobs"][start:-1]), abs=0.02)
    assert len(told["generated"]) == 1


def _records(server: Serving) -> list[dict[str, Any]]:
    """Oldest first."""
    return server.client.get("/v1/cache/requests", params={"limit": 200}).json()["data"][::-1]

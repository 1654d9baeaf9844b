"""Replies held against the published schemas: llm-comply, which has the specifications inside, against a real server.

The demo's model answers everything that needs no sense. What does is asked of a scripted model. The acceptance suite of
Open Responses (`bin/compliance-test.ts`, which needs Bun and its repository) is here as its bodies.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from reprise.core.job import Job
from reprise.core.settings import Settings
from tests.agents.packages import python_with
from tests.api.servers import EOS, MODEL, RunningServer, running_server
from tests.chat.text_models import text_model

pytestmark = pytest.mark.agents

PACKAGES = ("llm-comply==0.5.0", "jsonschema==4.26.0")
RUN_S = 300
CLIENTS = Path(__file__).parent / "clients"

REASONING_EVENTS = (
    "reasoning in a stream has the event names of OpenAI's API (response.reasoning_text.delta), which its SDKs and "
    "Codex read; Open Responses calls them response.reasoning.delta"
)
TEXT_ONLY = "models read text only: an image in the newest question is a 400"
NO_SENSE = "the demo's model never ends a call to a tool that it was not trained for: see the scripted model"
REFUSED = {
    "image-input": TEXT_ONLY,
    "chat-image-input": TEXT_ONLY,
    "anth-image-input": TEXT_ONLY,
    "streaming-response": REASONING_EVENTS,
    "streaming-usage": REASONING_EVENTS,
    "chat-tool-calling": NO_SENSE,
    "anth-tool-calling": NO_SENSE,
}
"""The tests that fail on the demo's model, and why. All others pass without a warning."""

FORMATS = {
    "open-responses": ("gpt-5-demo", 13),
    "openai-chat": ("gpt-5-demo", 9),
    "anthropic": ("claude-opus-demo", 9),
}
"""The model for each API, whose name keeps its tests of reasoning from being skipped, and the number of tests."""
SCRIPTED = {
    "open-responses": ("tool-calling", "streaming-response", "streaming-usage"),
    "openai-chat": ("chat-tool-calling", "chat-streaming-response", "chat-streaming-usage"),
    "anthropic": ("anth-tool-calling", "anth-streaming-response", "anth-streaming-usage"),
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'


def results(url: str, model: str, api: str, *, only: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """What llm-comply says of each test, by its id."""
    command = [str(python_with("llm-comply", PACKAGES)), "-m", "llm_comply.cli", "run", "--json", "--format", api]
    command += ["--base-url", f"{url}/v1", "--api-key", "none", "--model", model]
    command += ["--filter", ",".join(only)] if only else []
    ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ran.returncode in (0, 1), ran.stderr
    return {each["id"]: each for each in json.loads(ran.stdout)["results"]}


def complaints(result: dict[str, Any]) -> list[str]:
    told = [*(result.get("errors") or ()), *(result.get("warnings") or ())]
    return told if told or result["status"] == "passed" else [result["status"]]


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo's model under two names, so that a request has to say which one it means."""
    folder = tmp_path_factory.mktemp("comply")
    names = {name for name, _ in FORMATS.values()}
    demo_model = files("reprise.lab.demo") / "model"
    tables = [f'[models.{name}]\nmodel = "{demo_model}"\n' for name in sorted(names)]
    (folder / "reprise.toml").write_text("temp = 0\nmax-tokens = 256\n" + "".join(tables))
    command = [sys.executable, "-m", "reprise.cli.main", "serve", "--config", str(folder / "reprise.toml"), "--port=0"]
    log = folder / "log"
    with log.open("w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.search(r" at (http\S+) ", process.stdout.readline())
            assert said is not None, log.read_text()
            yield said[1]
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("api", FORMATS)
def test_every_reply_has_the_form_that_the_specification_requires(demo_server: str, api: str) -> None:
    model, number = FORMATS[api]
    found = results(demo_server, model, api)
    assert len(found) == number
    told = {name: complaints(result) for name, result in found.items()}
    assert {name: said for name, said in told.items() if said and name not in REFUSED} == {}
    assert [name for name in REFUSED if name in told and not told[name]] == [], "these are refused no longer"
    by_name = [line for name, lines in told.items() if REFUSED.get(name) == REASONING_EVENTS for line in lines]
    assert set(by_name) <= {f"unknown SSE event type: response.reasoning_text.{kind}" for kind in ("delta", "done")}


def script(job: Job) -> list[int]:
    asks = "get_weather" in text_model().decode(job.prompt.tokens.tolist())
    return text_model().encode((CALL if asks else "Hello there.") + EOS)


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[RunningServer]:
    with running_server(script, settings=Settings(model=MODEL, settles=False)) as running:
        yield running


@pytest.mark.parametrize("api", SCRIPTED)
def test_calls_and_streams_of_a_model_that_does_what_it_is_asked(scripted_server: RunningServer, api: str) -> None:
    found = results(scripted_server.url, MODEL, api, only=SCRIPTED[api])
    assert {name: complaints(result) for name, result in found.items()} == {name: [] for name in SCRIPTED[api]}


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def suite_test(
    *turns: dict[str, Any],
    schema: str | None = "ResponseResource",
    endpoint: str = "/responses",
    **judged: Any,
) -> dict[str, Any]:
    """Bodies that are sent in turn, and how the replies are judged: without a schema they are errors."""
    return {"turns": turns, "schema": schema, "endpoint": endpoint, **judged}


def turn(*items: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    """A body: its items, or its text. The model's name and ids of the reply before stand for themselves."""
    (first, *_) = items
    return {"model": "$MODEL", "input": first if isinstance(first, str) else items, **fields}


ASKS = said("user", "How is the weather in Paris?")
CALLED = "response.function_call_arguments"
SUITE = {
    "basic-response": suite_test(turn(said("user", "Greet me in three words."))),
    "streaming-response": suite_test(turn(said("user", "Count to five.")), stream=True),
    "system-prompt": suite_test(turn(said("system", "Talk like a pirate."), said("user", "Greet me."))),
    "tool-calling": suite_test(turn(ASKS, tools=[WEATHER]), has="function_call"),
    "tool-calling-streaming": suite_test(
        turn(ASKS, tools=[WEATHER]),
        stream=True,
        has="function_call",
        events=["response.output_item.added", f"{CALLED}.delta", f"{CALLED}.done", "response.output_item.done"],
    ),
    "function-call-roundtrip": suite_test(
        turn("Use the tool.", tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}),
        turn(
            {"type": "function_call_output", "call_id": "$CALL", "output": '{"temperature": 18}'},
            previous_response_id="$RESPONSE",
        ),
    ),
    "multi-turn": suite_test(turn(said("user", "I am Ada."), said("assistant", "Hello!"), said("user", "Who am I?"))),
    "previous-response-id": suite_test(
        turn("Remember the word papaya."), turn("Which word?", previous_response_id="$RESPONSE")
    ),
    "assistant-phase": suite_test(
        turn(
            {**said("assistant", "I look it up."), "phase": "commentary"},
            {**said("assistant", "It is four."), "phase": "final_answer"},
            said("user", "Repeat the number."),
        )
    ),
    "compact-response": suite_test(
        turn(said("user", "We launch on Tuesday."), said("assistant", "Noted."), prompt_cache_key="launch"),
        schema="CompactResource",
        endpoint="/responses/compact",
        has="compaction",
    ),
    "compact-missing-model": suite_test(
        {"input": [said("user", "Shorten this.")]}, schema=None, endpoint="/responses/compact"
    ),
    "image-input": suite_test(turn(said("user", [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]))),
    "file-input": suite_test(turn(said("user", [{"type": "input_file", "file_data": "data:application/pdf,hi"}]))),
    "file-search": suite_test(turn("Search.", tools=[{"type": "file_search"}], tool_choice={"type": "file_search"})),
    "web-search": suite_test(turn("Search.", tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})),
}
HOSTED = "the server runs no tools of its own"
REFUSED_BY_SUITE = {
    "image-input": TEXT_ONLY,
    "file-input": "models read text only: a file in the newest question is a 400",
    "file-search": HOSTED,
    "web-search": HOSTED,
}
"""The tests of the suite that fail, and why; beside those with names in `websocket-`, for which see docs/clients.md."""


def test_the_acceptance_suite_of_open_responses(scripted_server: RunningServer) -> None:
    python, client = python_with("llm-comply", PACKAGES), CLIENTS / "open_responses_suite.py"
    ran = subprocess.run(
        [python, client, scripted_server.url, MODEL],
        input=json.dumps(SUITE),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert {name: found for name, found in told.items() if found and name not in REFUSED_BY_SUITE} == {}
    assert [name for name in REFUSED_BY_SUITE if not told[name]] == [], "these are refused no longer"

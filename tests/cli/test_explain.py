"""`reprise explain`: a request of a running server, and two request bodies without one."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reprise.cli.main import app
from tests.models.tiny import tiny_model
from tests.workloads.serving import returned, serving
from tests.workloads.talk import QUESTIONS, TOOLS, system, thoughtful, user


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    return result.exit_code, result.output


def compared(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    for name, body in (("a", first), ("b", second)):
        (folder / f"{name}.json").write_text(json.dumps(body))
    status, text = run(folder / "a.json", folder / "b.json", "--model", tiny_model("llama"), "--json")
    assert status == 0, text
    return json.loads(text)


def test_a_request_of_a_server_for_a_person() -> None:
    with serving(tiny_model("llama"), settles=False) as server:
        first = server.ask([system(), user(QUESTIONS[0])], thoughtful(0))
        history = [system(), user(QUESTIONS[0]), returned(first, has_reasoning=True), user(QUESTIONS[1])]
        second = server.ask(history, thoughtful(1))
        server.wait_until_idle()
        url = str(server.client.base_url)
        status, text = run(second.id, "--url", url)
        assert status == 0
        assert "reason: thinking stripped" in text
        assert f"{second.computed:,} computed" in text
        assert "diverged at token" in text
        assert "--restore-reasoning" in text
        assert json.loads(run(second.id, "--url", url, "--json")[1]) == server.record(second.id)
        # Without an id: the last one, and the address without its scheme.
        assert run("--url", url.removeprefix("http://")) == (0, text)
        listed = CliRunner().invoke(app, ["requests", "--url", f"{url}/v1/", "--limit", "2"])
        assert listed.exit_code == 0, listed.output
        newest, oldest = [line for line in listed.output.splitlines() if "chatcmpl-" in line]
        assert second.id in newest and first.id in oldest
        assert f"{second.computed:,}" in newest and "thinking stripped" in newest
        records = json.loads(CliRunner().invoke(app, ["requests", "--url", url, "--json"]).output)
        assert [record["id"] for record in records] == [second.id, first.id]
        status, text = run("chatcmpl-nobody", "--url", url)
        assert status == 2
        assert "There is no record of request" in text


def test_two_bodies_of_one_chat(tmp_path: Path) -> None:
    messages = [system(), user(QUESTIONS[0])]
    grown = [*messages, {"role": "assistant", "content": "Yes."}, user(QUESTIONS[1])]
    told = compared(tmp_path, {"messages": messages}, {"messages": grown})
    # The `<think>` of the generation prompt is no part of history.
    assert told["reason"] == "thinking stripped"
    assert told["first_tokens"] - 5 < told["resumable"] <= told["reused"] < told["first_tokens"]


def test_two_bodies_with_other_tools(tmp_path: Path) -> None:
    messages = [user(QUESTIONS[0])]
    told = compared(
        tmp_path,
        {"messages": messages, "tools": list(TOOLS)},
        {"messages": messages, "tools": [TOOLS[0], TOOLS[2], TOOLS[1]]},
    )
    assert told["reason"] == "tools changed"
    assert told["explanation"]["part"] == "tools"


def test_two_bodies_of_other_apis(tmp_path: Path) -> None:
    chat = {"messages": [system("Be brief."), user("Hello there.")]}
    anthropic = {"system": "Be brief.", "max_tokens": 9, "messages": [user("Hello there.")]}
    responses = {"instructions": "Be brief.", "input": "Hello there."}
    for other in (anthropic, responses):
        assert compared(tmp_path, chat, other)["reason"] == "nothing new"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "is not valid JSON"), ("[]", "expected a JSON object"), ('{"messages": 5}', "is not a request body")],
)
def test_a_file_that_is_no_request(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    status, said = run(file, file, "--model", tiny_model("llama"))
    assert status == 2
    assert sentence in said


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("{}")
    assert "--model" in run(file, file)[1]
    assert "no such directory" in run(file, file, "--model", tmp_path / "none")[1]
    status, text = run("chatcmpl-1", "--url", "http://127.0.0.1:1")
    assert status == 2
    assert "No server answers" in text


def test_a_server_that_has_answered_nothing_and_addresses_that_are_none() -> None:
    with serving(tiny_model("llama")) as server:
        url = str(server.client.base_url)
        status, text = run("--url", url)
        assert status == 2 and "not answered any requests yet" in text
        listed = CliRunner().invoke(app, ["requests", "--url", url])
        assert (listed.exit_code, listed.output) == (0, "No requests yet.\n")
        server.client.post("/chat/completions", json={"messages": "hi"})
        status, text = run("--url", url)
        assert status == 0
        assert "refused with status 400" in text and "note: POST /chat/completions" in text
    for wrong in ("ftp://host", "http://", "host:99999"):
        status, text = run("--url", wrong)
        assert status == 2 and "127.0.0.1:8080" in text

"""Sessions of well-known clients, replayed against the real loop: recorded ones, and some in their documented form.

The recorded ones come from `tests/agents` (`recording.py` says how).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.chat.answer import Answer, ToolCall
from reprise.core.job import Purpose
from tests.matrix import now_and_later
from tests.models.tiny import tiny_model
from tests.workloads.made import filled, places
from tests.workloads.serving import Serving, serving

BODIES = Path(__file__).parent / "bodies"
NAMES = sorted(path.stem for path in BODIES.glob("*.json"))
SENDS_REASONING = ["claude_code", "claude_code_2_1_330", "codex", "codex_0_169", "opencode_1_18_33", "ai_sdk_openai"]
SOME = {"claude_code_2_1_330", "codex_0_169", "ollama"}
"""Short sessions of several APIs; with `make test-all` the others and earlier versions too."""
# A template may close an empty thought where the generation prompt opened one.
SLACK = 6


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(tiny_model("qwen3_5"), settles=False, accepts_any_model=True) as made:
        yield made


def session(name: str) -> dict[str, Any]:
    return json.loads((BODIES / f"{name}.json").read_text(encoding="utf-8"))


def answer_of(given: dict[str, Any]) -> Answer:
    calls = [
        ToolCall(id=f"call_{at}", name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False))
        for at, call in enumerate(given["calls"])
    ]
    return Answer(content=given["content"], reasoning=given["reasoning"], tool_calls=tuple(calls))


def num_messages(request: dict[str, Any]) -> int:
    return len(request.get("messages") or request["input"])


@pytest.mark.parametrize("name", now_and_later(sorted(SOME), sorted({*NAMES} - SOME)))
def test_a_session_computes_only_what_is_new(name: str, served: Serving):
    given = session(name)
    notes: set[str] = set()
    made: dict[str, str] = {}
    before = None
    for number, (request, answer) in enumerate(zip(given["requests"], given["answers"], strict=True)):
        served.answer = answer_of(answer)
        response = served.client.post(given["path"], json=json.loads(filled(json.dumps(request), made)))
        made |= places(number, response.text)
        assert response.status_code == 200, response.text
        assert not any(word in response.text for word in ("event: error", "response.failed", '"error":{')), (
            response.text
        )
        (*_, last) = served.engine.of(Purpose.GENERATE)
        # The first request of a chat may share a few words with another's, where nobody takes a snapshot.
        is_first = number == 0 or num_messages(request) <= num_messages(given["requests"][number - 1])
        assert is_first or last.outcome.num_prefilled <= last.oracle + SLACK, last.outcome
        if number == 1 and name in SENDS_REASONING:
            # All of the answer is found again, the call in it too.
            assert before is not None
            assert last.outcome.num_reused >= len(before.job.prompt) + len(before.generated) - SLACK
        before = last
        notes |= set(served.record(response.headers["x-request-id"])["notes"])
    for expected in given["notes"]:
        assert any(expected in note for note in notes), (expected, notes)


@pytest.mark.parametrize("name", ["ai_sdk_chat", "langchain", "ollama", "openai_agents_chat"])
def test_who_does_not_send_reasoning_back(name: str):
    """`docs/clients.md` names them: their second requests compute the call again."""
    given = session(name)
    assert given["answers"][0]["reasoning"] not in json.dumps(given["requests"])


@pytest.mark.parametrize("path", sorted(BODIES.rglob("*.json")), ids=lambda path: str(path.relative_to(BODIES)))
def test_nothing_personal_is_in_a_session(path: Path):
    text = path.read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "/tmp/" not in text
    assert "/root" not in text
    assert "@" not in text
    # browser-use sends a schema of 13 kB with each request.
    assert len(json.dumps(json.loads(text))) < (70_000 if "browser_use" in path.name else 20_000)

"""Sessions of well-known clients, in their documented form, replayed against the real loop."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.chat.answer import Answer, ToolCall
from reprise.core.job import Purpose
from tests.models.tiny import tiny_model
from tests.workloads.serving import Serving, serving

BODIES = Path(__file__).parent / "bodies"
NAMES = sorted(path.stem for path in BODIES.glob("*.json"))
# A template may close an empty thought where the generation prompt opened one.
SLACK = 6
FAILURES = ("event: error", "response.failed", '"error":{')


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


@pytest.mark.parametrize("name", NAMES)
def test_a_session_computes_only_what_is_new(name: str, served: Serving):
    given = session(name)
    notes: set[str] = set()
    for number, (request, answer) in enumerate(zip(given["requests"], given["answers"], strict=True)):
        served.answer = answer_of(answer)
        response = served.client.post(given["path"], json=request)
        assert response.status_code == 200, response.text
        assert not any(word in response.text for word in ("event: error", "response.failed", '"error":{')), (
            response.text
        )
        (*_, last) = served.engine.of(Purpose.GENERATE)
        # The first request may share a few words with another client's, where nobody takes a snapshot.
        assert number == 0 or last.outcome.prefilled <= last.oracle + SLACK, last.outcome
        notes |= set(served.record(response.headers["x-request-id"])["notes"])
    for expected in given["notes"]:
        assert any(expected in note for note in notes), (expected, notes)


@pytest.mark.parametrize("name", ["claude_code", "codex"])
def test_a_tool_loop_goes_on_where_the_answer_ended(name: str, served: Serving):
    given = session(name)
    jobs = []
    for request, answer in zip(given["requests"][:2], given["answers"], strict=False):
        served.answer = answer_of(answer)
        served.client.post(given["path"], json=request)
        jobs.append(served.engine.of(Purpose.GENERATE)[-1])
    first, second = jobs
    assert second.outcome.reused >= len(first.job.prompt) + len(first.generated) - SLACK


@pytest.mark.parametrize("name", NAMES)
def test_nothing_personal_is_in_a_session(name: str):
    text = (BODIES / f"{name}.json").read_text(encoding="utf-8")
    assert "/home/" not in text
    assert "@" not in text
    assert len(text) < 20_000

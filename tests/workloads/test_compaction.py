"""After a chat was summarised the next turn is warm: real agents' requests, recorded, with other summaries."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from reprise.chat.answer import Answer
from reprise.core.job import Purpose
from reprise.core.sizes import Bytes
from tests.models.tiny import tiny_model
from tests.workloads.serving import serving

RECORDED = Path(__file__).parent / "compactions"
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))
SUMMARY = "<analysis>\nThe user asked about the file a.txt and some more.\n</analysis>\n\n<summary>\n{}\n</summary>"
SLACK = 8
"""The generation prompt, and the token that starts the decode."""
WORDS = [
    "the",
    "parser",
    "fails",
    "on",
    "empty",
    "input",
    "and",
    "the",
    "tests",
    "in",
    "the",
    "folder",
    "were",
    "not",
    "run",
    "since",
    "then",
]


def summary(number: int) -> str:
    """Another text for every summary, of some length."""
    lines = [f"{line}. {' '.join(WORDS[(line * number) % 7 :])} ({number})" for line in range(1, 5)]
    return "\n".join(lines)


def questions(request: dict[str, Any]) -> str:
    """What the user said last."""
    users = [m for m in request.get("messages") or request["input"] if m.get("role") == "user"]
    content = users[-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def replay(
    name: str, architecture: str, *, start: int = 0, stop: int | None = None, **settings: Any
) -> list[tuple[int, int]]:
    """For each request after a summary: the tokens that were computed, and those that nobody could know.

    Of the recorded requests those from `start` to `stop`.
    """
    given = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    found: list[tuple[int, int]] = []
    num_summaries = given["answers"][:start].count("summary")
    with serving(tiny_model(architecture), accepts_any_model=True, **settings) as served:
        was_summary = False
        for kind, body in list(zip(given["answers"], given["requests"], strict=True))[start:stop]:
            told = SUMMARY.format(summary(num_summaries + 1)) if kind == "summary" else "It says hello."
            served.answer = Answer(content=told, reasoning="Let me see.")
            request = json.loads(json.dumps(body).replace("{summary}", json.dumps(summary(num_summaries))[1:-1]))
            response = served.client.post(given["path"], json=request)
            assert response.status_code == 200, response.text
            served.wait_until_idle()
            (*_, last) = served.engine.of(Purpose.GENERATE)
            if was_summary:
                prompt = served.service.served.text.decode(last.job.prompt.tokens)
                new = prompt[prompt.rfind(questions(request)) :]
                found.append((last.outcome.num_prefilled, len(served.service.served.text.encode(new))))
            was_summary = kind == "summary"
            num_summaries += was_summary
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "architecture"), list(zip(NAMES, itertools.cycle(["qwen3_5", "llama"]), strict=False))
)
def test_what_follows_a_summary_is_computed_before_it_is_asked(name: str, architecture: str) -> None:
    first, *later = replay(name, architecture)
    computed, new = later[-1]
    assert computed <= new + SLACK
    # The first time nobody can know.
    assert first[0] - first[1] > 150


@pytest.mark.matrix
def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    """The first summary that a new server is asked for is followed as the last server's were."""
    name = NAMES[0]
    answers = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))["answers"]
    *_, last = (at for at, kind in enumerate(answers) if kind == "summary")
    disk: dict[str, Any] = {"disk_directory": str(tmp_path), "disk_bytes": Bytes(10**9)}
    replay(name, "llama", stop=last, **disk)
    (note,) = tmp_path.glob("*/notes/*.json")
    assert note.stat().st_mode & 0o777 == 0o600
    ((computed, new),) = replay(name, "llama", start=last - 1, stop=last + 2, **disk)
    assert computed <= new + SLACK

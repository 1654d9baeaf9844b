"""ARCHITECTURE.md tells of one request in ten calls: they are made, in that order."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import reprise
from tests.api.real_server import real_server

_ROOT = Path(__file__).parents[2]
_SOURCE = str(Path(reprise.__file__).parent)


@contextmanager
def calls_seen() -> Iterator[list[str]]:
    """The functions of the source that threads which start in this block enter, by their qualified names."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCE):
            seen.append(frame.f_code.co_qualname)

    threading.setprofile(note)
    try:
        yield seen
    finally:
        threading.setprofile(sys.getprofile())


def points() -> list[list[str]]:
    """The functions that each point of the list names."""
    text = (_ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    told = text.partition("## One request, ten calls")[2].partition("\n## ")[0]
    _, *found = re.split(r"^\d+\. ", told, flags=re.MULTILINE)
    return [re.findall(r"`((?:[A-Z]\w+\.)?[a-z_]+)`", point) for point in found]


def test_a_turn_makes_the_ten_calls_in_order() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cat?"}]
    body: dict[str, Any] = {"messages": chat, "max_tokens": 8, "temperature": 0}
    with calls_seen() as seen, real_server("qwen3_5", settles=False) as client:
        answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        chat += [answer, {"role": "user", "content": "And a dog?"}]
        num_before = len(seen)
        client.post("/v1/chat/completions", json=body).raise_for_status()
        turn = seen[num_before:]
    told = points()
    assert len(told) == 10
    functions = {*turn, *(name.rpartition(".")[2] for name in turn)}
    assert [name for point in told for name in point if name not in functions] == []
    # Each behind the one before: the engine thread may still be tidying up behind the turn before.
    rest = iter(turn)
    assert [point[0] for point in told if point and point[0] not in rest] == []

"""What a reader meets: lines and classes of the source; files, functions and changes of file that one turn runs.

    python -m bench.needles

Counts the second turn of a chat on the tiny hybrid, 12 tokens sampled, from the request's first byte to the reply's
last. Lines and classes are exact; a turn's counts vary by what the engine does between two steps.
"""

import ast
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

import reprise
from bench.tiny.build import build_model
from reprise.api.http.listening import listen
from reprise.cli.engines import run_server
from reprise.core.settings import Settings

SOURCE = Path(reprise.__file__).parent
WINGS = ("lab", "cluster")
_ENGINE = "reprise-engine"
_TOKENS = 12


def sizes() -> Mapping[str, int]:
    """Lines, lines without the wings, files and classes of the source."""
    found = Counter[str]()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        num_lines = len(text.splitlines())
        is_wing = file.relative_to(SOURCE).parts[0] in WINGS
        found["lines"] += num_lines
        found["lines without wings"] += 0 if is_wing else num_lines
        found["files"] += 1
        found["classes"] += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(text)))
    return found


class CountedCalls:
    """The calls of the package's functions on all threads, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self._called: set[CodeType] = set()
        self._last = ""
        self._num_changes = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile function of each thread."""
        if event != "call" or not self.is_on or not frame.f_code.co_filename.startswith(str(SOURCE)):
            return
        self._called.add(frame.f_code)
        if threading.current_thread().name == _ENGINE:
            self._num_changes += frame.f_code.co_filename != self._last
            self._last = frame.f_code.co_filename

    def counts(self) -> Mapping[str, int]:
        return {
            "files a turn": len({code.co_filename for code in self._called}),
            "functions a turn": len(self._called),
            "changes of file on the engine thread": self._num_changes,
        }


def _chat(url: str, calls: CountedCalls) -> None:
    messages: list[dict[str, Any]] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for turn in range(2):
            messages.append({"role": "user", "content": f"Name {turn + 2} things that are blue, please."})
            calls.is_on = turn == 1
            body = {"messages": messages, "max_tokens": _TOKENS, "temperature": 0.0}
            reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            calls.is_on = False
            messages.append(reply["choices"][0]["message"])


def main() -> None:
    calls = CountedCalls()
    threading.setprofile(calls.note)
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder, "model"))
        listener = listen("127.0.0.1", 0)

        def ask() -> None:
            try:
                _chat(f"http://127.0.0.1:{listener.getsockname()[1]}", calls)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

        sys.setprofile(calls.note)
        threading.Thread(target=ask).start()
        run_server(Settings(model=str(Path(folder, "model")), disk_directory=str(Path(folder, "disk"))), listener, None)
        sys.setprofile(None)
    for name, number in {**sizes(), **calls.counts()}.items():
        print(f"{number:7,}  {name}")


if __name__ == "__main__":
    sys.exit(main())

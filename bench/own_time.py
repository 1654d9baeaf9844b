"""Processor time of the server process per request of a growing chat on the demo's model, and of mlx-lm's.

    python -m bench.own_time [--beside OTHER_CHECKOUT] [--turns 12] [--rounds 4]

On a model of no size almost all of it is the server's own work. All servers are up together and take turns, so that
whatever else the machine does falls on each. Reports medians over the chats, and our time by thread where the system
has it (Linux).
"""

import argparse
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from bench.streams import prose
from reprise.lab.bench.server_process import ServerProcess, free_port, mlx_lm_command, reprise_command

MODEL_DIR = Path(str(files("reprise.lab.demo") / "model"))

_WORDS = 40
"""Of each user message."""
_TOKENS = 16
"""Of each answer."""


@dataclass(slots=True)
class OwnTimeSide:
    """A server, and what its chats took per request, in ms."""

    name: str
    server: ServerProcess
    took_ms: list[float] = field(default_factory=list[float])
    by_thread_ms: dict[str, float] = field(default_factory=dict[str, float])

    def measure(self, seed: int, turns: int) -> None:
        process = psutil.Process(self.server.pid)
        before_s, threads_before = _cpu_s(process), _thread_s(self.server.pid)
        chat(self.server.url, seed, turns)
        self.took_ms.append(1000 * (_cpu_s(process) - before_s) / turns)
        for thread, now_s in _thread_s(self.server.pid).items():
            spent_ms = 1000 * (now_s - threads_before.get(thread, 0.0)) / turns
            self.by_thread_ms[thread] = self.by_thread_ms.get(thread, 0.0) + spent_ms


def chat(url: str, seed: int, turns: int) -> None:
    """One growing chat, streamed; every answer is sampled."""
    messages: list[dict[str, Any]] = []
    with httpx.Client(base_url=url, timeout=120.0) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": prose(1000 * seed + turn, _WORDS)})
            body = {"messages": messages, "stream": True, "max_tokens": _TOKENS, "temperature": 1.0, "seed": turn}
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                chunks = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
            deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
            messages.append({"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)})


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _thread_s(pid: int) -> dict[str, float]:
    """Processor time by thread ("name id"); nothing where the system does not say."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # A thread may end meanwhile.
        with suppress(OSError):
            name = (task / "comm").read_text(encoding="utf-8").strip()
            # Nanoseconds on a processor, waiting for one, and how often.
            found[f"{name} {task.name}"] = int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9
    return found


@contextmanager
def _source(checkout: Path) -> Generator[None]:
    """Processes that are started meanwhile import this checkout's package."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(checkout / "src")
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _sides(stack: ExitStack, beside: Path | None) -> Sequence[OwnTimeSide]:
    checkouts = {"reprise": Path(__file__).parent.parent} | ({} if beside is None else {"beside": beside})
    sides: list[OwnTimeSide] = []
    for name, checkout in checkouts.items():
        with _source(checkout):
            command = reprise_command(MODEL_DIR, "--no-settle", "--no-audit")
            sides.append(OwnTimeSide(name, stack.enter_context(ServerProcess(command))))
    port = free_port()
    rival = ServerProcess(mlx_lm_command(MODEL_DIR, port), url=f"http://127.0.0.1:{port}")
    return [*sides, OwnTimeSide("mlx-lm", stack.enter_context(rival))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout of this project, measured in the same run")
    parser.add_argument("--turns", type=int, default=12, help="of each chat (default: 12)")
    parser.add_argument("--rounds", type=int, default=4, help="chats with each server (default: 4)")
    options = parser.parse_args()
    with ExitStack() as stack:
        sides = _sides(stack, options.beside)
        for side in sides:
            chat(side.server.url, 10**6, 4)
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.measure(number, options.turns)
        for side in sides:
            print(f"{side.name:8} {median(side.took_ms):6.1f} ms a request   ({min(side.took_ms):.1f} at least)")
            busiest = sorted(side.by_thread_ms.items(), key=lambda item: -item[1])[:5]
            print("         " + ", ".join(f"{name} {ms / options.rounds:.1f}" for name, ms in busiest))


if __name__ == "__main__":
    sys.exit(main())

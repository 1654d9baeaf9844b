"""Processor time of the server process per request of a growing chat on the demo's model, and of mlx-lm's.

    python -m bench.own_time [--beside OTHER_CHECKOUT] [--turns 12] [--rounds 4]
    python -m bench.own_time --long [--turns 12]

On a model of no size almost all of it is the server's own work. All servers are up together and take turns, so that
whatever else the machine does falls on each. Reports medians over the chats, and our time by thread where the system
has it (Linux).

`--long`: instead, what one server's records say of warm turns of a chat of 160 messages and about 96,000 tokens: the
time to render a turn and in the queue, before its prefill begins (goal on two idle cores: 25 ms together).
"""

import argparse
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from bench.streams import prose
from bench.tiny.build import QWEN3_5, build_model
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
        with self.noted(turns):
            chat(self.server.url, seed, turns)

    @contextmanager
    def noted(self, turns: int) -> Generator[None]:
        """Note the processor time of so many turns."""
        process = psutil.Process(self.server.pid)
        before_s, threads_before = _cpu_s(process), _thread_s(self.server.pid)
        yield
        self.took_ms.append(1000 * (_cpu_s(process) - before_s) / turns)
        for thread, now_s in _thread_s(self.server.pid).items():
            spent_ms = 1000 * (now_s - threads_before.get(thread, 0.0)) / turns
            self.by_thread_ms[thread] = self.by_thread_ms.get(thread, 0.0) + spent_ms

    def busiest(self, rounds: int) -> str:
        """The threads with the most processor time, in ms."""
        busiest = sorted(self.by_thread_ms.items(), key=lambda item: -item[1])[:5]
        return ", ".join(f"{name} {ms / rounds:.1f}" for name, ms in busiest)


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


_MESSAGES = 160
_LONG_WORDS = 385
"""Of each message: about 600 tokens."""


def long_chat(num_turns: int) -> None:
    """Warm turns of one long chat: times by the server's own records, and processor time by thread."""
    messages: list[dict[str, Any]] = [
        {"role": "assistant" if number % 2 else "user", "content": prose(number, _LONG_WORDS)}
        for number in range(_MESSAGES)
    ]
    # One head: the first turn computes all of the prompt.
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 1 << 18}
    spans: list[dict[str, float]] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        build_model(Path(folder), {**QWEN3_5, "text_config": {**QWEN3_5["text_config"], **small}})
        server = stack.enter_context(ServerProcess(reprise_command(Path(folder), "--no-settle", "--no-audit")))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=1200.0))
        side = OwnTimeSide("reprise", server)
        for turn in range(num_turns + 1):
            messages.append({"role": "user", "content": prose(1000 + turn, _WORDS)})
            body = {"messages": messages, "max_tokens": _TOKENS}
            with side.noted(1) if turn > 0 else nullcontext():
                reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            messages.append(reply["choices"][0]["message"])
            record = client.get(f"/v1/cache/requests/{reply['id']}").raise_for_status().json()
            spans.append(record["spans"])
            print(f"{record['prompt_tokens']:,} tokens, {record['reused']:,} reused: {record['spans']}", flush=True)
    own_ms = [1000 * (each["render"] + each["queue"]) for each in spans[1:]]
    rendered_ms = median(1000 * each["render"] for each in spans[1:])
    print(f"{median(own_ms):.1f} ms a warm turn ({min(own_ms):.1f} at least), of which {rendered_ms:.1f} to render it")
    print(f"processor time of a turn: {side.busiest(num_turns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout of this project, measured in the same run")
    parser.add_argument("--turns", type=int, default=12, help="of each chat (default: 12)")
    parser.add_argument("--rounds", type=int, default=4, help="chats with each server (default: 4)")
    parser.add_argument("--long", action="store_true", help="warm turns of one long chat, by the server's records")
    options = parser.parse_args()
    if options.long:
        long_chat(options.turns)
        return
    with ExitStack() as stack:
        sides = _sides(stack, options.beside)
        for side in sides:
            chat(side.server.url, 10**6, 4)
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.measure(number, options.turns)
        for side in sides:
            print(f"{side.name:8} {median(side.took_ms):6.1f} ms a request   ({min(side.took_ms):.1f} at least)")
            print(f"         {side.busiest(options.rounds)}")


if __name__ == "__main__":
    sys.exit(main())

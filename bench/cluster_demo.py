"""Two replicas behind a gateway, many chats at once, and one replica killed in the middle: `make cluster-demo`.

The same chats are held with one server that nobody kills, with two replicas that share a cache directory, and with two
that do not. The gateway is Shepherd Model Gateway (`smg` on PyPI), which keeps a chat on the replica of its last turn.
"""

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.fact_chats import random_chat
from reprise.lab.bench.client import ClientReply, Post, Refused, Unreachable, send
from reprise.lab.bench.server_process import ServerProcess, free_port, reprise_command
from reprise.lab.demo.client import DemoFailed
from reprise.lab.demo.facts import FactExchange
from reprise.lab.demo.turns import OPENING, History, request_body

NUM_CHATS, NUM_TURNS = 8, 24
NUM_TRIES = 30
READ_S = 4.0
"""For so long all users read before the kill. What a turn computed is on disk two seconds after it."""

_READY_S = 90.0


@dataclass(slots=True, eq=False)
class _DemoChat:
    """One user's chat so far."""

    exchanges: Sequence[FactExchange]
    history: History = OPENING
    answers: list[str] = field(default_factory=list[str])
    num_computed: list[int] = field(default_factory=list[int])
    """Prompt tokens, by turn."""
    num_lost: int = 0
    """Answers that broke off, and were asked for again."""

    def ask(self, client: httpx.Client, turn: int) -> None:
        """The next turn, again and again until there is an answer."""
        asked = (*self.history, {"role": "user", "content": self.exchanges[turn].user})
        for _ in range(NUM_TRIES):
            reply = _reply_of(client, asked)
            if reply is not None and reply.num_computed is not None:
                message = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning}
                self.history = (*asked, message)
                self.answers.append(reply.content)
                self.num_computed.append(reply.num_computed)
                return
            self.num_lost += 1
            time.sleep(0.5)
        raise DemoFailed("No replica answers any more.")


def _reply_of(client: httpx.Client, history: History) -> ClientReply | None:
    body: dict[str, Any] = {**request_body(history), "model": "model", "logprobs": False}
    del body["tools"]
    with suppress(Refused, Unreachable):
        return send(client, Post(body=body))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """What came of all chats."""

    name: str
    num_answers: int
    num_right: int
    num_lost: int
    num_computed: int
    """Prompt tokens, of all turns."""
    num_computed_then: int
    """Those of the turn in which the replica was killed."""


def hold_all(smg: str, *, num_chats: int, num_turns: int) -> list[ClusterRun]:
    """One server; two replicas that share a directory, one of which dies; two that do not. Raises ServerFailed."""
    with ExitStack() as stack:
        model = stack.enter_context(as_file(files("reprise.lab.demo") / "model"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reprise-cluster-")))

        def hold(name: str, num_replicas: int, options: Callable[[int], Sequence[str]]) -> ClusterRun:
            with ExitStack() as servers:
                replicas = [ServerProcess(replica_command(model, *options(number))) for number in range(num_replicas)]
                for replica in replicas:
                    servers.callback(replica.stop)
                url = replicas[0].url if num_replicas == 1 else servers.enter_context(start_gateway(smg, replicas)).url
                chats = [_DemoChat(random_chat(Random(seed), num_turns, has_tool=False)) for seed in range(num_chats)]
                with httpx.Client(base_url=url, timeout=60.0) as client:
                    hold_chats(chats, client, victim=replicas[-1] if num_replicas > 1 else None)
                return _run_of(name, chats)

        shared = ("--disk-cache", str(folder / "shared"))
        return [
            hold("one server, not killed", 1, lambda number: ()),
            hold("two replicas, one cache directory", 2, lambda number: shared),
            hold("two replicas, separate caches", 2, lambda number: ()),
        ]


def replica_command(model: Path, *options: str) -> tuple[str, ...]:
    """Serves the demo's model."""
    # Without settling, or the counts would depend on how long a server was idle between two turns.
    return reprise_command(model, "--no-settle", *options)


def start_gateway(smg: str, replicas: Sequence[ServerProcess]) -> ServerProcess:
    """The gateway, once it has all replicas."""
    port = free_port()
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(replica.url for replica in replicas), "--policy", "cache_aware"]
    # A few chats are to be spread, too; by default only dozens of requests count as an imbalance.
    command += ["--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1"]
    command += ["--health-check-endpoint", "/health/ready", "--health-check-interval-secs", "1"]
    command += ["--health-failure-threshold", "1", "--worker-startup-check-interval", "1"]
    gateway = ServerProcess(command, url=f"http://127.0.0.1:{port}")
    deadline_s = time.monotonic() + _READY_S
    while httpx.get(f"{gateway.url}/workers").json()["total"] < len(replicas):
        if time.monotonic() > deadline_s:
            gateway.stop()
            raise DemoFailed("The gateway does not find its replicas.")
        time.sleep(0.2)
    return gateway


def hold_chats(chats: Sequence[_DemoChat], client: httpx.Client, *, victim: ServerProcess | None) -> None:
    """Every turn of all chats at once; halfway the victim is killed while it answers."""
    num_turns = len(chats[0].exchanges)
    with ThreadPoolExecutor(len(chats)) as pool:
        for turn in range(num_turns):
            if turn == _kill_at(num_turns):
                time.sleep(READ_S)
                if victim is not None:
                    threading.Timer(0.1, victim.kill).start()
            asked = [pool.submit(chat.ask, client, turn) for chat in chats]
            for each in asked:
                each.result()


def _kill_at(num_turns: int) -> int:
    return num_turns * 2 // 3


def _run_of(name: str, chats: Sequence[_DemoChat]) -> ClusterRun:
    pairs = [(told.answer, given) for chat in chats for told, given in zip(chat.exchanges, chat.answers, strict=True)]
    kill_at = _kill_at(len(chats[0].exchanges))
    return ClusterRun(
        name=name,
        num_answers=len(pairs),
        num_right=sum(right == given for right, given in pairs),
        num_lost=sum(chat.num_lost for chat in chats),
        num_computed=sum(sum(chat.num_computed) for chat in chats),
        num_computed_then=sum(chat.num_computed[kill_at] for chat in chats),
    )


def main() -> None:
    """Hold the chats and print the table."""
    smg = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    if smg is None:
        raise SystemExit("The gateway is missing. Install it with: pip install smg")
    table = Table(title=f"{NUM_CHATS} chats of {NUM_TURNS} turns; one of two replicas is killed")
    for column in ("", "answers", "right", "asked again", "tokens computed", "in the kill's turn"):
        table.add_column(column, justify="right" if column else "left")
    for run in hold_all(smg, num_chats=NUM_CHATS, num_turns=NUM_TURNS):
        numbers = (run.num_answers, run.num_right, run.num_lost, run.num_computed, run.num_computed_then)
        table.add_row(run.name, *(f"{number:,}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()

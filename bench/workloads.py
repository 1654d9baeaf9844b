"""Tokens computed while a user waits, over HTTP, against an oracle that remembers every state. The counts are exact.

    python -m bench.workloads [--layers qwen3_5 --layers gemma3_text …]

Tiny models with random weights on the real server, one for each kind of layers; what they say is given to them. Prints
a table, and ends with status 1 if a bound is broken. The settling chat has idle time between its turns, the rest none.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.tiny.build import build_model
from reprise.lab.demo.oracle import Oracle
from tests.models.tiny import CONFIGS
from tests.workloads import plays
from tests.workloads.conftest import LAYERS
from tests.workloads.serving import HttpTurn, Serving, serving
from tests.workloads.talk import whole_prose


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRow:
    """A workload that was held. `against`: what `most` is a multiple of, in tokens; `allowed` on top of it."""

    workload: str
    turns: list[HttpTurn]
    against: int
    most: float
    allowed: int = 0
    settled: int = 0

    @property
    def computed(self) -> int:
        return sum(turn.computed for turn in self.turns)

    @property
    def is_within(self) -> bool:
        return self.computed <= self.most * self.against + self.allowed


def against_oracle(workload: str, turns: list[HttpTurn], most: float, *, allowed: int = 0) -> WorkloadRow:
    return WorkloadRow(workload=workload, turns=turns, against=sum(t.oracle for t in turns), most=most, allowed=allowed)


def forget(server: Serving) -> None:
    """Begin as if nothing had been asked."""
    server.wait_until_idle()
    server.engine.clear()
    server.engine.served.clear()
    server.engine.oracle = Oracle()


def settling_rows(model: Path) -> Iterator[WorkloadRow]:
    with serving(model) as server:
        messages, turns = plays.chat(server, 40, waits=True)
        yield WorkloadRow(
            workload="forty turns, thinking stripped, settling",
            turns=turns,
            against=plays.unknown_tokens(server, messages),
            most=1.1,
            settled=server.health()["settled"],
        )


def rows(model: Path) -> Iterator[WorkloadRow]:
    """Every workload of a server that does not settle."""
    with serving(model, settles=False) as server:
        _, turns = plays.chat(server, 40)
        yield against_oracle("forty turns, thinking stripped", turns, 1.02)
        held: list[tuple[str, Callable[[], list[HttpTurn]], float]] = [
            ("20 tool calls, then a message; reasoning returned", lambda: agent(server, has_reasoning=True), 1.05),
            ("20 tool calls, then a message; reasoning dropped", lambda: agent(server, has_reasoning=False), 1.05),
            ("ten users, one system prompt", lambda: plays.one_system_prompt(server), 1.02),
            ("ten users, tools and no system prompt", lambda: plays.tools_alone(server), 1.02),
            ("one document, from the third question on", lambda: document(server), 1.05),
        ]
        for workload, hold, most in held:
            forget(server)
            yield against_oracle(workload, hold(), most)
        forget(server)
        messages, turns = plays.chat(server, 20)
        yield against_oracle("regenerate", plays.regenerated(server, messages), 1.02)
        yield against_oracle("edit the last message", plays.edited_last(server, messages), 1.02)
        for at in (15, 8, 0):
            edited = [plays.edited_earlier(server, messages, at)]
            yield against_oracle(f"edit message {at + 1} of 20", edited, 1.0, allowed=plays.spacing(turns))


def agent(server: Serving, *, has_reasoning: bool) -> list[HttpTurn]:
    return plays.agent(server, 20, has_reasoning=has_reasoning)


def document(server: Serving) -> list[HttpTurn]:
    return plays.one_document(server, whole_prose())[2:]


def shown(row: WorkloadRow) -> str:
    share = row.computed / row.against
    bound = f"{row.most:.2f}" + (f" + {row.allowed}" if row.allowed > 0 else "")
    return (
        f"  {row.workload:50} {len(row.turns):4} {sum(t.prompt for t in row.turns):9,} {row.computed:8,}"
        f" {row.against:8,} {share:7.3f}  {bound:10} {row.settled:7,} {'' if row.is_within else 'BROKEN'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", action="append", choices=LAYERS, help="one kind of model; all if not given")
    chosen = parser.parse_args().layers or LAYERS
    is_within = True
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        for name in chosen:
            model = Path(folder) / name
            build_model(model, CONFIGS[name], vocab_size=512)
            started = time.perf_counter()
            print(
                f"{name}\n"
                f"  {'':50} {'asks':>4} {'prompt':>9} {'on path':>8} {'against':>8} {'ratio':>7}  bound      idle"
            )
            for row in (*settling_rows(model), *rows(model)):
                print(shown(row), flush=True)
                is_within = is_within and row.is_within
            print(f"  {time.perf_counter() - started:.0f} s")
    if not is_within:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

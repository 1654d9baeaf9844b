"""Decode speed with drafts against the same without, on what agents and chats write: ratios of one run.

    python -m bench.drafts [--model qwen3_5] [--hidden 512] [--rounds 3] [--together 2]

The model's weights are random, so a grammar that allows one text alone makes it write what an agent would: a file of
200 lines with some edits, tool calls like those before, an answer once more, and chat that repeats nothing. Every token
is computed and verified as always. Both sides run in one process and take turns.

Beside each ratio: the same by processor time, which other programs disturb less; and what drafts could bring at best
with the pass costs measured here, if all text that was written before were drafted in passes of the best sizes.

With `--together`, so many requests of a kind are answered at once, each of a chat of its own. Their drafts are verified
in one pass, with the sizes and costs that a trial found.

    python -m bench.drafts --replay [tau_bench_gpt4o_airline.json] [--dialogues 40] [--recurrent]

counts instead, without a model and for passes of fixed costs: passes, drafted and accepted tokens of the same
workloads, of chats as the demo's model answers them, and of recorded agent sessions.
"""

import argparse
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.draft_replay import ReplayTurn, WrittenRuns, least_cost, show, workloads
from bench.rivals import MODELS
from bench.tiny.build import build_model
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Sampling
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import PassCosts
from reprise.loop import EngineClient
from reprise.loop.worker import Worker

LEAST = {"edit": 2.0, "tools": 2.0, "again": 2.0, "chat": 0.98}
"""What the ratio is to reach."""

_ids = itertools.count()


class Script:
    """A grammar that allows one text alone."""

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self._rest = iter(text)
        self._next = next(self._rest)
        self._size = vocab_size

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        mask = np.zeros(-(-self._size // 32), dtype=np.uint32)
        mask[self._next // 32] = np.uint32(1) << np.uint32(self._next % 32)
        return mask

    def accept(self, token: int) -> None:
        assert token == self._next
        self._next = next(self._rest, 0)


class DraftSide:
    """An engine with or without drafts."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.loop = EngineClient(Settings(model=str(path), **options))
        self.vocab_size = self.loop.start().vocab_size

    def run(self, *turns: ReplayTurn) -> tuple[float, float, list[Finished]]:
        """Tokens behind the first one per second and per second of the processor, of all turns at once; their ends."""
        ended = threading.Event()
        times: list[float] = []
        worked: list[float] = []
        ends: list[Finished] = []

        def hear(event: Event) -> None:
            if isinstance(event, Sampled):
                times.append(time.perf_counter())
                worked.append(time.process_time())
            if isinstance(event, Finished):
                ends.append(event)
                if len(ends) == len(turns):
                    ended.set()

        for turn in turns:
            job = Job(
                id=f"job-{next(_ids)}",
                prompt=Prompt(tokens=as_tokens(turn.prompt)),
                max_tokens=len(turn.answer),
                sampling=Sampling(temperature=0),
                constraint=lambda turn=turn: Script(turn.answer, self.vocab_size),
            )
            self.loop.submit(job, hear)
        ended.wait()
        assert all(end.error is None for end in ends), ends
        num = len(times) - 1
        return num / (times[-1] - times[0]), num / (worked[-1] - worked[0]), ends

    def wait_until_tried(self) -> None:
        """Wait for the trial that says which passes may verify drafts, and print what it found."""
        found: list[str | None] = []

        def read(worker: Worker) -> None:
            found[:] = [worker.drafting] if worker.is_tried else []

        while not found:
            time.sleep(1)
            self.loop._ask(read).result()  # pyright: ignore[reportPrivateUsage]
        print("drafts:", found[0], flush=True)

    def costs(self) -> PassCosts:
        """The measured costs of passes."""
        costs: list[PassCosts] = []

        def read(worker: Worker) -> None:
            assert worker.drafts is not None
            costs.append(worker.drafts.costs)

        self.loop._ask(read).result()  # pyright: ignore[reportPrivateUsage]
        return costs[0]


def at_best(turns: Sequence[ReplayTurn], costs: Sequence[float]) -> float:
    """The ratio of an oracle on the last answer. `costs`: see `least_cost`."""
    said = WrittenRuns()
    *_, repeated = [said.repeated(turn) for turn in turns]
    return len(repeated) / least_cost(repeated, costs)


@contextmanager
def sides(name: str, hidden: int, *, is_tried: bool) -> Generator[tuple[DraftSide, DraftSide]]:
    """With drafts and without. `is_tried`: with the passes that a trial found, not with any."""
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        config = dict(MODELS[name])
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 4}
        config |= {"text_config": {**config["text_config"], **sizes}} if "text_config" in config else sizes
        build_model(Path(folder), config)
        # A busy machine does not put the trial off.
        mode = {"drafts": "auto", "background": "never"} if is_tried else {"drafts": "always"}
        pair = DraftSide(Path(folder), **mode), DraftSide(Path(folder), drafts="off")
        try:
            yield pair
        finally:
            for side in pair:
                side.loop.close(timeout_s=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3_5")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size: the larger, the more a pass costs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, default=1, help="requests that are answered at once")
    parser.add_argument("--replay", type=Path, nargs="?", const=Path(), help="count; with a file of recorded sessions")
    parser.add_argument("--dialogues", type=int, default=40, help="how many of them are replayed, from the first on")
    parser.add_argument("--recurrent", action="store_true", help="replay a model whose layers cannot drop tokens")
    options = parser.parse_args()
    if options.replay is not None:
        file = None if options.replay == Path() else options.replay
        show(file, num_dialogues=options.dialogues, rewinds=not options.recurrent)
        return
    with sides(options.model, options.hidden, is_tried=options.together > 1) as (drafting, plain):
        if options.together > 1:
            drafting.wait_until_tried()
        for side in (drafting, plain):
            for turns in workloads(10**6).values():
                for turn in turns:
                    side.run(turn)
        for name, least in LEAST.items():
            ratios: list[float] = []
            worked: list[float] = []
            bests: list[float] = []
            counts = ""
            for seed in range(options.rounds):
                chats = [workloads(seed + 1000 * row)[name] for row in range(options.together)]
                speeds: dict[bool, float] = {}
                works: dict[bool, float] = {}
                for side in (drafting, plain) if seed % 2 == 0 else (plain, drafting):
                    for turn in (turn for turns in chats for turn in turns[:-1]):
                        side.run(turn)
                    is_drafting = side is drafting
                    speeds[is_drafting], works[is_drafting], ends = side.run(*(turns[-1] for turns in chats))
                    if is_drafting:
                        accepted, drafted = (
                            sum(getattr(end.outcome, what) for end in ends) for what in ("num_accepted", "num_drafted")
                        )
                        counts = f"{accepted:,} of {drafted:,} drafted tokens accepted"
                ratios.append(speeds[True] / speeds[False])
                worked.append(works[True] / works[False])
                costs = drafting.costs()
                bests.append(at_best(chats[0], [costs.relative(size) for size in range(1, costs.largest + 1)]))
                plain.loop.clear().result()
                drafting.loop.clear().result()
            low = "" if median(ratios) >= least else f"  <- below {least}"
            print(
                f"{name:6} {median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}), by processor time "
                f"{median(worked):.2f} x, of {median(bests):.2f} x at best; {counts}{low}",
                flush=True,
            )
        print("pass, ms by tokens:", {size: round(ms, 2) for size, ms in drafting.costs().table().items()})
        print("load:", " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()

"""What a long conversation of a dense model takes while it runs, when it ends, and when its next turn comes.

    python -m bench.memory [--positions 65536]

Full attention, 16 KB a token, random entries, no model. Four ways to hold the path: copied into the cache and out of it
again; shared with the sequence that runs on it, as the server does; and where its buffers have gone since, restored as
a copy while there is room for two, or in place of what is stored where there is not. Bytes are what MLX holds, as
multiples of the conversation's KV. Those of the shared path and of the last way gate (exit status 1).
"""

import argparse
import gc
from dataclasses import dataclass, field

import mlx.core as mx

from bench.restore import TURN, Filler, Gates, prompt_of, runner_for, seconds
from reprise.cache.node import Lease
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.kinds import Full
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import SHARES_FROM, Runner
from reprise.engine.states.blueprint import KvSpec
from reprise.loop.sequences import SequencePool
from reprise.memory import Memory

CHUNK = 2048
NEVER = 10**9
MOST = 1.08
"""Of what is shared, in multiples of the conversation's KV: it is held once, with room to grow."""


def dense(*, shares_from: int = SHARES_FROM) -> Runner:
    """Thirty-two layers of one head: a layer is held twice now and then, which is little where there are many."""
    return runner_for((KvSpec(Full()),) * 32, Filler(heads=1), shares_from=shares_from)


@dataclass(eq=False)
class LoopParts:
    """The parts of the loop that decide what is held, without scheduler and model."""

    shares_from: int
    budget: int | None = None
    live: LiveSequence | None = None
    lease: Lease | None = None
    copied: int = 0
    """Bytes of entries that were copied into the cache or out of it."""
    moments: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        gc.collect()
        mx.clear_cache()
        self.before = mx.get_active_memory()
        self.runner = dense(shares_from=self.shares_from)
        self.memory = Memory(self.budget)
        self.cache = PrefixCache(self.runner.loaded.blueprint.layout, memory=self.memory)
        self.sequences = SequencePool(self.runner, self.cache, self.memory, chunk=CHUNK)
        self.each = self.runner.footprint.full
        self.allowance = StepAllowance(1.0)

    def note(self, moment: str) -> None:
        """Remember how much is held now, and that the books say so."""
        self.sequences.measure()
        self.cache.check()
        self.moments[moment] = mx.get_active_memory() - self.before

    def begin(self, tokens: Tokens) -> None:
        """A request comes: start where the cache reaches, and compute its prompt."""
        match = self.cache.match(tokens)
        at = self.cache.resume_at(match, limit=len(tokens) - 1)
        self.lease = self.cache.lease(match, at)
        shared = self._shared()
        num_idle = len(self.sequences.idle)
        self.live = self.sequences.start(match, at, reserve=len(tokens))
        while not self.sequences.restore(self.live, tokens[:at], namespace="", allowance=self.allowance):
            self.allowance.renew()
        is_reopened = len(self.sequences.idle) < num_idle
        self.copied += shared - self._shared() if is_reopened else at * self.each
        self.sequences.measure()
        self._feed(tokens, at)

    def answer(self, tokens: Tokens) -> None:
        """The answer comes, and prompt and answer are stored."""
        assert self.live is not None
        self._feed(tokens, self.live.position)
        held, shared = self.cache.stats.kv_nbytes, self._shared()
        self.cache.commit(tokens, self.runner.source(self.live), kind=BoundaryKind.GENERATION_END)
        self.copied += self.cache.stats.kv_nbytes - held - (self._shared() - shared)
        self.sequences.measure()

    def end(self, tokens: Tokens) -> None:
        """The request is over; its buffers stay for its next turn, or go."""
        assert self.live is not None and self.lease is not None
        self.cache.release(self.lease)
        self.sequences.end(self.live, tokens, namespace="")
        self.live = self.lease = None

    def _feed(self, tokens: Tokens, start: int) -> None:
        assert self.live is not None
        for at in range(start, len(tokens), CHUNK):
            chunk = tokens[at : at + CHUNK]
            self.sequences.memory.reserve(self.sequences.runner.growth([self.live], len(chunk)))
            self.runner.prefill([self.live], [chunk])
            self.sequences.measure()

    def _shared(self) -> int:
        segments = (s for node in self.cache.tree.nodes() for group in node.segments.values() for s in group)
        return sum(segment.nbytes for segment in segments if segment.sequence is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the long path is held. `loses_buffers`: others have come between the turns. `budget`: in KV of the path."""

    name: str
    shares_from: int = SHARES_FROM
    loses_buffers: bool = False
    budget: float | None = None
    most: float | None = None


WAYS = (
    Way(name="copied", shares_from=NEVER),
    Way(name="shared", most=MOST),
    Way(name="its buffers gone, room for two", loses_buffers=True),
    Way(name="its buffers gone, room for 1.25", loses_buffers=True, budget=1.25, most=1.15),
)


def converse(way: Way, positions: int, gates: Gates) -> None:
    """Two turns of a conversation that is so long."""
    each = dense().footprint.full
    house = LoopParts(way.shares_from, None if way.budget is None else int(way.budget * positions * each))
    tokens = prompt_of(positions + 3 * TURN)
    prompt, first, second, third = (tokens[: positions + n * TURN] for n in range(4))
    house.begin(prompt)
    house.note("runs")
    house.answer(first)
    house.note("stored")
    house.end(first)
    house.note("over")
    if way.loses_buffers:
        house.sequences.close_idle()
    stored = house.copied
    mx.reset_peak_memory()
    taken = seconds(lambda: house.begin(second))
    house.note("next runs")
    house.answer(third)
    house.note("next stored")
    peak = mx.get_peak_memory() - house.before
    house.end(third)
    house.note("next over")
    kv = each * len(third)
    most = max(*house.moments.values(), peak)
    shown = "  ".join(f"{nbytes / kv:9.2f}" for nbytes in (*house.moments.values(), peak))
    is_within = way.most is None or most <= way.most * kv
    print(
        f"  {way.name:32} {shown}  {stored / kv:7.2f}  {(house.copied - stored) / kv:7.2f}  {taken:6.2f} s"
        f"{gates.check(is_within)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=65_536)
    positions = parser.parse_args().positions
    gates = Gates()
    each = dense().footprint.full
    print(f"{positions:,} positions, {positions * each / 1e9:.2f} GB of KV; multiples of that\n")
    heads = ("runs", "stored", "over", "next runs", "n. stored", "next over", "peak")
    print(f"  {'':32} {'  '.join(f'{head:>9}' for head in heads)}  {'copied':>7}  {'n. copied':>7}  {'start':>8}")
    for way in WAYS:
        converse(way, positions, gates)
    if gates.num_broken > 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What it costs to resume, to store a turn, and to go on in the buffers of the last one: bytes, and ratios of times.

    python -m bench.restore [--repeats 5]

Layers are filled with random entries, no model is run. Bytes are exact and gate (exit status 1): a restore copies what
is needed once and nothing else, and the room to grow beside it is bounded; a commit copies what is new; a reopened
sequence keeps its buffers. Restores are measured as sixteen turns on a server that is never idle left the store, and
after its idle compaction. Times are ratios to one `mx.concatenate` of as many bytes in the same run.
"""

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from reprise.cache.payload import SegmentPayload
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.allowance import StepAllowance
from reprise.core.kinds import Full, KvKind, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner
from reprise.engine.states.blueprint import Blueprint, KvSpec, Spec, StateSpec, leaf_states
from reprise.engine.states.layers import KvLayer
from reprise.engine.states.payloads import Snapshot
from reprise.engine.states.restoration import restored
from reprise.engine.states.sequence_batch import SequenceBatch, SequenceSource
from reprise.loop.sequences import SequencePool

HEADS, WIDTH = 8, 128
STATE = (1, 1024, 1024)
BLUEPRINTS: Mapping[str, tuple[Spec, ...]] = {
    "full": (KvSpec(Full()),) * 4,
    "full, 4-bit": (KvSpec(Full(), 4, 64),) * 8,
    "full + window": (*(KvSpec(Full()),) * 2, *(KvSpec(Window(1024)),) * 4),
    "full + state": (*(KvSpec(Full()),) * 2, *(StateSpec(1),) * 6),
}
POSITIONS = (2_048, 8_192, 32_768)
TURN = 500
TURNS = 16
"""A conversation is committed in so many turns, so that its entries lie in many payloads."""

MOST_BYTES = 1.05
MOST_TIME = 1.5
ROOM = 512
"""Positions of room to grow that a short sequence gets whatever its length."""


class Filler:
    """Stands where a model stands: gives every layer random entries and answers nothing."""

    def __init__(self, heads: int = HEADS) -> None:
        self.heads = heads

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        num = tokens.shape[1]
        for state in leaf_states(cache):
            if isinstance(state, KvLayer):
                shape = (1, self.heads, num, WIDTH)
                state.update_and_fetch(mx.random.normal(shape).astype(mx.bfloat16), mx.zeros(shape, mx.bfloat16))
            else:
                state.cache = [mx.random.normal(STATE)]
        return mx.zeros((1, num, 1))


@dataclass(frozen=True, slots=True)
class Counted:
    """A source that notes how many bytes it was asked to copy."""

    source: SequenceSource
    copied: list[int]

    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return self.source.segment_nbytes(kind, length)

    def snapshot_nbytes(self) -> int:
        return self.source.snapshot_nbytes()

    def segment(self, kind: KvKind, span: Span) -> SegmentPayload:
        segment = self.source.segment(kind, span)
        self.copied.append(segment.nbytes)
        return segment

    def snapshot(self) -> Snapshot:
        snapshot = self.source.snapshot()
        self.copied.append(snapshot.nbytes)
        return snapshot


class Gates:
    """Counts that must hold."""

    def __init__(self) -> None:
        self.num_broken = 0

    def check(self, holds: bool) -> str:
        self.num_broken += 0 if holds else 1
        return "" if holds else "  <- too much"


def runner_of(name: str, *, shares_from: int = 10**9) -> Runner:
    return runner_for(BLUEPRINTS[name], Filler(), shares_from=shares_from)


def runner_for(specs: tuple[Spec, ...], model: Filler, *, shares_from: int) -> Runner:
    """A runner for layers of these kinds, which `model` fills."""
    loaded: Any = SimpleNamespace(model=model, blueprint=Blueprint(specs=specs), vocab_size=1, context=None)
    return Runner(loaded, can_batch=True, shares_from=shares_from)


def prompt_of(length: int) -> Tokens:
    return as_tokens(np.random.default_rng(length).integers(0, 50_000, length))


def fresh(runner: Runner, *, reserve: int) -> LiveSequence:
    live = runner.begin()
    live.rows.reserve(reserve)
    return live


def stored_in_turns(runner: Runner, cache: PrefixCache, tokens: Tokens) -> LiveSequence:
    """A sequence of these tokens, stored turn by turn."""
    live = fresh(runner, reserve=len(tokens))
    start = 0
    for turn in range(1, TURNS + 1):
        stop = len(tokens) * turn // TURNS
        runner.prefill([live], [tokens[start:stop]])
        cache.commit(tokens[:stop], runner.source(live), kind=BoundaryKind.STABLE)
        # As the loop does, however busy it is.
        cache.compact_path(tokens[:stop])
        start = stop
    return live


def memory_of(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that are held afterwards and were not before, and the most in between."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    held = mx.get_active_memory() - before
    # Without an allocation there is no peak.
    most = max(held, mx.get_peak_memory() - before)
    del result
    return held, most


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = work()
    taken = time.perf_counter() - started
    del result
    return taken


def keep_freed_pages() -> None:
    """Have the C library keep what is freed, whatever its size.

    Else an array of more than 32 MB gets fresh pages each time and smaller ones do not: a restore, which makes many
    small ones, would look better than the one large `mx.concatenate`.
    """
    if sys.platform == "linux":
        mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4
        assert mallopt(mmap_max, 0) == 1 and mallopt(trim_threshold, 2**31 - 1) == 1


def room_of(rows: SequenceBatch) -> int:
    """The bytes of a sequence's buffers in which no entry stands."""
    return sum(layer.nbytes - layer.nbytes // layer.capacity * layer.held for layer in rows.kv_layers)


def restore(name: str, position: int, repeats: int, gates: Gates) -> None:
    runner = runner_of(name)
    cache = PrefixCache(runner.loaded.blueprint.layout)
    tokens = prompt_of(position)
    runner.stop(stored_in_turns(runner, cache, tokens))
    print(f"  restore at {position:,}, {runner.footprint.at(position) / 1e6:.1f} MB needed")
    _restore(runner, cache, tokens, repeats=repeats, gates=gates, when=f"{TURNS} turns")
    while cache.compact(max_entries=10**9) > 0:
        pass
    _restore(runner, cache, tokens, repeats=repeats, gates=gates, when="compacted")


def _restore(runner: Runner, cache: PrefixCache, tokens: Tokens, *, repeats: int, gates: Gates, when: str) -> None:
    blueprint, footprint, position = runner.loaded.blueprint, runner.footprint, len(tokens)
    needed = footprint.at(position)
    what = cache.read(cache.match(tokens), position)
    held, most = memory_of(lambda: restored(blueprint, what))
    room = room_of(restored(blueprint, what))
    is_once = most - room <= MOST_BYTES * needed and room <= ROOM * sum(footprint.by_kind.values())

    # A snapshot's arrays are used as they are.
    parts = [mx.random.normal(((needed - footprint.snapshot) // 8,)) for _ in range(2)]
    mx.eval(parts)

    def concatenate() -> mx.array:
        whole = mx.concatenate(parts)
        mx.eval(whole)
        return whole

    # What is over quickly is disturbed more easily.
    num = repeats * min(8, POSITIONS[-1] // position)
    pairs = [(seconds(lambda: restored(blueprint, what)), seconds(concatenate)) for _ in range(num)]
    # The quickest of each: others use the machine too.
    quickest, reference = min(a for a, _ in pairs), min(b for _, b in pairs)
    ratio = quickest / reference
    slow = f"  (more than {MOST_TIME})" if ratio > MOST_TIME else ""
    print(
        f"    {when:10} copied {(held - room) / needed:5.3f}   at most {(most - room) / needed:5.3f}   "
        f"room {room / needed:5.3f}   time {1000 * quickest:6.1f} ms, {ratio:4.2f} x concatenate{slow}"
        f"{gates.check(is_once)}"
    )


def commit(name: str, position: int, gates: Gates) -> None:
    runner = runner_of(name)
    cache = PrefixCache(runner.loaded.blueprint.layout)
    tokens = prompt_of(position + TURN)
    live = stored_in_turns(runner, cache, tokens[:position])
    runner.prefill([live], [tokens[position:]])
    copied: list[int] = []
    before = cache.stats.kv_nbytes + cache.stats.snapshot_nbytes
    cache.commit(tokens, Counted(SequenceSource(live.rows, live.row), copied), kind=BoundaryKind.STABLE)
    kept = cache.stats.kv_nbytes + cache.stats.snapshot_nbytes - before
    new = TURN * sum(runner.footprint.by_kind.values()) + runner.footprint.snapshot
    share = sum(copied) / (new if new > 0 else 1)
    print(
        f"  commit of {TURN} behind {position:,}: {sum(copied) / 1e6:.2f} MB copied, {share:.2f} of what is new, "
        f"{kept / 1e6:.2f} MB more held{gates.check(sum(copied) <= new)}"
    )


def reopen(name: str, position: int, gates: Gates) -> None:
    runner = runner_of(name, shares_from=1)
    cache = PrefixCache(runner.loaded.blueprint.layout)
    sequences = SequencePool(runner, cache, cache.memory, chunk=2048)
    tokens = prompt_of(position)
    live = stored_in_turns(runner, cache, tokens)
    full = [plane for layer in live.rows.layers(Full()) for plane in layer.planes]
    sequences.end(live, tokens, namespace="")
    longer = as_tokens([*tokens.tolist(), *prompt_of(TURN).tolist()])
    reopened: list[LiveSequence | None] = []

    def take() -> None:
        match = cache.match(longer)
        at = cache.resume_at(match, limit=len(longer) - 1)
        assert at == position, at
        taken, allowance = sequences.start(match, at, reserve=len(longer)), StepAllowance(1.0)
        while not sequences.restore(taken, longer[:at], namespace="", allowance=allowance):
            allowance.renew()
        reopened.append(taken)

    _, most = memory_of(take)
    assert reopened == [live], "the idle sequence is reopened"
    kept = [plane for layer in live.rows.layers(Full()) for plane in layer.planes]
    rest = runner.footprint.at(position) - position * runner.footprint.full
    room = ROOM * sum(n for kind, n in runner.footprint.by_kind.items() if not isinstance(kind, Full))
    is_kept = all(one is other for one, other in zip(full, kept, strict=True))
    print(
        f"  reopened at {position:,}: {'no' if is_kept else 'SOME'} KV of full attention copied, "
        f"{max(0, most) / 1e6:.2f} MB for windows and states{gates.check(is_kept and most <= 2 * (rest + room))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    gates = Gates()
    keep_freed_pages()
    for name in BLUEPRINTS:
        print(name)
        for position in POSITIONS:
            restore(name, position, repeats, gates)
        commit(name, POSITIONS[1], gates)
        reopen(name, POSITIONS[1], gates)
    if gates.num_broken > 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

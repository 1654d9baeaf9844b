"""How long the index takes to answer, and how much memory it needs, with payloads that have a size and nothing else.

    python -m bench.index [--chats 1000] [--tokens 100000]

Reports medians over the repeats and bytes by `tracemalloc` (which sees numpy's buffers too). Bytes gate (exit
status 1).
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reprise.cache.node import Lease
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Full, KvKind, Layout, Window
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.plan.checkpoints import Plan, make_plan

LAYOUTS = {
    "full": Layout(kinds=(Full(),)),
    "full + window": Layout(kinds=(Full(), Window(512))),
    "full + state": Layout(kinds=(Full(),), has_snapshots=True),
}
SYSTEM_TOKENS = 2_000
TURN_TOKENS = 500
TURNS = 10
VOCABULARY = 150_000
INTERVAL = 512
"""Tokens between the checkpoints of a long prefill: as many as there ever are."""
MOST_NBYTES = 12.0
"""Of the index, for a token, before compaction."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A payload of so many entries."""

    length: int

    @property
    def nbytes(self) -> int:
        return 1000 * self.length

    def cut(self, start: int, stop: int) -> "Sized":
        return Sized(stop - start)

    def join(self, others: Sequence["Sized"]) -> "Sized":
        return Sized(self.length + sum(other.length for other in others))


class UniformSource:
    def segment_nbytes(self, kind: KvKind, length: int) -> int:
        return 1000 * length

    def snapshot_nbytes(self) -> int:
        return 3_000_000

    def segment(self, kind: KvKind, span: Span) -> Sized:
        return Sized(len(span))

    def snapshot(self) -> Sized:
        return Sized(3000)


def chats(num: int, rng: np.random.Generator) -> Iterator[list[Tokens]]:
    """The prompts of each chat, turn by turn; all begin with one system prompt."""
    system = rng.integers(0, VOCABULARY, SYSTEM_TOKENS)
    for _ in range(num):
        whole = np.concatenate([system, rng.integers(0, VOCABULARY, TURNS * TURN_TOKENS)])
        yield [as_tokens(whole[: SYSTEM_TOKENS + (turn + 1) * TURN_TOKENS]) for turn in range(TURNS)]


def long_chat(num_tokens: int, rng: np.random.Generator) -> list[Tokens]:
    """A chat of 200 turns that ends at `num_tokens`."""
    whole = rng.integers(0, VOCABULARY, num_tokens)
    return [as_tokens(whole[: num_tokens * (turn + 1) // 200]) for turn in range(200)]


def store(cache: PrefixCache, turns: list[Tokens]) -> None:
    """As a server would: each turn comes in as a request, and its end is stored."""
    for turn in turns:
        lease = take_lease(cache, turn)
        commit(cache, turn)
        cache.release(lease)


def commit(cache: PrefixCache, tokens: Tokens) -> None:
    cache.commit(tokens, UniformSource(), kind=BoundaryKind.STABLE)


def take_lease(cache: PrefixCache, prompt: Tokens) -> Lease:
    match = cache.match(prompt)
    return cache.lease(match, cache.resume_at(match, limit=len(prompt) - 1))


def plan_for(cache: PrefixCache, prompt: Prompt) -> Plan:
    """What is decided for a request when it is admitted."""
    match = cache.match(prompt.tokens)
    end = len(prompt) - 1
    at = cache.resume_at(match, limit=end)
    return make_plan(prompt, layout=cache.layout, resume_at=at, end=end, branches=[match.length], interval=INTERVAL)


def median_ms(work: Callable[[], object], repeats: int = 51) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def measure(name: str, layout: Layout, num_chats: int, num_tokens: int) -> bool:
    """Report; gives whether the index is as small as it has to be."""
    rng = np.random.default_rng(7)
    cache = PrefixCache(layout)
    everyone = list(chats(num_chats, rng))
    turns = long_chat(num_tokens, rng)
    tracemalloc.start()
    for chat in everyone:
        store(cache, chat)
    store(cache, turns)
    spread = tracemalloc.get_traced_memory()[0] / cache.stats.num_tokens
    while cache.compact(max_entries=1_000_000) > 0:
        pass
    compacted = tracemalloc.get_traced_memory()[0] / cache.stats.num_tokens
    tracemalloc.stop()

    prompt = as_tokens(np.concatenate([turns[-1], rng.integers(0, VOCABULARY, 100)]))
    fresh = PrefixCache(layout)
    store(fresh, turns)

    def resume(of: PrefixCache) -> int:
        return of.resume_at(of.match(prompt), limit=len(prompt) - 1)

    assert resume(cache) == resume(fresh) == num_tokens
    # A chat of 200 turns that goes on, and one whose second half is another: so it takes checkpoints all the way.
    boundaries = tuple(Boundary(len(turn), BoundaryKind.STABLE) for turn in turns)
    half = num_tokens // 2
    other = as_tokens(np.concatenate([turns[-1][:half], rng.integers(0, VOCABULARY, half)]))
    longer, edited = (Prompt(tokens=tokens, boundaries=boundaries) for tokens in (prompt, other))
    assert plan_for(cache, longer).resume_at == num_tokens
    match, fresh_match = cache.match(prompt), fresh.match(prompt)
    print(f"{name}: {cache.stats.num_tokens:,} tokens in {cache.stats.num_nodes:,} edges")
    print(f"  match and resume, {num_tokens:,} tokens   {median_ms(lambda: resume(cache)):8.3f} ms")
    print(f"  the same in 200 edges              {median_ms(lambda: resume(fresh)):8.3f} ms")
    print(f"  match and plan                     {median_ms(lambda: plan_for(cache, longer)):8.3f} ms")
    print(f"  the same in 200 edges              {median_ms(lambda: plan_for(fresh, longer)):8.3f} ms")
    print(f"  match and plan, second half edited {median_ms(lambda: plan_for(fresh, edited)):8.3f} ms")
    print(f"  read                               {median_ms(lambda: cache.read(match, num_tokens)):8.3f} ms")
    print(f"  read from 200 edges                {median_ms(lambda: fresh.read(fresh_match, num_tokens)):8.3f} ms")
    print(f"  lease and release                  {median_ms(lambda: cache.release(take_lease(cache, prompt))):8.3f} ms")
    print(f"  in 200 edges                       {median_ms(lambda: fresh.release(take_lease(fresh, prompt))):8.3f} ms")
    print(f"  commit of what is there            {median_ms(lambda: commit(cache, turns[-1])):8.3f} ms")
    print(f"  the same in 200 edges              {median_ms(lambda: commit(fresh, turns[-1])):8.3f} ms")
    over = "" if spread <= MOST_NBYTES else "  <- too much"
    print(f"  index                              {compacted:8.2f} bytes/token ({spread:.2f} before compaction){over}")
    start = time.perf_counter()
    num_evicted = sum(1 for _ in range(1000) if cache.evict_one())
    per_eviction = 1000 * (time.perf_counter() - start) / max(1, num_evicted)
    print(f"  eviction (of {num_evicted:,})               {per_eviction:8.3f} ms")
    return spread <= MOST_NBYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100_000)
    options = parser.parse_args()
    small = [measure(name, layout, options.chats, options.tokens) for name, layout in LAYOUTS.items()]
    if not all(small):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

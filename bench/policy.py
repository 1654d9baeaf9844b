"""Which policy keeps what: traces replayed against the real store, with exact counts.

`python -m bench.policy [TRACE…] [--long N]` prints one table for each trace, and checks what the default policy has to
show; exit status 1 where it does not. `--long` replays a made trace of N requests and reports how much memory it took.
Without a trace file only the made workloads are replayed.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console

from bench.made_traces import WORKLOADS, Shape, chats_in_turn, uniform_documents, zipf_chats
from reprise.lab.simulate.report import table_of
from reprise.lab.simulate.run import Result, run_simulation
from reprise.lab.simulate.traces import Granularity, read_trace
from reprise.replay.payloads import Sizes
from reprise.replay.request import Request
from reprise.replay.store import Replay

KV = 20_480
SNAPSHOT = 3_100 * KV
LEAST = 0.98
"""The default policy never reuses less than this, as a multiple of what LRU reuses."""

LAYOUTS = {
    "full": Sizes(full=KV),
    "hybrid": Sizes(full=KV, snapshot=SNAPSHOT),
    "window": Sizes(full=KV // 2, window=KV // 2, window_tokens=512),
}


def at_least_lru(results: tuple[Result, ...]) -> bool:
    lru = {r.budget: r.reused for r in results if r.policy == "lru"}
    return all(r.reused >= LEAST * lru[r.budget] for r in results if r.policy == "cost")


def traces(console: Console, paths: list[Path]) -> bool:
    good = True
    for path in paths:
        requests = read_trace(path, granularity=Granularity.BLOCK)
        budgets = tuple(int(million * 1e6) * KV for million in (0.25, 1, 3, 10))
        results = run_simulation(path.name, requests, budgets=budgets, sizes=LAYOUTS["full"])
        console.print(table_of(results, bytes_per_token=KV))
        good &= at_least_lru(results)
    return good


def made(console: Console) -> bool:
    good = True
    workloads = WORKLOADS | {"uniform-documents": lambda: uniform_documents(num_requests=4000, num_documents=60)}
    for name, workload in workloads.items():
        for layout, sizes in LAYOUTS.items():
            factor = 4 if layout == "hybrid" else 1
            budgets = tuple(factor * tokens * KV for tokens in (40_000, 150_000))
            policies = ("lru", "greedy-dual", "cost", "infinite")
            results = run_simulation(f"{name}, {layout}", workload(), budgets=budgets, policies=policies, sizes=sizes)
            console.print(table_of(results, bytes_per_token=KV))
            good &= at_least_lru(results)
    return good


def many_chats(console: Console) -> bool:
    """32 chats in turn in 8 GB compute what they compute in infinite memory; 16 in 2 GB at most 9 % on the path."""
    large = Shape(system=2000, user=200, answer=300, thinking=150)
    small = Shape(system=1000, user=100, answer=200, thinking=150)
    good = True
    for num_chats, gb, shape, share in ((32, 8, large, None), (16, 2, small, 0.09)):
        results = run_simulation(
            f"{num_chats} chats in turn, 10 turns, {gb} GB, settled",
            chats_in_turn(num_chats=num_chats, num_turns=10, shape=shape),
            budgets=(gb * 10**9,),
            policies=("lru", "greedy-dual", "cost", "infinite"),
            sizes=LAYOUTS["hybrid"],
            settles=True,
        )
        console.print(table_of(results, bytes_per_token=KV))
        by = {r.policy: r for r in results}
        most = by["infinite"].computed if share is None else share * by["cost"].prompt
        good &= by["cost"].computed <= most
    return good


def long(console: Console, num_requests: int) -> bool:
    """Memory does not grow with the trace: compared at a tenth and at the end."""
    replay = Replay(policy="cost", budget=200_000, sizes=Sizes(), unit=1)
    stream: Iterator[Request] = zipf_chats(
        num_requests=num_requests, num_chats=2_000, shape=Shape(system=40, user=8, answer=8, opening=2)
    )
    # Until the memory of returns is full it grows, by design.
    early_at = max(num_requests // 10, min(num_requests // 2, 30_000))
    early = 0
    process = psutil.Process()
    start = time.perf_counter()
    for at, request in enumerate(stream, start=1):
        replay.take(request)
        if at == early_at:
            early = process.memory_info().rss
    seconds = time.perf_counter() - start
    late = process.memory_info().rss
    console.print(
        f"{num_requests:,} requests in {seconds:.0f} s, {60 * num_requests / seconds:,.0f} a minute; resident memory "
        f"{early / 1e6:.1f} MB after {early_at:,} and {late / 1e6:.1f} MB at the end; hits {replay.tally.hit_share:.1%}"
    )
    return late <= 1.1 * early


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--long", type=int, metavar="N", help="only replay a made trace of N requests")
    options = parser.parse_args()
    console = Console(width=110)
    if options.long is not None:
        return 0 if long(console, options.long) else 1
    checks = {
        "many chats": many_chats(console),
        f"never below {LEAST} × LRU, made workloads": made(console),
        f"never below {LEAST} × LRU, traces": traces(console, options.traces),
    }
    for name, is_good in checks.items():
        console.print(f"{'yes' if is_good else 'NO '}  {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

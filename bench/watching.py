"""What a watcher costs decoding: the engine thread's time for inspections, and tokens per second, in turns, in one run.

`python -m bench.watching [ROUNDS]`. The model is tiny, so a step takes a millisecond or two, and what is done beside
the steps weighs the most that it can. The watcher reads the events, and overview and tree as often as the page does.
Fails where inspections take more than a hundredth of the time that the engine's thread works.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from bench.tiny.build import build_model
from reprise.lab.bench.server_process import server

_TOKENS = 1500


def _speed(client: httpx.Client) -> float:
    """Tokens per second behind the first of one long answer."""
    body = {"messages": [{"role": "user", "content": f"Count. {time.time()}"}], "max_tokens": _TOKENS, "stream": True}
    times: list[float] = []
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
    return (len(times) - 1) / (times[-1] - times[0])


_PAGE = (("/v1/cache/overview", 1.0), ("/v1/cache/tree", 1.5))
"""What the page asks for, and the seconds between two times."""
_MOST = 0.01


def _watched(client: httpx.Client) -> float:
    is_over, is_there = threading.Event(), threading.Event()

    def listen() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as other, other.stream("GET", "/v1/events") as response:
            for line in response.iter_lines():
                is_there.set()
                if is_over.is_set() and line.startswith("data"):
                    return

    def ask(path: str, pause_s: float) -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            while not is_over.wait(pause_s):
                other.get(path).raise_for_status()

    watchers = [threading.Thread(target=listen), *(threading.Thread(target=ask, args=each) for each in _PAGE)]
    for watcher in watchers:
        watcher.start()
    is_there.wait()
    try:
        return _speed(client)
    finally:
        is_over.set()
        for watcher in watchers:
            watcher.join()


def _spent(client: httpx.Client) -> tuple[int, float, float]:
    """Inspections so far, the engine thread's seconds for them, and those in which it worked."""
    told = client.get("/health").json()
    return told["inspections"], told["inspection_s"], told["busy_s"]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder) / "model")
        with server(Path(folder) / "model", "--no-settle") as client:
            _speed(client)
            alone: list[float] = []
            watched: list[float] = []
            spent: tuple[float, ...] = (0.0, 0.0, 0.0)
            for _ in range(rounds):
                before = _spent(client)
                watched.append(_watched(client))
                now = _spent(client)
                spent = tuple(total + after - earlier for total, earlier, after in zip(spent, before, now, strict=True))
                # Events go on for half a minute behind the last watcher: without them is without having been watched.
                time.sleep(32)
                alone.append(_speed(client))
    ratio = statistics.median(watched) / statistics.median(alone)
    print(f"alone {statistics.median(alone):.0f} tokens/s, watched {statistics.median(watched):.0f}: {ratio:.4f}")
    num, inspection_s, busy_s = spent
    print(f"{num:.0f} inspections took {inspection_s / busy_s:.2%} of {busy_s:.1f} s of the engine's thread")
    if inspection_s > _MOST * busy_s:
        sys.exit(f"inspections may take {_MOST:.0%}")


if __name__ == "__main__":
    main()

"""What a watcher costs decoding: tokens per second with and without one, in turns, in one run.

`python -m bench.watching [ROUNDS]`. The model is tiny, so a step takes a millisecond or two, and what is done beside
the steps weighs the most that it can.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from reprise.benchmark.server_process import server
from reprise.demo.tiny.build import build_model

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


def _watched(client: httpx.Client) -> float:
    is_over, is_there = threading.Event(), threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as other, other.stream("GET", "/v1/events") as response:
            for line in response.iter_lines():
                is_there.set()
                if is_over.is_set() and line.startswith("data"):
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    is_there.wait()
    try:
        return _speed(client)
    finally:
        is_over.set()
        watcher.join()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder) / "model")
        with server(Path(folder) / "model", "--no-settle") as client:
            _speed(client)
            alone: list[float] = []
            watched: list[float] = []
            for _ in range(rounds):
                watched.append(_watched(client))
                # Events go on for half a minute behind the last watcher: without them is without having been watched.
                time.sleep(32)
                alone.append(_speed(client))
    ratio = statistics.median(watched) / statistics.median(alone)
    print(f"alone {statistics.median(alone):.0f} tokens/s, watched {statistics.median(watched):.0f}: {ratio:.4f}")


if __name__ == "__main__":
    main()

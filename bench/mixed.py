"""Long beside short, against mlx-lm's own server on the same model in the same run.

    python -m bench.mixed [--model llama] [--long 60000] [--prefill 20000]

1. One stream with a long context, alone and then beside seven short ones: its decode step, as the mean gap between
   tokens.
2. A stream that is being read while a long prompt is prefilled: its longest gap; and a short request that comes in the
   midst of that: its time to first token.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.rivals import MODELS, RivalServer, model, ours, theirs
from bench.streams import StreamClient, TimedStream, chat, prose

STALL_MS = 100
NUM_SHORT = 7
NUM_STEPS = 48
WORDS_PER_TOKEN = 0.66
_MANY = 20_000
"""More tokens than any stream will live to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Decode steps of the long stream in seconds."""

    alone_s: float
    together_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """While a long prompt is prefilled, in seconds."""

    longest_gap_s: float
    usual_gap_s: float
    short_ttft_s: float
    long_ttft_s: float


def step_s(stream: TimedStream, start_s: float, end_s: float) -> float:
    """The mean: tokens that come together on the way here were not made together."""
    times = [at for at in stream.token_s if start_s <= at <= end_s]
    return (times[-1] - times[0]) / (len(times) - 1)


def text(seed: int, num_tokens: int) -> str:
    return prose(seed, int(num_tokens * WORDS_PER_TOKEN))


def beside(server: RivalServer, num_tokens: int) -> Beside:
    """A long stream, and then seven short ones beside it."""
    client = StreamClient(server)
    long = client.send(chat(text(1, num_tokens), num=_MANY))
    _wait(long, NUM_STEPS)
    shorts = [client.send(chat(prose(2 + i, 8), num=_MANY)) for i in range(NUM_SHORT)]
    for short in shorts:
        _wait(short, NUM_STEPS)
    client.hang_up()
    came_s = min(short.sent_s for short in shorts)
    low, high = max(short.first_s for short in shorts), min(short.token_s[-1] for short in shorts)
    return Beside(alone_s=step_s(long, long.first_s, came_s), together_s=step_s(long, low, high))


def stalls(server: RivalServer, num_tokens: int) -> Stalls:
    """A stream, a long prompt, and a short request in the midst of its prefill."""
    client = StreamClient(server)
    reader = client.send(chat(prose(20, 20), num=_MANY))
    _wait(reader, NUM_STEPS)
    usual = step_s(reader, reader.first_s, time.perf_counter())
    long = client.send(chat(text(21, num_tokens), num=2))
    time.sleep(1.0)
    short = client.send(chat(prose(22, 10), num=2))
    while not long.token_s or not short.token_s:
        time.sleep(0.01)
    done_s = long.first_s
    client.hang_up()
    gaps = [after - before for before, after in pairwise(reader.token_s) if long.sent_s < after and before < done_s]
    return Stalls(
        longest_gap_s=max(gaps),
        usual_gap_s=usual,
        short_ttft_s=short.ttft_s,
        long_ttft_s=long.ttft_s,
    )


def _wait(stream: TimedStream, num: int) -> None:
    while len(stream.token_s) < num and stream.failure is None:
        time.sleep(0.01)


def _show(what: str, unit: str, values: Sequence[float], wanted: str) -> None:
    a, b = values
    print(f"{what:48}{a:10.1f} {b:10.1f} {unit}   {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--long", type=int, default=60_000)
    parser.add_argument("--prefill", type=int, default=20_000)
    options = parser.parse_args()
    stall = ("--max-stall-ms", str(STALL_MS))
    with model(options.model) as path, ours(path, *stall) as mine, theirs(path) as other:
        print(f"{'':48}{mine.name:>10} {other.name:>10}")
        waits = [stalls(server, options.prefill) for server in (mine, other)]
        print(f"a prompt of about {options.prefill:,} tokens is prefilled")
        _show("  longest gap of a stream meanwhile", "ms", [1000 * w.longest_gap_s for w in waits], f"near {STALL_MS}")
        _show("  its usual gap", "ms", [1000 * w.usual_gap_s for w in waits], "")
        _show("  TTFT of a short request meanwhile", "ms", [1000 * w.short_ttft_s for w in waits], "at most theirs")
        _show("  TTFT of the long prompt", "ms", [1000 * w.long_ttft_s for w in waits], "")
        sides = [beside(server, options.long) for server in (mine, other)]
        print(f"a stream of about {options.long:,} tokens")
        _show("  its step alone", "ms", [1000 * s.alone_s for s in sides], "")
        _show("  its step beside seven short streams", "ms", [1000 * s.together_s for s in sides], "")
        _show("  ratio", "  ", [s.together_s / s.alone_s for s in sides], "1.5 at most")


if __name__ == "__main__":
    main()

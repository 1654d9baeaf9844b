"""The translate burst and eight streams, against mlx-lm's own server on the same model in the same run.

    python -m bench.throughput [--model llama] [--rounds 5]

Both servers are up together and take turns, so that whatever else the machine does falls on both. Ratios are of the
medians; below 1 we are faster where it is a time, above 1 where it is a throughput.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median

from bench.rivals import MODELS, RivalServer, model, ours, theirs
from bench.streams import TimedStream, burst, chat, prose, total_s

SYSTEM_WORDS = 1300
TEXT_WORDS = 165
PARALLEL = 6
NUM_STREAMS = 8


def translate(server: RivalServer, seed: int) -> list[TimedStream]:
    """Six parallel requests with one long system prompt that nobody has seen yet."""
    system = prose(seed, SYSTEM_WORDS)
    texts = [prose(seed + 1 + i, TEXT_WORDS + 10 * i) for i in range(PARALLEL)]
    return burst(server, [chat(text, system=system, num=16) for text in texts])


def decode(server: RivalServer, seed: int) -> list[TimedStream]:
    return burst(server, [chat(prose(seed + i, 20), num=256) for i in range(NUM_STREAMS)])


def tokens_per_s(found: Sequence[TimedStream]) -> float:
    """While all streams run: from the last first token to the first last one, all streams together."""
    low = max(stream.token_s[0] for stream in found)
    high = min(stream.token_s[-1] for stream in found)
    return sum(low < at <= high for stream in found for at in stream.token_s) / (high - low)


def compare(
    servers: Sequence[RivalServer],
    rounds: int,
    measure: Callable[[RivalServer, int], list[TimedStream]],
    what: Callable[..., float],
) -> list[float]:
    """The median over the rounds for each server; the order of the servers changes from round to round."""
    found: dict[str, list[float]] = {server.name: [] for server in servers}
    for turn in range(rounds):
        for server in servers if turn % 2 == 0 else reversed(servers):
            found[server.name].append(what(measure(server, 1000 * turn)))
    return [median(found[server.name]) for server in servers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3_5")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with model(options.model) as path, ours(path) as mine, theirs(path) as other:
        for server in (mine, other):
            warm_up = translate(server, 10**6)
            decode(server, 10**6)
            print(f"{server.name}: {warm_up[0].prompt} tokens a prompt, {sum(s.cached for s in warm_up)} cached in all")
        a, b = compare((mine, other), options.rounds, translate, total_s)
        print(f"translate burst, total s        {a:8.3f} {b:8.3f}   ratio {a / b:.2f} (wanted: 0.6 at most)")
        a, b = compare((mine, other), options.rounds, decode, tokens_per_s)
        print(f"8 streams, tokens/s together    {a:8.1f} {b:8.1f}   ratio {a / b:.2f} (wanted: 0.95 at least)")


if __name__ == "__main__":
    main()

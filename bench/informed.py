"""What can be known of a trace's returns, apart from our policy: `python -m bench.informed TRACE [--tokens N…]`.

Belady's rule knows each prompt's next turn, which nobody can. Here only the distribution of returns is known: prompts
are of the classes that the default policy tells apart when they come (by their answers it tells them apart further, and
of that nothing is known here), and a class gives its blocks up at the age that is best at a
price for memory. That is the best order there is if the budget has to be kept on average alone (Whittle, "Restless
bandits", 1988), so nothing that knows no more than the classes does better. In two ways:

`fitted`: with the distributions of the trace itself, so that chance counts as knowledge too: a bound.
`told`: with those of three quarters of the prompts, counted on the fourth, for each quarter: knowledge without chance,
and still of the whole trace from its first prompt on, where a policy has to learn while it serves.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reprise.cache.reuse_rate import ConversationHistory
from reprise.core.tokens import Tokens
from reprise.lab.simulate.traces import Granularity, read_trace

_AGES = np.unique(np.round(2.0 ** (np.arange(0, 64) / 4)).astype(np.int64))
_PRICES = np.geomspace(1e-7, 1, 160)
_QUARTERS = 4

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """One entry for each block of each prompt, from there to the block's next use.

    `kinds`: the class of the prompt. `prompts`: its number. `until_use`: prompts to the next one with this block, or
    more than there are; `lasting`: the same, or to the trace's end.
    """

    kinds: Ints
    prompts: Ints
    until_use: Ints
    lasting: Ints
    num_prompts: int
    block: int


def _keys(tokens: Tokens) -> Iterator[int]:
    """A key for each block of a prompt, of the block and all before it."""
    key = 0
    for token in tokens.tolist():
        key = hash((key, token))
        yield key


def waits_of(path: Path) -> Waits:
    """The waits of a trace of block hashes."""
    lineage, last = ConversationHistory(), dict[int, int]()
    kinds, prompts, next_use = list[int](), list[int](), list[int]()
    num, block = 0, 0
    for num, request in enumerate(read_trace(path, granularity=Granularity.BLOCK), start=1):
        tokens, block = request.prompt.tokens[: request.shareable], request.block
        visit = lineage.arrive(tokens, known=0, namespace="")
        pause = 0 if visit.gap is None else 1 + int(np.searchsorted((16, 64, 256, 1024), visit.gap, side="right"))
        new = int(np.searchsorted((512, 4096, 32768), visit.num_new * block, side="right"))
        turn = int(np.searchsorted((1, 2, 4, 8), visit.turn, side="right"))
        for at, key in enumerate(_keys(tokens)):
            if key in last:
                next_use[last[key]] = num
            last[key] = len(kinds)
            # What all prompts begin with is a class of its own: nobody gives that up.
            kinds.append(1 + turn + 10 * pause + 100 * new if at > 0 else 0)
            prompts.append(num)
            next_use.append(1 << 40)
    started, used = np.array(prompts), np.array(next_use)
    return Waits(
        kinds=np.unique(kinds, return_inverse=True)[1].astype(np.int64),
        prompts=started,
        until_use=used - started,
        lasting=np.minimum(used, num) - started,
        num_prompts=num,
        block=block,
    )


def reused(waits: Waits, budget_tokens: int, *, is_fitted: bool) -> float:
    """Tokens reused with so much memory on average."""
    fold = np.random.default_rng(0).integers(0, _QUARTERS, waits.num_prompts + 1)[waits.prompts]
    pairs = [(_by_age(waits, fold >= 0),) * 2] if is_fitted else []
    if not is_fitted:
        pairs = [(_by_age(waits, fold != one), _by_age(waits, fold == one)) for one in range(_QUARTERS)]
    points: list[tuple[float, float]] = []
    for price in _PRICES:
        memory = blocks = 0.0
        for (uses, held), (real_uses, real_held) in pairs:
            stops = (uses - price * held).argmax(axis=1)[:, None]
            blocks += float(np.take_along_axis(real_uses, stops, axis=1).sum())
            memory += float(np.take_along_axis(real_held, stops, axis=1).sum())
        points.append((memory, blocks))
    points.sort()
    room = budget_tokens / waits.block * waits.num_prompts
    best = np.maximum.accumulate([blocks for _, blocks in points])
    return float(np.interp(room, [memory for memory, _ in points], best)) * waits.block


def _by_age(waits: Waits, chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Uses, and blocks × prompts held, if a class is given up at each age. Shape ``(classes, ages)``."""
    kinds, until_use, lasting = waits.kinds[chosen], waits.until_use[chosen], waits.lasting[chosen]
    num = int(waits.kinds.max()) + 1
    stops = (0, *_AGES)
    uses = [np.bincount(kinds, weights=until_use <= age, minlength=num) for age in stops]
    held = [np.bincount(kinds, weights=np.minimum(lasting, age), minlength=num) for age in stops]
    return np.stack(uses, axis=1).astype(np.float64), np.stack(held, axis=1).astype(np.float64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="block hashes, as JSON lines")
    parser.add_argument("--tokens", type=int, nargs="+", default=[250_000, 1_000_000, 3_000_000, 10_000_000])
    options = parser.parse_args()
    waits = waits_of(options.trace)
    for tokens in options.tokens:
        told, fitted = (reused(waits, tokens, is_fitted=is_fitted) for is_fitted in (False, True))
        print(f"{tokens:>12,} tokens of memory: {told / 1e6:7.2f}M told, {fitted / 1e6:7.2f}M fitted")
    return 0


if __name__ == "__main__":
    sys.exit(main())

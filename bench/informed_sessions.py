"""What agent sessions leave to know: `python -m bench.informed_sessions SESSIONS [--live 2] [--tokens 120000]`.

A model with snapshots resumes where one is, so whatever is kept of a chat has one at its end, which takes room. Beyond
that everything is free here: a path can be cut at every position (`anywhere`), or at those where a long prefill has its
checkpoints (`at intervals`), as if all their snapshots were there and took nothing. Paths are cut from the end, those
first that are

`lru`: unused for longest;
`told`: least likely to be asked for next, by how often that was so in the trace itself, chance included: for what the
answer ended with, how many prompts ago it was, and how many seconds. No server knows that before the first prompt.

As a share of the bound of `reprise simulate` (`belady`), which knows the future. It is no proof for all orders: one
that looks further than the next prompt may do better.
"""

import argparse
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path

from reprise.core.tokens import join_tokens
from reprise.lab.simulate.offline import FutureKnown
from reprise.lab.simulate.sessions import TimedRequest, read_sessions
from reprise.plan.checkpoints import interval_tokens

_PROMPTS = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_SECONDS = (2, 10, 30, 120, 600)

Kind = tuple[bool | None, int, int]
Latest = dict[str, int]
Order = Callable[[int, str, Latest], tuple[float, int]]


class SessionWaits:
    """How often agents of each kind were asked for next."""

    def __init__(self, trace: Sequence[TimedRequest]) -> None:
        self._trace = trace
        self._waited, self._came = Counter[Kind](), Counter[Kind]()
        latest: Latest = {}
        for at, (now, upcoming) in enumerate(pairwise(trace)):
            latest[now.agent] = at
            for agent, last in latest.items():
                kind = self._kind(at, last)
                self._waited[kind] += 1
                self._came[kind] += upcoming.agent == agent

    def rate(self, at: int, last: int) -> float:
        """The chance of an agent, last asked for with request `last`, to come right behind request `at`."""
        kind = self._kind(at, last)
        return self._came[kind] / (self._waited[kind] + 1)

    def _kind(self, at: int, last: int) -> Kind:
        before = self._trace[last]
        silent_s = max(0.0, self._trace[at].at_s - before.at_s - before.took_s)
        return before.request.calls_tool, bisect_right(_PROMPTS, at + 1 - last), bisect_right(_SECONDS, silent_s)


class _KeptPrompt:
    """What is kept of each agent's path, as blocks, each of which is stored once."""

    def __init__(self, room: int, snapshot: int) -> None:
        """`room` and `snapshot`, the size of one, in blocks."""
        self._room, self._snapshot = room, snapshot
        self.paths: dict[str, list[int]] = {}
        self._uses = Counter[int]()
        self._numbers: dict[tuple[int, int], int] = {}

    def numbered(self, tokens: Sequence[int]) -> list[int]:
        """The numbers of a path's blocks, each of which stands for all before it, too."""
        path: list[int] = []
        for token in tokens:
            path.append(self._numbers.setdefault((path[-1] if path else -1, token), len(self._numbers)))
        return path

    def reused(self, path: Sequence[int]) -> int:
        """How far the longest kept path that this one begins with reaches."""
        ends = [len(kept) for kept in self.paths.values() if kept and len(kept) <= len(path)]
        at = {end: path[end - 1] for end in ends}
        return max((len(kept) for kept in self.paths.values() if kept and at.get(len(kept)) == kept[-1]), default=0)

    def keep(self, agent: str, path: list[int]) -> None:
        self._cut(agent, 0)
        self.paths[agent] = path
        self._uses.update(path)

    def fit(self, order: Sequence[str], step: int) -> None:
        """Cut paths in this order, at multiples of `step`, until what is kept has room."""
        for agent in order:
            while agent in self.paths and len(self._uses) + self._snapshot * len(self.paths) > self._room:
                stop = (len(self.paths[agent]) - 1) // step * step
                # Less than its own snapshot is not worth that.
                self._cut(agent, stop if stop > self._snapshot else 0)

    def _cut(self, agent: str, stop: int) -> None:
        path = self.paths.get(agent, [])
        for block in path[stop:]:
            self._uses[block] -= 1
            if self._uses[block] == 0:
                del self._uses[block]
        del path[stop:]
        if not path:
            self.paths.pop(agent, None)


def reused(trace: Sequence[TimedRequest], *, room: int, snapshot: int, step: int, order: Order) -> int:
    """Blocks reused; `room` and `snapshot` in blocks."""
    kept, latest, total = _KeptPrompt(room, snapshot), Latest(), 0
    for at, one in enumerate(trace):
        tokens, answer = one.request.prompt.tokens, one.request.answer
        path = kept.numbered((tokens if answer is None else join_tokens(tokens, answer)).tolist())
        total += kept.reused(path[: len(tokens)])
        latest[one.agent] = at
        kept.keep(one.agent, path)
        ranked = sorted(kept.paths, key=lambda agent, now=at: order(now, agent, latest))
        kept.fit(ranked, step)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=Path, metavar="SESSIONS", help="recorded sessions of coding agents")
    parser.add_argument("--live", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[120_000])
    parser.add_argument("--snapshot-tokens", type=int, default=3100)
    parser.add_argument("--limit", type=int, default=1000)
    options = parser.parse_args()
    trace = list(islice(read_sessions(options.sessions, num_live=options.live), options.limit))
    block = trace[0].request.block
    interval = interval_tokens(checkpoint_nbytes=options.snapshot_tokens, kv_nbytes_per_token=1) // block
    future = FutureKnown(block=block)
    for one in trace:
        future.add(one.request)
    waits = SessionWaits(trace)
    orders: dict[str, Order] = {
        "lru": lambda at, agent, latest: (0.0, latest[agent]),
        "told": lambda at, agent, latest: (waits.rate(at, latest[agent]), latest[agent]),
    }
    for tokens in options.tokens:
        most = future.reused_within(tokens, snapshot_tokens=options.snapshot_tokens)
        for name, order in orders.items():
            shares = [
                reused(trace, room=tokens // block, snapshot=options.snapshot_tokens // block, step=step, order=order)
                * block
                / most
                for step in (1, interval)
            ]
            print(f"{tokens:>10,} tokens, {name:<5} {shares[0]:.1%} anywhere, {shares[1]:.1%} at intervals")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

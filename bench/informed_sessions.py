"""What agent sessions leave to know: `python -m bench.informed_sessions SESSIONS [--live 2] [--tokens 120000]`.

A model with snapshots (or windows: give what one takes as `--snapshot-tokens`) resumes where one is, so whatever is
kept of a chat has one at its end, which takes room. Beyond that everything is free: a path can be cut at every position
(`anywhere`), as if all snapshots were there and took nothing; or it is cut where it has one more, and pays for those
(`paid`: at the best of several distances). With full attention (`--snapshot-tokens 0`) every position is one to resume
from, and `anywhere` is what counts. Paths are cut from the end, those first that are

`lru`: unused for longest;
`told`: least likely to be asked for next, by how often that was so in the trace itself, chance included: for what the
answer ended with, how many prompts ago it was, and how many seconds. No server knows that before the first prompt. With
`--told-by OTHER` it is how often that was so in as many requests of other sessions: without this trace's own chance.

As a share of the bound of `reprise simulate` (`belady`), which knows the future. It is no proof for all orders: one
that looks further than the next prompt may do better.
"""

import argparse
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

from reprise.core.tokens import join_tokens
from reprise.lab.simulate.offline import FutureKnown
from reprise.lab.simulate.sessions import read_sessions
from reprise.replay.request import Request

_PROMPTS = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_SECONDS = (2, 10, 30, 120, 600)
_DISTANCES = (4096, 8192, 16384, 32768, 65536, 1 << 40)
"""Between snapshots; the last: only at the end."""

Kind = tuple[bool | None, int, int]
Latest = dict[str, int]
Order = Callable[[int, str, Latest], tuple[float, int]]


class SessionWaits:
    """How often agents of each kind were asked for next in a trace."""

    def __init__(self, trace: Sequence[Request]) -> None:
        self._waited, self._came = Counter[Kind](), Counter[Kind]()
        latest: Latest = {}
        for at, (now, upcoming) in enumerate(pairwise(trace)):
            latest[now.agent] = at
            for agent, last in latest.items():
                kind = _kind(trace, at, last)
                self._waited[kind] += 1
                self._came[kind] += upcoming.agent == agent

    def rate(self, trace: Sequence[Request], at: int, last: int) -> float:
        """The chance of an agent, last asked for with request `last`, to come right behind request `at`."""
        kind = _kind(trace, at, last)
        return self._came[kind] / (self._waited[kind] + 1)


def _kind(trace: Sequence[Request], at: int, last: int) -> Kind:
    before = trace[last]
    silent_s = max(0.0, trace[at].at_s - before.at_s - before.took_s)
    return before.calls_tool, bisect_right(_PROMPTS, at + 1 - last), bisect_right(_SECONDS, silent_s)


class _KeptPrompt:
    """What is kept of each agent's path, as blocks, each of which is stored once."""

    def __init__(self, room: int, snapshot: int, step: int, *, pays: bool) -> None:
        """`room`, `snapshot`, the size of one, and `step`, between the positions where paths are cut, in blocks.

        `pays`: there is a snapshot at each of those.
        """
        self._room, self._snapshot, self._step, self._pays = room, snapshot, step, pays
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
        """How far this path is kept, up to a place to resume: any block, or where a snapshot is."""
        known = next((at for at, block in enumerate(path) if self._uses[block] == 0), len(path))
        if self._snapshot == 0:
            return known
        ends = (len(kept) for kept in self.paths.values() if len(kept) <= known and kept[-1] == path[len(kept) - 1])
        below = known // self._step * self._step if self._pays else 0
        return max(below, max(ends, default=0))

    def keep(self, agent: str, path: list[int]) -> None:
        self._cut(agent, 0)
        self.paths[agent] = path
        self._uses.update(path)

    def fit(self, order: Sequence[str], running: str) -> None:
        """Cut paths in this order until what is kept has room; that of `running` where it likes, on its way."""
        for agent in order:
            step = 1 if agent == running else self._step
            while agent in self.paths and len(self._uses) + self._snapshot * self._num_snapshots() > self._room:
                stop = (len(self.paths[agent]) - 1) // step * step
                # Less than its own snapshot is not worth that.
                self._cut(agent, stop if stop > self._snapshot else 0)

    def _num_snapshots(self) -> int:
        below = sum((len(path) - 1) // self._step for path in self.paths.values()) if self._pays else 0
        return len(self.paths) + below

    def _cut(self, agent: str, stop: int) -> None:
        path = self.paths.get(agent, [])
        for block in path[stop:]:
            self._uses[block] -= 1
            if self._uses[block] == 0:
                del self._uses[block]
        del path[stop:]
        if not path:
            self.paths.pop(agent, None)


def reused(trace: Sequence[Request], *, room: int, snapshot: int, step: int, order: Order, pays: bool = False) -> int:
    """Blocks reused; `room`, `snapshot` and `step` in blocks."""
    kept, latest, total = _KeptPrompt(room, snapshot, step, pays=pays), Latest(), 0
    for at, one in enumerate(trace):
        tokens, answer = one.prompt.tokens, one.answer
        path = kept.numbered((tokens if answer is None else join_tokens(tokens, answer)).tolist())
        total += kept.reused(path[: len(tokens)])
        latest[one.agent] = at
        kept.keep(one.agent, path)
        ranked = sorted(kept.paths, key=lambda agent, now=at: order(now, agent, latest))
        kept.fit(ranked, one.agent)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=Path, metavar="SESSIONS", help="recorded sessions of coding agents")
    parser.add_argument("--live", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[120_000])
    parser.add_argument("--snapshot-tokens", type=int, default=3100)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--told-by", type=Path, metavar="OTHER", help="count the distributions in these sessions")
    options = parser.parse_args()

    def read(path: Path) -> list[Request]:
        return list(islice(read_sessions(path, num_live=options.live), options.limit))

    trace = read(options.sessions)
    block = trace[0].block
    future = FutureKnown(block=block)
    for one in trace:
        future.add(one)
    waits = SessionWaits(trace if options.told_by is None else read(options.told_by))
    orders: dict[str, Order] = {
        "lru": lambda at, agent, latest: (0.0, latest[agent]),
        "told": lambda at, agent, latest: (waits.rate(trace, at, latest[agent]), latest[agent]),
    }
    for tokens in options.tokens:
        most = future.reused_within(tokens, snapshot_tokens=options.snapshot_tokens)
        for name, order in orders.items():
            play = partial(reused, trace, room=tokens // block, snapshot=options.snapshot_tokens // block, order=order)
            anywhere = play(step=1) * block / most
            paid, distance = max(
                (play(step=max(1, distance // block), pays=True) * block / most, distance) for distance in _DISTANCES
            )
            fallbacks = "none below the end" if distance == _DISTANCES[-1] else f"every {distance:,}"
            print(f"{tokens:>10,} tokens, {name:<5} {anywhere:.1%} anywhere, {paid:.1%} paid ({fallbacks})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

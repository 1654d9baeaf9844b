"""Which item of the cache is worth least. Pure: facts in, a number out; the lowest number goes first."""

from dataclasses import dataclass
from typing import Protocol

from reprise.core.prompt import BoundaryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one item that could be evicted.

    `cost`: the tokens to compute again if it were gone and its position were asked for. `nbytes`: what evicting it
    gives back. `last_use`, `now`: the cache's clock, a count of requests. `num_uses`: how often a request resumed here.
    """

    kind: BoundaryKind
    cost: int
    nbytes: int
    last_use: int
    now: int
    floor: float
    """The policy's floor when the item was last used."""
    num_uses: int
    num_branches: int
    is_superseded: bool
    is_side: bool


class Policy(Protocol):
    """An order of eviction. `floor` ages the items: it is stamped on an item when it is used, and only `on_evict`
    raises it.
    """

    @property
    def floor(self) -> float: ...

    def worth(self, facts: Facts) -> float: ...

    def on_evict(self, worth: float) -> None:
        """An item of this worth was evicted."""
        ...


class Lru:
    """Least recently used first. For comparison."""

    floor = 0.0

    def worth(self, facts: Facts) -> float:
        return float(facts.last_use)

    def on_evict(self, worth: float) -> None:
        pass


class CostAware:
    """Greedy-dual by size and frequency: what a byte saves, aged by what was given up before.

    After Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching" (1998): an item's
    worth is the floor at its last use plus uses × cost / size; the floor rises to the worth of whatever is evicted.
    """

    def __init__(self) -> None:
        self.floor = 0.0

    def worth(self, facts: Facts) -> float:
        if facts.nbytes == 0:
            return facts.floor
        uses = 1 + facts.num_uses + max(0, facts.num_branches - 1)
        gain = uses * facts.cost / facts.nbytes
        if facts.is_superseded:
            gain *= 0.1
        if facts.is_side:
            gain *= 0.1
        return facts.floor + gain

    def on_evict(self, worth: float) -> None:
        self.floor = max(self.floor, worth)


POLICIES: dict[str, type[Lru] | type[CostAware]] = {"lru": Lru, "cost": CostAware}
"""The table of policies by name; `cost` is the default."""

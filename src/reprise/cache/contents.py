"""What one prefix cache holds, and the books about it: the state that commits, leases and removals work on."""

from collections.abc import Callable
from dataclasses import dataclass

from reprise.cache.eviction import EvictionOrder
from reprise.cache.ledger import Ledger
from reprise.cache.pin_book import PinBook
from reprise.cache.policy import ExpectedSaving, Facts, Policy
from reprise.cache.tree import Landmark, Node, leased_nbytes
from reprise.cache.worth import facts_of
from reprise.core.kinds import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """How finely payloads are cut, in tokens.

    `piece`: the longest piece, which bounds what a split or an eviction has to copy. `tail`: how much of a path's end
    is evicted at a time where every position is resumable.
    """

    piece: int = 2048
    tail: int = 1024

    def __post_init__(self) -> None:
        assert self.piece > 0 and self.tail > 0, self


class Contents:
    """The trees by namespace, and what is written down about them.

    Who changes what: landmarks come and go by `marking`, paths grow by `commits`, leases are given and taken by
    `leasing`, and everything else that goes, goes by `removal`. `integrity` compares the result with the trees.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        budget: int | None = None,
        policy: Policy | None = None,
        grain: Grain | None = None,
    ) -> None:
        self.layout = layout
        self.budget = budget
        self.grain = grain if grain is not None else Grain()
        self.reserved: int = 0
        """What live sequences hold, less what they lend: that is counted as held by the tree."""
        self.coming: int = 0
        """What was read from the disk and is not in the tree yet; set by who reads."""
        self.ledger = Ledger()
        self.roots: dict[str, Node] = {}
        self.clock = 0
        self.now_s = 0.0
        self.order = EvictionOrder(policy if policy is not None else ExpectedSaving(), self.facts)
        self.num_landmarks = 0
        self.pins = PinBook()
        self.recall: Callable[[object], None] = _nobody_lends
        """Makes a lender that has ended replace everything that it lends by copies; set by the owner of the sequences.

        One that still runs is left alone: what it lent is dropped, and it computes on in the same buffers.
        """

    def facts(self, landmark: Landmark) -> Facts:
        """What the policy may know of this landmark. O(depth) at worst."""
        return facts_of(landmark, self.layout, tail=self.grain.tail, clock=self.clock, now_s=self.now_s)

    def free(self) -> int | None:
        """Bytes left in the budget (negative when over it), or None without a budget."""
        return None if self.budget is None else self.budget - self.reserved - self.coming - self.ledger.held

    def protected_nbytes(self) -> int:
        """At least so many bytes stay whatever is evicted, pins aside: full entries and snapshots up to the leases."""
        return leased_nbytes(self.roots.values())


def _nobody_lends(lender: object) -> None:
    raise AssertionError(f"entries are lent by {lender}, and nobody can recall them")

"""The one place where bytes are charged."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """Bytes and tokens that the tree holds, and what was evicted. Changed by the tree's owner only."""

    kv: int = 0
    snapshots: int = 0
    tokens: int = 0
    num_nodes: int = 0
    evictions: int = 0
    evicted_by_reason: Counter[str] = field(default_factory=Counter[str])

    @property
    def held(self) -> int:
        """All bytes of payloads."""
        return self.kv + self.snapshots

    def charge_kv(self, nbytes: int) -> None:
        self.kv += nbytes
        assert self.kv >= 0, self

    def charge_snapshot(self, nbytes: int) -> None:
        self.snapshots += nbytes
        assert self.snapshots >= 0, self

    def count_tokens(self, num: int) -> None:
        self.tokens += num
        assert self.tokens >= 0, self

    def count_nodes(self, num: int) -> None:
        self.num_nodes += num
        assert self.num_nodes >= 0, self

    def count_eviction(self, reason: str) -> None:
        self.evictions += 1
        self.evicted_by_reason[reason] += 1

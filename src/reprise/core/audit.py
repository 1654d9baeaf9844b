"""What the live audit has found: answers computed again, cold, while the server was idle."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    SAME = "same"
    NEAR_TIE = "near tie"
    """Another token came, and rounding explains it: the two were about equally likely, or stood at a filter's edge."""
    DIFFERENT = "different"
    """Beyond rounding: what was reused was not what a cold run computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTotals:
    """Answers that were audited since the start. `worst`: the largest difference of a token's log-probability."""

    num_checked: int = 0
    num_different: int = 0
    num_near_ties: int = 0
    worst: float = 0.0
    verdicts: Mapping[str, Verdict] = field(default_factory=dict[str, Verdict])
    """Of the latest jobs, by id."""

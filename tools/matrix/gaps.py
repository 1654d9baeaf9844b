"""How far two computations of the same thing are apart."""

import math
from dataclasses import dataclass

import mlx.core as mx

from tests.zoo.forward import largest_difference

ROUNDING = 1e-3
"""Differences up to this are rounding: float32, sums in another order. Mistakes are some 0.01 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest absolute difference in log-probability, over all positions and tokens, and in which comparison."""

    difference: float = 0.0
    where: str = ""

    @property
    def is_rounding(self) -> bool:
        return self.difference <= ROUNDING

    def widened(self, one: mx.array, other: mx.array, where: str) -> "Gap":
        """This gap, or that between these two arrays of log-probabilities if it is larger (or not a number)."""
        difference = largest_difference(one, other)
        if math.isnan(self.difference) or difference <= self.difference:
            return self
        return Gap(difference=difference, where=where)

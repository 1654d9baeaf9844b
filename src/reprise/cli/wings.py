"""Ranks, which a server on one machine does without: imported when its options ask for them."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from reprise.core.settings import Settings

if TYPE_CHECKING:
    from reprise.cluster.ranks.group import LeadingRank


class Ranks(Protocol):
    """What `reprise serve --tensor-parallel` needs of `reprise.cluster.ranks`."""

    def check_rank(self, settings: Settings, environment: Mapping[str, str]) -> None:
        """Refuse settings that several ranks do not support."""
        ...

    def least_nbytes_of_rank(self, nbytes: int, environment: Mapping[str, str]) -> int:
        """The least that this process holds of weights of `nbytes`."""
        ...

    def follow_rank_0(self, settings: Settings) -> None:
        """Follow rank 0 until it stops this rank."""
        ...

    def leading_rank(self, settings: Settings) -> "LeadingRank":
        """The group that this process leads."""
        ...


def ranks() -> Ranks:
    """Tensor parallelism over the ranks of a launcher."""
    return cast("Ranks", import_module("reprise.cluster.ranks.serve"))

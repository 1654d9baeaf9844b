"""Which landmarks a newer one of the same conversation makes superfluous."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from reprise.cache.tree import Landmark, Node, subtree
from reprise.core.prompt import BoundaryKind

_ENDS = frozenset(set(BoundaryKind) - {BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT})
"""Landmarks that any later one of these, or a stable one, of the same conversation supersedes.

A stable one is superseded by a stable one alone: when the next message strips a tool loop, it is where to resume.
"""


def superseded_by(kind: BoundaryKind) -> frozenset[BoundaryKind]:
    """The kinds of landmarks below on the path that one of this kind makes superfluous."""
    if kind is BoundaryKind.STABLE:
        return _ENDS | {BoundaryKind.STABLE}
    return _ENDS if kind in _ENDS else frozenset()


def superseded_on(nodes: Sequence[Node], position: int, kind: BoundaryKind) -> Iterator[Landmark]:
    """What a landmark of this kind at `position`, on a path of these nodes from the root, makes superfluous there."""
    kinds = superseded_by(kind)
    for node in nodes:
        for mark in node.landmarks.values():
            if mark.position < position and mark.kind in kinds and not mark.is_superseded:
                yield mark


def superseded_beside(nodes: Sequence[Node]) -> Iterator[Landmark]:
    """What this same prompt left beside the path: its chat goes on from here."""
    visit = nodes[-1].visit
    if visit == 0:
        return  # The policy knows no prompts.
    for below, node in pairwise(reversed(nodes)):
        for beside in node.children.values():
            if beside is not below and beside.visit == visit:
                for mark in [mark for found in subtree(beside) for mark in found.landmarks.values()]:
                    if mark.kind in _ENDS and not mark.is_superseded:
                        yield mark
        if node.first_visit < visit:
            return  # Above, everything is older than the prompt.

"""Landmarks come into the tree and leave it here, and are placed anew in the order of eviction as prompts come by."""

from collections.abc import Iterable

from reprise.cache.contents import Contents
from reprise.cache.tree import Landmark, Node
from reprise.core.prompt import BoundaryKind


def add_landmark(contents: Contents, node: Node, position: int, kind: BoundaryKind, *, is_side: bool) -> Landmark:
    """Make a landmark on this edge. It has no snapshot, and no place in the order of eviction until it is used."""
    landmark = Landmark(position=position, kind=kind, node=node, made_at=contents.clock, is_side=is_side)
    node.landmarks[position] = landmark
    contents.num_landmarks += 1
    if node.ghosts is not None:
        node.ghosts.forget_landmark(position)
    return landmark


def mark_end(contents: Contents, leaf: Node, *, stable_at: int | None = None) -> None:
    """Make the end of a leaf evictable again (layouts where every position is resumable)."""
    if leaf.stop in leaf.landmarks:
        return
    end = add_landmark(contents, leaf, leaf.stop, BoundaryKind.INTERVAL, is_side=False)
    end.last_use, end.num_uses, end.stable_at = leaf.last_use, leaf.num_uses, stable_at
    contents.order.use(end)


def drop_landmark(contents: Contents, landmark: Landmark) -> None:
    """Take a landmark out of the tree, and give its bytes back."""
    del landmark.node.landmarks[landmark.position]
    contents.pins.forget(landmark)
    contents.num_landmarks -= 1
    if landmark.snapshot is not None:
        contents.ledger.charge_snapshot(-landmark.snapshot.nbytes)
        # The order of eviction may still hold the landmark for a while; its bytes are given back now.
        landmark.snapshot = None


def supersede(contents: Contents, marks: Iterable[Landmark]) -> None:
    """A newer landmark of the same conversation has made these superfluous."""
    for mark in marks:
        mark.is_superseded = True
        contents.order.place(mark)


def pass_by(contents: Contents, node: Node, visit: int) -> None:
    """The prompt of this number went through `node`: look again at everything there whose worth that changes."""
    if visit > node.visit:
        node.visit = visit
        for landmark in node.landmarks.values():
            if not landmark.is_superseded:  # The others go first in any case, and are looked at again in time.
                contents.order.place(landmark)

"""What takes things out of the tree again: eviction for want of room, clearing, and shortening what nobody needs.

Nothing here touches what a lease or a pin protects, but for `forget` (both) and `clear` (pins). A lease protects its
path: all but the superseded landmarks on the way to its position.
"""

from functools import partial

from reprise.cache.contents import Contents
from reprise.cache.ghosts import Ghosts
from reprise.cache.ledger import Ledger
from reprise.cache.loans import lenders_of, lent_on
from reprise.cache.marking import drop_landmark, mark_end
from reprise.cache.policy import Facts
from reprise.cache.tree import Landmark, Node, cut_pieces, kv_nbytes, subtree
from reprise.cache.trimming import end_of_use, evicted_from, trimmed
from reprise.core.kinds import Full
from reprise.core.tokens import own_tokens


def make_room(contents: Contents, nbytes: int, *, new: Facts | None = None) -> bool:
    """Evict until `nbytes` more fit the budget. False if that cannot be: then nothing more can be evicted.

    `new`: what the room is for, if it may not take the place of what is worth more.
    """
    while True:
        free = contents.free()
        if free is None or free >= nbytes:
            return True
        if not evict_one(contents, "budget", new=new):
            return False


def evict_one(contents: Contents, reason: str, *, new: Facts | None = None) -> bool:
    """Evict the item of least worth. False if nothing may be evicted (for `new`, if that is given)."""
    landmark = contents.order.pop(may_evict=partial(_may_evict, contents), new=new)
    if landmark is None:
        return False
    _evict(contents, landmark, reason)
    return True


def clear(contents: Contents, namespace: str | None) -> None:
    """Drop everything that no lease protects, pins included: of one namespace, or of all. O(size of the trees)."""
    for name in [name for name in contents.roots if namespace in (None, name)]:
        root = contents.roots[name]
        for mark in [mark for node in subtree(root) for mark in node.landmarks.values()]:
            contents.pins.forget(mark)
        # What one round leaves, such as the new end of a path that was shortened, is for the next.
        while marks := [mark for node in subtree(root) for mark in node.landmarks.values()]:
            num_before = contents.ledger.evictions
            for mark in marks:
                if mark.node.landmarks.get(mark.position) is mark and _may_evict(contents, mark):
                    _evict(contents, mark, "cleared")
            if contents.ledger.evictions == num_before:
                break
        if not root.children and root.num_leases == 0:
            del contents.roots[name]
            contents.ledger.count_nodes(-1)
    contents.order.sweep(contents.num_landmarks)


def forget(contents: Contents) -> None:
    """Drop everything at once, leases included: for when what is stored is not to be trusted any more."""
    for root in contents.roots.values():
        for node in subtree(root):
            # The nodes refer to each other, and the order to landmarks: their bytes are not to wait for that.
            for landmark in node.landmarks.values():
                landmark.snapshot = None
                contents.pins.forget(landmark)
            node.landmarks.clear()
            node.pieces.clear()
    contents.roots = {}
    contents.num_landmarks = 0
    contents.order.sweep(0)
    contents.ledger = Ledger(evictions=contents.ledger.evictions, evicted_by_reason=contents.ledger.evicted_by_reason)


def trim_path(contents: Contents, node: Node, position: int) -> None:
    """Drop the window and chunk entries that only a landmark or lease at `position` of this edge needed."""
    needs = [need for kind in contents.layout.kinds if not isinstance(kind, Full) for need in kind.needs(position)]
    lowest = min((need.start for need in needs), default=position)
    above: Node | None = node
    while above is not None and above.stop > lowest:
        rest = trimmed(above)
        if rest is not None:
            before = kv_nbytes(above)
            above.pieces = rest
            contents.ledger.charge_kv(kv_nbytes(above) - before)
        above = above.parent


def prune(contents: Contents, node: Node) -> None:
    """Shorten a path to its last landmark or lease, through as many edges as it takes."""
    while node.parent is not None and not node.children:
        stop = end_of_use(node)
        if stop > node.start:
            if stop < node.stop:
                _shorten(contents, node, stop)
            return
        node = _remove(contents, node)


def _may_evict(contents: Contents, landmark: Landmark) -> bool:
    if landmark.stays_until > contents.now_s:
        return False
    node = landmark.node
    if landmark.is_superseded and not contents.layout.resumes_anywhere:
        # Who runs on this path came from further on. If this stayed for the lease, one growing chat would fill the
        # budget with what it has left behind, and have no room for its next position ever after.
        return all(lease.position != landmark.position for lease in node.leases)
    below = node.num_leases - len(node.leases)
    return below == 0 and all(lease.position < landmark.position for lease in node.leases)


def _evict(contents: Contents, landmark: Landmark, reason: str) -> None:
    contents.ledger.count_eviction(reason)
    node, position = landmark.node, landmark.position
    for lender in lenders_of(node):
        # Nothing is freed by dropping what a live sequence still holds.
        contents.recall(lender)
    is_end = not node.children and position == node.stop
    if contents.layout.resumes_anywhere:
        cut = evicted_from(landmark, contents.grain.tail, contents.now_s)
        drop_landmark(contents, landmark)
        if is_end:
            # Pins that ran out are the only landmarks inside an edge here.
            for mark in [mark for mark in node.landmarks.values() if mark.position > cut]:
                drop_landmark(contents, mark)
            _cut_tail(contents, node, cut, stable_at=landmark.stable_at)
        return
    drop_landmark(contents, landmark)
    _ghosts(node).lose_landmark(position)
    trim_path(contents, node, position)
    prune(contents, node)


def _cut_tail(contents: Contents, leaf: Node, stop: int, *, stable_at: int | None) -> None:
    """Drop ``[stop, leaf.stop)``, and make the path's new end evictable."""
    end = leaf
    if stop > leaf.start:
        _shorten(contents, leaf, stop)
    else:
        end = _remove(contents, leaf)
    if end.parent is not None and not end.children:
        mark_end(contents, end, stable_at=stable_at)


def _shorten(contents: Contents, leaf: Node, stop: int) -> None:
    before, lent_before = kv_nbytes(leaf), lent_on(leaf)
    leaf.pieces = cut_pieces(leaf, leaf.start, stop)
    contents.ledger.charge_kv(kv_nbytes(leaf) - before)
    # What a running sequence lent and nobody keeps is its own again: that frees nothing.
    contents.reserved += lent_before - lent_on(leaf)
    contents.ledger.count_tokens(stop - leaf.stop)
    ghosts = _ghosts(leaf).up_to(stop)
    ghosts.lose_path(stop, int(leaf.tokens[stop - leaf.start]))
    leaf.ghosts = ghosts
    leaf.tokens = own_tokens(leaf.tokens[: stop - leaf.start])


def _remove(contents: Contents, leaf: Node) -> Node:
    """Take a leaf out of the tree; gives its parent."""
    parent = leaf.parent
    assert parent is not None and leaf.num_leases == 0 and not leaf.landmarks and not leaf.children, leaf.start
    first = int(leaf.tokens[0])
    del parent.children[first]
    contents.ledger.charge_kv(-kv_nbytes(leaf))
    contents.reserved += lent_on(leaf)
    contents.ledger.count_tokens(-len(leaf.tokens))
    contents.ledger.count_nodes(-1)
    leaf.parent, leaf.pieces = None, {}
    _ghosts(parent).lose_path(parent.stop, first)
    end = parent.landmarks.get(parent.stop)
    if end is not None:
        contents.order.place(end)  # Fewer paths go on from it.
    return parent


def _ghosts(node: Node) -> Ghosts:
    if node.ghosts is None:
        node.ghosts = Ghosts()
    return node.ghosts

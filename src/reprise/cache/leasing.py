"""Leases, and what a request that comes tells of the path that it uses."""

from reprise.cache.contents import Contents
from reprise.cache.lookup import Match
from reprise.cache.marking import pass_by
from reprise.cache.removal import prune, trim_path
from reprise.cache.tree import Lease, Walk, path_to, subtree


def protect(walked: Walk, position: int) -> Lease:
    """Keep the walked path up to `position` from eviction, until `release`. O(depth)."""
    node = next(n for n in walked.nodes if position <= n.stop)
    held = Lease(node, position)
    node.leases.append(held)
    for above in path_to(node):
        above.num_leases += 1
    return held


def release(contents: Contents, lease: Lease) -> None:
    """Give the lease back, and drop what was kept for it alone. Releasing twice is a bug."""
    assert not lease.is_released, lease
    lease.is_released = True
    lease.node.leases.remove(lease)
    for above in path_to(lease.node):
        above.num_leases -= 1
    if not contents.layout.resumes_anywhere:
        trim_path(contents, lease.node, lease.position)
        prune(contents, lease.node)


def note_use(contents: Contents, match: Match, position: int) -> None:
    """The matched path is used up to `position`."""
    contents.clock += 1
    for node in match.walk.nodes:
        if node.start < position:
            node.last_use = contents.clock
            node.num_uses += 1
            landmark = node.landmarks.get(position)
            if landmark is not None:
                landmark.last_use = contents.clock
                landmark.num_uses += 1
                contents.order.use(landmark)


def note_arrival(contents: Contents, match: Match) -> int:
    """Let the policy know of a request, and look again at everything whose worth that changes. Gives its number."""
    arrival = contents.order.policy.arrive(match.tokens, known=match.length, namespace=match.namespace)
    nodes, last = match.walk.nodes, match.walk.last
    passed = nodes if match.length == last.stop else nodes[:-1]
    for node in passed:
        pass_by(contents, node, arrival.number)
    if arrival.continues is not None:
        # What the earlier prompt left beside this path has just been left behind.
        beside = last.children.values() if match.length == last.stop else (last,)
        for top in [node for node in beside if node.visit == arrival.continues]:
            for node in subtree(top):
                for landmark in node.landmarks.values():
                    contents.order.place(landmark)
    contents.order.advance(arrival.number)
    return arrival.number

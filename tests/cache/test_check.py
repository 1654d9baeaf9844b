"""`check()` is worth something: each book, when it is wrong, makes it raise."""

from collections.abc import Callable

import pytest

from reprise.cache.node import Checkpoint, Lease, Node, Segment
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.kinds import Chunk, Full, Layout, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, as_tokens
from reprise.memory import Account
from tests.cache.hash_model import HashSegment, HashSource
from tests.cache.trial import SIZES

WINDOW = Window(6)
LAYOUT = Layout(kinds=(Full(), WINDOW), has_snapshots=True)
TRUNK = tuple(range(20))


def full_of_things(layout: Layout = LAYOUT) -> tuple[PrefixCache, Node, Node]:
    """A cache, its trunk ``[0, 20)`` with two children and a lease at 20, and a leaf ``[20, 30)``."""
    cache = PrefixCache(layout, sizes=SIZES)
    for tokens in (TRUNK[:12], TRUNK, TRUNK + (7,) * 10, TRUNK + (8,) * 10):
        cache.commit(as_tokens(tokens), HashSource(tokens), kind=BoundaryKind.STABLE)
    match = cache.match(as_tokens(TRUNK))
    cache.lease(match, 20)
    cache.check()
    trunk = cache.tree.roots[""].children[0]
    while trunk.stop < 20:
        (trunk,) = trunk.children.values()
    return cache, trunk, trunk.children[7]


def uncount(cache: PrefixCache, node: Node, account: Account, nbytes: int) -> None:
    """Make all books agree that bytes of this node are gone."""
    cache.memory.charge(account, -nbytes)
    node.totals.nbytes -= nbytes
    cache.tree.totals.nbytes -= nbytes


def wrong_kv(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.memory.charge(Account.KV, 10)


def wrong_snapshots(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.memory.charge(Account.SNAPSHOTS, -70)


def wrong_tokens(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.tree.totals.num_tokens += 1


def wrong_bytes_of_a_namespace(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.totals.nbytes += 1


def wrong_nodes(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.serial += 10**6


def wrong_checkpoint_count(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.tree.totals.num_checkpoints += 1


def lost_lease(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.leases.clear()


def lease_not_counted_above(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.tree.roots[""].num_leases -= 1


def lease_that_was_released(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.leases[0].is_released = True


def lease_of_another_edge(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.leases[0].position = 25


def lease_that_points_elsewhere(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.leases[0] = Lease(leaf, 20)


def checkpoint_out_of_order(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.order.remove(leaf.checkpoints[30])


def one_checkpoint_in_the_place_of_another(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.order.remove(leaf.checkpoints[30])
    cache.order.place(Checkpoint(30, BoundaryKind.STABLE, leaf))


def stranger_in_the_order(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.order.place(Checkpoint(30, BoundaryKind.STABLE, leaf))


def pin_of_what_is_gone(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    cache.pins.pin(Checkpoint(30, BoundaryKind.STABLE, leaf), 5.0)


def checkpoint_of_another_node(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.checkpoints[30].node = trunk


def checkpoint_elsewhere(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.checkpoints[30].position = 29


def checkpoint_behind_its_edge(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    checkpoint = leaf.checkpoints.pop(30)
    checkpoint.position = 31
    leaf.checkpoints[31] = checkpoint


def checkpoint_without_snapshot(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    snapshot = leaf.checkpoints[30].snapshot
    assert snapshot is not None
    leaf.checkpoints[30].snapshot = None
    uncount(cache, leaf, Account.SNAPSHOTS, snapshot.nbytes)


def checkpoint_lost(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    checkpoint = leaf.checkpoints[30]
    cache.tree.drop_checkpoint(leaf.checkpoints[30])
    cache.order.remove(checkpoint)


def full_entries_lost(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    uncount(cache, leaf, Account.KV, sum(segment.nbytes for segment in leaf.segments.pop(Full())))


def window_entries_lost(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    uncount(cache, leaf, Account.KV, leaf.segments[WINDOW].pop(0).nbytes)
    if not leaf.segments[WINDOW]:
        del leaf.segments[WINDOW]


def window_entries_that_nobody_needs(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    # The leaf ends at 30, which needs [25, 30).
    cache.tree.attach((trunk, leaf), WINDOW, Segment(Span(20, 22), HashSegment(("one", "two"))))


def empty_list_of_pieces(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.segments[WINDOW] = []


def pieces_of_a_kind_the_model_lacks(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.segments[Chunk(5)] = leaf.segments.pop(WINDOW)


def pieces_out_of_order(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.segments[Full()].reverse()


def piece_behind_its_edge(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    last = leaf.segments[Full()][-1]
    leaf.segments[Full()][-1] = Segment(Span(last.span.start, last.span.stop + 1), last.payload)


def child_elsewhere(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.start += 1


def child_under_another_token(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    trunk.children[99] = trunk.children.pop(7)


def child_of_another_parent(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.parent = cache.tree.roots[""]


def tokens_that_can_change(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.tokens = leaf.tokens.copy()


def tokens_that_keep_another_buffer_alive(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    leaf.tokens = as_tokens((*leaf.tokens, 1))[:-1]


def something_on_the_root(cache: PrefixCache, trunk: Node, leaf: Node) -> None:
    root = cache.tree.roots[""]
    root.checkpoints[0] = trunk.checkpoints[20]


@pytest.mark.parametrize(
    "corrupt",
    [
        wrong_kv,
        wrong_snapshots,
        wrong_tokens,
        wrong_bytes_of_a_namespace,
        wrong_nodes,
        wrong_checkpoint_count,
        lost_lease,
        lease_not_counted_above,
        lease_that_was_released,
        lease_of_another_edge,
        lease_that_points_elsewhere,
        checkpoint_out_of_order,
        one_checkpoint_in_the_place_of_another,
        stranger_in_the_order,
        pin_of_what_is_gone,
        checkpoint_of_another_node,
        checkpoint_elsewhere,
        checkpoint_behind_its_edge,
        checkpoint_lost,
        window_entries_that_nobody_needs,
        empty_list_of_pieces,
        pieces_of_a_kind_the_model_lacks,
        pieces_out_of_order,
        piece_behind_its_edge,
        child_elsewhere,
        child_under_another_token,
        child_of_another_parent,
        tokens_that_can_change,
        tokens_that_keep_another_buffer_alive,
        something_on_the_root,
    ],
)
def test_a_wrong_book_is_noticed(corrupt: Callable[[PrefixCache, Node, Node], None]) -> None:
    cache, trunk, leaf = full_of_things()
    corrupt(cache, trunk, leaf)
    with pytest.raises(AssertionError):
        cache.check()


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (checkpoint_without_snapshot, "^30$"),
        (full_entries_lost, "full attention entries are complete on every edge"),
        (window_entries_lost, "Window"),
    ],
)
def test_what_is_lost_is_noticed_where_all_books_agree(
    corrupt: Callable[[PrefixCache, Node, Node], None], sentence: str
) -> None:
    cache, trunk, leaf = full_of_things()
    corrupt(cache, trunk, leaf)
    with pytest.raises(AssertionError, match=sentence):
        cache.check()


def test_a_path_that_nothing_could_evict_is_noticed() -> None:
    cache, _, leaf = full_of_things(Layout(kinds=(Full(),)))
    cache.lease(cache.match(as_tokens(TRUNK + (7,) * 10)), 30)
    checkpoint = leaf.checkpoints[30]
    cache.tree.drop_checkpoint(leaf.checkpoints[30])
    cache.order.remove(checkpoint)
    with pytest.raises(AssertionError, match="a path ends at a checkpoint"):
        cache.check()


def test_a_lease_is_released_once() -> None:
    cache, _, _ = full_of_things()
    lease = cache.lease(cache.match(as_tokens(TRUNK)), 20)
    cache.release(lease)
    with pytest.raises(AssertionError):
        cache.release(lease)
    cache.check()

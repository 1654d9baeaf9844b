"""The tree that is shown has everything that is in memory or on disk, once, and moves to memory what is read."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.prefix_cache import PrefixCache
from reprise.core.inspection import InspectedNode, TreePart
from reprise.core.kinds import Full, Layout
from reprise.core.prompt import Boundary, BoundaryKind
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.disk.records.record import tail_key, token_bytes
from reprise.disk.store.edges import disk_tree
from reprise.loop.tree_inspection import edge_tokens, inspect_tree
from tests.cache.hash_model import BlankSource
from tests.disk.chains import BLOCK
from tests.disk.test_index import ROOTS, Ids, Piece, filled, ids, naive_keys, stores
from tests.loop.driving import PATIENCE_S, DrivenEngine
from tests.loop.restarts import Restarts, words
from tests.matrix import examples


def prefixes(path: Sequence[int]) -> set[Ids]:
    return {tuple(path[: num + 1]) for num in range(len(path))}


def paths_of(nodes: Sequence[InspectedNode], tokens: dict[int | str, Tokens]) -> dict[int | str, Ids]:
    """The whole path of each node; parents come first."""
    found: dict[int | str, Ids] = {}
    for node in nodes:
        above = found[node.parent] if node.parent is not None else ()
        assert node.num_tokens == len(tokens[node.id]) and node.start <= len(above)
        found[node.id] = (*above[: node.start], *tokens[node.id].tolist())
    return found


@given(have=stores(), committed=st.lists(ids.filter(len), max_size=5))
@settings(max_examples=examples(200), deadline=None)
def test_each_token_is_shown_once_wherever_it_is(have: set[Piece], committed: list[Ids]) -> None:
    cache, index = PrefixCache(Layout(kinds=(Full(),), has_snapshots=False)), filled(have, resumes_anywhere=False)
    for path in committed:
        cache.commit(as_tokens(path), BlankSource(), kind=BoundaryKind.STABLE)
    entries, is_whole = index.newest(ROOTS[""], most=10**6)
    on_disk = disk_tree(entries, root=ROOTS[""], is_whole=is_whole)
    part = TreePart(namespace="", on_disk=on_disk)
    shown = inspect_tree(cache, None, (), max_nodes=10**6, now_s=0.0, part=part)
    tokens = {edge.id: edge.tokens for edge in edge_tokens(cache, part, max_nodes=10**6)}
    paths = paths_of(shown.nodes, tokens)

    in_memory = set().union(*map(prefixes, committed))
    stored = [
        piece
        for piece in have
        if piece.namespace == ""
        and all(
            Piece("", piece.prefix[: (k + 1) * BLOCK], False) in have
            for k in range(len(piece.prefix) // BLOCK - (not piece.is_tail))
        )
    ]
    reachable = set().union(*(prefixes(piece.prefix) for piece in stored))
    assert set().union(*map(prefixes, paths.values())) == in_memory | reachable
    assert sum(node.num_tokens for node in shown.nodes) == len(in_memory | reachable)
    for node in shown.nodes:
        own = [each for each in prefixes(paths[node.id]) if len(each) > node.start]
        assert set(own) <= (in_memory if isinstance(node.id, int) else reachable - in_memory)
        below = [each for each in shown.nodes if each.parent == node.id]
        assert node.num_children == len(below)
        if isinstance(node.id, str):
            ending = [piece for piece in stored if piece.prefix in own]
            assert node.disk_nbytes == sum(1000 + len(piece.prefix) for piece in ending)
            resumable = {len(piece.prefix) for piece in ending if piece.is_tail}
            assert {at.position for at in node.checkpoints} == resumable
            key, span = bytes.fromhex(node.id.split("-")[0]), Span(node.start, node.start + node.num_tokens)
            kept = index.path_tokens(key, span, root=ROOTS[""])
            assert kept == tokens[node.id].tobytes() and index.path_tokens(key, span, root=ROOTS["other"]) is None
            again = inspect_tree(
                cache, None, (), max_nodes=1, now_s=0.0, part=TreePart(namespace="", under=node.id, on_disk=on_disk)
            )
            assert [each.id for each in again.nodes] == [node.id]


def test_the_paths_used_last_are_taken_and_that_there_are_more_is_said() -> None:
    paths: list[Ids] = [(0, 1, 0, 1, turn) for turn in range(9)]
    block = Piece("", paths[0][:BLOCK], False)
    index = filled({block, *(Piece("", path, True) for path in paths)}, resumes_anywhere=False)
    used = [tail_key(naive_keys("", paths[0])[-1], token_bytes(as_tokens([turn]))) for turn in (3, 7)]
    for key in used:
        index.use(key, index.moment(1.0))
    entries, is_whole = index.newest(ROOTS[""], most=2)
    assert [entry.key for entry, _ in entries] == [naive_keys("", paths[0])[-1], *reversed(used)] and not is_whole
    # The block is as new as what stands on it.
    assert entries[0][1] == index.last_use_ns[used[1]] > index.last_use_ns[entries[0][0].key]
    assert index.newest(ROOTS[""], most=9)[1] and not index.newest(ROOTS["other"], most=9)[0]


def test_many_paths_of_one_namespace_do_not_hide_those_of_another() -> None:
    mine, others = Piece("", (0,) * BLOCK, False), {Piece("other", (1, turn), True) for turn in range(9)}
    index = filled({mine, *others}, resumes_anywhere=False)
    for key in index.keys_of(ROOTS["other"]):
        index.use(key, index.moment(1.0))
    index.check()
    entries, is_whole = index.newest(ROOTS[""], most=1)
    assert [entry.key for entry, _ in entries] == [naive_keys("", mine.prefix)[-1]] and is_whole


def test_a_chat_on_disk_is_a_branch_until_it_is_read(start: Restarts) -> None:
    system, boundary = words(3, 70), [Boundary(70, BoundaryKind.SYSTEM)]
    chats = [[*system, *words(seed, 50)] for seed in (4, 5)]
    engine = start("llama")
    for chat in chats:
        engine.run(chat, boundaries=boundary)
    engine.run(words(9, 40), namespace="other")
    engine = start("llama")
    before = shown_of(engine)
    assert [node.id for node in before if isinstance(node.id, int)] == []
    assert sum(node.num_tokens for node in before) >= 70 + 2 * 50
    trunk = next(node for node in before if node.parent is None)
    assert trunk.num_children == 2 and trunk.first_tokens == tuple(system[:24]) and trunk.disk_nbytes > 0
    engine.run([*chats[0], 1, 2], boundaries=boundary)
    after = shown_of(engine)
    in_memory = [node for node in after if isinstance(node.id, int)]
    # What was answered stays on disk alone, for the chat went on with something else.
    branch, *answer = sorted((node for node in after if isinstance(node.id, str)), key=lambda node: node.start)
    assert all(node.start == 120 for node in answer)
    assert sum(node.num_tokens for node in in_memory) >= 120
    assert (branch.start, branch.first_tokens) == (70, tuple(chats[1][70:94])) and branch.parent in {
        node.id for node in in_memory
    }
    assert branch.age_s < 120


def shown_of(engine: DrivenEngine) -> Sequence[InspectedNode]:
    part = TreePart(namespace="", on_disk=engine.loop.disk_tree(""))
    return engine.loop.inspect(part=part).result(PATIENCE_S).tree.nodes

"""What is found: against brute force, and with nothing computed that need not be."""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.core.tokens import as_tokens
from reprise.disk.records.record import IndexEntry, block_key, root_key, tail_key, token_bytes
from reprise.disk.store import index as index_module
from reprise.disk.store.index import DiskIndex
from tests.disk.chains import BLOCK, find, opened, position, put_path
from tests.matrix import examples

Ids = tuple[int, ...]
ROOTS = {name: root_key(fingerprint="model", namespace=name) for name in ("", "other")}

ids = st.lists(st.integers(0, 1), max_size=18).map(tuple)
namespaces = st.sampled_from(["", "", "other"])


@dataclass(frozen=True)
class Piece:
    """A record, as the whole prefix that it ends."""

    namespace: str
    prefix: Ids
    is_tail: bool


pieces = st.builds(Piece, namespace=namespaces, prefix=ids, is_tail=st.booleans()).filter(
    lambda piece: len(piece.prefix) > 0 and (piece.is_tail or len(piece.prefix) % BLOCK == 0)
)


def naive_keys(namespace: str, prefix: Ids) -> list[bytes]:
    keys = [ROOTS[namespace]]
    for k in range(len(prefix) // BLOCK):
        keys.append(block_key(keys[-1], token_bytes(as_tokens(prefix[k * BLOCK : (k + 1) * BLOCK]))))
    return keys


def entry_for(piece: Piece) -> IndexEntry:
    keys = naive_keys(piece.namespace, piece.prefix)
    tail = token_bytes(as_tokens(piece.prefix[len(piece.prefix) // BLOCK * BLOCK :]))
    parent = keys[-1] if piece.is_tail else keys[-2]
    return IndexEntry(
        key=tail_key(parent, tail) if piece.is_tail else keys[-1],
        parent=parent,
        root=ROOTS[piece.namespace],
        is_tail=piece.is_tail,
        start=len(piece.prefix) // BLOCK * BLOCK if piece.is_tail else len(piece.prefix) - BLOCK,
        tokens=tail if piece.is_tail else token_bytes(as_tokens(piece.prefix[-BLOCK:])),
        nbytes=len(piece.prefix),
        file_nbytes=1000 + len(piece.prefix),
    )


def oracle(have: set[Piece], namespace: str, tokens: Ids, limit: int, *, resumes_anywhere: bool) -> int:
    """The furthest position, by trying all of them."""

    def has_blocks(num: int) -> bool:
        return all(Piece(namespace, tokens[: (k + 1) * BLOCK], False) in have for k in range(num))

    for p in range(min(limit, len(tokens)), 0, -1):
        if has_blocks(p // BLOCK) and Piece(namespace, tokens[:p], True) in have:
            return p
        if resumes_anywhere and p % BLOCK == 0 and has_blocks(p // BLOCK):
            return p
        if resumes_anywhere and has_blocks(p // BLOCK) and any(begins(piece, namespace, tokens[:p]) for piece in have):
            return p
    return 0


def begins(piece: Piece, namespace: str, path: Ids) -> bool:
    """Whether this piece, and not only those below it, has the end of `path`."""
    whole = len(path) // BLOCK * BLOCK
    if piece.namespace != namespace or piece.prefix[: len(path)] != path:
        return False
    return len(piece.prefix) <= whole + BLOCK and (not piece.is_tail or len(piece.prefix) // BLOCK * BLOCK == whole)


def filled(have: set[Piece], *, resumes_anywhere: bool) -> DiskIndex:
    index = DiskIndex(block=BLOCK, resumes_anywhere=resumes_anywhere)
    for at_ns, piece in enumerate(sorted(have, key=repr)):
        index.add(entry_for(piece), at_ns)
    index.check()
    return index


@st.composite
def stores(draw: st.DrawFn) -> set[Piece]:
    """Some pieces by themselves, and some paths with all that they stand on: what is found is mostly those."""
    have = set(draw(st.lists(pieces, max_size=10)))
    for namespace, path in draw(st.lists(st.tuples(namespaces, ids), max_size=4)):
        have |= {Piece(namespace, path[: (k + 1) * BLOCK], False) for k in range(len(path) // BLOCK)}
        have |= {
            Piece(namespace, path[:p], True) for p in draw(st.lists(st.integers(1, 18), max_size=3)) if p <= len(path)
        }
        have |= {Piece(namespace, path, True)} if len(path) > 0 else set()
    return have


@given(have=stores(), namespace=namespaces, tokens=ids, limit=st.integers(-1, 20), resumes_anywhere=st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_what_is_found_is_the_furthest(
    have: set[Piece], namespace: str, tokens: Ids, limit: int, resumes_anywhere: bool
) -> None:
    judge(have, namespace, tokens, limit, resumes_anywhere=resumes_anywhere)
    for piece in have:
        longer = piece.prefix + tokens
        judge(have, piece.namespace, longer, min(limit, len(longer)), resumes_anywhere=resumes_anywhere)
        judge(have, piece.namespace, longer, len(longer), resumes_anywhere=resumes_anywhere)


def judge(have: set[Piece], namespace: str, tokens: Ids, limit: int, *, resumes_anywhere: bool) -> None:
    index = filled(have, resumes_anywhere=resumes_anywhere)
    common = oracle(have, namespace, tokens, len(tokens), resumes_anywhere=True)
    assert index.common_length(as_tokens(tokens), root=ROOTS[namespace]) == common
    found = index.find(as_tokens(tokens), root=ROOTS[namespace], namespace=namespace, limit=limit)
    assert position(found) == oracle(have, namespace, tokens, limit, resumes_anywhere=resumes_anywhere)
    if found is None:
        return
    chain = naive_keys(namespace, tokens)[1:]
    blocks = [key for key in found.keys if not index.entries[key].is_tail]
    marks = [key for key in found.keys if index.entries[key].is_tail]
    assert list(found.keys) == blocks + marks and len(marks) <= 1
    assert found.nbytes == sum(index.entries[key].nbytes for key in found.keys) and found.namespace == namespace
    if resumes_anywhere:
        last = next(piece for piece in have if entry_for(piece).key == found.keys[-1])
        assert found.position % BLOCK == 0 or begins(last, namespace, tokens[: found.position])
        assert len(found.keys) == -(-found.position // BLOCK)
        return
    assert blocks == chain[: len(blocks)]
    assert len(marks) == 1 and len(blocks) == found.position // BLOCK
    assert marks[0] == tail_key(
        index.entries[marks[0]].parent, token_bytes(as_tokens(tokens[len(blocks) * BLOCK : found.position]))
    )


@given(have=stores(), queued=stores(), namespace=namespaces, tokens=ids, resumes_anywhere=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_what_is_missing_is_what_nobody_has(
    have: set[Piece], queued: set[Piece], namespace: str, tokens: Ids, resumes_anywhere: bool
) -> None:
    judge_missing(have, queued, namespace, tokens, resumes_anywhere=resumes_anywhere)
    for piece in queued:
        judge_missing(have, queued, piece.namespace, piece.prefix + tokens, resumes_anywhere=resumes_anywhere)


def judge_missing(have: set[Piece], queued: set[Piece], namespace: str, tokens: Ids, *, resumes_anywhere: bool) -> None:
    index = filled(have, resumes_anywhere=resumes_anywhere)
    in_queue = {entry_for(piece).key for piece in queued}
    missing_at = partial(index.missing, as_tokens(tokens), root=ROOTS[namespace], queued=in_queue)
    [missing] = missing_at([len(tokens)])
    keys = naive_keys(namespace, tokens)
    there = have | queued
    assert missing.blocks == tuple(
        (k, keys[k])
        for k in range(len(tokens) // BLOCK)
        if Piece(namespace, tokens[: (k + 1) * BLOCK], False) not in there
    )
    whole = len(tokens) // BLOCK * BLOCK
    has_tail = len(tokens) == whole or any(begins(piece, namespace, tokens) for piece in have)
    is_whole = len(tokens) == 0 or (resumes_anywhere and has_tail)
    assert missing.needs_tail == (not is_whole and Piece(namespace, tokens, True) not in there)
    assert missing.tail_parent == keys[-1]
    # Asked for with others, each is as alone, less the blocks of those before it.
    ends = range(len(tokens) + 1)
    alone, together = [missing_at([end])[0] for end in ends], missing_at(ends)
    assert [(each.needs_tail, each.tail_parent) for each in together] == [
        (each.needs_tail, each.tail_parent) for each in alone
    ]
    for end, each in enumerate(alone):
        assert each.blocks == tuple(chain.from_iterable(before.blocks for before in together[: end + 1]))
    # What is put for it lets the position be resumed.
    wanted = {Piece(namespace, tokens[: (k + 1) * BLOCK], False) for k, _ in missing.blocks}
    wanted |= {Piece(namespace, tokens, True)} if missing.needs_tail else set()
    assert oracle(there | wanted, namespace, tokens, len(tokens), resumes_anywhere=resumes_anywhere) == len(tokens)


@given(have=stores(), gone=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_an_index_that_lost_entries_is_as_if_they_had_never_been(have: set[Piece], gone: st.DataObject) -> None:
    index = filled(have, resumes_anywhere=False)
    removed: set[Piece] = gone.draw(st.sets(st.sampled_from(sorted(have, key=repr)))) if have else set[Piece]()
    for piece in removed:
        assert index.remove(entry_for(piece).key) == entry_for(piece)
    index.check()
    fresh = filled(have - removed, resumes_anywhere=False)
    assert index.entries == fresh.entries and index.nbytes == fresh.nbytes


def test_the_bytes_of_a_path_are_counted_once() -> None:
    have = {Piece("", (0,) * n, False) for n in (4, 8, 12)} | {Piece("", (0,) * 13, True), Piece("", (1,) * 4, False)}
    index = filled(have, resumes_anywhere=False)
    leaves = {entry_for(Piece("", (0,) * 13, True)).key, entry_for(Piece("", (0,) * 12, False)).key, b"unknown"}
    assert index.path_nbytes(leaves) == 4 * 1000 + 4 + 8 + 12 + 13


def test_only_what_is_found_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return block_key(parent, tokens)

    index = filled({Piece("", (0,) * n, False) for n in (4, 8)}, resumes_anywhere=True)
    monkeypatch.setattr(index_module, "block_key", counting)
    found = index.find(as_tokens([0] * 40_000), root=ROOTS[""], namespace="", limit=40_000)
    assert position(found) == 8 and len(hashed) == 3


def test_a_namespace_never_finds_what_is_of_another(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        put_path(cache, [1, 2, 3, 4, 5, 6], namespace="a")
        assert position(find(cache, [1, 2, 3, 4, 5, 6], namespace="a")) == 6
        assert find(cache, [1, 2, 3, 4, 5, 6], namespace="b") is None
        assert find(cache, [1, 2, 3, 4, 5, 6]) is None


def test_another_model_never_finds_it(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache, opened(tmp_path / "kv", fingerprint="other") as other:
        put_path(cache, [1, 2, 3, 4, 5, 6])
        assert find(other, [1, 2, 3, 4, 5, 6]) is None

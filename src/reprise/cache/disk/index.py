"""What is on disk, in memory: which prompts can be resumed where. Touches no file."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from reprise.cache.disk.format import Header
from reprise.cache.disk.keys import block_key, mark_key, token_bytes
from reprise.cache.disk.record import Found, Missing, Record
from reprise.core.tokens import Tokens, common_prefix

TOKEN_NBYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the index knows of one record's file."""

    key: bytes
    parent: bytes
    root: bytes
    is_mark: bool
    start: int
    tokens: bytes
    """Those of the block, or of the mark's tail."""
    nbytes: int
    """Of the record."""
    file_nbytes: int


def entry_of(record: Record | Header, *, file_nbytes: int) -> Entry:
    """The entry of a record, of which the header says enough."""
    return Entry(
        key=record.key,
        parent=record.parent,
        root=record.root,
        is_mark=record.is_mark,
        start=record.start,
        tokens=token_bytes(record.tokens),
        nbytes=record.nbytes,
        file_nbytes=file_nbytes,
    )


class Index:
    """The entries by key, by what they stand on, and the marks by their tails."""

    def __init__(self, *, block: int, resumes_anywhere: bool) -> None:
        self.block = block
        self.resumes_anywhere = resumes_anywhere
        self.entries: dict[bytes, Entry] = {}
        self.above: dict[bytes, set[bytes]] = defaultdict(set)
        """Keys of the entries that stand on a key, whether that is there itself or not."""
        self.tails: dict[bytes, dict[int, dict[bytes, bytes]]] = {}
        """Parent → length of the tail in bytes → tail → key of the mark."""
        self.rows: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """Parent → tokens and keys of all that stands on it, sorted: those that agree the furthest are neighbours."""

    def add(self, entry: Entry) -> None:
        assert entry.key not in self.entries, entry
        self.entries[entry.key] = entry
        self.above[entry.parent].add(entry.key)
        insort(self.rows.setdefault(entry.parent, []), (entry.tokens, entry.key))
        if entry.is_mark:
            self.tails.setdefault(entry.parent, {}).setdefault(len(entry.tokens), {})[entry.tokens] = entry.key

    def remove(self, key: bytes) -> Entry:
        entry = self.entries.pop(key)
        beside = self.above[entry.parent]
        beside.remove(key)
        row = self.rows[entry.parent]
        del row[bisect_left(row, (entry.tokens, key))]
        if not beside:
            del self.above[entry.parent], self.rows[entry.parent]
        if entry.is_mark:
            by_length = self.tails[entry.parent]
            del by_length[len(entry.tokens)][entry.tokens]
            if not by_length[len(entry.tokens)]:
                del by_length[len(entry.tokens)]
            if not by_length:
                del self.tails[entry.parent]
        return entry

    def is_bare(self, key: bytes) -> bool:
        """Whether nothing stands on this key."""
        return key not in self.above

    def path_nbytes(self, keys: Set[bytes]) -> int:
        """File bytes of these entries and of all that they stand on, each counted once. O(their number)."""
        seen: set[bytes] = set()
        nbytes = 0
        for key in keys:
            at = key
            while at not in seen and (entry := self.entries.get(at)) is not None:
                seen.add(at)
                nbytes += entry.file_nbytes
                at = entry.parent
        return nbytes

    def find(self, tokens: Tokens, *, root: bytes, namespace: str, limit: int) -> Found | None:
        """The largest position ≤ `limit` that can be resumed from what is there, or None.

        O(tokens that are found), and one look-up for each length of tail at a block where no mark agrees.
        """
        limit = max(0, min(limit, len(tokens)))
        wanted = token_bytes(tokens)
        chain = self._chain(wanted, root, limit)
        # A mark above block k ends before block k + 1 does: the first that is found from the end is the furthest.
        for num_blocks in range(len(chain), -1, -1):
            start = num_blocks * self.block
            parent = chain[num_blocks - 1] if num_blocks > 0 else root
            rest = wanted[start * TOKEN_NBYTES : limit * TOKEN_NBYTES]
            if self.resumes_anywhere:
                key, num = self._most_alike(parent, rest)
                keys = chain if key is None else (*chain, key)
                return self._found(start + num, namespace, keys) if start + num > 0 else None
            mark = self._longest_mark(parent, rest)
            if mark is not None:
                position = start + len(mark.tokens) // TOKEN_NBYTES
                return self._found(position, namespace, (*chain[:num_blocks], mark.key))
        return None

    def runs(self, root: bytes) -> list[Entry]:
        """All entries that can be reached from `root`, each behind what it stands on. O(their number)."""
        found: list[Entry] = []
        left = sorted(self.above.get(root, ()))
        while left:
            entry = self.entries[left.pop()]
            found.append(entry)
            if not entry.is_mark:
                left.extend(sorted(self.above.get(entry.key, ())))
        return found

    def missing(self, tokens: Tokens, *, root: bytes, queued: Set[bytes]) -> Missing:
        """What a path lacks. `queued`: keys that will be there. O(tokens)."""
        wanted = token_bytes(tokens)
        blocks: list[tuple[int, bytes]] = []
        parent = root
        for k, key in enumerate(self._keys(wanted, root)):
            if key not in self.entries and key not in queued:
                blocks.append((k, parent))
            parent = key
        tail = wanted[len(tokens) // self.block * self.block * TOKEN_NBYTES :]
        is_whole = len(tokens) == 0
        if self.resumes_anywhere:
            # Every position can be resumed if its entries are there, in whatever record.
            is_whole = self._most_alike(parent, tail)[1] * TOKEN_NBYTES == len(tail)
        mark = mark_key(parent, tail)
        return Missing(
            blocks=tuple(blocks),
            needs_mark=not is_whole and mark not in self.entries and mark not in queued,
            mark_parent=parent,
        )

    def check(self) -> None:
        """AssertionError where the tables differ from the entries."""
        above: dict[bytes, set[bytes]] = {}
        tails: dict[bytes, dict[int, dict[bytes, bytes]]] = {}
        rows: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for key, entry in self.entries.items():
            assert key == entry.key, entry
            above.setdefault(entry.parent, set()).add(key)
            rows.setdefault(entry.parent, []).append((entry.tokens, key))
            if entry.is_mark:
                tails.setdefault(entry.parent, {}).setdefault(len(entry.tokens), {})[entry.tokens] = key
        assert above == self.above, "what stands on what"
        assert tails == self.tails, "the tails of the marks"
        assert {parent: sorted(row) for parent, row in rows.items()} == self.rows, "the sorted rows"

    def _keys(self, wanted: bytes, root: bytes) -> Iterator[bytes]:
        """The keys of the whole blocks of these tokens, each computed when it is asked for."""
        step = self.block * TOKEN_NBYTES
        parent = root
        for at in range(0, len(wanted) - step + 1, step):
            parent = block_key(parent, wanted[at : at + step])
            yield parent

    def _chain(self, wanted: bytes, root: bytes, limit: int) -> tuple[bytes, ...]:
        """The keys of the blocks up to `limit` that are there without a gap."""
        chain: list[bytes] = []
        for key in self._keys(wanted, root):
            if (len(chain) + 1) * self.block > limit or key not in self.entries:
                break
            chain.append(key)
        return tuple(chain)

    def _most_alike(self, parent: bytes, rest: bytes) -> tuple[bytes | None, int]:
        """What stands on `parent` and agrees with the most tokens of `rest`, and how many these are.

        O(log of how many stand there): no other agrees further than the two between which `rest` would stand.
        """
        best, most = None, 0
        wanted = np.frombuffer(rest, dtype=np.int32)
        row = self.rows.get(parent, [])
        at = bisect_left(row, (rest, b""))
        for _, key in row[max(0, at - 1) : at + 1]:
            num = common_prefix(np.frombuffer(self.entries[key].tokens, dtype=np.int32), wanted)
            if num > most:
                best, most = key, num
        return best, most

    def _longest_mark(self, parent: bytes, tail: bytes) -> Entry | None:
        by_length = self.tails.get(parent, {})
        for nbytes in sorted(by_length, reverse=True):
            if nbytes <= len(tail) and (key := by_length[nbytes].get(tail[:nbytes])) is not None:
                return self.entries[key]
        return None

    def _found(self, position: int, namespace: str, keys: tuple[bytes, ...]) -> Found:
        nbytes = sum(self.entries[key].nbytes for key in keys)
        return Found(position=position, namespace=namespace, keys=keys, nbytes=nbytes)

"""The in-memory index of the records on disk: resumable positions, eviction order, bytes. Does no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from sortedcontainers import SortedList

from reprise.core.backend import StoredText
from reprise.core.tokens import Span, Tokens, as_tokens, common_prefix
from reprise.disk.folders.model_folder import FileInfo
from reprise.disk.records.record import (
    TOKEN_NBYTES,
    DiskMatch,
    IndexEntry,
    MissingRecords,
    block_key,
    tail_key,
    token_bytes,
)

_NOTHING: SortedList[tuple[bytes, bytes]] = SortedList()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableFile:
    """A file in our folder that is no usable record: another format version or block size, or a note."""

    info: FileInfo
    root: bytes | None
    """The root key of its namespace, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCursor:
    """A position on a path: the key of the last whole block before it (or the root), and the tokens since."""

    parent: bytes
    tail: bytes = b""


class DiskIndex:
    """Entries by key, by parent and in eviction order (LRU, children before parents); counts their bytes."""

    def __init__(self, *, block: int, resumes_anywhere: bool) -> None:
        self.block = block
        self.resumes_anywhere = resumes_anywhere
        self.entries: dict[bytes, IndexEntry] = {}
        self.unusable: dict[Path, UnusableFile] = {}
        self.nbytes = 0
        """Bytes of all files in the folder."""
        self.unwritten_uses: dict[bytes, int] = {}
        """Times of last use (ns) not yet written to the files, by key."""
        self.last_use_ns: dict[bytes, int] = {}
        self.verified: set[bytes] = set()
        """Records whose bodies were read or written since the index was created."""
        self.num_changes = 0
        """Grows with every change of entries or uses; memoized results compare it."""
        self.has_met_damage = False
        """Whether a damaged record was found: all others are then suspect until they have been read."""
        self._tails: dict[bytes, dict[int, dict[bytes, bytes]]] = {}
        """Parent → length of the tail in bytes → tail → key of the tail record."""
        self._rows: dict[bytes, SortedList[tuple[bytes, bytes]]] = {}
        """Parent → (tokens, key) of its children, sorted, so the longest common prefixes are between neighbours.

        The parent itself may be missing.
        """
        self._leaves: dict[bytes, SortedList[tuple[int, bytes]]] = {}
        """Root → (time of last use, key) of its entries without children: no namespace's paths hide another's."""
        self._latest_ns = 0

    # Changes.

    def moment(self, now_s: float) -> int:
        """`now_s` in nanoseconds, made larger than all earlier times, even if the clock was set back."""
        self._latest_ns = max(round(now_s * 1e9), self._latest_ns + 1)
        return self._latest_ns

    def add(self, entry: IndexEntry, at_ns: int) -> None:
        """Add a record whose file was last used at `at_ns`."""
        assert entry.key not in self.entries, entry
        self.entries[entry.key] = entry
        if entry.parent not in self._rows and entry.parent in self.last_use_ns:
            self._remove_leaf(self.entries[entry.parent])
        self._rows.setdefault(entry.parent, SortedList()).add((entry.tokens, entry.key))
        if entry.is_tail:
            self._tails.setdefault(entry.parent, {}).setdefault(len(entry.tokens), {})[entry.tokens] = entry.key
        self._set_use(entry.key, at_ns)
        self.nbytes += entry.file_nbytes
        self._latest_ns = max(self._latest_ns, at_ns)

    def remove(self, key: bytes) -> IndexEntry:
        """Remove a record. Its parent inherits its time of last use."""
        entry = self.entries[key]
        self.num_changes += 1
        if key not in self._rows:
            self._remove_leaf(entry)
        del self.entries[key]
        at_ns = self.last_use_ns.pop(key)
        self.nbytes -= entry.file_nbytes
        self.unwritten_uses.pop(key, None)
        self.verified.discard(key)
        beside = self._rows[entry.parent]
        beside.remove((entry.tokens, key))
        if not beside:
            del self._rows[entry.parent]
            if entry.parent in self.last_use_ns:
                self._add_leaf(self.entries[entry.parent], self.last_use_ns[entry.parent])
        if entry.is_tail:
            by_length = self._tails[entry.parent]
            del by_length[len(entry.tokens)][entry.tokens]
            if not by_length[len(entry.tokens)]:
                del by_length[len(entry.tokens)]
            if not by_length:
                del self._tails[entry.parent]
        if at_ns > self.last_use_ns.get(entry.parent, at_ns):
            self.use(entry.parent, at_ns)
        return entry

    def use(self, key: bytes, at_ns: int) -> None:
        """Mark the record as used; ignored if it is missing."""
        if key in self.entries:
            self._set_use(key, at_ns)
            self.unwritten_uses[key] = at_ns

    def note_use(self, key: bytes, at_ns: int) -> None:
        """Use the time of last use that another server gave the file."""
        self._set_use(key, at_ns)
        self._latest_ns = max(self._latest_ns, at_ns)

    def _set_use(self, key: bytes, at_ns: int) -> None:
        if key not in self._rows:
            if key in self.last_use_ns:
                self._remove_leaf(self.entries[key])
            self._add_leaf(self.entries[key], at_ns)
        self.last_use_ns[key] = at_ns
        self.num_changes += 1

    def _add_leaf(self, entry: IndexEntry, at_ns: int) -> None:
        self._leaves.setdefault(entry.root, SortedList()).add((at_ns, entry.key))

    def _remove_leaf(self, entry: IndexEntry) -> None:
        leaves = self._leaves[entry.root]
        leaves.remove((self.last_use_ns[entry.key], entry.key))
        if not leaves:
            del self._leaves[entry.root]

    def add_unusable(self, file: UnusableFile) -> None:
        assert file.info.path not in self.unusable, file
        self.unusable[file.info.path] = file
        self.nbytes += file.info.nbytes

    def remove_unusable(self, path: Path) -> None:
        self.nbytes -= self.unusable.pop(path).info.nbytes

    def remove_all(self) -> None:
        for key in self.keys_of(None):
            self.remove(key)
        for path in list(self.unusable):
            self.remove_unusable(path)

    # Eviction order.

    def oldest(self, keep: Set[bytes]) -> tuple[int, bytes] | None:
        """(time of last use, key) of the next record to evict, not in `keep`, or None. O(namespaces · |keep|)."""
        firsts = (next((leaf for leaf in leaves if leaf[1] not in keep), None) for leaves in self._leaves.values())
        return min((leaf for leaf in firsts if leaf is not None), default=None)

    def oldest_unusable(self) -> UnusableFile | None:
        return min(self.unusable.values(), key=lambda file: file.info.mtime_ns, default=None)

    def keys_of(self, root: bytes | None) -> list[bytes]:
        """The keys of a namespace's records (None: of all), parents first. O(records log records)."""
        entries = [entry for entry in self.entries.values() if root is None or entry.root == root]
        entries.sort(key=lambda entry: (entry.start, entry.is_tail))
        return [entry.key for entry in entries]

    # Queries.

    def path_nbytes(self, keys: Set[bytes]) -> int:
        """File bytes of these entries and all their ancestors, each counted once. O(entries visited)."""
        seen: set[bytes] = set()
        nbytes = 0
        for key in keys:
            at = key
            while at not in seen and (entry := self.entries.get(at)) is not None:
                seen.add(at)
                nbytes += entry.file_nbytes
                at = entry.parent
        return nbytes

    def follow(
        self, cursor: DiskCursor, tokens: Tokens, ends: Collection[int]
    ) -> tuple[DiskCursor | None, dict[int, int]]:
        """The records that end within the next `tokens` of a path: blocks, and tails at `ends`.

        Positions count from the cursor. Returns the cursor after `tokens` (None: a block is missing, so nothing further
        can be found), and file bytes by the position where a record ends. O(tokens found).
        """
        wanted, before = cursor.tail + token_bytes(tokens), len(cursor.tail) // TOKEN_NBYTES
        found: dict[int, int] = defaultdict(int)
        parent, at = cursor.parent, 0
        while True:
            stop = at + self.block
            for end in [end for end in ends if at <= before + end < stop]:
                tail = self.entries.get(tail_key(parent, wanted[at * TOKEN_NBYTES : (before + end) * TOKEN_NBYTES]))
                found[end] += tail.file_nbytes if tail is not None else 0
            if stop * TOKEN_NBYTES > len(wanted):
                return DiskCursor(parent=parent, tail=wanted[at * TOKEN_NBYTES :]), dict(found)
            parent = block_key(parent, wanted[at * TOKEN_NBYTES : stop * TOKEN_NBYTES])
            block = self.entries.get(parent)
            if block is None:
                return None, dict(found)
            found[stop - before] += block.file_nbytes
            at = stop

    def find(self, tokens: Tokens, *, root: bytes, namespace: str, limit: int) -> DiskMatch | None:
        """The largest position ≤ `limit` that can be resumed from these records, or None.

        O(tokens found), plus one look-up per tail length at each block without a matching tail.
        """
        limit = max(0, min(limit, len(tokens)))
        wanted = token_bytes(tokens)
        blocks = self._chain(wanted, root, limit)
        # A tail after block k ends before block k + 1 does: searching from the end, the first hit is the furthest.
        for num_blocks in range(len(blocks), -1, -1):
            start = num_blocks * self.block
            parent = blocks[num_blocks - 1] if num_blocks > 0 else root
            rest = wanted[start * TOKEN_NBYTES : limit * TOKEN_NBYTES]
            if self.resumes_anywhere:
                key, num = self._longest_common(parent, rest)
                keys = blocks if key is None else (*blocks, key)
                return self._found(start + num, namespace, keys) if start + num > 0 else None
            tail = self._longest_tail(parent, rest)
            if tail is not None:
                return self._found(tail.stop, namespace, (*blocks[:num_blocks], tail.key))
        return None

    def common_length(self, tokens: Tokens, *, root: bytes) -> int:
        """How far the tokens agree with any record's path, resumable there or not. O(tokens found)."""
        wanted = token_bytes(tokens)
        blocks = self._chain(wanted, root, len(tokens))
        start = len(blocks) * self.block
        _, num = self._longest_common(blocks[-1] if blocks else root, wanted[start * TOKEN_NBYTES :])
        return start + num

    def runs(self, root: bytes) -> list[IndexEntry]:
        """All entries reachable from `root`, parents first. O(entries)."""
        found: list[IndexEntry] = []
        left = [root]
        while left:
            below = [self.entries[key] for _, key in self._rows.get(left.pop(), ())]
            found += below
            left += [entry.key for entry in below]
        return found

    def newest(self, root: bytes, *, most: int) -> tuple[list[tuple[IndexEntry, int]], bool]:
        """The most recently used paths from `root`, and whether they are all; visits the newest `most` leaves.

        Each entry with its time of last use (ns), which includes its descendants', parents first.
        """
        found: list[tuple[IndexEntry, int]] = []
        for at_ns, path in self._newest_paths(root, most=most):
            found.extend((entry, max(at_ns, self.last_use_ns[entry.key])) for entry in reversed(path))
        return found, most >= len(self._leaves.get(root, ()))

    def newest_texts(self, root: bytes, *, most: int, most_leaves: int) -> list[StoredText]:
        """The most recently used paths from `root`, newest first, each without what a newer one has.

        Each behind the block before it. Ends after `most` tokens, or after visiting `most_leaves` leaves. A tail is
        left out if a longer record begins with it.
        """
        found: list[StoredText] = []
        left = most
        for _, path in self._newest_paths(root, most=most_leaves, without=self._is_continued):
            text = path[: left // self.block + 2][::-1]
            before = self.entries.get(text[0].parent)
            tokens = b"".join(entry.tokens for entry in (text if before is None else [before, *text]))
            run, start = as_tokens(np.frombuffer(tokens, dtype=np.int32)), 0 if before is None else self.block
            if start < len(run):
                found.append(StoredText(tokens=run, start=start))
            left -= len(run) - start
            if left <= 0:
                break
        return found

    def _newest_paths(
        self, root: bytes, *, most: int, without: Callable[[bytes], bool] = lambda leaf: False
    ) -> Iterator[tuple[int, list[IndexEntry]]]:
        """The paths to the `most` leaves of `root` used last, newest first: when (ns), and what no newer one has.

        Entries from the leaf up. What stands on nothing is left out, as it cannot be found, and leaves that are
        `without`.
        """
        seen: set[bytes] = {root}
        for at_ns, leaf in islice(reversed(self._leaves.get(root, ())), most):
            path: list[IndexEntry] = []
            key = leaf
            while key not in seen and (entry := self.entries.get(key)) is not None and entry.root == root:
                path.append(entry)
                key = entry.parent
            if key in seen and not without(leaf):
                seen.update(entry.key for entry in path)
                yield at_ns, path

    def _is_continued(self, key: bytes) -> bool:
        """Whether another record after the same block begins with this one's tokens. O(log children)."""
        entry = self.entries[key]
        row = self._rows[entry.parent]
        after = row.bisect_right((entry.tokens, key))
        return after < len(row) and row[after][0].startswith(entry.tokens)

    def path_tokens(self, key: bytes, span: Span, *, root: bytes) -> bytes | None:
        """The tokens of a span of the path that ends with a record; None if it is missing or has another root.

        O(blocks in and after the span).
        """
        runs: list[bytes] = []
        at = key
        while (entry := self.entries.get(at)) is not None and entry.root == root:
            if not runs and entry.stop < span.stop:
                return None
            runs.append(entry.tokens)
            if entry.start <= span.start:
                whole = b"".join(reversed(runs))
                return whole[(span.start - entry.start) * TOKEN_NBYTES : (span.stop - entry.start) * TOKEN_NBYTES]
            at = entry.parent
        return None

    def has(self, key: bytes) -> bool:
        """Whether the record is present and not suspect."""
        return key in self.entries and not self.is_suspect(key)

    def is_suspect(self, key: bytes) -> bool:
        """Whether the record may be damaged: another one was, and this one has not been read since."""
        return self.has_met_damage and key not in self.verified

    def missing(self, tokens: Tokens, ends: Sequence[int], *, root: bytes, queued: Set[bytes]) -> list[MissingRecords]:
        """The records that are missing or suspect and not in `queued`, for each of `ends`, which ascend.

        Each without the blocks of the ends before it. O(tokens + ends).
        """
        wanted = token_bytes(tokens)
        found: list[MissingRecords] = []
        keys = enumerate(self._keys(wanted, root))
        parent, num_blocks = root, 0
        for end in ends:
            blocks: list[tuple[int, bytes]] = []
            for k, key in islice(keys, end // self.block - num_blocks):
                if not self.has(key) and key not in queued:
                    blocks.append((k, parent))
                parent = key
            num_blocks = end // self.block
            tail = wanted[num_blocks * self.block * TOKEN_NBYTES : end * TOKEN_NBYTES]
            needs_tail = end > 0 and self._needs_tail(parent, tail, queued)
            found.append(MissingRecords(blocks=tuple(blocks), needs_tail=needs_tail, tail_parent=parent))
        return found

    def _needs_tail(self, parent: bytes, tail: bytes, queued: Set[bytes]) -> bool:
        if self.resumes_anywhere:
            # Any record that has the entries will do.
            holder, num = self._longest_common(parent, tail)
            if num * TOKEN_NBYTES == len(tail) and (holder is None or not self.is_suspect(holder)):
                return False
        key = tail_key(parent, tail)
        return not self.has(key) and key not in queued

    def check(self) -> None:
        """AssertionError if tables, order or byte count disagree with the entries."""
        tails: dict[bytes, dict[int, dict[bytes, bytes]]] = {}
        rows: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for key, entry in self.entries.items():
            assert key == entry.key, entry
            rows.setdefault(entry.parent, []).append((entry.tokens, key))
            if entry.is_tail:
                tails.setdefault(entry.parent, {}).setdefault(len(entry.tokens), {})[entry.tokens] = key
        assert tails == self._tails, "tails by parent"
        known = {parent: list(row) for parent, row in self._rows.items()}
        assert {parent: sorted(row) for parent, row in rows.items()} == known, "sorted children by parent"
        assert self.last_use_ns.keys() == self.entries.keys(), "every entry has a time of last use"
        leaves: dict[bytes, list[tuple[int, bytes]]] = {}
        for key, at_ns in sorted(self.last_use_ns.items(), key=lambda item: (item[1], item[0])):
            if key not in rows:
                leaves.setdefault(self.entries[key].root, []).append((at_ns, key))
        assert {root: list(own) for root, own in self._leaves.items()} == leaves, "exactly the entries without children"
        nbytes = sum(entry.file_nbytes for entry in self.entries.values())
        nbytes += sum(file.info.nbytes for file in self.unusable.values())
        assert nbytes == self.nbytes, (nbytes, self.nbytes)
        assert self.unwritten_uses.keys() <= self.entries.keys()
        assert self.verified <= self.entries.keys()

    def _keys(self, wanted: bytes, root: bytes) -> Iterator[bytes]:
        """The keys of the whole blocks of these tokens, computed lazily."""
        step = self.block * TOKEN_NBYTES
        parent = root
        for at in range(0, len(wanted) - step + 1, step):
            parent = block_key(parent, wanted[at : at + step])
            yield parent

    def _chain(self, wanted: bytes, root: bytes, limit: int) -> tuple[bytes, ...]:
        """The keys of the blocks up to `limit` that are present without a gap."""
        chain: list[bytes] = []
        for key in self._keys(wanted, root):
            if (len(chain) + 1) * self.block > limit or key not in self.entries:
                break
            chain.append(key)
        return tuple(chain)

    def _longest_common(self, parent: bytes, rest: bytes) -> tuple[bytes | None, int]:
        """The child of `parent` with the longest common prefix with `rest`, and that length in tokens.

        O(log children): the longest is one of the two neighbours of `rest` in sorted order.
        """
        best, most = None, 0
        wanted = np.frombuffer(rest, dtype=np.int32)
        row = self._rows.get(parent, _NOTHING)
        at = row.bisect_left((rest, b""))
        for _, key in row[max(0, at - 1) : at + 1]:
            num = common_prefix(np.frombuffer(self.entries[key].tokens, dtype=np.int32), wanted)
            if num > most:
                best, most = key, num
        return best, most

    def _longest_tail(self, parent: bytes, tail: bytes) -> IndexEntry | None:
        by_length = self._tails.get(parent, {})
        for nbytes in sorted(by_length, reverse=True):
            if nbytes <= len(tail) and (key := by_length[nbytes].get(tail[:nbytes])) is not None:
                return self.entries[key]
        return None

    def _found(self, position: int, namespace: str, keys: tuple[bytes, ...]) -> DiskMatch:
        nbytes = sum(self.entries[key].nbytes for key in keys)
        return DiskMatch(position=position, namespace=namespace, keys=keys, nbytes=nbytes)

"""A model's folder in an object store, as a `ModelFolder`.

    <16 hex of the model>/servers/<server>                written again every few seconds: the lease of a server
    <16 hex of the model>/<2 hex of the key>/<key>.kv
    <16 hex of the model>/notes/<key of a namespace's root>.json
    <16 hex of the model>/uses/<key>                      written when the record was used, if it is old

The size limit has no lock and needs none: writes are atomic, deletions idempotent, and all servers delete in nearly the
same order (leaves first, by the objects' times), so two servers over the limit delete the same objects. A lock could be
held by a dead server, and not every store has conditional writes. What others have written since the last listing is
not counted: until the next one, the limit can be exceeded by that much.
"""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import cast

from reprise.disk.folders.bucket import ObjectBucket
from reprise.disk.folders.lease import EXPIRED_S, new_server_name
from reprise.disk.folders.model_folder import MODEL_NAME, NOTES, RECORD_NAME, SERVERS, FileInfo, ModelFolder
from reprise.disk.records.format import (
    LENGTH,
    MAX_HEADER_NBYTES,
    EncodedFile,
    Unverified,
    read_header,
    read_record,
)
from reprise.disk.records.record import DiskRecord, IndexEntry, folder_name

_USES = "uses"
_USE_NAME = re.compile(rf"[0-9a-f]{{16}}/{_USES}/[0-9a-f]{{64}}")

USE_SHOWN_S = 3600.0
"""An object cannot be touched: a use is shown by another one, written where the last known use is older than this."""

_HEAD_NBYTES = 8 << 10
"""How much of an unknown object is read first; most headers are shorter."""

MOST_HEADERS = 4096
"""How many unknown objects' headers are read per scan, newest first. The others are only counted until the next one."""

_READS_AT_ONCE = 8
_HEADERS_AT_ONCE = 64
_REMOVED_AT_ONCE = 1000


class ModelBucket(ModelFolder):
    """A model's objects in a bucket. There is no quarantine: what fails verification is removed."""

    is_remote = True
    removed_at_once = _REMOVED_AT_ONCE
    reads_at_once = _READS_AT_ONCE

    def __init__(self, bucket: ObjectBucket, *, fingerprint: str) -> None:
        super().__init__(Path(folder_name(fingerprint)), place=bucket.url)
        self._bucket = bucket
        self._model = self.folder.name
        self._server = new_server_name()
        self._content: EncodedFile | None = None
        """The content of the record being written."""
        self._lock = threading.Lock()
        """Guards the following."""
        self._files: dict[Path, FileInfo] = {}
        """This model's records and notes: the last listing, updated with this server's writes and removals since."""
        self._written_meanwhile: dict[Path, FileInfo | None] | None = None
        """What this server has written, or removed (None), since the current listing began."""
        self._heads: dict[Path, memoryview] = {}
        self._leased_at: tuple[int, float] | None = None
        """The same moment by the store's clock (ns) and by ours (s)."""
        self._nbytes_around: dict[Path, int] = {}
        self._evictable: list[FileInfo] = []

    # Other servers.

    def begin_lease(self) -> None:
        self._bucket.put(self._lease_name, self._server.encode())

    def renew_lease(self) -> None:
        self.begin_lease()

    def release(self) -> None:
        with suppress(OSError):
            self._bucket.delete([self._lease_name])

    @property
    def _lease_name(self) -> str:
        return f"{self._model}/{SERVERS}/{self._server}"

    def note_servers(self, now_ns: int) -> bool:
        del now_ns  # By this server's clock; the store has its own.
        leases = list(self._bucket.listing(f"{self._model}/{SERVERS}"))
        own = next((lease for lease in leases if lease.path.name == self._server), None)
        if own is not None:
            self._leased_at = (own.mtime_ns, time.monotonic())
        living = _living(leases, own.mtime_ns if own is not None else self._now_ns())
        self._bucket.delete([lease.path.as_posix() for lease in leases if lease not in living])
        before, self.servers = self.servers, frozenset(lease.path.name for lease in living) - {self._server}
        return bool(before or self.servers)

    def _now_ns(self) -> int:
        """The store's estimated time."""
        if self._leased_at is None:
            return time.time_ns()
        at_ns, seen_s = self._leased_at
        return at_ns + round((time.monotonic() - seen_s) * 1e9)

    @contextmanager
    def locked(self) -> Generator[int]:
        yield self._now_ns()

    # What lies there.

    def prepare(self, is_known: Callable[[Path, int], bool], is_closing: Callable[[], bool]) -> None:
        with self._lock:
            self._written_meanwhile = {}
        try:
            objects = list(self._bucket.listing(""))
            own = {each.path: each for each in objects if self._is_ours(each.path)}
            used_ns = self._uses(objects, own)
            unknown = [each for path, each in own.items() if not is_known(path, each.nbytes)]
            unknown.sort(key=lambda each: each.mtime_ns, reverse=True)
            heads = self._read_heads(unknown[:MOST_HEADERS], is_closing)
            for each in unknown:
                # Removed since the listing, or beyond `MOST_HEADERS`.
                if each.path not in heads and _is_record(each.path):
                    del own[each.path]
            files = {
                path: replace(info, mtime_ns=max(info.mtime_ns, used_ns.get(path, 0))) for path, info in own.items()
            }
        except BaseException:
            with self._lock:
                self._written_meanwhile = None
            raise
        with self._lock:
            for path, info in (self._written_meanwhile or {}).items():
                files.pop(path, None)
                if info is not None:
                    files[path] = info
            self._files, self._heads, self._written_meanwhile = files, heads, None
            self.has_unread = len(unknown) > MOST_HEADERS
        self._note_around([each for each in objects if each.path not in own])

    def _uses(self, objects: Iterable[FileInfo], own: Collection[Path]) -> dict[Path, int]:
        """When records were used, as servers have shown; what shows the use of a record that is gone is removed."""
        shown = [each for each in objects if self.folder in each.path.parents and _is_use(each.path)]
        used_ns = {self.path_of(bytes.fromhex(each.path.name)): each.mtime_ns for each in shown}
        gone = [path for path in used_ns if path not in own]
        for at in range(0, len(gone), self.removed_at_once):
            self._bucket.delete([self._use_name(path) for path in gone[at : at + self.removed_at_once]])
        return used_ns

    def _use_name(self, path: Path) -> str:
        return f"{self._model}/{_USES}/{path.stem}"

    def _is_ours(self, path: Path) -> bool:
        is_inside = self.folder in path.parents and path.parts[1] != SERVERS
        return is_inside and RECORD_NAME.fullmatch(path.name) is not None

    def _read_heads(self, objects: list[FileInfo], is_closing: Callable[[], bool]) -> dict[Path, memoryview]:
        """The heads of these records, read in batches; without those that are gone."""
        heads: dict[Path, memoryview] = {}
        wanted = [each for each in objects if _is_record(each.path)]
        for at in range(0, len(wanted), _HEADERS_AT_ONCE):
            if is_closing():
                break
            some = wanted[at : at + _HEADERS_AT_ONCE]
            with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="reprise-disk-headers") as pool:
                for each, head in zip(some, pool.map(self._head, some), strict=True):
                    if head is not None:
                        heads[each.path] = head
        return heads

    def _head(self, each: FileInfo) -> memoryview | None:
        """An object up to the end of its header, or None if it is gone."""
        try:
            head = self._bucket.get(each.path.as_posix(), min(_HEAD_NBYTES, each.nbytes))
            if len(head) >= LENGTH.size:
                (header_nbytes,) = cast("tuple[int]", LENGTH.unpack(head[: LENGTH.size]))
                most = min(LENGTH.size + header_nbytes, each.nbytes)
                if len(head) < most <= MAX_HEADER_NBYTES:
                    head = self._bucket.get(each.path.as_posix(), most)
        except FileNotFoundError:
            return None
        return head

    def listed(self, now_ns: int) -> Mapping[Path, Collection[FileInfo]]:
        folders: dict[Path, list[FileInfo]] = defaultdict(list)
        # Including those that are empty now.
        folders |= {self.folder / f"{number:02x}": [] for number in range(256)} | {self.folder / NOTES: []}
        with self._lock:
            for info in self._files.values():
                folders[info.path.parent].append(info)
        return folders

    def all_files(self) -> Iterable[FileInfo]:
        return [each for each in self._bucket.listing(self._model) if self._is_ours(each.path)]

    def used_ns(self, path: Path) -> int | None:
        with self._lock:
            return self._files[path].mtime_ns if path in self._files else None

    def _note_around(self, objects: Collection[FileInfo]) -> None:
        """Take those of a listing that are not this model's; leases of living servers protect their models' objects."""
        now_ns = self._now_ns()
        leases: dict[str, list[FileInfo]] = defaultdict(list)
        records: dict[str, list[FileInfo]] = defaultdict(list)
        for each in objects:
            model, *rest = each.path.parts or ("",)
            if rest[:1] == [SERVERS]:
                leases[model].append(each)
            elif MODEL_NAME.fullmatch(model) and model != self._model:
                records[model] += [each] if RECORD_NAME.fullmatch(each.path.name) or _is_use(each.path) else []
        unserved = [info for model, infos in records.items() if not _living(leases[model], now_ns) for info in infos]
        with self._lock:
            self._nbytes_around = {each.path: each.nbytes for each in objects}
            self.around_nbytes = sum(self._nbytes_around.values())
            self._evictable = sorted(unserved, key=lambda info: info.mtime_ns)

    def look_around(self, now_ns: int) -> None:
        """Nothing: `prepare` has listed them."""

    def evictable_around(self) -> list[FileInfo]:
        with self._lock:
            return list(self._evictable)

    # Reading.

    def entry(self, info: FileInfo) -> IndexEntry:
        with self._lock:
            head = self._heads.pop(info.path, None)
        if head is None:
            head = self._head(info)
            if head is None:
                raise FileNotFoundError(2, "there is no such object")
        entry = read_header(BytesIO(head), info.nbytes).entry
        self.verify_name(info.path, entry)
        return entry

    def read(self, key: bytes) -> DiskRecord:
        path = self.path_of(key)
        with self._lock:
            info = self._files.get(path)
        if info is None:
            raise FileNotFoundError(2, "there is no such object")
        try:
            return self._read(info)
        except Unverified:
            # Read again before it is removed as damaged: the connection may have ended early.
            return self._read(info)
        except FileNotFoundError:
            self._note(path, None)
            raise

    def _read(self, info: FileInfo) -> DiskRecord:
        content = self._bucket.get(info.path.as_posix(), info.nbytes)
        record = read_record(BytesIO(content), len(content))
        self.verify_name(info.path, record)
        return record

    def read_note(self, root: bytes) -> str:
        return bytes(self._bucket.get(self.note_path(root).as_posix(), MAX_HEADER_NBYTES)).decode()

    # Writing.

    def fill(self, key: bytes, encoded: EncodedFile, at_ns: int) -> None:
        # Objects cannot be renamed: it is sent by `publish`.
        self._content = encoded

    def publish(self, key: bytes) -> None:
        assert self._content is not None, "what is published was filled before"
        self._put(self.path_of(key), b"".join(self._content.chunks))

    def abandon(self, key: bytes) -> None:
        self._content = None

    def write_note(self, path: Path, content: bytes) -> None:
        self._put(path, content)

    def _put(self, path: Path, content: bytes) -> None:
        self._bucket.put(path.as_posix(), content)
        self._note(path, FileInfo(path=path, nbytes=len(content), mtime_ns=self._now_ns()))

    def set_time(self, path: Path, at_ns: int) -> None:
        """Show the use of an old record to other servers, at the store's time."""
        with self._lock:
            info = self._files.get(path)
        now_ns = self._now_ns()
        if info is not None and now_ns - info.mtime_ns > USE_SHOWN_S * 1e9:
            self._bucket.put(self._use_name(path), b"1")
            self._note(path, replace(info, mtime_ns=now_ns))

    def _note(self, path: Path, info: FileInfo | None) -> None:
        with self._lock:
            self._files.pop(path, None)
            if info is not None:
                self._files[path] = info
            if self._written_meanwhile is not None:
                self._written_meanwhile[path] = info

    # Removing.

    def remove(self, path: Path) -> None:
        self.remove_all([path])

    def remove_all(self, paths: Collection[Path]) -> None:
        self._bucket.delete([path.as_posix() for path in paths])
        for path in paths:
            self._note(path, None)
        with self._lock:
            self.around_nbytes -= sum(self._nbytes_around.pop(path, 0) for path in paths)
            self._evictable = [info for info in self._evictable if info.path not in paths]


def _living(leases: Iterable[FileInfo], now_ns: int) -> list[FileInfo]:
    return [lease for lease in leases if now_ns - lease.mtime_ns < EXPIRED_S * 1e9]


def _is_use(path: Path) -> bool:
    return _USE_NAME.fullmatch(path.as_posix()) is not None


def _is_record(path: Path) -> bool:
    return path.suffix == ".kv"

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

from reprise.disk.folders.bucket import ObjectBucket, ObjectInfo
from reprise.disk.folders.lease import EXPIRED_S, new_server_name
from reprise.disk.folders.model_directory import MODEL_NAME, NOTES, RECORD_NAME, SERVERS, NamedRecords
from reprise.disk.folders.model_folder import FileInfo
from reprise.disk.records.format import (
    LENGTH,
    MAX_HEADER_NBYTES,
    EncodedFile,
    RecordHeader,
    Unverified,
    read_header,
    read_record,
)
from reprise.disk.records.record import DiskRecord, folder_name

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


class ModelBucket(NamedRecords):
    """One model's objects in a bucket, used by this server until `release`, and by others."""

    is_remote = True
    removed_at_once = _REMOVED_AT_ONCE
    reads_at_once = _READS_AT_ONCE

    def __init__(self, bucket: ObjectBucket, *, fingerprint: str) -> None:
        super().__init__(Path(folder_name(fingerprint)))
        self.names = threading.RLock()
        self.servers: frozenset[str] = frozenset()
        self.around = ObjectsAround()
        self.has_unread = False
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

    @property
    def place(self) -> str:
        return self._bucket.url

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

    @property
    def has_vanished(self) -> bool:
        # Objects have no folder: removed ones are found missing one by one.
        return False

    def note_servers(self, now_ns: int) -> bool:
        del now_ns  # By this server's clock; the store has its own.
        leases = list(self._bucket.listing(f"{self._model}/{SERVERS}"))
        own = next((lease for lease in leases if lease.name == self._lease_name), None)
        if own is not None:
            self._leased_at = (own.changed_ns, time.monotonic())
        living = _living(leases, own.changed_ns if own is not None else self._now_ns())
        self._bucket.delete([lease.name for lease in leases if lease not in living])
        before, self.servers = self.servers, frozenset(_last(lease.name) for lease in living) - {self._server}
        return bool(before or self.servers)

    @property
    def has_new_servers(self) -> bool:
        return True

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
            own = {Path(each.name): each for each in objects if self._is_ours(each)}
            used_ns = self._uses(objects, own)
            unknown = [each for path, each in own.items() if not is_known(path, each.nbytes)]
            unknown.sort(key=lambda each: each.changed_ns, reverse=True)
            heads = self._read_heads(unknown[:MOST_HEADERS], is_closing)
            for each in unknown:
                # Removed since the listing, or beyond `MOST_HEADERS`.
                if Path(each.name) not in heads and _is_record(each):
                    del own[Path(each.name)]
            infos = ((path, _info_of(each)) for path, each in own.items())
            files = {path: replace(info, mtime_ns=max(info.mtime_ns, used_ns.get(path, 0))) for path, info in infos}
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
        self.around.note([each for each in objects if Path(each.name) not in own], self._model, self._now_ns())

    def _uses(self, objects: Iterable[ObjectInfo], own: Mapping[Path, ObjectInfo]) -> dict[Path, int]:
        """When records were used, as servers have shown; what shows the use of a record that is gone is removed."""
        shown = [each for each in objects if each.name.startswith(f"{self._model}/") and _is_use(each)]
        used_ns = {self.path_of(bytes.fromhex(_last(each.name))): each.changed_ns for each in shown}
        gone = [path for path in used_ns if path not in own]
        for at in range(0, len(gone), self.removed_at_once):
            self._bucket.delete([self._use_name(path) for path in gone[at : at + self.removed_at_once]])
        return used_ns

    def _use_name(self, path: Path) -> str:
        return f"{self._model}/{_USES}/{path.stem}"

    def _is_ours(self, each: ObjectInfo) -> bool:
        is_inside = each.name.startswith(f"{self._model}/") and RECORD_NAME.fullmatch(_last(each.name)) is not None
        return is_inside and not each.name.startswith(f"{self._model}/{SERVERS}/")

    def _read_heads(self, objects: list[ObjectInfo], is_closing: Callable[[], bool]) -> dict[Path, memoryview]:
        """The heads of these records, read in batches; without those that are gone."""
        heads: dict[Path, memoryview] = {}
        wanted = [each for each in objects if _is_record(each)]
        for at in range(0, len(wanted), _HEADERS_AT_ONCE):
            if is_closing():
                break
            some = wanted[at : at + _HEADERS_AT_ONCE]
            with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="reprise-disk-headers") as pool:
                for each, head in zip(some, pool.map(self._head, some), strict=True):
                    if head is not None:
                        heads[Path(each.name)] = head
        return heads

    def _head(self, each: ObjectInfo) -> memoryview | None:
        """An object up to the end of its header, or None if it is gone."""
        try:
            head = self._bucket.get(each.name, min(_HEAD_NBYTES, each.nbytes))
            if len(head) >= LENGTH.size:
                (header_nbytes,) = cast("tuple[int]", LENGTH.unpack(head[: LENGTH.size]))
                most = min(LENGTH.size + header_nbytes, each.nbytes)
                if len(head) < most <= MAX_HEADER_NBYTES:
                    head = self._bucket.get(each.name, most)
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

    def forget_listed(self) -> None:
        """Nothing is kept from one listing to the next."""

    def sweep(self) -> int:
        return 0

    def all_files(self) -> Iterable[FileInfo]:
        return [_info_of(each) for each in self._bucket.listing(self._model) if self._is_ours(each)]

    def is_there(self, path: Path) -> bool:
        with self._lock:
            return path in self._files

    def has_folder(self) -> bool:
        return True

    def used_ns(self, path: Path) -> int | None:
        with self._lock:
            return self._files[path].mtime_ns if path in self._files else None

    def is_obstructed(self, key: bytes) -> bool:
        return False

    # Reading.

    def header(self, info: FileInfo) -> RecordHeader:
        with self._lock:
            head = self._heads.pop(info.path, None)
        if head is None:
            head = self._head(ObjectInfo(name=info.path.as_posix(), nbytes=info.nbytes, changed_ns=info.mtime_ns))
            if head is None:
                raise FileNotFoundError(2, "there is no such object")
        header = read_header(BytesIO(head), info.nbytes)
        if info.path != self.path_of(header.key):
            raise Unverified("its name does not match its content")
        return header

    def read(self, key: bytes) -> DiskRecord:
        path = self.path_of(key)
        with self._lock:
            info = self._files.get(path)
        if info is None:
            raise FileNotFoundError(2, "there is no such object")
        try:
            return self._read(key, info)
        except Unverified:
            # Read again before it is removed as damaged: the connection may have ended early.
            return self._read(key, info)
        except FileNotFoundError:
            self._note(path, None)
            raise

    def _read(self, key: bytes, info: FileInfo) -> DiskRecord:
        content = self._bucket.get(info.path.as_posix(), info.nbytes)
        record = read_record(BytesIO(content), len(content))
        if record.key != key:
            raise Unverified("its name does not match its content")
        return record

    def read_note(self, root: bytes) -> str:
        return bytes(self._bucket.get(self.note_path(root).as_posix(), MAX_HEADER_NBYTES)).decode()

    # Writing.

    def temporary_of(self, path: Path) -> Path:
        return path

    def begin(self, key: bytes, nbytes: int) -> int:
        return 0

    def fill(self, begun: int, encoded: EncodedFile) -> None:
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
            self.around.forget(path)

    def quarantine(self, path: Path) -> None:
        """Remove it: a bucket has no quarantine."""
        self.remove(path)

    def clear_quarantine(self) -> None:
        """There is none."""


class ObjectsAround:
    """The objects other than a model's: those of other models, and any others below the prefix."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes_of: dict[Path, int] = {}
        self._evictable: list[FileInfo] = []
        self.nbytes = 0

    def note(self, objects: Collection[ObjectInfo], own: str, now_ns: int) -> None:
        """Update from a listing; leases of living servers protect their models' objects."""
        leases: dict[str, list[ObjectInfo]] = defaultdict(list)
        records: dict[str, list[FileInfo]] = defaultdict(list)
        for each in objects:
            model, _, rest = each.name.partition("/")
            if rest.startswith(f"{SERVERS}/"):
                leases[model].append(each)
            elif MODEL_NAME.fullmatch(model) and model != own and _is_evictable(each):
                records[model].append(_info_of(each))
        unserved = [info for model, infos in records.items() if not _living(leases[model], now_ns) for info in infos]
        with self._lock:
            self._nbytes_of = {Path(each.name): each.nbytes for each in objects}
            self.nbytes = sum(self._nbytes_of.values())
            self._evictable = sorted(unserved, key=lambda info: info.mtime_ns)

    def forget(self, path: Path) -> None:
        """Forget an object that was removed."""
        with self._lock:
            self.nbytes -= self._nbytes_of.pop(path, 0)
            self._evictable = [info for info in self._evictable if info.path != path]

    def look(self, now_ns: int) -> None:
        """No-op: `note` has the last listing."""

    def evictable(self) -> list[FileInfo]:
        with self._lock:
            return list(self._evictable)


def _living(leases: Iterable[ObjectInfo], now_ns: int) -> list[ObjectInfo]:
    return [lease for lease in leases if now_ns - lease.changed_ns < EXPIRED_S * 1e9]


def _info_of(each: ObjectInfo) -> FileInfo:
    return FileInfo(path=Path(each.name), nbytes=each.nbytes, mtime_ns=each.changed_ns)


def _is_evictable(each: ObjectInfo) -> bool:
    return RECORD_NAME.fullmatch(_last(each.name)) is not None or _is_use(each)


def _is_use(each: ObjectInfo) -> bool:
    return _USE_NAME.fullmatch(each.name) is not None


def _is_record(each: ObjectInfo) -> bool:
    return each.name.endswith(".kv")


def _last(name: str) -> str:
    return name.rpartition("/")[2]

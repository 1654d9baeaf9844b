"""Planted bugs in the disk tier: its format, its index, its bound and its threads."""

from tools.mutants.mutant import Mutant

_FORMAT = ("tests/disk/test_format.py",)
_INDEX = ("tests/disk/test_index.py",)
_BOUND = ("tests/disk/test_bound.py",)
_CACHE = ("tests/disk/test_cache.py",)
_FAULTS = ("tests/disk/test_faults.py", "tests/disk/test_disk_machine.py")
_PROCESSES = ("tests/disk/test_processes.py",)
_READ_AHEAD = ("tests/loop/test_read_ahead.py",)
_SHARING = ("tests/disk/test_sharing.py",)
_BUCKET = ("tests/disk/test_bucket.py",)
_MOVED = ("tests/loop/test_sharing.py",)
_RESTORE_STEPS = ("tests/loop/test_restore_steps.py", "-k", "state-40-False")
_WRITE_BEHIND = ("tests/loop/test_write_behind.py",)
_RESTARTS = ("tests/loop/test_disk.py", "-k", "read_again or restart")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


DISK_MUTANTS = (
    _mutant(
        "read_record",
        "the body is not verified",
        "body_sum.digest() != header.body_sha256",
        "len(header.body_sha256) == 0",
        _FORMAT,
    ),
    _mutant(
        "read_header",
        "the key is not compared with the tokens",
        "entry.key != key_of(entry.parent, entry.tokens, is_tail=entry.is_tail)",
        "len(entry.key) == 0",
        _FORMAT,
    ),
    _mutant(
        "root_key",
        "namespaces share what is stored",
        "_hash(b'root', FORMAT_VERSION.to_bytes(4, 'little'), fingerprint.encode(), namespace.encode())",
        "_hash(b'root', FORMAT_VERSION.to_bytes(4, 'little'), fingerprint.encode())",
        _INDEX,
    ),
    _mutant(
        "DiskIndex._longest_tail",
        "the shortest tail is taken instead of the longest",
        "sorted(by_length, reverse=True)",
        "sorted(by_length)",
        _INDEX,
    ),
    _mutant(
        "DiskIndex.find",
        "a tail may end behind the limit",
        "wanted[start * TOKEN_NBYTES : limit * TOKEN_NBYTES]",
        "wanted[start * TOKEN_NBYTES :]",
        _INDEX,
    ),
    _mutant(
        "DiskIndex._longest_common",
        "only one neighbour is compared with a prompt",
        "row[max(0, at - 1) : at + 1]",
        "row[at : at + 1]",
        _INDEX,
    ),
    _mutant(
        "RecordStore._make_room",
        "other files below the directory do not count",
        "over = self.index.nbytes + self.others_nbytes + nbytes - self.max_bytes",
        "over = self.index.nbytes + nbytes - self.max_bytes",
        _BOUND,
    ),
    _mutant(
        "RecordStore._make_room",
        "everything goes for what cannot fit",
        "if own_spare + sum((info.nbytes for info in others)) < over:\n    return False",
        "",
        _BOUND,
    ),
    _mutant(
        "RecordStore._remove_oldest",
        "what is being fetched goes",
        "self.held.keys() | {beside}",
        "{beside}",
        _BOUND,
    ),
    _mutant(
        "FolderListings.look",
        "a folder that has just changed is not listed again",
        "now_ns - changed_ns > _SETTLED_NS",
        "True",
        (*_BOUND, *_PROCESSES),
    ),
    _mutant(
        "RecordStore.show_uses",
        "times of use are not written",
        "self.directory.set_time(self.directory.path_of(key), at_ns)",
        "self.directory.path_of(key)",
        _BOUND,
    ),
    _mutant(
        "RecordWriter._fail",
        "a full disk is written to again at once",
        "self._paused_at = self._store.clock()",
        "",
        _FAULTS,
    ),
    _mutant(
        "RecordStore._remove_oldest",
        "what another server uses goes first",
        "not self._was_used_since(*own)",
        "True",
        _SHARING,
    ),
    _mutant(
        "ModelDirectory._temporary_of",
        "two servers write one file at once",
        "f'.{self._lease.name}{_TEMPORARY_ENDING}'",
        "f'.0-0{_TEMPORARY_ENDING}'",
        _SHARING,
    ),
    _mutant(
        "_lives",
        "a machine that died holds its files for ever",
        "now_ns - path.stat().st_mtime_ns < EXPIRED_S * 1000000000.0",
        "path.exists()",
        _SHARING,
    ),
    _mutant("ReadAhead._waits_for_scan", "a chat that moved is computed", "not self._disk.is_shared", "True", _MOVED),
    _mutant(
        "ReadAhead.advance",
        "a look that hangs is waited for",
        "time.monotonic() >= look.until_s",
        "False",
        (*_MOVED, "-k", "hangs"),
    ),
    _mutant(
        "RecordStore._drop_damaged",
        "a damaged file stays known",
        "entry = self.index.remove(key)",
        "entry = self.index.entries[key]",
        _FAULTS,
    ),
    _mutant(
        "ModelDirectory.sweep",
        "what was not finished stays when opening",
        "self.remove(info.path)",
        "info.path",
        _FAULTS,
    ),
    _mutant(
        "ReadAhead._may_fit",
        "prompts are read for which there is no room beside each other",
        "return sum((read.needed for read in self._reads)) + needed <= room",
        "return self._sizes.at(position) <= room",
        _READ_AHEAD,
    ),
    _mutant(
        "ReadAhead._commit_to",
        "what was read in parts is joined in one step",
        "source, seams = read.target.source(position), read.target.records.seams",
        "source, seams = read.target.source(position), None",
        _RESTORE_STEPS,
    ),
    _mutant(
        "ReadAhead._take",
        "a disk that hangs is waited for",
        "now_s - read.progress_s >= STALLED_S",
        "now_s - read.progress_s < 0",
        (*_READ_AHEAD, "-k", "disk_that_hangs"),
    ),
    _mutant(
        "ReadAhead.void",
        "what was cleared while it was read comes back",
        "read.is_void |= namespace in (None, read.namespace)",
        "read.is_void |= False",
        (*_READ_AHEAD, "-k", "before_a_clear"),
    ),
    _mutant(
        "ReadAhead._commit_to",
        "all that is reused is told as read from the disk",
        "request.reading.num_loaded += max(0, self._resume_at(request) - held)",
        "request.reading.num_loaded += self._resume_at(request)",
        _RESTARTS,
    ),
    _mutant(
        "ReadAhead._admit",
        "what waited for a read waits on",
        "request.reading.is_loading = False",
        "request.reading.is_loading = request.reading.num_loads == 0",
        _READ_AHEAD,
    ),
    _mutant(
        "WriteBehind._write_part",
        "what was evicted while a path is written ends it",
        "return not is_new",
        "return False",
        _WRITE_BEHIND,
    ),
    _mutant(
        "WriteBehind._ends",
        "where chats parted is not written",
        "ends | shared | kept",
        "ends | kept",
        _WRITE_BEHIND,
    ),
    _mutant(
        "WriteBehind._missing_records",
        "positions that all chats share are not written",
        "missing.needs_tail",
        "missing.needs_tail and end == len(path.tokens)",
        ("tests/loop/test_disk.py", "-k", "llama or read_again or one_prefix"),
    ),
    _mutant(
        "_chunk_starts",
        "where a chunk begins is not written",
        "range(step, length + 1, step)",
        "range(0)",
        _WRITE_BEHIND,
    ),
    _mutant(
        "DiskTier.close",
        "what was not written is lost when the server stops",
        "self._write_behind.due_in_s is not None",
        "False",
        _RESTARTS,
    ),
    _mutant(
        "RecordStore._add_note",
        "notes leave the disk before records",
        "replace(info, mtime_ns=_LAST_NS)",
        "info",
        ("tests/disk/test_notes.py",),
    ),
    _mutant(
        "RecordStore.write_note",
        "a note does not count against the bound",
        'self._make_room(len(content), beside=b"", now_ns=now_ns)',
        "True",
        ("tests/disk/test_notes.py",),
    ),
    _mutant(
        "ModelDirectory.write_note",
        "a note is written in its place, and may stand there half",
        "_created(temporary)",
        "_created(path)",
        ("tests/disk/test_notes.py",),
    ),
    _mutant(
        "DiskCache._readable_root",
        "a store that is unavailable is asked for each prompt",
        "self._store.is_unavailable",
        "False",
        _BUCKET,
    ),
    _mutant(
        "ModelBucket.prepare",
        "what is written while a bucket is listed is forgotten",
        "files[path] = info",
        "",
        _BUCKET,
    ),
    _mutant(
        "ModelBucket.prepare",
        "a use that another server shows is not seen",
        "max(info.mtime_ns, used_ns.get(path, 0))",
        "info.mtime_ns",
        _BUCKET,
    ),
    _mutant(
        "RecordStore._uses_to_show",
        "a use is shown for each record of a path",
        "key not in parents",
        "True",
        _BUCKET,
    ),
    _mutant(
        "RecordStore._uses_to_show",
        "an eviction shows the use of what it leaves",
        "at_ns >= recent_ns",
        "True",
        _BUCKET,
    ),
    _mutant(
        "Fetch.begin_next",
        "records read at once take any number of bytes",
        "nbytes > room",
        "False",
        _BUCKET,
    ),
    _mutant(
        "Fetch.deliver",
        "records read at once are given as they come",
        "first = self._begun.popleft()",
        "self._begun.remove(read); first = read",
        _BUCKET,
    ),
    _mutant(
        "LinkSpeed.note",
        "reads that share a link are taken for a slow link",
        "nbytes * at_once",
        "nbytes",
        ("tests/disk/test_link.py",),
    ),
    _mutant(
        "ReadAhead._is_worth_reading",
        "what is slower to read than to compute is read",
        "reading_s <= max(computing_s, LEAST_READ_S)",
        "True",
        ("tests/loop/test_slow_disk.py",),
    ),
)

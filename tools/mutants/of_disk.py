"""Planted bugs in the disk tier: its format, its index, its bound and its threads."""

from tools.mutants.mutant import Mutant

_FORMAT = ("tests/disk/test_format.py",)
_INDEX = ("tests/disk/test_index.py",)
_BOUND = ("tests/disk/test_bound.py",)
_CACHE = ("tests/disk/test_cache.py",)
_FAULTS = ("tests/disk/test_faults.py", "tests/disk/test_disk_machine.py")
_CLEAR = ("tests/disk/test_clear.py",)
_PROCESSES = ("tests/disk/test_processes.py",)
_READ_AHEAD = ("tests/loop/test_read_ahead.py",)
_SHARING = ("tests/disk/test_sharing.py",)
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
        "header.key != key_of(header.parent, header.tokens, is_tail=header.is_tail)",
        "len(header.key) == 0",
        _FORMAT,
    ),
    _mutant(
        "read_header",
        "a header may be as long as it says",
        "header_nbytes > MAX_HEADER_NBYTES or LENGTH.size + header_nbytes > file_nbytes",
        "LENGTH.size + header_nbytes > file_nbytes",
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
        "DiskIndex.missing",
        "what is queued is asked for again",
        "if not self.has(key) and key not in queued:\n    blocks.append((k, parent))",
        "if not self.has(key):\n    blocks.append((k, parent))",
        _INDEX,
    ),
    _mutant(
        "DiskIndex.is_suspect",
        "what was damaged unseen is thought to be there when its path is stored again",
        "return self.has_met_damage and key not in self.verified",
        "return False",
        ("tests/disk/test_faults.py", "-k", "stored_again"),
    ),
    _mutant(
        "RecordStore._is_there",
        "what is suspect is not verified when it is stored again",
        "self.read(key)",
        "pass",
        ("tests/disk/test_faults.py", "-k", "stored_again"),
    ),
    _mutant(
        "DiskIndex._most_alike",
        "only one neighbour is compared with a prompt",
        "row[max(0, at - 1) : at + 1]",
        "row[at : at + 1]",
        _INDEX,
    ),
    _mutant(
        "DiskIndex.add",
        "what others stand on may go before them",
        "self._remove_leaf(self.entries[entry.parent])",
        "",
        _BOUND,
    ),
    _mutant(
        "DiskIndex.remove",
        "a use of what has gone does not count for what it stood on",
        "self.use(entry.parent, at_ns)",
        "",
        _BOUND,
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
        "OtherFiles.evictable",
        "a live server's files go",
        "_MODEL_NAME.fullmatch(model.name) and (not living_servers(model / _SERVERS, self._seen_ns))",
        "_MODEL_NAME.fullmatch(model.name)",
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
        "RecordStore.write",
        "a file has its name before the disk has its bytes",
        "directory.fill(descriptor, encoded)",
        "directory.publish(record.key)\ndirectory.fill(descriptor, encoded)\npath.rename(temporary)",
        _CACHE,
    ),
    _mutant(
        "RecordStore.write",
        "what was cleared while it was written appears",
        "not self._is_due(record, is_wanted) or self._is_known(record.key)",
        "self._is_known(record.key)",
        _CLEAR,
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
        "RecordStore._gone",
        "what other servers have removed stays known",
        "path.parent in listed and path not in there and (not path.exists())",
        "False",
        _SHARING,
    ),
    _mutant(
        "RecordStore._enter",
        "a note that another server has written is taken for the one that is known",
        "unusable.info.nbytes == info.nbytes",
        "True",
        _SHARING,
    ),
    _mutant(
        "RecordStore.write",
        "what another server has written meanwhile is written again",
        "not self._is_due(record, is_wanted) or self._is_known(record.key)",
        "not self._is_due(record, is_wanted)",
        _SHARING,
    ),
    _mutant(
        "RecordStore._remove_oldest",
        "what another server uses goes first",
        "not self._is_younger(*own)",
        "True",
        _SHARING,
    ),
    _mutant(
        "ModelDirectory.temporary_of",
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
    _mutant("ReadAhead._waits_for_look", "a chat that moved is computed", "not self._disk.is_shared", "True", _MOVED),
    _mutant(
        "ReadAhead.advance",
        "a look that hangs is waited for",
        "time.monotonic() >= look.until_s",
        "False",
        (*_MOVED, "-k", "hangs"),
    ),
    _mutant(
        "RecordStore.clear",
        "clearing leaves the quarantine",
        "self.directory.clear_quarantine()",
        "",
        _CLEAR,
    ),
    _mutant(
        "RecordStore._put_away",
        "a damaged file stays known",
        "entry = self.index.remove(key)",
        "entry = self.index.entries[key]",
        _FAULTS,
    ),
    _mutant(
        "RecordStore._take_stock",
        "what was not finished stays when opening",
        "self.directory.remove(info.path)",
        "info.path",
        _FAULTS,
    ),
    _mutant(
        "Fetch._end",
        "a cancelled fetch holds its records for ever",
        "self._store.let_go(self._held)",
        "",
        _BOUND,
    ),
    _mutant(
        "RecordStore.write",
        "a folder that vanished is not made again",
        "directory.has_vanished",
        "False",
        _FAULTS,
    ),
    _mutant("RecordStore.write", "a folder in a record's place is written to", "path.is_dir()", "False", _FAULTS),
    _mutant(
        "RecordStore._enter",
        "what lies in a folder of somebody's is looked into",
        "not self.directory.is_place_of_record(info.path)",
        "False",
        _FAULTS,
    ),
    _mutant("_parsed", "the header is not verified", "metadata[_HEADER_SUM] != _checksum(fields)", "False", _FORMAT),
    _mutant(
        "ReadAhead._may_fit",
        "prompts are read for which there is no room beside each other",
        "return sum((read.needed for read in self._reads)) + needed <= room",
        "return self._sizes.at(position) <= room",
        _READ_AHEAD,
    ),
    _mutant(
        "ReadAhead._decode",
        "what was read is decoded at once, however much",
        "self._allowance.has_room",
        "True",
        (*_READ_AHEAD, "-k", "small_steps"),
    ),
    _mutant(
        "ReadAhead._commit_to",
        "what was read in parts is joined in one step",
        "read.target.seams",
        "None",
        _RESTORE_STEPS,
    ),
    _mutant(
        "ReadAhead._take",
        "a disk that hangs is waited for",
        "now_s - read.heard_s >= STALLED_S",
        "now_s - read.heard_s < 0",
        _READ_AHEAD,
    ),
    _mutant(
        "ReadAhead.void",
        "what was cleared while it was read comes back",
        "read.is_void |= namespace in (None, read.namespace)",
        "read.is_void |= False",
        _READ_AHEAD,
    ),
    _mutant(
        "ReadAhead._commit_to",
        "all that is reused is told as read from the disk",
        "request.loaded += max(0, self._resume_at(request) - held)",
        "request.loaded += self._resume_at(request)",
        _RESTARTS,
    ),
    _mutant(
        "ReadAhead._admit",
        "what waited for a read waits on",
        "request.set_loading(is_loading=False)",
        "request.set_loading(is_loading=request.num_loads == 0)",
        _READ_AHEAD,
    ),
    _mutant(
        "WriteBehind._go_on",
        "what was evicted while a path is written ends it",
        "return not is_new",
        "return False",
        _WRITE_BEHIND,
    ),
    _mutant(
        "WriteBehind._go_on",
        "a path is copied to its end though the disk takes nothing",
        "return is_taken and len(path.left) > 0",
        "return len(path.left) > 0",
        _WRITE_BEHIND,
    ),
    _mutant(
        "WriteBehind._copy",
        "a record is copied at once, however large",
        "copy.left and copied < COPIED_AT_ONCE",
        "copy.left",
        _WRITE_BEHIND,
    ),
    _mutant(
        "WriteBehind._planned",
        "positions that all chats share are not written",
        "missing.needs_tail",
        "missing.needs_tail and end == len(path.tokens)",
        ("tests/loop/test_disk.py", "-k", "llama or read_again or one_prefix"),
    ),
    _mutant(
        "DiskTier.close",
        "a full disk holds up the end",
        "self._disk.is_paused()",
        "False",
        _READ_AHEAD,
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
        "replace(info, mtime_ns=_NEVER_NS)",
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
        "os.open(temporary, flags, PRIVATE_FILE)",
        "os.open(path, flags, PRIVATE_FILE)",
        ("tests/disk/test_notes.py",),
    ),
)

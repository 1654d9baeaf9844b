"""Planted bugs in the disk tier: its format, its index, its bound and its threads."""

from tools.mutants.mutant import Mutant

_FORMAT = ("tests/cache/disk/test_format.py",)
_INDEX = ("tests/cache/disk/test_index.py",)
_BOUND = ("tests/cache/disk/test_bound.py",)
_CACHE = ("tests/cache/disk/test_cache.py",)
_FAULTS = ("tests/cache/disk/test_faults.py", "tests/cache/disk/test_disk_machine.py")
_CLEAR = ("tests/cache/disk/test_clear.py",)
_PROCESSES = ("tests/cache/disk/test_processes.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


DISK_MUTANTS = (
    _mutant(
        "read_record",
        "the body is not verified",
        "hashlib.sha256(body).digest() != header.body_sha256",
        "len(header.body_sha256) == 0",
        _FORMAT,
    ),
    _mutant(
        "read_header",
        "the key is not compared with the tokens",
        "header.key != key_of(header.parent, header.tokens, is_mark=header.is_mark)",
        "len(header.key) == 0",
        _FORMAT,
    ),
    _mutant(
        "read_header",
        "a header may be as long as it says",
        "header_nbytes > MAX_HEADER_NBYTES or PREFIX.size + header_nbytes + KEY_NBYTES > file_nbytes",
        "PREFIX.size + header_nbytes + KEY_NBYTES > file_nbytes",
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
        "Index._longest_mark",
        "the shortest mark is taken instead of the longest",
        "sorted(by_length, reverse=True)",
        "sorted(by_length)",
        _INDEX,
    ),
    _mutant(
        "Index.find",
        "a mark may end behind the limit",
        "wanted[start * TOKEN_NBYTES : limit * TOKEN_NBYTES]",
        "wanted[start * TOKEN_NBYTES :]",
        _INDEX,
    ),
    _mutant(
        "Index.missing",
        "what is queued is asked for again",
        "key not in self.entries and key not in queued",
        "key not in self.entries",
        _INDEX,
    ),
    _mutant(
        "Index._most_alike",
        "only one neighbour is compared with a prompt",
        "row[max(0, at - 1) : at + 1]",
        "row[at : at + 1]",
        _INDEX,
    ),
    _mutant(
        "LeafOrder._counts",
        "what others stand on may go before them",
        "return self.last_use_ns.get(item[1]) == item[0] and self._is_bare(item[1])",
        "return self.last_use_ns.get(item[1]) == item[0]",
        _BOUND,
    ),
    _mutant(
        "LeafOrder.forget",
        "a use of what has gone does not count for what it stood on",
        "self.use(parent, max(at_ns, known_ns))",
        "self.use(parent, known_ns)",
        _BOUND,
    ),
    _mutant(
        "Room.make",
        "other files below the directory do not count",
        "over = inventory.nbytes + self.surroundings.nbytes + nbytes - self.max_bytes",
        "over = inventory.nbytes + nbytes - self.max_bytes",
        _BOUND,
    ),
    _mutant(
        "Room.make",
        "everything goes for what cannot fit",
        "if own_spare + sum((seen.nbytes for seen in others)) < over:\n    return False",
        "",
        _BOUND,
    ),
    _mutant(
        "Room._remove_oldest",
        "what is being fetched goes",
        "self._state.held.keys() | {beside}",
        "{beside}",
        _BOUND,
    ),
    _mutant(
        "Surroundings.evictable",
        "a live server's files go",
        "_MODEL.fullmatch(model.name) and (not is_locked(model / LOCK))",
        "_MODEL.fullmatch(model.name)",
        _BOUND,
    ),
    _mutant(
        "Surroundings.look",
        "a folder that has just changed is not listed again",
        "now_ns - changed_ns > _SETTLED_NS",
        "True",
        (*_BOUND, *_PROCESSES),
    ),
    _mutant(
        "Writer._write",
        "a file has its name before the disk has its bytes",
        "fill_file(descriptor, encoded)",
        "temporary.replace(shelf.path_of(record.key))\n"
        "temporary = shelf.path_of(record.key)\n"
        "fill_file(descriptor, encoded)",
        _CACHE,
    ),
    _mutant(
        "Writer._write",
        "what was cleared while it was written appears",
        "if not self._is_wanted(record):\n    return\npath = shelf.path_of(record.key)",
        "path = shelf.path_of(record.key)",
        _CLEAR,
    ),
    _mutant(
        "Writer._show",
        "times of use are not written",
        "os.utime(self._shelf.path_of(key), ns=(at_ns, at_ns))",
        "self._shelf.path_of(key)",
        _BOUND,
    ),
    _mutant(
        "State.fail",
        "a full disk is written to again at once",
        "self._paused_at = self.clock()",
        "",
        _FAULTS,
    ),
    _mutant(
        "Shelf.__init__",
        "two servers may have one folder",
        "self._lock is None",
        "self._lock == -1",
        (*_CACHE, *_PROCESSES),
    ),
    _mutant(
        "clear",
        "clearing leaves the quarantine",
        "shelf.clear_quarantine()",
        "shelf.quarantine.exists()",
        _CLEAR,
    ),
    _mutant(
        "put_away",
        "a damaged file stays known",
        "entry = state.inventory.remove(key)",
        "entry = state.inventory.index.entries[key]",
        _FAULTS,
    ),
    _mutant(
        "take_stock",
        "what was not finished stays when opening",
        "remove_file(seen.path)",
        "",
        _FAULTS,
    ),
    _mutant(
        "Fetch._end",
        "a cancelled fetch holds its records for ever",
        "self._state.let_go(self._held)",
        "",
        _CACHE,
    ),
)

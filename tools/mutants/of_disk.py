"""Planted bugs in the disk tier: its format, its index, its bound and its threads."""

from tools.mutants.mutant import Mutant

_FORMAT = ("tests/cache/disk/test_format.py",)
_INDEX = ("tests/cache/disk/test_index.py",)
_BOUND = ("tests/cache/disk/test_bound.py",)
_CACHE = ("tests/cache/disk/test_cache.py",)
_FAULTS = ("tests/cache/disk/test_faults.py", "tests/cache/disk/test_disk_machine.py")
_CLEAR = ("tests/cache/disk/test_clear.py",)
_PROCESSES = ("tests/cache/disk/test_processes.py",)


def _mutant(file: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, file=f"cache/disk/{file}", old=old, new=new, tests=tests)


DISK_MUTANTS = (
    _mutant(
        "format.py",
        "the body is not verified",
        "if hashlib.sha256(body).digest() != header.body_sha256:",
        "if len(header.body_sha256) == 0:",
        _FORMAT,
    ),
    _mutant(
        "format.py",
        "the key is not compared with the tokens",
        "if header.key != key_of(header.parent, header.tokens, is_mark=header.is_mark):",
        "if len(header.key) == 0:",
        _FORMAT,
    ),
    _mutant(
        "format.py",
        "a header may be as long as it says",
        "if header_nbytes > MAX_HEADER_NBYTES or PREFIX.size",
        "if PREFIX.size",
        _FORMAT,
    ),
    _mutant("keys.py", "namespaces share what is stored", ", namespace.encode())", ")", _INDEX),
    _mutant(
        "index.py",
        "the shortest mark is taken instead of the longest",
        "for nbytes in sorted(by_length, reverse=True):",
        "for nbytes in sorted(by_length):",
        _INDEX,
    ),
    _mutant(
        "index.py",
        "a mark may end behind the limit",
        "wanted[start * TOKEN_NBYTES : limit * TOKEN_NBYTES]",
        "wanted[start * TOKEN_NBYTES :]",
        _INDEX,
    ),
    _mutant(
        "index.py",
        "what is queued is asked for again",
        "if key not in self.entries and key not in queued:",
        "if key not in self.entries:",
        _INDEX,
    ),
    _mutant(
        "index.py",
        "only one neighbour is compared with a prompt",
        "row[max(0, at - 1) : at + 1]",
        "row[at : at + 1]",
        _INDEX,
    ),
    _mutant(
        "order.py",
        "what others stand on may go before them",
        "return self.last_use_ns.get(item[1]) == item[0] and self._is_bare(item[1])",
        "return self.last_use_ns.get(item[1]) == item[0]",
        _BOUND,
    ),
    _mutant(
        "order.py",
        "a use of what has gone does not count for what it stood on",
        "self.use(parent, max(at_ns, known_ns))",
        "self.use(parent, known_ns)",
        _BOUND,
    ),
    _mutant(
        "room.py",
        "other files below the directory do not count",
        "over = inventory.nbytes + self.surroundings.nbytes + nbytes - self.max_bytes",
        "over = inventory.nbytes + nbytes - self.max_bytes",
        _BOUND,
    ),
    _mutant(
        "room.py",
        "everything goes for what cannot fit",
        "        if own_spare + sum(seen.nbytes for seen in others) < over:\n            return False\n",
        "",
        _BOUND,
    ),
    _mutant(
        "room.py",
        "what is being fetched goes",
        "order.oldest(self._state.held.keys() | {beside})",
        "order.oldest({beside})",
        _BOUND,
    ),
    _mutant(
        "surroundings.py",
        "a live server's files go",
        "if _MODEL.fullmatch(model.name) and not is_locked(model / LOCK)]",
        "if _MODEL.fullmatch(model.name)]",
        _BOUND,
    ),
    _mutant(
        "surroundings.py",
        "a folder that has just changed is not listed again",
        "is_settled=now_ns - changed_ns > _SETTLED_NS,",
        "is_settled=True,",
        (*_BOUND, *_PROCESSES),
    ),
    _mutant(
        "writer.py",
        "a file has its name before the disk has its bytes",
        "            fill_file(descriptor, encoded)\n            with state.changed:\n                at_ns",
        "            temporary.replace(shelf.path_of(record.key))\n"
        "            temporary = shelf.path_of(record.key)\n"
        "            fill_file(descriptor, encoded)\n            with state.changed:\n                at_ns",
        _CACHE,
    ),
    _mutant(
        "writer.py",
        "what was cleared while it was written appears",
        "                if not self._is_wanted(record):\n                    return\n                path",
        "                path",
        _CLEAR,
    ),
    _mutant(
        "writer.py",
        "times of use are not written",
        "os.utime(self._shelf.path_of(key), ns=(at_ns, at_ns))",
        "self._shelf.path_of(key)",
        _BOUND,
    ),
    _mutant(
        "state.py",
        "a full disk is written to again at once",
        "        self._paused_at = self.clock()\n",
        "",
        _FAULTS,
    ),
    _mutant(
        "shelf.py",
        "two servers may have one folder",
        "        if self._lock is None:",
        "        if self._lock == -1:",
        (*_CACHE, *_PROCESSES),
    ),
    _mutant(
        "clearing.py",
        "clearing leaves the quarantine",
        "            shelf.clear_quarantine()",
        "            shelf.quarantine.exists()",
        _CLEAR,
    ),
    _mutant(
        "damage.py",
        "a damaged file stays known",
        "            entry = state.inventory.remove(key)",
        "            entry = state.inventory.index.entries[key]",
        _FAULTS,
    ),
    _mutant(
        "opening.py",
        "what was not finished stays when opening",
        "            remove_file(seen.path)\n            continue\n",
        "            continue\n",
        _FAULTS,
    ),
    _mutant(
        "fetch.py",
        "a cancelled fetch holds its records for ever",
        "        self._state.let_go(self._held)\n",
        "",
        _CACHE,
    ),
)

"""Planted bugs in the loop: how jobs end, what parked sequences hold, and the memory budget."""

from tools.mutants.mutant import Mutant

_REUSE = ("tests/loop/test_reuse.py", "-k", "llama or qwen3_5")
_PARKED = ("tests/loop/test_idle_sequences.py",)
_BUDGET = ("tests/loop/test_budget.py", "-k", "llama or taking_over or held_twice")

_LOADS = ("tests/loop/test_disk_loads.py",)
_WRITES = ("tests/loop/test_disk_writes.py",)
_RESTARTS = ("tests/loop/test_disk.py", "-k", "read_again or restart")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


LOOP_MUTANTS = (
    _mutant(
        "Passes._complete",
        "pieces that cannot be joined fail the answers of others",
        "Exception",
        "KeyError",
        ("tests/loop/test_busy.py",),
    ),
    _mutant(
        "Passes._complete",
        "a chat on a busy server is never tidied",
        "self._cache.compact_path(tokens, namespace=task.job.namespace)",
        "pass",
        ("tests/loop/test_busy.py",),
    ),
    _mutant(
        "Passes._complete",
        "nobody tells how long an answer was",
        "self._cache.note_answer(task.lease, len(task.generated))",
        "pass",
        ("tests/loop/test_told.py",),
    ),
    _mutant(
        "Commits.store",
        "nobody tells where the next turn may differ",
        "task.job.prompt.stable_at",
        "None",
        ("tests/loop/test_told.py",),
    ),
    _mutant(
        "Commits.progress",
        "what a cancelled job computed is lost",
        "task.live is None or task.position <= task.resume_at",
        "task.position > -1",
        _REUSE,
    ),
    _mutant(
        "Ends.let_go",
        "leases are never given back",
        "self._cache.release(lease)",
        "pass",
        ("tests/loop/test_given_back.py", "-k", "llama"),
    ),
    _mutant(
        "Parked.adopt",
        "parked sequences are never adopted",
        "not self._sequences or position == 0",
        "position >= 0",
        _PARKED,
    ),
    _mutant(
        "Parked.adopt",
        "an adopted sequence can be adopted again",
        "del self._sequences[live]",
        "",
        _PARKED,
    ),
    _mutant(
        "Parked.adopt",
        "the path that an adoption leaves stays lent, and is overwritten",
        "self._cache.loans(live, parked.tokens, namespace=parked.namespace, start=position)",
        "self._cache.loans(live, parked.tokens, namespace=parked.namespace, start=len(parked.tokens))",
        _PARKED,
    ),
    _mutant(
        "Parked.end",
        "a sequence that is not worth parking ends with its loans",
        "self.recall(live, tokens, namespace=namespace)",
        "",
        _PARKED,
    ),
    _mutant(
        "Parked._recall_parked",
        "a recall that breaks off leaves the cache as if nothing had happened",
        "self.is_spoilt = True",
        "",
        _PARKED,
    ),
    _mutant(
        "Ends.lose",
        "what a failed sequence had lent is lost",
        "self._parked.recall(task.live, tokens, namespace=task.job.namespace)",
        "self._parked.recall(task.live, tokens[:0], namespace=task.job.namespace)",
        _PARKED,
    ),
    _mutant(
        "Room.free",
        "what running sequences were promised is given away",
        "cache.reserved + cache.coming + promised",
        "cache.reserved + cache.coming",
        ("tests/loop/test_memory.py", "-k", "promised"),
    ),
    _mutant(
        "Room.make",
        "buffers grow without asking",
        "free is None or free >= nbytes",
        "nbytes > 0",
        _BUDGET,
    ),
    _mutant(
        "Room.start",
        "a path for which there is no room twice is copied",
        "return self._take_over(match, position, reserve=reserve)",
        "return self._runner.start(self._cache.read(match, position), reserve=reserve)",
        _BUDGET,
    ),
    _mutant(
        "Room.is_full",
        "an answer never ends where the memory ends",
        "return free is not None and growth > max(0, free)",
        "return free is not None and growth > 10**15",
        _BUDGET,
    ),
    _mutant(
        "Loads._may_fit",
        "prompts are read for which there is no room beside each other",
        "return sum(load.needed for load in self._loads) + needed <= room",
        "return self._footprint.at(position) <= room",
        _LOADS,
    ),
    _mutant(
        "Loads._take_over",
        "what was read is taken over at once, however much",
        "taken < _COPIED_AT_ONCE and (taken == 0 or time.monotonic() < until_s)",
        "True",
        (*_LOADS, "-k", "small_steps"),
    ),
    _mutant(
        "Loads._take",
        "a disk that hangs is waited for",
        "now_s - load.heard_s >= _STALLED_S",
        "now_s - load.heard_s < 0",
        _LOADS,
    ),
    _mutant(
        "Loads.void",
        "what was cleared while it was read comes back",
        "load.is_void |= namespace in (None, load.namespace)",
        "load.is_void |= False",
        _LOADS,
    ),
    _mutant(
        "Loads._commit",
        "all that is reused is told as read from the disk",
        "task.loaded += max(0, self._resume_at(task) - held)",
        "task.loaded += self._resume_at(task)",
        _RESTARTS,
    ),
    _mutant(
        "Loads._end",
        "what waited for a load waits on",
        "task.is_loading = False",
        "task.is_loading = task.num_loads == 0",
        _LOADS,
    ),
    _mutant(
        "Writes._go_on",
        "what was evicted while a path is written ends it",
        "return not is_new",
        "return False",
        _WRITES,
    ),
    _mutant(
        "Writes._go_on",
        "a path is copied to its end though the disk takes nothing",
        "return is_taken and len(noted.left) > 0",
        "return len(noted.left) > 0",
        _WRITES,
    ),
    _mutant(
        "Writes._copy",
        "a record is copied at once, however large",
        "making.left and copied < _AT_ONCE",
        "making.left",
        _WRITES,
    ),
    _mutant(
        "Writes._planned",
        "positions that all chats share are not written",
        "missing.needs_tail",
        "missing.needs_tail and end == len(noted.tokens)",
        ("tests/loop/test_disk.py", "-k", "llama or read_again or one_prefix"),
    ),
    _mutant(
        "Disk.close",
        "a full disk holds up the end",
        "self._disk.is_paused()",
        "False",
        _LOADS,
    ),
    _mutant(
        "Disk.close",
        "what was not written is lost when the server stops",
        "self._writes.due_in_s is not None",
        "False",
        _RESTARTS,
    ),
    _mutant(
        "Worker.has_work",
        "the loop does not sleep while all wait for the disk",
        "(not self._tasks and not self._commits.is_compact)",
        "not self._commits.is_compact",
        _LOADS,
    ),
)

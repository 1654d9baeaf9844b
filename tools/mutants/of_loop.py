"""Planted bugs in the loop: how jobs end, what parked sequences hold, and the memory budget."""

from tools.mutants.mutant import Mutant

_REUSE = ("tests/loop/test_reuse.py", "-k", "llama or qwen3_5")
_PARKED = ("tests/loop/test_idle_sequences.py",)
_BUDGET = ("tests/loop/test_budget.py", "-k", "llama or taking_over or held_twice")

_READ_AHEAD = ("tests/loop/test_read_ahead.py",)


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
        "Worker.has_work",
        "the loop does not sleep while all wait for the disk",
        "(not self.requests and not self._is_compact)",
        "not self._is_compact",
        _READ_AHEAD,
    ),
)

"""Planted bugs in the loop: how jobs end, what parked sequences hold, and the memory budget."""

from tools.mutants.mutant import Mutant

_REUSE = ("tests/loop/test_reuse.py", "-k", "llama or qwen3_5")
_PARKED = ("tests/loop/test_parked.py",)
_BUDGET = ("tests/loop/test_budget.py", "-k", "llama or taking_over or held_twice")

_LOADS = ("tests/loop/test_disk_loads.py",)
_WRITES = ("tests/loop/test_disk_writes.py",)
_RESTARTS = ("tests/loop/test_disk.py", "-k", "read_again or restart")


def _mutant(file: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, file=f"loop/{file}", old=old, new=new, tests=tests)


LOOP_MUTANTS = (
    _mutant(
        "passes.py",
        "pieces that cannot be joined fail the answers of others",
        "        except Exception:\n            # The answer is there",
        "        except KeyError:\n            # The answer is there",
        ("tests/loop/test_busy.py",),
    ),
    _mutant(
        "passes.py",
        "a chat on a busy server is never tidied",
        "            self._cache.compact_path(tokens, namespace=task.job.namespace)\n",
        "            pass\n",
        ("tests/loop/test_busy.py",),
    ),
    _mutant(
        "passes.py",
        "nobody tells how long an answer was",
        "self._cache.note_answer(task.lease, len(task.generated))",
        "pass",
        ("tests/loop/test_told.py",),
    ),
    _mutant(
        "commits.py",
        "nobody tells where the next turn may differ",
        "stable_at=task.job.prompt.stable_at,",
        "stable_at=None,",
        ("tests/loop/test_told.py",),
    ),
    _mutant(
        "commits.py",
        "what a cancelled job computed is lost",
        "if task.live is None or task.position <= task.resume_at:",
        "if task.position > -1:",
        _REUSE,
    ),
    _mutant(
        "ends.py",
        "leases are never given back",
        "self._cache.release(lease)",
        "pass",
        ("tests/loop/test_given_back.py", "-k", "llama"),
    ),
    _mutant(
        "parked.py",
        "parked sequences are never adopted",
        "        if not self._sequences or position == 0:\n            return None\n",
        "        if position >= 0:\n            return None\n",
        _PARKED,
    ),
    _mutant(
        "parked.py",
        "an adopted sequence can be adopted again",
        "        del self._sequences[live]\n        return live\n",
        "        return live\n",
        _PARKED,
    ),
    _mutant(
        "parked.py",
        "the path that an adoption leaves stays lent, and is overwritten",
        "namespace=parked.namespace, start=position)",
        "namespace=parked.namespace, start=len(parked.tokens))",
        _PARKED,
    ),
    _mutant(
        "parked.py",
        "a sequence that is not worth parking ends with its loans",
        "            self.recall(live, tokens, namespace=namespace)\n            self._runner.stop(live)\n",
        "            self._runner.stop(live)\n",
        _PARKED,
    ),
    _mutant(
        "parked.py",
        "a recall that breaks off leaves the cache as if nothing had happened",
        "        except Exception:\n            self.is_spoilt = True\n",
        "        except Exception:\n",
        _PARKED,
    ),
    _mutant(
        "ends.py",
        "what a failed sequence had lent is lost",
        "self._parked.recall(task.live, tokens, namespace=task.job.namespace)",
        "self._parked.recall(task.live, tokens[:0], namespace=task.job.namespace)",
        _PARKED,
    ),
    _mutant(
        "room.py",
        "what running sequences were promised is given away",
        "cache.reserved + cache.coming + promised + ",
        "cache.reserved + cache.coming + ",
        ("tests/loop/test_memory.py", "-k", "promised"),
    ),
    _mutant(
        "room.py",
        "buffers grow without asking",
        "        if free is None or free >= nbytes:\n            return True\n        self._lend_doubled()\n",
        "        if nbytes > 0:\n            return True\n        self._lend_doubled()\n",
        _BUDGET,
    ),
    _mutant(
        "room.py",
        "a path for which there is no room twice is copied",
        "return self._take_over(match, position, reserve=reserve)",
        "return self._runner.start(self._cache.read(match, position), reserve=reserve)",
        _BUDGET,
    ),
    _mutant(
        "room.py",
        "an answer never ends where the memory ends",
        "return free is not None and growth > max(0, free)",
        "return free is not None and growth > 10**15",
        _BUDGET,
    ),
    _mutant(
        "loads.py",
        "prompts are read for which there is no room beside each other",
        "return sum(load.needed for load in self._loads) + needed <= room",
        "return self._footprint.at(position) <= room",
        _LOADS,
    ),
    _mutant("loads.py", "a disk that hangs is waited for", ">= _STALLED_S:", "< 0:", _LOADS),
    _mutant(
        "loads.py",
        "what was cleared while it was read comes back",
        "load.is_void |= namespace in (None, load.namespace)",
        "load.is_void |= False",
        _LOADS,
    ),
    _mutant(
        "loads.py",
        "all that is reused is told as read from the disk",
        "task.loaded += max(0, self._resume_at(task) - held)",
        "task.loaded += self._resume_at(task)",
        _RESTARTS,
    ),
    _mutant(
        "loads.py",
        "what waited for a load waits on",
        "            task.is_loading = False\n",
        "            task.is_loading = task.num_loads == 0\n",
        _LOADS,
    ),
    _mutant(
        "writes.py",
        "what was evicted while a path is written ends it",
        "return not is_new",
        "return False",
        _WRITES,
    ),
    _mutant(
        "writes.py",
        "a path is copied to its end though the disk takes nothing",
        "return is_taken and len(noted.left) > 0",
        "return len(noted.left) > 0",
        _WRITES,
    ),
    _mutant(
        "writes.py",
        "a record is copied at once, however large",
        "while making.left and copied < _AT_ONCE:",
        "while making.left:",
        _WRITES,
    ),
    _mutant(
        "writes.py",
        "positions that all chats share are not written",
        "if missing.needs_mark:",
        "if missing.needs_mark and end == len(noted.tokens):",
        ("tests/loop/test_disk.py", "-k", "llama or read_again or one_prefix"),
    ),
    _mutant("disk.py", "a full disk holds up the end", "if self._disk.is_paused():", "if False:", _LOADS),
    _mutant(
        "disk.py",
        "what was not written is lost when the server stops",
        "while self._writes.due_in_s is not None and",
        "while False and",
        _RESTARTS,
    ),
    _mutant(
        "worker.py",
        "the loop does not sleep while all wait for the disk",
        "(not self._tasks and not self._commits.is_compact)",
        "not self._commits.is_compact",
        _LOADS,
    ),
)

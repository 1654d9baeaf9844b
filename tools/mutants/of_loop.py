"""Planted bugs in the loop: how requests end, what idle sequences hold, and the memory budget."""

from tools.mutants.mutant import Mutant

_REUSE = ("tests/loop/test_reuse.py", "-k", "llama or qwen3_5")
_PARKED = ("tests/loop/test_idle_sequences.py",)
_BUDGET = ("tests/loop/test_budget.py", "-k", "llama or taking_over or held_twice")

_MEMORY = ("tests/cache/test_accounts.py",)

_READ_AHEAD = ("tests/loop/test_read_ahead.py",)
_INSPECTIONS = ("tests/loop/test_inspection_queue.py",)
_TREE = ("tests/loop/test_tree_on_disk.py",)
_EMBEDDING = ("tests/loop/test_embedding.py",)
_OWN = ("tests/api/test_watching.py", "-k", "key_sees")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


LOOP_MUTANTS = (
    _mutant(
        "SharedMemory._reclaim",
        "who gives up last is asked before the first is asked again",
        "any(reclaim() for reclaim in reclaimers)",
        "any([reclaim() for reclaim in reclaimers])",
        _MEMORY,
    ),
    _mutant(
        "SharedMemory._reclaim",
        "who gives up last is asked first",
        "any(reclaim() for reclaim in reclaimers)",
        "any(reclaim() for reclaim in reversed(reclaimers))",
        _MEMORY,
    ),
    _mutant(
        "SharedMemory._reclaim",
        "weights go before what is stored",
        "any(reclaim() for reclaim in reclaimers) or self.unload_one()",
        "self.unload_one() or any(reclaim() for reclaim in reclaimers)",
        _MEMORY,
    ),
    _mutant(
        "SharedMemory._reclaim",
        "of two models the one whose prefixes are worth most gives first",
        "sorted(self.parts, key=Memory.least_score)",
        "sorted(self.parts, key=Memory.least_score, reverse=True)",
        _MEMORY,
    ),
    _mutant(
        "Memory.evict_from_others",
        "what is new takes the place of another model's whatever that is worth",
        "part.least_score() <= most",
        "True",
        _MEMORY,
    ),
    _mutant(
        "_may_go",
        "a model is unloaded before the request comes that it was loaded for",
        "(model.num_asked > 0 or now_s >= model.loaded_s + limits.arrival_s)",
        "True",
        ("tests/schedule/test_models.py",),
    ),
    _mutant(
        "ModelEngine.take_weights",
        "what was stored of other weights is found again",
        "self._worker.runner.loaded.fingerprint != loaded.fingerprint",
        "False",
        ("tests/loop/test_models.py",),
    ),
    _mutant(
        "RadixTree._charge_kv",
        "what the tree shares with a sequence is counted for both",
        "self._memory.transfer(Account.SEQUENCES, Account.KV, shared)",
        "self._memory.charge(Account.KV, shared)",
        _MEMORY,
    ),
    _mutant(
        "SequencePool.end",
        "the newest idle sequence is closed instead of the oldest",
        "next(iter(self._idle))",
        "next(reversed(self._idle))",
        _PARKED,
    ),
    _mutant(
        "SequencePool._close",
        "a closed sequence leaves the tree without copies",
        "self._tree.replace(refs, live.copy_out(_shared_of(refs)))",
        "live.copy_out(_shared_of(refs))",
        _PARKED,
    ),
    _mutant(
        "RequestTable.fail",
        "others are admitted on what a request broke before it failed",
        "if self._sequences.is_broken:\n    self.reset_cache()",
        "",
        _PARKED,
    ),
    _mutant(
        "Worker._complete",
        "segments that cannot be joined fail the answers of others",
        "Exception",
        "KeyError",
        ("tests/loop/test_busy.py",),
    ),
    _mutant(
        "RequestPrefixes._commit",
        "nobody tells where the next turn may differ",
        "request.job.prompt.stable_at",
        "None",
        ("tests/loop/test_told.py",),
    ),
    _mutant(
        "RequestPrefixes.store_progress",
        "what a cancelled request computed is lost",
        "request.position <= phase.plan.resume_at",
        "request.position > -1",
        _REUSE,
    ),
    _mutant(
        "SequencePool._reopen",
        "idle sequences are never reopened",
        "not self._idle or position == 0",
        "position >= 0",
        _PARKED,
    ),
    _mutant(
        "SequencePool._reopen",
        "a reopened sequence can be reopened again",
        "del self._idle[live]",
        "",
        _PARKED,
    ),
    _mutant(
        "SequencePool._close",
        "a close that breaks off leaves the cache as if nothing had happened",
        "self.is_broken = True",
        "",
        _PARKED,
    ),
    _mutant(
        "RequestTable._discard_state",
        "what a failed sequence had shared is lost",
        "self._sequences.discard(phase.live, request.tokens, namespace=request.namespace)",
        "self._sequences.discard(phase.live, request.tokens[:0], namespace=request.namespace)",
        _PARKED,
    ),
    _mutant(
        "SequencePool.available",
        "what running sequences were promised is given away",
        "live + promised + self.cache.protected_nbytes()",
        "live + self.cache.protected_nbytes()",
        ("tests/loop/test_memory.py", "-k", "promised"),
    ),
    _mutant(
        "SharedMemory.reserve",
        "buffers grow without asking",
        "not self.fits(nbytes)",
        "nbytes == 0 and not self.fits(nbytes)",
        _BUDGET,
    ),
    _mutant(
        "SequencePool.start",
        "a path for which there is no room twice is copied",
        "self._tree.owned_segments(path.tokens, path.namespace)",
        "[]",
        _BUDGET,
    ),
    _mutant(
        "Worker.step",
        "a step takes over as much beside streams as without",
        "self.executor.speed.decode_s + self._tower_s() if decodes else 0.0",
        "0.0",
        ("tests/loop/test_restore_steps.py", "-k", "is_told_how_long"),
    ),
    _mutant(
        "Preemption.is_context_full",
        "an answer never ends where the memory ends",
        "self._sequences.runner.growth([live], 2) > max(0, budget - self._sequences.memory.held)",
        "self._sequences.runner.growth([live], 2) > 10 ** 15",
        _BUDGET,
    ),
    _mutant(
        "Worker.has_work",
        "the loop does not sleep while all wait for the disk",
        "len(self.requests) == 0 and (not self.cache.is_compact or 0 in self._idle_dues)",
        "not self.cache.is_compact",
        _READ_AHEAD,
    ),
    _mutant(
        "Audit._judge",
        "an audit blames nobody",
        "worst > most or gap > most",
        "False",
        ("tests/loop/test_audit.py", "-k", "llama and wrong_state"),
    ),
    _mutant(
        "ModelEngine.publish",
        "inspections are not counted",
        "inspections.num_answered",
        "0",
        _INSPECTIONS,
    ),
    _mutant(
        "_follow",
        "what leaves where an edge ends is shown twice on disk",
        "leaves if is_above else [*leaves, _run_on_disk(edge, edge.start + num)]",
        "[*leaves, _run_on_disk(edge, edge.start + num)]",
        _TREE,
    ),
    _mutant(
        "DiskIndex._newest_paths",
        "the many paths of one key on disk hide another's",
        "self._leaves_of.get(root, ())",
        "self._leaves",
        _TREE,
    ),
    _mutant(
        "RequestTable.note_prefilled",
        "what is prefilled ahead for one key is shown to another",
        "owner = request.job.owner",
        'owner = "key-of-nobody"',
        _OWN,
    ),
    _mutant(
        "inspect_tree",
        "a key is told how much the cache holds of all",
        "cache.tree.totals_of(part.namespace)",
        "cache.tree.totals",
        _OWN,
    ),
    _mutant(
        "ModelEngine.unload",
        "the whole heap is searched for weights that something still refers to",
        "self._loaded = self._loaded.without_weights()",
        "pass",
        ("tests/loop/test_models.py", "-k", "frozen or given_back"),
    ),
    _mutant(
        "EmbeddingQueue._end",
        "a vector of one key answers for another's",
        "self.kept.keep(each.namespace, each.key, vector.copy())",
        'self.kept.keep("", each.key, vector.copy())',
        _EMBEDDING,
    ),
    _mutant(
        "EmbeddingQueue.step",
        "a pass over embeddings is not cut for other models",
        "num_others > 0 and self._clock() - since_s >= stall_s",
        "False",
        _EMBEDDING,
    ),
    _mutant(
        "EmbeddingQueue._fail_rows",
        "an input fails for another in its pass",
        "len(rows) > 1",
        "False",
        _EMBEDDING,
    ),
    _mutant(
        "EmbeddingQueue._begin",
        "the input that waits longest is left out for those of like length",
        "list(self._waiting.values())",
        "sorted(self._waiting.values(), key=lambda each: len(each.input.tokens))",
        _EMBEDDING,
    ),
    _mutant(
        "key_of",
        "a pair has the vector of the text with its tokens",
        "digest.update(str(given.num_first).encode())",
        "pass",
        _EMBEDDING,
    ),
    _mutant(
        "EngineThread._step",
        "a model without idle work outlives its keep-alive",
        "self._wakes_in_s = 0.0",
        "pass",
        _EMBEDDING,
    ),
)

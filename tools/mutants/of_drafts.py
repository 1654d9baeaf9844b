"""Planted bugs in drafts: what is looked up, what is undone, and whose texts they are."""

from tools.mutants.mutant import Mutant

_VERIFY = ("tests/engine/test_verify.py",)
_HISTORY = ("tests/drafts/test_history.py",)
_DRAFTER = ("tests/drafts/test_drafter.py",)
_TRAIL = ("tests/drafts/test_trail.py",)
_BENEFIT = ("tests/drafts/test_benefit.py",)
_COSTS = ("tests/drafts/test_costs.py",)
_LOOP = ("tests/loop/test_drafts.py",)
_EXACT = (*_LOOP, "-k", "exact")
_SEQUENCE = ("tests/engine/test_draft_sequence.py",)
_MODEL = ("tests/loop/test_draft_model.py",)
_NAMESPACES = (*_MODEL, "-k", "its_own_namespace")
_NEVER_RIGHT = (*_MODEL, "-k", "never_right or tried_again")
_ON_DISK = ("tests/loop/test_draft_on_disk.py",)
_SETTLING = ("tests/loop/test_draft_settling.py",)
_TOLD = ("tests/api/test_drafts_told.py", "-k", "overview")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


DRAFTS_MUTANTS = (
    _mutant(
        "Runner.verify",
        "entries of rejected tokens stay",
        "self._undo(rows, len(draft) - num_right)",
        "self._undo(rows, len(draft) - num_right - 1)",
        _VERIFY,
    ),
    _mutant(
        "Runner.verify",
        "accepted tokens are not fed again to recurrent layers",
        "live.unfed = (*fed, *draft[:num_right])",
        "live.unfed = tuple(fed)",
        _VERIFY,
    ),
    _mutant(
        "SequenceBatch.undo_last",
        "recurrent states stay behind a rejected draft",
        "state.arrays = list(before[i])",
        "state.arrays = state.arrays",
        _VERIFY,
    ),
    _mutant(
        "sample_along",
        "all positions sample with the key of the first",
        "sample_batch([sampler] * len(rows), rows, num_pending=range(len(rows)))",
        "sample_batch([sampler] * len(rows), rows, num_pending=0)",
        _VERIFY,
    ),
    _mutant(
        "Drafts.namespace",
        "all namespaces draft from one text",
        "return self._namespaces[name]",
        "return next(iter(self._namespaces.values()))",
        _DRAFTER,
    ),
    _mutant(
        "Drafts.note_verified",
        "what is told of drafts is what was told first",
        "self._status = None",
        "pass",
        _DRAFTER,
    ),
    _mutant(
        "share_of_disk",
        "a draft model may fill the disk",
        "return loaded.nbytes / max(1, loaded.nbytes + target.nbytes)",
        "return 1.0",
        (*_ON_DISK, "-k", "takes_its_share"),
    ),
    _mutant(
        "TokenHistory._note",
        "the end of a text hides where the same went on",
        "(ends >= first) & (held[ends - start] != _GAP)",
        "ends >= first",
        _HISTORY,
    ),
    _mutant(
        "Drafts.start",
        "what another namespace said before the start is drafted",
        "lambda: self._earlier(namespace)",
        'lambda: self._earlier("")',
        _DRAFTER,
    ),
    _mutant(
        "_Namespace.read_earlier",
        "of what was said before the start the oldest is found first",
        "self._earlier.pop()",
        "self._earlier.pop(0)",
        _DRAFTER,
    ),
    _mutant(
        "Trail._follow",
        "one equal token behind a change is taken for sure",
        "self.match >= CONFIRMED",
        "self.match >= 1",
        _TRAIL,
    ),
    _mutant(
        "TokenHistory.read",
        "a draft runs on over the end of a text",
        "tokens[: gaps[0]] if len(gaps) > 0 else tokens",
        "tokens",
        _HISTORY,
    ),
    _mutant(
        "best_length",
        "a draft is verified whatever its pass costs",
        "expected / cost > max(least, best.speed)",
        "expected > max(least, best.speed)",
        _BENEFIT,
    ),
    _mutant(
        "PassCosts._estimate",
        "one pass that was held up decides",
        "len(seen) < _ENOUGH",
        "len(seen) < 1",
        _COSTS,
    ),
    _mutant(
        "DraftSequence.keep",
        "a draft model keeps a wrong guess",
        "rows.undo_last(len(guessed) - num, rows.before_guess)",
        "rows.undo_last(max(0, len(guessed) - num - 1), rows.before_guess)",
        _SEQUENCE,
    ),
    _mutant(
        "DraftSequence.keep",
        "a draft model computes again what it guessed right",
        "num = next((i for i in range(most) if guessed[i] != text[i]), most)",
        "num = 0",
        _SEQUENCE,
    ),
    _mutant(
        "FollowedText._begin",
        "a draft model looks its prefixes up in the namespace of others",
        "model.cache.lookup(request.tokens, self.limit, namespace=request.namespace)",
        'model.cache.lookup(request.tokens, self.limit, namespace="")',
        _NAMESPACES,
    ),
    _mutant(
        "FollowedText._stop",
        "a draft model forgets what it computed of an answer",
        "tokens = self._store(following, self._end_kind(following))",
        "tokens = self._request.tokens_to(following.sequence.position)",
        (*_MODEL, "-k", "nothing_else"),
    ),
    _mutant(
        "Worker.clear_cache",
        "a draft model keeps what was cleared",
        "self.draft_model.clear(namespace, owner=owner)",
        "None",
        _NAMESPACES,
    ),
    _mutant(
        "SettledPrefix.pause",
        "what a draft model has settled is lost when a request comes",
        "self._stop()",
        "super().give_up()",
        _SETTLING,
    ),
    _mutant(
        "SettledPrefix.give_up",
        "a draft model settles on where others need the room",
        "self._is_over = True",
        "",
        _SETTLING,
    ),
    _mutant(
        "DraftModel.settle",
        "a draft model settles without an end",
        "settled.lacking > self.max_settle",
        "False",
        _SETTLING,
    ),
    _mutant(
        "DraftModel.clear",
        "a draft model's disk keeps what was cleared",
        "self.disk.clear(namespace)",
        "None",
        _ON_DISK,
    ),
    _mutant(
        "stats_of",
        "the files of a draft model are somebody else's",
        "[disk.stats() for disk in disks]",
        "[disk.stats() for disk in disks[:1]]",
        _ON_DISK,
    ),
    _mutant(
        "DraftAccount.note_answered",
        "a draft model that lost never comes back",
        "self.balance = min(0.0, self.balance + _SHARE_OF_TRIALS * num_tokens)",
        "pass",
        _NEVER_RIGHT,
    ),
    _mutant(
        "Heartbeat.note",
        "a draft model that computes ahead counts as an engine that hangs",
        "(status.counts, _num_settled(status))",
        "(status.counts, 0)",
        ("tests/api/test_health.py", "-k", "no_progress"),
    ),
    _mutant(
        "overview",
        "a server that drafts nothing says that nothing it drafted was right",
        "None if status.drafts is None else _drafts(savings)",
        "_drafts(savings)",
        _TOLD,
    ),
    _mutant(
        "_drafts",
        "rejected draft tokens count as passes that were saved",
        "sum(drafted.num_accepted for drafted in savings.drafted.values())",
        "sum(drafted.num for drafted in savings.drafted.values())",
        _TOLD,
    ),
    _mutant(
        "_add_record",
        "the drafts of the last answer are all that count",
        "savings.drafted.get(source, Drafted(num=0, num_accepted=0)) + drafted",
        "drafted",
        _TOLD,
    ),
    _mutant(
        "Runner.exact_size",
        "exact drafts use passes of sizes that were not tried",
        "range(2, most + 1)",
        "(2, 4, 8, 16, 32)",
        _EXACT,
    ),
)

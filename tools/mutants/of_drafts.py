"""Planted bugs in drafts: what is looked up, what is undone, and whose texts they are."""

from tools.mutants.mutant import Mutant

_VERIFY = ("tests/engine/test_verify.py",)
_HISTORY = ("tests/drafts/test_history.py",)
_DRAFTER = ("tests/drafts/test_drafter.py",)
_BENEFIT = ("tests/drafts/test_benefit.py",)
_LOOP = ("tests/loop/test_drafts.py",)


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
        "SequenceBatch.forget_last",
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
        "sample_along",
        "a spent thinking budget is overlooked within a draft",
        "sampler.foresees(len(draft))",
        "True",
        _VERIFY,
    ),
    _mutant(
        "RequestPrefixes.store_progress",
        "an answer is stored without what a rejected draft left behind",
        "self._runner.catch_up(phase.live)",
        "",
        _LOOP,
    ),
    _mutant(
        "Drafts.namespace",
        "all namespaces draft from one text",
        "        found = self._namespaces[name]",
        "        found = next(iter(self._namespaces.values()))",
        _DRAFTER,
    ),
    _mutant("Worker.clear_cache", "what was cleared is drafted from", "self.drafts.clear(namespace)", "", _LOOP),
    _mutant(
        "TokenHistory.find",
        "a draft runs on over the end of a text",
        "tokens[: gaps[0]] if len(gaps) > 0 else tokens",
        "tokens",
        _HISTORY,
    ),
    _mutant(
        "best_length",
        "a draft is verified whatever its pass costs",
        "expected / cost > best_gain",
        "expected > best_gain",
        _BENEFIT,
    ),
)

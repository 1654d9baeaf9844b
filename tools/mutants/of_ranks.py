"""Planted bugs in what the ranks of a group do alike, and in how they notice that one is lost."""

from tools.mutants.mutant import Mutant

_FOLLOWED = ("tests/loop/test_followed.py",)
_DISK = ("tests/loop/test_disk_on_ranks.py",)
_LINKS = ("tests/engine/test_rank_links.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


RANK_MUTANTS = (
    _mutant(
        "Leader.run",
        "after a pass that failed the ranks go on",
        "name in PASSES",
        "name is None",
        _FOLLOWED,
    ),
    _mutant(
        "Leader.run",
        "other ranks number what an operation gives from one further on",
        '["run", self._take_dropped(), self._next, name, coded, by_name]',
        '["run", self._take_dropped(), self._next + 1, name, coded, by_name]',
        _FOLLOWED,
    ),
    _mutant(
        "LinksToFollowers.accept",
        "ranks with different models begin",
        "theirs != facts",
        "theirs is None",
        _LINKS,
    ),
    _mutant(
        "Door._hear",
        "anyone is a rank",
        'hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode())',
        "True",
        _LINKS,
    ),
    _mutant(
        "ShardsElsewhere.end_read",
        "parts of a record that do not belong together are used",
        "answer != form",
        "answer is None",
        _DISK,
    ),
    _mutant(
        "ShardKeeper.clear",
        "a clear leaves the parts of other ranks",
        "self.disk.clear_root(root).add_done_callback(lambda _: self._answer(number, ''))",
        "self._answer(number, '')",
        _DISK,
    ),
    _mutant(
        "open_parts",
        "ranks write into one folder",
        'f"{fingerprint} rank {rank}"',
        "fingerprint",
        _DISK,
    ),
)

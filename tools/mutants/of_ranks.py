"""Planted bugs in what the ranks of a group do alike, and in how they notice that one is lost."""

from tools.mutants.mutant import Mutant

_FOLLOWED = ("tests/loop/test_followed.py",)
_DISK = ("tests/loop/test_disk_on_ranks.py",)
_LINKS = ("tests/engine/test_rank_links.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


RANK_MUTANTS = (
    _mutant(
        "Leader._forget",
        "other ranks keep what nobody holds",
        "self._dropped.append(number)",
        "pass",
        _FOLLOWED,
    ),
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
        "Runner._may_run_ahead",
        "a pass is run ahead that other ranks do not know",
        "self.loaded.blueprint.joins and self.loaded.may_run_ahead",
        "self.loaded.blueprint.joins",
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
        "Stranger.hello",
        "anyone is a rank",
        'hmac.compare_digest(str(hello["secret"]).encode(), secret.encode())',
        "True",
        _LINKS,
    ),
    _mutant(
        "LinksToFollowers._hear",
        "nobody says that a rank has died",
        'self.fail(f"rank {rank} has ended")',
        "pass",
        _LINKS,
    ),
    _mutant(
        "LinkToLeader._read",
        "a rank goes on without rank 0",
        "self._on_end()",
        "pass",
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
        "ShardsElsewhere._wait",
        "nobody waits until the other ranks have read their parts",
        "len(asked.answers) < self._num_others",
        "False",
        _DISK,
    ),
    _mutant(
        "SplitDirectory._tell_of",
        "other ranks keep what rank 0 evicts",
        "self._others.remove([key])",
        "pass",
        _DISK,
    ),
    _mutant(
        "SplitDirectory.read",
        "what another rank lacks stays on rank 0",
        "self.remove(self.path_of(key))",
        "pass",
        _DISK,
    ),
    _mutant(
        "DiskCache.agree",
        "what another rank has lost is looked for again and again",
        "self.remove(own - common)",
        "pass",
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
        "FollowingRank._drop",
        "other ranks keep what was read for a request that has gone",
        "self._kept.drop(number)",
        "pass",
        (*_DISK, "-k", "read_for_nothing"),
    ),
    _mutant(
        "open_parts",
        "ranks write into one folder",
        'f"{fingerprint} rank {rank}"',
        "fingerprint",
        _DISK,
    ),
    _mutant(
        "_note_queued",
        "other ranks write nothing",
        "queue_part(encoder, root, parent, record.start, record.tokens, is_tail=record.is_tail)",
        "pass",
        _DISK,
    ),
)

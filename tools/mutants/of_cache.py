"""Planted bugs in the tree, the prefix cache, its lookups, its eviction, its pins and its books."""

from tools.mutants.mutant import Mutant

_LAWS = (
    "tests/cache/test_compaction.py",
    "tests/cache/test_ghosts.py",
    "tests/cache/test_laws.py",
    "tests/cache/test_machine.py",
    "tests/cache/test_soak.py",
)
_CHECK = ("tests/cache/test_check.py",)
_POLICY = ("tests/cache/test_policy.py", "tests/simulate")
_LINEAGE = ("tests/cache/test_lineage.py",)
_PINS = ("tests/cache/test_pins.py",)
_ROWS = ("tests/cache/test_logits_rows.py",)
_LEARNING = ("tests/cache/test_reuse_rate.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...] = _LAWS) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


TREE = (
    _mutant(
        "walk",
        "a match goes on below an edge that it left",
        "if at < child.stop:\n    break",
        "",
    ),
    _mutant(
        "RadixTree._note_use",
        "the children of a node are not in order of use",
        "beside[first] = beside.pop(first)",
        "",
    ),
    _mutant(
        "RadixTree._split",
        "a lost lease: the upper part of a split edge does not count them",
        "upper.num_leases, upper.last_use, upper.num_uses = node.num_leases, node.last_use, node.num_uses",
        "upper.num_leases, upper.last_use, upper.num_uses = len(node.leases), node.last_use, node.num_uses",
    ),
    _mutant(
        "RadixTree._split",
        "a shared buffer: the lower tokens of a split edge are a view",
        "own_tokens(node.tokens[position - node.start :])",
        "node.tokens[position - node.start :]",
    ),
    _mutant(
        "Segment.cut",
        "a cut takes the payload's head instead of the part",
        "self.payload.cut(span.start - self.span.start, span.stop - self.span.start)",
        "self.payload.cut(0, span.stop - span.start)",
    ),
    _mutant(
        "Segment.cut",
        "a shared buffer: a part of a segment keeps the whole of it",
        "self.payload.cut(span.start - self.span.start, span.stop - self.span.start)",
        "self.payload",
    ),
)

LOOKUP = (
    _mutant(
        "resume_position",
        "nothing is ever reused",
        "min(limit, match.length)",
        "0",
    ),
    _mutant(
        "resume_position",
        "reuse goes on behind the divergence",
        "match.length",
        "match.walk.last.stop",
    ),
    _mutant(
        "CheckpointMap.highest",
        "a checkpoint at the limit itself is passed over",
        "number = bisect_right(self._positions, limit)",
        "number = bisect_left(self._positions, limit)",
    ),
    _mutant(
        "checkpoint_at",
        "a stale snapshot: that of the highest checkpoint, wherever the request resumes",
        "node.checkpoints.get(position)",
        "node.checkpoints.get(max(node.checkpoints, default=0))",
    ),
    _mutant(
        "_runs_of",
        "entries behind the divergence count as stored",
        "segment.span.clip(span.start, min(span.stop, walked.length))",
        "segment.span.clip(span.start, span.stop)",
    ),
    _mutant(
        "missing",
        "a commit copies what is there",
        "subtract((need,), _runs_of(kind, walked, need))",
        "[need]",
    ),
    _mutant(
        "_slices",
        "a slice is read from the payload's first entry on",
        "found.append(SegmentSlice(segment.payload, span.start - offset, span.stop - offset, span))",
        "found.append(SegmentSlice(segment.payload, 0, len(span), span))",
    ),
    _mutant(
        "_segments_within",
        "the segment in which a need begins is skipped",
        "bisect_right(segments, span.start, key=lambda segment: segment.span.stop)",
        "bisect_right(segments, span.start, key=lambda segment: segment.span.start)",
    ),
    _mutant(
        "evicted_to",
        "whatever is not there was evicted",
        "return match.length if any(position < at <= match.length for at in lost) else None",
        "return match.length",
    ),
)

STORE = (
    _mutant(
        "RadixTree.walk",
        "all namespaces are one",
        "self._roots.get(namespace)",
        "self._roots.get('')",
    ),
    _mutant(
        "PrefixCache.commit",
        "a commit does not guard the path that it extends",
        "self.tree.protect(walk, walk.length)",
        "self.tree.protect(walk, 0)",
    ),
    _mutant(
        "Evictor.may_evict",
        "what is superseded goes from under a lease",
        "return all(lease.position != checkpoint.position for lease in node.leases)",
        "return True",
    ),
    _mutant(
        "RadixTree.unprotect",
        "a released lease stays counted above",
        "above.num_leases -= 1",
        "above.num_leases -= above is lease.node",
    ),
    _mutant(
        "PrefixCache._extend",
        "a pin is forgotten when the chat goes on",
        "not self.pins.holds(end)",
        "True",
    ),
    _mutant(
        "Evictor.make_room",
        "the budget is no bound",
        "nbytes == 0",
        "nbytes < 10 ** 9",
    ),
    _mutant(
        "RadixTree.drop_checkpoint",
        "an evicted snapshot stays alive",
        "checkpoint.snapshot = None",
        "",
    ),
    _mutant(
        "RadixTree._split",
        "a split charges its bytes anew",
        "self._set_segments(node, below)",
        "node.segments = below",
    ),
    _mutant(
        "Evictor._prune",
        "a path above an evicted end stays for ever",
        "node = self._remove(node)",
        "self._remove(node)\nreturn",
    ),
    _mutant(
        "Evictor._cut_tail",
        "what is left of a shortened chat can never be evicted",
        "made = self._tree.add_checkpoint(\n"
        "    end, end.stop, BoundaryKind.INTERVAL, is_auxiliary=is_auxiliary, stable_at=behind.stable_at\n)\n"
        "self._tree.inherit_uses(made)\nself._order.place(made)",
        "",
    ),
    _mutant(
        "Evictor._trim_path",
        "window entries that nothing needs any more stay",
        "above.stop",
        "above.start",
    ),
)

UPKEEP = (
    _mutant(
        "_needed",
        "checkpoints on the next edge do not count",
        "below.start > reach",
        "below.start >= node.stop",
    ),
    _mutant(
        "_needed",
        "window entries of a lease are trimmed",
        "positions = [*below.checkpoints.within(span.start + 1, reach), *leased]",
        "positions = below.checkpoints.within(span.start + 1, reach)",
    ),
    _mutant(
        "end_of_use",
        "a leaf is cut below a lease",
        "return max([*node.checkpoints, *leased], default=node.start)",
        "return max([*node.checkpoints], default=node.start)",
    ),
    _mutant(
        "_tail_start",
        "a tail is cut below a lease or a pin",
        "[node.start, max(near, default=node.stop - tail_tokens), *protected]",
        "[node.start, max(near, default=node.stop - tail_tokens)]",
    ),
    _mutant(
        "RadixTree._merge_chain",
        "checkpoints of a merged edge stay behind",
        "checkpoint.node = top",
        "pass",
    ),
    _mutant(
        "RadixTree.compact_path",
        "a path of many edges is never joined while the server is busy",
        "self._merge_chain(node) if node is not last else 0",
        "0",
    ),
    _mutant(
        "_joinable",
        "a long segment is copied for a few short ones",
        "len(segments[first].span) <= _tokens(segments, first + 1, stop)",
        "stop - first > 2",
    ),
    _mutant(
        "RadixTree.compact_path",
        "a path is joined at every turn",
        "_joinable(node, self.sizes.longest, is_growing=True)",
        "_joinable(node, self.sizes.longest)",
    ),
    _mutant(
        "RadixTree._join",
        "joined entries are in the wrong order",
        "head.payload.join([segment.payload for segment in rest])",
        "rest[0].payload.join([head.payload, *(segment.payload for segment in rest[1:])])",
    ),
    _mutant(
        "RadixTree._merge_chain",
        "children of a merged edge keep their old parent",
        "child.parent = top",
        "pass",
    ),
    _mutant(
        "RadixTree._merge_chain",
        "merged edges keep their payloads alive",
        "node.parent, node.children, node.segments, node.checkpoints = None, {}, {}, CheckpointMap()",
        "node.parent = None",
    ),
    _mutant(
        "EvictionOrder.pop",
        "leased checkpoints fall out of the order",
        "for score, checkpoint in put_back:\n    self._push(score, checkpoint)",
        "for score, checkpoint in put_back[1:]:\n    self._push(score, checkpoint)",
    ),
    _mutant(
        "Ghosts.forget_checkpoint",
        "a checkpoint that was made again still counts as evicted",
        "self.checkpoints = [at for at in self.checkpoints if at != position]",
        "pass",
    ),
    _mutant(
        "Ghosts.add_path",
        "evicted paths are not remembered",
        "self.paths = [*others, lost][-_MOST_GHOSTS:]",
        "pass",
    ),
)

BOOKS = (
    _mutant(
        "_check_node",
        "leases are not checked",
        "node.num_leases == len(node.leases) + sum((child.num_leases for child in node.children.values()))",
        "node.num_leases >= 0 * len(node.leases) * sum((child.num_leases for child in node.children.values()))",
        _CHECK,
    ),
    _mutant(
        "PrefixCache.check",
        "the order is not checked",
        "len(self.order) == len(checkpoints)",
        "len(self.order) >= 0",
        _CHECK,
    ),
)

WORTH = (
    _mutant(
        "superseded_kinds",
        "an older stable position is worth as much as the newest",
        "return _TIPS | {BoundaryKind.STABLE}",
        "return _TIPS",
        _POLICY,
    ),
    _mutant(
        "superseded_kinds",
        "only a stable checkpoint supersedes a stable one, whatever the next turn repeats",
        "kind is BoundaryKind.STABLE or (kind in _TIPS and stable_at is not None and position <= stable_at)",
        "kind is BoundaryKind.STABLE",
        _POLICY,
    ),
    _mutant(
        "EvictionOrder.new_candidate",
        "entries are worth what a turn adds",
        "leaving = superseded_kinds(position, kind, stable_at)",
        "pass",
        _POLICY,
    ),
    _mutant(
        "EvictionOrder.new_candidate",
        "a turn is worth its whole path",
        "_current_below(walk.last, min(walk.length, position - 1), leaving=leaving)",
        "0",
        _POLICY,
    ),
    _mutant(
        "Evictor._passed",
        "a path that fills the budget takes what is worth more to others",
        "scores[each] <= worth",
        "True",
        _POLICY,
    ),
    _mutant(
        "Evictor._passed",
        "a path that fills the budget drops where its chat may have to go on",
        "each.kind in SHARED_KINDS and self._may_replace(each)",
        "self._may_replace(each)",
        _POLICY,
    ),
    _mutant(
        "_is_passed",
        "whoever was last at a system prompt is behind it",
        "below is None or below.last_visit != checkpoint.node.last_visit",
        "below is None",
        _POLICY,
    ),
    _mutant(
        "ExpectedSaving.score",
        "a chat resumes where it has passed",
        "candidate.is_passed",
        "False",
        _POLICY,
    ),
    _mutant(
        "_lost_with",
        "what had branched off and was lost is forgotten when the path is cut",
        "[*branched, GhostPath.of(cut, start=start, stop=reached)]",
        "[GhostPath.of(cut, start=start, stop=reached)]",
        _POLICY,
    ),
    _mutant(
        "PrefixCache.expect",
        "what is settled for the next turn has no room beside what its chat leaves",
        "self.tree.leave(checkpoint)",
        "pass",
        _POLICY,
    ),
    _mutant(
        "PrefixCache._beside",
        "a chat leaves what others brought below a shared beginning",
        "[below for below in node.children.values() if below.last_visit == number]",
        "list(node.children.values())",
        _POLICY,
    ),
    _mutant(
        "RadixTree.use",
        "a chat that goes on where it was not expected to has left that place",
        "used.is_left = False",
        "pass",
        _POLICY,
    ),
    _mutant(
        "ReuseRateEstimator.advance",
        "rates are not learnt before the 64th prompt",
        "self._now % _REFRESH == 0 or (self._now < _REFRESH and self._now.bit_count() == 1)",
        "self._now % _REFRESH == 0",
        _LEARNING,
    ),
    _mutant(
        "superseded_beside",
        "a chat supersedes the end of another that shares its beginning",
        "checkpoint.stable_at is not None and checkpoint.stable_at <= node.stop",
        "True",
        _POLICY,
    ),
    _mutant(
        "EvictionOrder.advance",
        "what is due again at once is re-evaluated without an end",
        "due.append(checkpoint)",
        "self.place(checkpoint)",
        _POLICY[:1],
    ),
    _mutant(
        "EvictionOrder.candidate",
        "the cost of a checkpoint is counted from the beginning",
        "checkpoint.position - resume_at",
        "checkpoint.position",
        _POLICY,
    ),
    _mutant(
        "_freed_nbytes",
        "a snapshot weighs nothing",
        "checkpoint.snapshot.nbytes if checkpoint.snapshot is not None else 0",
        "0",
        _POLICY,
    ),
    _mutant(
        "EvictionOrder.evicted_from",
        "an end is cut on both sides of its stable boundary",
        "start = max(start, end.stable_at)",
        "pass",
        _POLICY,
    ),
    _mutant(
        "Evictor._cut_tail",
        "an end that was cut is not known to be behind its stable boundary any more",
        "self.tree.add_checkpoint(\n"
        "    end, end.stop, BoundaryKind.INTERVAL, is_auxiliary=is_auxiliary, stable_at=behind.stable_at\n)",
        "self.tree.add_checkpoint(end, end.stop, BoundaryKind.INTERVAL, is_auxiliary=is_auxiliary)",
        _POLICY,
    ),
    _mutant(
        "Evictor._cut_tail",
        "what a title left is a chat's once a part of it was evicted",
        "self.tree.add_checkpoint(\n"
        "    end, end.stop, BoundaryKind.INTERVAL, is_auxiliary=is_auxiliary, stable_at=behind.stable_at\n)",
        "self.tree.add_checkpoint(end, end.stop, BoundaryKind.INTERVAL, stable_at=behind.stable_at)",
        _LINEAGE,
    ),
    _mutant(
        "EvictionOrder.evicted_from",
        "the trunk of a sub-agent goes with its tail",
        "max(start, trunk_at)",
        "start",
        _LINEAGE,
    ),
    _mutant(
        "Lineages.trunk_of_ended",
        "an id ends what another chat brought here",
        "first_visit < ended.first",
        "False",
        _LINEAGE,
    ),
    _mutant(
        "PrefixCache._has_left",
        "who leaves another chat's path early has been all along it",
        "self.order.policy.number_of(tokens, namespace=namespace) is not None",
        "True",
        _LINEAGE,
    ),
    _mutant(
        "PrefixCache._has_left",
        "what a chat has edited away counts as long as what it goes on with",
        "self.order.policy.number_of(tokens, namespace=namespace) is not None",
        "False",
        _LINEAGE,
    ),
    _mutant(
        "Lineages._of",
        "an id reaches into another namespace",
        "found.namespace == namespace",
        "True",
        _LINEAGE,
    ),
    _mutant(
        "_hazards",
        "who is not known better is judged by those who never came to be",
        "rates[..., :1, :] = by_all",
        "pass",
        _LEARNING,
    ),
)

PINS = (
    _mutant(
        "Pins.pin",
        "who pins what another has pinned takes the pin away",
        "known.owners | {owner}",
        "frozenset({owner})",
        _PINS,
    ),
    _mutant(
        "Pins.disown",
        "one owner unpins for all",
        "self._until[checkpoint].owners - {owner}",
        "frozenset()",
        _PINS,
    ),
)

ROWS = (
    _mutant("Evictor._evict_least", "rows do not go first", "if self.evict_row():\n    return True", "", _ROWS),
    _mutant(
        "PrefixCache._extend",
        "a chat that grows loses the row at its end",
        "self.rows.at(end) is None",
        "True",
        ("tests/loop/test_repeats.py", "-k", "llama and one_token"),
    ),
)

CACHE_MUTANTS = (*ROWS, *TREE, *LOOKUP, *STORE, *UPKEEP, *BOOKS, *WORTH, *PINS)

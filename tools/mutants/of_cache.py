"""Planted bugs in the tree, the store, its lookups, its eviction and its books."""

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
_LEARNING = ("tests/cache/test_returns.py",)


def _mutant(file: str, name: str, old: str, new: str, tests: tuple[str, ...] = _LAWS) -> Mutant:
    return Mutant(name=name, file=f"cache/{file}", old=old, new=new, tests=tests)


TREE = (
    _mutant(
        "tree.py",
        "a match goes on below an edge that it left",
        "        if at < child.stop:\n            break\n",
        "",
    ),
    _mutant(
        "tree.py",
        "a split leaves the landmark at its position below",
        "[p for p in node.landmarks if p <= position]",
        "[p for p in node.landmarks if p < position]",
    ),
    _mutant(
        "tree.py",
        "a split leaves the lease at its position below",
        "[lease for lease in node.leases if lease.position <= position]",
        "[lease for lease in node.leases if lease.position < position]",
    ),
    _mutant(
        "tree.py",
        "a lost lease: the upper part of a split edge does not count them",
        "upper.num_leases, upper.last_use, upper.num_uses = node.num_leases, node.last_use, node.num_uses",
        "upper.num_leases, upper.last_use, upper.num_uses = len(node.leases), node.last_use, node.num_uses",
    ),
    _mutant(
        "tree.py",
        "a shared buffer: the lower tokens of a split edge are a view",
        "own_tokens(node.tokens[position - node.start :])",
        "node.tokens[position - node.start :]",
    ),
    _mutant(
        "tree.py",
        "a cut takes the payload's head instead of the part",
        "piece.payload.cut(part.start - offset, part.stop - offset)",
        "piece.payload.cut(0, part.stop - part.start)",
    ),
    _mutant(
        "tree.py",
        "a shared buffer: a part of a piece keeps the whole of it",
        "inside.append(Piece(part, piece.payload.cut(part.start - offset, part.stop - offset)))",
        "inside.append(Piece(part, piece.payload))",
    ),
)

LOOKUP = (
    _mutant(
        "lookup.py",
        "nothing is ever reused",
        "    limit = min(limit, match.length)\n    if layout",
        "    limit = 0\n    if layout",
    ),
    _mutant(
        "lookup.py",
        "reuse goes on behind the divergence",
        "    limit = min(limit, match.length)\n    if layout",
        "    limit = min(limit, match.walk.last.stop)\n    if layout",
    ),
    _mutant(
        "landmarks.py",
        "a landmark at the limit itself is passed over",
        "number = bisect_right(self._positions, limit)",
        "number = bisect_left(self._positions, limit)",
    ),
    _mutant(
        "lookup.py",
        "a stale snapshot: that of the highest landmark, wherever the request resumes",
        "return node.landmarks.get(position)\n",
        "return node.landmarks.get(max(node.landmarks, default=0))\n",
    ),
    _mutant(
        "lookup.py",
        "one kind of layer decides for all",
        "lowest = min(best_position(kind, runs[kind], position) for kind in layout.kinds)",
        "lowest = max(best_position(kind, runs[kind], position) for kind in layout.kinds)",
    ),
    _mutant(
        "lookup.py",
        "entries behind the divergence count as stored",
        "(piece.span.clip(0, walked.length) for node",
        "(piece.span.clip(0, walked.last.stop) for node",
    ),
    _mutant(
        "lookup.py",
        "a commit copies what is there",
        "for hole in subtract(kind.needs(position), _runs_of(kind, walked)):",
        "for hole in kind.needs(position):",
    ),
    _mutant(
        "lookup.py",
        "a part is read from the payload's first entry on",
        "found.append(Part(piece.payload, span.start - offset, span.stop - offset, span))",
        "found.append(Part(piece.payload, 0, len(span), span))",
    ),
    _mutant(
        "lookup.py",
        "the piece in which a need begins is skipped",
        "bisect_right(pieces, need.start, key=lambda piece: piece.span.stop)",
        "bisect_right(pieces, need.start, key=lambda piece: piece.span.start)",
    ),
    _mutant(
        "lookup.py",
        "whatever is not there was evicted",
        "return ghosts is not None and match.next_token is not None and (",
        "return True or (",
    ),
)

STORE = (
    _mutant(
        "store.py",
        "all namespaces are one",
        "root = self.roots.get(namespace)\n        return match_in(",
        'root = self.roots.get("")\n        return match_in(',
    ),
    _mutant(
        "commits.py",
        "a commit does not guard the path that it extends",
        "guard = protect(walked, walked.length)",
        "guard = protect(walked, 0)",
    ),
    _mutant(
        "removal.py",
        "a lease protects one position too few",
        "all(lease.position < landmark.position for lease in node.leases)",
        "all(lease.position <= landmark.position for lease in node.leases)",
    ),
    _mutant(
        "removal.py",
        "what is superseded stays for every lease further on",
        "if landmark.is_superseded and not contents.layout.resumes_anywhere:",
        "if False:",
    ),
    _mutant(
        "removal.py",
        "what is superseded goes from under a lease",
        "return all(lease.position != landmark.position for lease in node.leases)",
        "return True",
    ),
    _mutant(
        "tree.py",
        "superseded snapshots on the way to a lease are thought to stay",
        "and mark.position <= stop and is_needed:",
        "and mark.position <= stop:",
    ),
    _mutant(
        "removal.py",
        "leases further down do not count",
        "return below == 0 and all(",
        "return all(",
    ),
    _mutant(
        "leasing.py",
        "a released lease stays counted above",
        "        above.num_leases -= 1\n    if not contents.layout.resumes_anywhere:",
        "        above.num_leases -= above is lease.node\n    if not contents.layout.resumes_anywhere:",
    ),
    _mutant(
        "leasing.py",
        "what only a lease held stays when it is released",
        "        trim_path(contents, lease.node, lease.position)\n        prune(contents, lease.node)\n",
        "        prune(contents, lease.node)\n",
    ),
    _mutant(
        "removal.py",
        "a pin holds nothing",
        "if landmark.stays_until > contents.now_s:\n        return False",
        "if landmark.stays_until > contents.now_s + 1000:\n        return False",
    ),
    _mutant(
        "commits.py",
        "a pin is forgotten when the chat goes on",
        "if contents.layout.resumes_anywhere and end is not None and end.stays_until <= contents.now_s:",
        "if contents.layout.resumes_anywhere and end is not None:",
    ),
    _mutant(
        "commits.py",
        "the budget is no bound",
        "is_whole = nbytes == 0 or _fits(contents, ",
        "is_whole = nbytes < 10**9 or _fits(contents, ",
    ),
    _mutant(
        "commits.py",
        "everything is evicted for what cannot fit anyway",
        "return nbytes <= most and make_room(contents, ",
        "return make_room(contents, ",
    ),
    _mutant(
        "marking.py",
        "bytes not returned: an evicted snapshot stays charged",
        "        contents.ledger.charge_snapshot(-landmark.snapshot.nbytes)\n",
        "",
    ),
    _mutant(
        "marking.py",
        "an evicted snapshot stays alive",
        "its bytes are given back now.\n        landmark.snapshot = None\n",
        "",
    ),
    _mutant(
        "removal.py",
        "bytes not returned: a removed edge stays charged",
        "    contents.ledger.charge_kv(-kv_nbytes(leaf))\n",
        "",
    ),
    _mutant(
        "removal.py",
        "a shortened edge keeps its tokens counted",
        "    contents.ledger.count_tokens(stop - leaf.stop)\n",
        "",
    ),
    _mutant(
        "commits.py",
        "a split charges its bytes anew",
        "ledger.charge_kv(kv_nbytes(last) + kv_nbytes(lower) - before)",
        "ledger.charge_kv(kv_nbytes(last))",
    ),
    _mutant(
        "removal.py",
        "a path above an evicted end stays for ever",
        "        node = _remove(contents, node)\n",
        "        _remove(contents, node)\n        return\n",
    ),
    _mutant(
        "removal.py",
        "what is left of a shortened chat can never be evicted",
        "    if end.parent is not None and not end.children:\n        mark_end(contents, end, stable_at=stable_at)\n",
        "",
    ),
    _mutant(
        "removal.py",
        "window entries that nothing needs any more stay",
        "    while above is not None and above.stop > lowest:",
        "    while above is not None and above.start > lowest:",
    ),
    _mutant(
        "commits.py",
        "a snapshot is taken again at a position that has one",
        "needs_snapshot = contents.layout.has_snapshots and mark is None",
        "needs_snapshot = contents.layout.has_snapshots",
    ),
)

UPKEEP = (
    _mutant(
        "trimming.py",
        "landmarks on the next edge do not count",
        "if below.start > reach:",
        "if below.start >= node.stop:",
    ),
    _mutant(
        "trimming.py",
        "window entries of a lease are trimmed",
        "positions = [*below.landmarks, *(lease.position for lease in below.leases)]",
        "positions = [*below.landmarks]",
    ),
    _mutant(
        "trimming.py",
        "the entries that a window keeps are trimmed",
        "spans.append(Span(node.start, min(kind.keep, node.stop)))",
        "pass",
    ),
    _mutant(
        "trimming.py",
        "a leaf is cut below a lease",
        "return max([*node.landmarks, *leased], default=node.start)",
        "return max([*node.landmarks], default=node.start)",
    ),
    _mutant(
        "trimming.py",
        "a tail is cut below a lease or a pin",
        "max(near, default=node.stop - tail_tokens), *protected])",
        "max(near, default=node.stop - tail_tokens)])",
    ),
    _mutant(
        "compaction.py",
        "a merged edge loses a lease",
        "        top.leases.extend(node.leases)\n",
        "",
    ),
    _mutant(
        "compaction.py",
        "landmarks of a merged edge stay behind",
        "            landmark.node = top\n",
        "            pass\n",
    ),
    _mutant(
        "compaction.py",
        "pieces are joined over a hole",
        "return after.span.start == before.span.stop and lender_of(after)",
        "return lender_of(after)",
    ),
    _mutant(
        "compaction.py",
        "a path in many parts is never joined while the server is busy",
        "    if len(chain) > 1:\n",
        "    if False:\n",
    ),
    _mutant(
        "compaction.py",
        "a long piece is copied for a few short ones",
        "len(pieces[first].span) <= _tokens(pieces, first + 1, stop)",
        "stop - first > 2",
    ),
    _mutant(
        "compaction.py",
        "a path is joined at every turn",
        "_joinable(node, longest, is_growing=True)) is not None",
        "_joinable(node, longest)) is not None",
    ),
    _mutant(
        "compaction.py",
        "joined entries are in the wrong order",
        "joined = head.payload.join([piece.payload for piece in rest])",
        "joined = rest[0].payload.join([head.payload, *(piece.payload for piece in rest[1:])])",
    ),
    _mutant(
        "compaction.py",
        "children of a merged edge keep their old parent",
        "        child.parent = top\n",
        "        pass\n",
    ),
    _mutant(
        "compaction.py",
        "merged edges keep their payloads alive",
        "node.parent, node.children, node.pieces, node.landmarks, node.leases = None, {}, {}, Landmarks(), []",
        "node.parent = None",
    ),
    _mutant(
        "eviction.py",
        "a landmark may be evicted twice",
        "return version == landmark.version and ",
        "return ",
    ),
    _mutant(
        "eviction.py",
        "leased landmarks fall out of the order",
        "for worth, landmark in put_back:",
        "for worth, landmark in put_back[1:]:",
    ),
    _mutant(
        "ghosts.py",
        "a landmark that was made again still counts as evicted",
        "self.landmarks = [at for at in self.landmarks if at != position]",
        "pass",
    ),
    _mutant(
        "ghosts.py",
        "evicted paths are not remembered",
        "self.paths = [*(path for path in self.paths if path != lost), lost][-_MOST:]",
        "pass",
    ),
)

BOOKS = (
    _mutant(
        "integrity.py",
        "leases are not checked",
        "assert node.num_leases == len(node.leases) + ",
        "assert node.num_leases >= 0 * len(node.leases) * ",
        _CHECK,
    ),
    _mutant(
        "integrity.py",
        "the order is not checked",
        "assert cache.order.num_placed() == landmarks",
        "assert cache.order.num_placed() >= 0",
        _CHECK,
    ),
    _mutant(
        "integrity.py",
        "coverage of full attention is not checked",
        "if isinstance(kind, Full):\n            whole",
        "if False:\n            whole",
        _CHECK,
    ),
    _mutant(
        "integrity.py",
        "landmarks are not checked",
        "        _check_resumable(node, position, layout)\n",
        "",
        _CHECK,
    ),
)

WORTH = (
    _mutant(
        "superseding.py",
        "an older stable position is worth as much as the newest",
        "return _ENDS | {BoundaryKind.STABLE}",
        "return _ENDS",
        _POLICY,
    ),
    _mutant(
        "superseding.py",
        "what a prompt left beside its chat's path is not superseded",
        "beside is not below and beside.visit == visit",
        "False",
        _POLICY,
    ),
    _mutant(
        "worth.py",
        "the cost of a landmark is counted from the beginning",
        "cost=landmark.position - standing,",
        "cost=landmark.position,",
        _POLICY,
    ),
    _mutant(
        "worth.py",
        "a snapshot weighs nothing",
        "nbytes = landmark.snapshot.nbytes if landmark.snapshot is not None else 0",
        "nbytes = 0",
        _POLICY,
    ),
    _mutant(
        "policy.py",
        "what next turns never have is worth as much as what they have",
        "rate *= self._tails_met / (self._tails_met + self._tails_missed)",
        "pass",
        _POLICY,
    ),
    _mutant(
        "policy.py",
        "nothing is learned from answers",
        "self._turns.specify(number, _place(_ANSWERED, num_tokens * self._unit_tokens))",
        "pass",
        _POLICY,
    ),
    _mutant(
        "trimming.py",
        "an end is cut on both sides of its stable boundary",
        "return max(start, end.stable_at) if end.stable_at is not None and is_tail(end) else start",
        "return start",
        _POLICY,
    ),
    _mutant(
        "removal.py",
        "an end that was cut is not known to be behind its stable boundary any more",
        "mark_end(contents, end, stable_at=stable_at)",
        "mark_end(contents, end)",
        _POLICY,
    ),
    _mutant(
        "returns.py",
        "who is not known better is judged by those who never came to be",
        "rates[..., :1, :] = by_all",
        "pass",
        _LEARNING,
    ),
    _mutant(
        "lineage.py",
        "a next turn always has what was left behind the stable boundary",
        "return at <= len(hashes) and bool(hashes[at - 1] == self._tail_keys[number % MEMORY])",
        "return True",
        _LEARNING,
    ),
    _mutant(
        "tree.py",
        "what a lease protects counts as free",
        "nbytes += sum(piece.payload.nbytes for piece in pieces if piece.span.stop <= stop)",
        "pass",
    ),
)

CACHE_MUTANTS = (*TREE, *LOOKUP, *STORE, *UPKEEP, *BOOKS, *WORTH)

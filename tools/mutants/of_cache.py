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
        "split",
        "a split leaves the landmark at its position below",
        "[p for p in node.landmarks if p <= position]",
        "[p for p in node.landmarks if p < position]",
    ),
    _mutant(
        "split",
        "a split leaves the lease at its position below",
        "[lease for lease in node.leases if lease.position <= position]",
        "[lease for lease in node.leases if lease.position < position]",
    ),
    _mutant(
        "split",
        "a lost lease: the upper part of a split edge does not count them",
        "upper.num_leases, upper.last_use, upper.num_uses = node.num_leases, node.last_use, node.num_uses",
        "upper.num_leases, upper.last_use, upper.num_uses = len(node.leases), node.last_use, node.num_uses",
    ),
    _mutant(
        "split",
        "a shared buffer: the lower tokens of a split edge are a view",
        "own_tokens(node.tokens[position - node.start :])",
        "node.tokens[position - node.start :]",
    ),
    _mutant(
        "cut_spans",
        "a cut takes the payload's head instead of the part",
        "piece.payload.cut(part.start - offset, part.stop - offset)",
        "piece.payload.cut(0, part.stop - part.start)",
    ),
    _mutant(
        "cut_spans",
        "a shared buffer: a part of a piece keeps the whole of it",
        "inside.append(Piece(part, piece.payload.cut(part.start - offset, part.stop - offset)))",
        "inside.append(Piece(part, piece.payload))",
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
        "Landmarks.highest",
        "a landmark at the limit itself is passed over",
        "number = bisect_right(self._positions, limit)",
        "number = bisect_left(self._positions, limit)",
    ),
    _mutant(
        "landmark_at",
        "a stale snapshot: that of the highest landmark, wherever the request resumes",
        "return node.landmarks.get(position)",
        "return node.landmarks.get(max(node.landmarks, default=0))",
    ),
    _mutant(
        "resume_position",
        "one kind of layer decides for all",
        "lowest = min(best_position(kind, runs[kind], position) for kind in layout.kinds)",
        "lowest = max(best_position(kind, runs[kind], position) for kind in layout.kinds)",
    ),
    _mutant(
        "_runs_of",
        "entries behind the divergence count as stored",
        "piece.span.clip(0, walked.length)",
        "piece.span.clip(0, walked.last.stop)",
    ),
    _mutant(
        "missing",
        "a commit copies what is there",
        "subtract(kind.needs(position), _runs_of(kind, walked))",
        "kind.needs(position)",
    ),
    _mutant(
        "_parts",
        "a part is read from the payload's first entry on",
        "found.append(Part(piece.payload, span.start - offset, span.stop - offset, span))",
        "found.append(Part(piece.payload, 0, len(span), span))",
    ),
    _mutant(
        "_parts",
        "the piece in which a need begins is skipped",
        "bisect_right(pieces, need.start, key=lambda piece: piece.span.stop)",
        "bisect_right(pieces, need.start, key=lambda piece: piece.span.start)",
    ),
    _mutant(
        "was_lost",
        "whatever is not there was evicted",
        "ghosts is not None and match.next_token is not None and ((match.length, match.next_token) in ghosts.paths)",
        "True or (match.length, match.next_token) in ghosts.paths",
    ),
)

STORE = (
    _mutant(
        "PrefixCache.match",
        "all namespaces are one",
        "self.roots.get(namespace)",
        "self.roots.get('')",
    ),
    _mutant(
        "commit",
        "a commit does not guard the path that it extends",
        "guard = protect(walked, walked.length)",
        "guard = protect(walked, 0)",
    ),
    _mutant(
        "_may_evict",
        "a lease protects one position too few",
        "all(lease.position < landmark.position for lease in node.leases)",
        "all(lease.position <= landmark.position for lease in node.leases)",
    ),
    _mutant(
        "_may_evict",
        "what is superseded stays for every lease further on",
        "landmark.is_superseded and not contents.layout.resumes_anywhere",
        "False",
    ),
    _mutant(
        "_may_evict",
        "what is superseded goes from under a lease",
        "return all(lease.position != landmark.position for lease in node.leases)",
        "return True",
    ),
    _mutant(
        "leased_nbytes",
        "superseded snapshots on the way to a lease are thought to stay",
        "mark.snapshot is not None and mark.position <= stop and is_needed",
        "mark.snapshot is not None and mark.position <= stop",
    ),
    _mutant(
        "_may_evict",
        "leases further down do not count",
        "below == 0 and all((lease.position < landmark.position for lease in node.leases))",
        "all((lease.position < landmark.position for lease in node.leases))",
    ),
    _mutant(
        "release",
        "a released lease stays counted above",
        "1",
        "above is lease.node",
    ),
    _mutant(
        "release",
        "what only a lease held stays when it is released",
        "trim_path(contents, lease.node, lease.position)",
        "",
    ),
    _mutant(
        "_may_evict",
        "a pin holds nothing",
        "contents.now_s",
        "contents.now_s + 1000",
    ),
    _mutant(
        "_grow",
        "a pin is forgotten when the chat goes on",
        "contents.layout.resumes_anywhere and end is not None and end.stays_until <= contents.now_s",
        "contents.layout.resumes_anywhere and end is not None",
    ),
    _mutant(
        "commit",
        "the budget is no bound",
        "nbytes == 0",
        "nbytes < 10 ** 9",
    ),
    _mutant(
        "_fits",
        "everything is evicted for what cannot fit anyway",
        "nbytes <= most and make_room(contents, nbytes, new=new)",
        "make_room(contents, nbytes, new=new)",
    ),
    _mutant(
        "drop_landmark",
        "bytes not returned: an evicted snapshot stays charged",
        "contents.ledger.charge_snapshot(-landmark.snapshot.nbytes)",
        "",
    ),
    _mutant(
        "drop_landmark",
        "an evicted snapshot stays alive",
        "landmark.snapshot = None",
        "",
    ),
    _mutant(
        "_remove",
        "bytes not returned: a removed edge stays charged",
        "contents.ledger.charge_kv(-kv_nbytes(leaf))",
        "",
    ),
    _mutant(
        "_shorten",
        "a shortened edge keeps its tokens counted",
        "contents.ledger.count_tokens(stop - leaf.stop)",
        "",
    ),
    _mutant(
        "_grow",
        "a split charges its bytes anew",
        "ledger.charge_kv(kv_nbytes(last) + kv_nbytes(lower) - before)",
        "ledger.charge_kv(kv_nbytes(last))",
    ),
    _mutant(
        "prune",
        "a path above an evicted end stays for ever",
        "node = _remove(contents, node)",
        "_remove(contents, node)\nreturn",
    ),
    _mutant(
        "_cut_tail",
        "what is left of a shortened chat can never be evicted",
        "if end.parent is not None and (not end.children):\n    mark_end(contents, end, stable_at=stable_at)",
        "",
    ),
    _mutant(
        "trim_path",
        "window entries that nothing needs any more stay",
        "above.stop",
        "above.start",
    ),
    _mutant(
        "commit",
        "a snapshot is taken again at a position that has one",
        "needs_snapshot = contents.layout.has_snapshots and mark is None",
        "needs_snapshot = contents.layout.has_snapshots",
    ),
)

UPKEEP = (
    _mutant(
        "_needed",
        "landmarks on the next edge do not count",
        "below.start > reach",
        "below.start >= node.stop",
    ),
    _mutant(
        "_needed",
        "window entries of a lease are trimmed",
        "positions = [*below.landmarks, *(lease.position for lease in below.leases)]",
        "positions = [*below.landmarks]",
    ),
    _mutant(
        "_needed",
        "the entries that a window keeps are trimmed",
        "spans.append(Span(node.start, min(kind.keep, node.stop)))",
        "pass",
    ),
    _mutant(
        "end_of_use",
        "a leaf is cut below a lease",
        "return max([*node.landmarks, *leased], default=node.start)",
        "return max([*node.landmarks], default=node.start)",
    ),
    _mutant(
        "tail_start",
        "a tail is cut below a lease or a pin",
        "[node.start, max(near, default=node.stop - tail_tokens), *protected]",
        "[node.start, max(near, default=node.stop - tail_tokens)]",
    ),
    _mutant(
        "_merge_chain",
        "a merged edge loses a lease",
        "top.leases.extend(node.leases)",
        "",
    ),
    _mutant(
        "_merge_chain",
        "landmarks of a merged edge stay behind",
        "landmark.node = top",
        "pass",
    ),
    _mutant(
        "_adjoin",
        "pieces are joined over a hole",
        "after.span.start == before.span.stop and lender_of(after) is lender_of(before)",
        "lender_of(after) is lender_of(before)",
    ),
    _mutant(
        "path_steps",
        "a path in many parts is never joined while the server is busy",
        "len(chain) > 1",
        "False",
    ),
    _mutant(
        "_joinable",
        "a long piece is copied for a few short ones",
        "len(pieces[first].span) <= _tokens(pieces, first + 1, stop)",
        "stop - first > 2",
    ),
    _mutant(
        "path_steps",
        "a path is joined at every turn",
        "_joinable(node, longest, is_growing=True)",
        "_joinable(node, longest)",
    ),
    _mutant(
        "_join",
        "joined entries are in the wrong order",
        "joined = head.payload.join([piece.payload for piece in rest])",
        "joined = rest[0].payload.join([head.payload, *(piece.payload for piece in rest[1:])])",
    ),
    _mutant(
        "_merge_chain",
        "children of a merged edge keep their old parent",
        "child.parent = top",
        "pass",
    ),
    _mutant(
        "_merge_chain",
        "merged edges keep their payloads alive",
        "node.parent, node.children, node.pieces, node.landmarks, node.leases = None, {}, {}, Landmarks(), []",
        "node.parent = None",
    ),
    _mutant(
        "_is_live",
        "a landmark may be evicted twice",
        "version == landmark.version and landmark.node.landmarks.get(landmark.position) is landmark",
        "landmark.node.landmarks.get(landmark.position) is landmark",
    ),
    _mutant(
        "EvictionOrder.pop",
        "leased landmarks fall out of the order",
        "for worth, landmark in put_back:\n    self._push(worth, landmark)",
        "for worth, landmark in put_back[1:]:\n    self._push(worth, landmark)",
    ),
    _mutant(
        "Ghosts.forget_landmark",
        "a landmark that was made again still counts as evicted",
        "self.landmarks = [at for at in self.landmarks if at != position]",
        "pass",
    ),
    _mutant(
        "Ghosts.lose_path",
        "evicted paths are not remembered",
        "self.paths = [*(path for path in self.paths if path != lost), lost][-_MOST:]",
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
        "check",
        "the order is not checked",
        "cache.order.num_placed() == landmarks",
        "cache.order.num_placed() >= 0",
        _CHECK,
    ),
    _mutant(
        "_check_node",
        "coverage of full attention is not checked",
        "isinstance(kind, Full)",
        "False",
        _CHECK,
    ),
    _mutant(
        "_check_node",
        "landmarks are not checked",
        "_check_resumable(node, position, layout)",
        "",
        _CHECK,
    ),
)

WORTH = (
    _mutant(
        "superseded_by",
        "an older stable position is worth as much as the newest",
        "return _ENDS | {BoundaryKind.STABLE}",
        "return _ENDS",
        _POLICY,
    ),
    _mutant(
        "superseded_beside",
        "what a prompt left beside its chat's path is not superseded",
        "beside is not below and beside.visit == visit",
        "False",
        _POLICY,
    ),
    _mutant(
        "facts_of",
        "the cost of a landmark is counted from the beginning",
        "landmark.position - standing",
        "landmark.position",
        _POLICY,
    ),
    _mutant(
        "facts_of",
        "a snapshot weighs nothing",
        "nbytes = landmark.snapshot.nbytes if landmark.snapshot is not None else 0",
        "nbytes = 0",
        _POLICY,
    ),
    _mutant(
        "ExpectedSaving.worth",
        "what next turns never have is worth as much as what they have",
        "rate *= self._tails_met / (self._tails_met + self._tails_missed)",
        "pass",
        _POLICY,
    ),
    _mutant(
        "ExpectedSaving.answered",
        "nothing is learned from answers",
        "self._turns.specify(number, _place(_ANSWERED, num_tokens * self._unit_tokens))",
        "pass",
        _POLICY,
    ),
    _mutant(
        "evicted_from",
        "an end is cut on both sides of its stable boundary",
        "return max(start, end.stable_at) if end.stable_at is not None and is_tail(end) else start",
        "return start",
        _POLICY,
    ),
    _mutant(
        "_cut_tail",
        "an end that was cut is not known to be behind its stable boundary any more",
        "mark_end(contents, end, stable_at=stable_at)",
        "mark_end(contents, end)",
        _POLICY,
    ),
    _mutant(
        "Returns._make_table",
        "who is not known better is judged by those who never came to be",
        "rates[..., :1, :] = by_all",
        "pass",
        _LEARNING,
    ),
    _mutant(
        "Lineage._has_tail",
        "a next turn always has what was left behind the stable boundary",
        "return at <= len(hashes) and bool(hashes[at - 1] == self._tail_keys[number % MEMORY])",
        "return True",
        _LEARNING,
    ),
    _mutant(
        "leased_nbytes",
        "what a lease protects counts as free",
        "nbytes += sum(piece.payload.nbytes for piece in pieces if piece.span.stop <= stop)",
        "pass",
    ),
)

CACHE_MUTANTS = (*TREE, *LOOKUP, *STORE, *UPKEEP, *BOOKS, *WORTH)

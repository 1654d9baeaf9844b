"""Planted bugs in drafts: what is looked up, what is undone, and whose texts they are."""

from tools.mutants.mutant import Mutant

_VERIFY = ("tests/engine/test_verify.py",)
_HISTORY = ("tests/drafts/test_history.py",)
_DRAFTER = ("tests/drafts/test_drafter.py",)
_TRAIL = ("tests/drafts/test_trail.py",)
_BENEFIT = ("tests/drafts/test_benefit.py",)
_COSTS = ("tests/drafts/test_costs.py",)
_LOOP = ("tests/loop/test_drafts.py",)
_ASSISTANT = ("tests/engine/test_assistant.py",)
_SEEING = ("tests/vision/test_heads_that_see.py",)
_TRIAL = ("tests/drafts/test_trial_of_passes.py",)
_HEAD = ("tests/engine/test_head.py",)
_COMPANION = ("tests/engine/test_companion.py",)
_GUESSES = ("tests/loop/test_head_drafts.py",)
_TOLD = ("tests/api/test_drafts_told.py", "-k", "overview")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


DRAFTS_MUTANTS = (
    _mutant(
        "HeadDrafts.draft",
        "guesses are made where they do not fit",
        "head.sequences.fits_draft([live], num_fed + num, pass_nbytes=nbytes)",
        "head.sequences.fits_draft([live], num_fed + num)",
        (*_GUESSES, "-k", "guesses_are_charged"),
    ),
    _mutant(
        "HeadDrafts.draft",
        "guesses are not charged",
        "head.sequences.memory.charged_for_pass(nbytes)",
        "head.sequences.memory.charged_for_pass(0)",
        (*_GUESSES, "-k", "guesses_are_charged"),
    ),
    _mutant(
        "Executor.price_to_guess",
        "the entries of a head that wait take nothing",
        "len(hidden.waiting)",
        "0",
        (*_GUESSES, "-k", "guesses_take"),
    ),
    _mutant(
        "Runner.verify",
        "entries of rejected tokens stay",
        "undone.append(num - num_right)",
        "undone.append(max(0, num - num_right - 1))",
        _VERIFY,
    ),
    _mutant(
        "Runner.verify",
        "accepted tokens are not fed again to recurrent layers",
        "live.unfed = tuple(lines[row][:num_right])",
        "live.unfed = tuple(known)",
        _VERIFY,
    ),
    _mutant(
        "StateLayer.undo_last",
        "recurrent states stay behind a rejected draft",
        "self.cache = list(before)",
        "pass",
        _VERIFY,
    ),
    _mutant(
        "StateLayer.undo_last",
        "what one row rejects is undone of the recurrent states of all",
        "[num > 0 for num in nums]",
        "[True for num in nums]",
        (*_VERIFY, "-k", "rows_of_a_batch"),
    ),
    _mutant(
        "Runner.catch_up",
        "rows that are fed with others to catch up keep what they were fed",
        "[0 if id(owner) in fed else num for owner in rows.owners]",
        "[0 for owner in rows.owners]",
        (*_VERIFY, "-k", "rows_of_a_batch"),
    ),
    _mutant(
        "PassTrial._try_together",
        "drafts of a group are verified in passes of any size",
        "all(map(self._agree, found, single))",
        "True",
        _TRIAL,
    ),
    _mutant(
        "best_size",
        "drafts of a group are verified whatever their pass costs",
        "sum(expected) / cost > speed",
        "sum(expected) > speed",
        (*_BENEFIT, "-k", "together"),
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
        "RequestDrafts._is_skipped",
        "looking up in vain takes what it takes, however fast the device is",
        "self.shared.searches.is_overdrawn",
        "False",
        _DRAFTER,
    ),
    _mutant(
        "PassCosts._estimate",
        "one pass that was held up decides",
        "len(seen) < _ENOUGH",
        "len(seen) < 1",
        _COSTS,
    ),
    _mutant(
        "FullLayer.append",
        "tokens see a head's entry for the first one",
        "super().append(new) + int(self._skips_first)",
        "super().append(new)",
        _HEAD,
    ),
    _mutant(
        "HiddenLayer.undo_last",
        "a head goes on from a token that was undone",
        "enumerate(ends)",
        "enumerate([num] * len(ends))",
        (*_HEAD, "-k", "undone"),
    ),
    _mutant(
        "HiddenLayer.undo_waiting",
        "a token that was undone waits for the head all the same",
        "del self.waiting[-num:]",
        "pass",
        (*_HEAD, "-k", "undone"),
    ),
    _mutant(
        "FollowedTokens.joined",
        "a head follows tokens with hidden states of others",
        "[each.hidden for each in several]",
        "[each.hidden for each in reversed(several)]",
        (*_HEAD, "-k", "one_by_one"),
    ),
    _mutant(
        "HeadedModel._follow",
        "any number of tokens waits for the head",
        "len(last.waiting) < MOST_WAITING",
        "True",
        (*_HEAD, "-k", "no_more_than_some"),
    ),
    _mutant(
        "HeadedModel._write",
        "what waited is written behind the places that were left for it",
        "layer.undo_last(layer.num_unwritten)",
        "layer.num_unwritten = 0",
        (*_HEAD, "-k", "one_by_one"),
    ),
    _mutant(
        "HeadedModel.guess",
        "a head guesses before it has followed what waits",
        "self._write(own, last)",
        "pass",
        (*_HEAD, "-k", "before_the_head_guesses"),
    ),
    _mutant(
        "Runner.source",
        "entries that nobody wrote are stored",
        "live.rows.write_waiting()",
        "pass",
        (*_HEAD, "-k", "before_it_is_stored"),
    ),
    _mutant(
        "Runner.growth_to_decode",
        "hidden states that wait are not foreseen",
        "num * self.footprint.waiting * len(lives)",
        "0",
        (*_HEAD, "-k", "no_more_than_some"),
    ),
    _mutant(
        "SequenceBatch.nbytes",
        "hidden states that wait are not counted",
        "self.hidden.waiting_nbytes",
        "0",
        (*_HEAD, "-k", "no_more_than_some"),
    ),
    _mutant(
        "SequenceBatch.join",
        "rows are joined that wait with other tokens",
        "rows.write_waiting()",
        "pass",
        (*_HEAD, "-k", "come_and_go"),
    ),
    _mutant(
        "SequenceBatch.keep_rows",
        "rows that stay wait with those that went",
        "self.write_waiting()",
        "pass",
        (*_HEAD, "-k", "come_and_go"),
    ),
    _mutant(
        "SequenceBatch.copy_rows",
        "a copy of rows waits, and what it copied too",
        "self.write_waiting()",
        "pass",
        (*_HEAD, "-k", "come_and_go"),
    ),
    _mutant(
        "Restoration.__init__",
        "an idle sequence goes on with what waited behind its place",
        "state.waiting.clear()",
        "pass",
        (*_HEAD, "-k", "returns_to_before"),
    ),
    _mutant(
        "HiddenLayer.follow",
        "a head's entry is made of the hidden state behind its own token",
        "mx.concatenate([before, hidden[:, :-1]], axis=1)",
        "hidden",
        _HEAD,
    ),
    _mutant(
        "Runner.verify",
        "behind a wrong guess a head goes on from other hidden states",
        "hidden[row : row + 1, :num_right]",
        "hidden[row : row + 1, -num_right:]",
        (*_GUESSES, "-k", "rejected"),
    ),
    _mutant(
        "HeadedModel.guess",
        "what a head guessed stays among its entries",
        "layer.undo_last(request.num_fed)",
        "layer.undo_last(request.num - 1)",
        (*_GUESSES, "-k", "rejected"),
    ),
    _mutant(
        "KvLayer.seen_next",
        "an assistant reads no entry of the last token",
        "return self._from(self.end - self._visible(1))",
        "return self._from(self.end - self._visible(1) + 1)",
        _ASSISTANT,
    ),
    _mutant(
        "_converted",
        "MiMo's head takes embeddings for hidden states",
        "form.hidden_first",
        "False",
        (*_HEAD, "-k", "formula"),
    ),
    _mutant(
        "_SeenEntries.__init__",
        "an assistant is asked one position further on",
        "mx.array(layer.lengths[0] - 1)",
        "mx.array(layer.lengths[0])",
        _ASSISTANT,
    ),
    _mutant(
        "HeadedSeeingModel.__call__",
        "a head gets the placeholders of an image for its rows",
        "embeddings = None if inputs is None else inputs.embedded.embeds",
        "embeddings = None",
        _SEEING,
    ),
    _mutant(
        "HeadedSeeingModel.__call__",
        "the head of a model that sees counts positions by itself",
        "FollowedTokens(tokens, last.follow(hidden), positions)",
        "FollowedTokens(tokens, last.follow(hidden), 0 * positions + 1)",
        _SEEING,
    ),
    _mutant(
        "_fingerprint",
        "what is stored with a head is found without it",
        "with_entries(model).parameters()",
        "without_head(model).parameters()",
        (*_HEAD, "-k", "not_for_another"),
    ),
    _mutant(
        "AccompaniedModel.guess",
        "what a companion guessed stays among its entries",
        "state.undo_last(total)",
        "state.undo_last(total - 1)",
        _COMPANION,
    ),
    _mutant(
        "AccompaniedModel.guess",
        "what a companion guessed stays in its recurrent state",
        "state.arrays = before[i]",
        "pass",
        _COMPANION,
    ),
    _mutant(
        "with_companion",
        "what is stored with a companion is found without it",
        'f"{loaded.fingerprint}+{companion.fingerprint}"',
        "loaded.fingerprint",
        _COMPANION,
    ),
    _mutant(
        "RequestDrafts._compute",
        "a head that is never right guesses on",
        "drafts.accounts[computed.source].is_overdrawn",
        "False",
        (*_GUESSES, "-k", "never_right"),
    ),
    _mutant(
        "DraftAccount.note_answered",
        "a head that lost never comes back",
        "self.balance = min(0.0, self.balance + _SHARE_OF_TRIALS * num_tokens)",
        "pass",
        (*_BENEFIT, "-k", "tried_again"),
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
        "PassTrial._run",
        "drafts use passes of sizes that were not tried",
        "range(2, most + 1)",
        "(2, 4, 8, 16, 32)",
        _TRIAL,
    ),
    _mutant(
        "are_same",
        "passes that choose other tokens are the same",
        "is_near and np.array_equal(several.argmax(axis=-1), single.argmax(axis=-1))",
        "is_near",
        _TRIAL,
    ),
    _mutant(
        "PassCosts.worthwhile",
        "passes that save nothing are drafted for",
        "size >= _WORTHWHILE * self.relative(size)",
        "size >= 0",
        _TRIAL,
    ),
)

"""Planted bugs in the live layers and in their payloads."""

from tools.mutants.mutant import Mutant

_LAYERS = ("tests/engine/test_layers.py",)
_GROWTH = ("tests/engine/test_growth.py",)
_OPAQUE = ("tests/engine/test_opaque.py",)
_PAYLOADS = ("tests/engine/test_payloads.py",)
_SAMPLER = ("tests/engine/test_sampler.py", "-k", "grammar or only")
_COLUMNS = ("tests/engine/test_columns.py",)
_RESTORE_STEPS = ("tests/loop/test_restore_steps.py", "-k", "taken_over or full-40-False")
_PARKED = ("tests/loop/test_idle_sequences.py", "-k", "branch_of_a_parked")
_RESTARTS = ("tests/loop/test_disk.py", "-k", "read_again or what_is_new")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


LAYERS = (
    _mutant(
        "KvLayer.index",
        "entries are read one place too far",
        "return self._ends[row] - (self.lengths[row] - position)",
        "return self._ends[row] - (self.lengths[row] - position) - 1",
        _LAYERS,
    ),
    _mutant(
        "WindowLayer._visible",
        "a window shows one entry too few",
        "min(length, self.window.size - 1)",
        "min(length, max(0, self.window.size - 2))",
        _LAYERS,
    ),
    _mutant(
        "KvLayer.join",
        "joined rows are padded on the right",
        "plane[row : row + view.shape[0], :, held - more : held, :] = view",
        "plane[row : row + view.shape[0], :, 0:more, :] = view",
        _LAYERS,
    ),
    _mutant(
        "KvLayer._mask",
        "padding of shorter rows is seen",
        "key >= stops - mx.array(self.lengths)[:, None, None, None]",
        "key >= 0",
        _LAYERS,
    ),
    _mutant(
        "KvLayer._mask",
        "a row that ends before others sees what was undone of it",
        "key <= query",
        "key <= self.end + mx.arange(num)[:, None]",
        (*_LAYERS, "-k", "apart"),
    ),
    _mutant(
        "KvLayer._parts",
        "rows of which more was undone go on where the others do",
        "enumerate(self._ends)",
        "enumerate([self.end] * self.num_rows)",
        (*_LAYERS, "-k", "apart"),
    ),
    _mutant(
        "SinkWindowLayer.undo_last",
        "kept positions that were undone stay",
        "self.lengths[0] < self.window.keep",
        "self.lengths[0] < 0",
        _LAYERS,
    ),
    _mutant(
        "SinkWindowLayer._slack",
        "a window with kept positions has the room of full attention",
        "return slack_of(self.window.size)",
        "return super()._slack(length)",
        _GROWTH,
    ),
    _mutant(
        "SinkWindowLayer.growth_for",
        "kept positions take no memory",
        "keep if not self.sinks and self._first() == 0 and self.held + num >= keep else 0",
        "0",
        _GROWTH,
    ),
    _mutant(
        "KvLayer.load",
        "a restored window stands where its entries end, not at its position",
        "position",
        "held",
        _LAYERS,
    ),
    _mutant(
        "KvLayer.keep_rows",
        "rows that stay take the lengths of those that leave",
        "[self.lengths[row] for row in rows]",
        "self.lengths[: len(rows)]",
        _LAYERS,
    ),
)

PAYLOADS = (
    _mutant(
        "PackedSegment.cut",
        "a shared buffer: a part of a packed segment keeps all of it",
        "mx.array(stack[:, :, start:stop, :])",
        "stack[:, :, start:stop, :]",
        _PAYLOADS,
    ),
    _mutant(
        "PackedSegment.plane",
        "a part is read from the segment's first entry on",
        "return self.stacks[stack][place : place + 1, :, start:stop, :]",
        "return self.stacks[stack][place : place + 1, :, 0 : stop - start, :]",
        _PAYLOADS,
    ),
    _mutant(
        "pack",
        "wrong layer: all planes are the first",
        "places[index] = (stack, place)",
        "places[index] = (stack, 0)",
        _PAYLOADS,
    ),
    _mutant(
        "PackedSegment.words",
        "a part is restored from the segment's first entry on",
        "as_words(self.stacks[stack])[run.start : run.stop, :, start:stop, :]",
        "as_words(self.stacks[stack])[run.start : run.stop, :, 0 : stop - start, :]",
        _COLUMNS,
    ),
    _mutant(
        "Column.joined",
        "a shared buffer: a restored layer keeps what it was restored from",
        "return mx.array(like).view(self.dtype)",
        "return like.view(self.dtype)",
        _COLUMNS,
    ),
    _mutant(
        "Column.joined",
        "room to grow before the entries",
        "[*self.parts, space]",
        "[space, *self.parts]",
        _COLUMNS,
    ),
    _mutant(
        "as_words",
        "rows are cut into words that they are not made of",
        "row_nbytes % size == 0",
        "row_nbytes >= size",
        _COLUMNS,
    ),
    _mutant(
        "_SegmentInTransfer.give_up",
        "what is moved stays held",
        "self._planes[planes.start : planes.stop] = [None] * len(planes)",
        "pass",
        _COLUMNS,
    ),
    _mutant(
        "LayerRestoration.advance",
        "the next piece of a plane overwrites the one before",
        "column.write(self._words, self._num_filled)",
        "column.write(self._words, 0)",
        _LAYERS,
    ),
    _mutant(
        "LiveSequence.words",
        "what a sequence is taking over is not there for others",
        "self.moving.words(span, wanted)",
        "layer.words(self.row, span)",
        _RESTORE_STEPS,
    ),
    _mutant(
        "SequenceSource.snapshot",
        "a snapshot of another sequence of the batch",
        "row = slice(self.row, self.row + 1)",
        "row = slice(0, 1)",
        _PAYLOADS,
    ),
    _mutant(
        "Restoration._attach",
        "a shared buffer: a model that writes into its state writes into the snapshot",
        "[copy.copy(array) for array in next(recurrent)]",
        "list(next(recurrent))",
        _PAYLOADS,
    ),
    _mutant(
        "Frozen.thaw",
        "a shared buffer: a cache of its own goes on with what was saved of it",
        "[_own(kept) for kept in self.beside]",
        "self.beside",
        _OPAQUE,
    ),
    _mutant(
        "SharedSegment.cut",
        "a part of a shared segment stands at its beginning",
        "Span(at + start, at + stop)",
        "Span(at, at + stop - start)",
        _PARKED,
    ),
)

FILING = (
    _mutant(
        "RecordSource._slices",
        "what was read begins at the record, and not at the position",
        "found.append(SegmentSlice(segment, both.start - own.start, both.stop - own.start, both))",
        "found.append(SegmentSlice(segment, 0, len(both), both))",
        _RESTARTS,
    ),
    _mutant(
        "RecordEncoder.add_snapshot",
        "records lack the snapshot's first layer",
        "snapshot.states",
        "snapshot.states[1:]",
        _RESTARTS,
    ),
    _mutant(
        "_array",
        "numbers are read as their machine words",
        "return words.view(dtype).reshape(section.shape)",
        "return words.astype(dtype).reshape(section.shape)",
        _RESTARTS,
    ),
)

WEIGHTS = (
    _mutant(
        "with_adapter",
        "an adapter has the fingerprint of its base",
        "fingerprint_of(added, config, of=base.fingerprint)",
        "base.fingerprint",
        ("tests/loop/test_other_weights.py", "-k", "adapters"),
    ),
    _mutant(
        "reason_to_run_alone",
        "what a model can is tried again for each loop",
        "loaded not in _tried",
        "loaded is not None",
        ("tests/engine/test_batching.py",),
    ),
    _mutant(
        "_twin",
        "an adapter changes the layers of its base",
        "return made[id(value)]",
        "return value",
        ("tests/engine/test_adapters.py", "-k", "as_mlx_lm_does"),
    ),
    _mutant(
        "_check_whole",
        "what an adapter's file lacks is random",
        "lacking = sorted(set(added) - set(weights))",
        "lacking = []",
        ("tests/engine/test_adapters.py", "-k", "in_part or cannot_be_loaded"),
    ),
    _mutant(
        "_add",
        "only the beginning of weights counts",
        "range(0, whole, _ROWS)",
        "range(0, min(whole, 1), _ROWS)",
        ("tests/engine/test_fingerprint.py", "tests/loop/test_other_weights.py"),
    ),
)

FILES = (
    _mutant(
        "LoadedModel.without_weights",
        "an adapter that was unloaded holds its base",
        "replace(self, model=nn.Module(), base=None)",
        "replace(self, model=nn.Module())",
        ("tests/loop/test_shared_bases.py",),
    ),
    _mutant(
        "LoadedModel.held_nbytes",
        "weights that an adapter replaces are not charged beside the base",
        "self.base.nbytes - self.shared_nbytes",
        "0",
        ("tests/loop/test_shared_bases.py", "-k", "replaces"),
    ),
    _mutant(
        "SharedBases.load",
        "files that have changed are not read while old weights are here",
        "_files(directory)",
        "()",
        ("tests/engine/test_adapters.py", "-k", "loaded_once"),
    ),
    _mutant(
        "SharedBases.load",
        "a base is loaded again for each adapter",
        "base = self._held.get(key)",
        "base = None",
        ("tests/engine/test_adapters.py", "-k", "loaded_once"),
    ),
    _mutant(
        "on_weights_of",
        "another KV format has the fingerprint of the first",
        "_facts(held.config, kv_bits, kv_group_size, held.vision)",
        "_facts(held.config, None, 64, held.vision)",
        ("tests/engine/test_shared_weights.py",),
    ),
    _mutant(
        "on_weights_of",
        "weights that are shared count for each KV format",
        "held.nbytes",
        "0",
        ("tests/engine/test_shared_weights.py", "tests/loop/test_shared_bases.py", "-k", "memory_of_one or kv_formats"),
    ),
    _mutant(
        "_engine_key",
        "aliases with different groups of quantized KV share a tree",
        "settings.kv_group_size if settings.kv_bits is not None else None",
        "None",
        ("tests/cli/test_model_tables.py", "-k", "one_engine"),
    ),
    _mutant(
        "_engine_key",
        "aliases with different adapters share a tree",
        "Path(adapter).expanduser().resolve()",
        "None",
        ("tests/cli/test_model_tables.py", "-k", "one_engine"),
    ),
    _mutant(
        "_header",
        "a file of weights that is cut off is loaded",
        "size < end",
        "size < 0",
        ("tests/engine/test_outline.py", "-k", "not_whole"),
    ),
    _mutant(
        "_numbered",
        "a part of the weights that is missing is not missed",
        "range(1, int(total) + 1)",
        "range(1, 2)",
        ("tests/engine/test_outline.py", "-k", "not_whole"),
    ),
)

SAMPLING = (
    _mutant(
        "TokenSampler.accept",
        "a grammar is not asked again behind a token",
        "self._has_mask = False",
        "",
        _SAMPLER,
    ),
)

ENGINE_MUTANTS = (*LAYERS, *PAYLOADS, *FILING, *WEIGHTS, *FILES, *SAMPLING)

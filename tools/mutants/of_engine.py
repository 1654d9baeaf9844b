"""Planted bugs in the live layers and in their payloads."""

from tools.mutants.mutant import Mutant

_LAYERS = ("tests/engine/test_layers.py",)
_OPAQUE = ("tests/engine/test_opaque.py",)
_PAYLOADS = ("tests/engine/test_payloads.py",)
_COLUMNS = ("tests/engine/test_columns.py",)
_PARKED = ("tests/loop/test_parked.py", "-k", "branch_of_a_parked")
_RESTARTS = ("tests/loop/test_disk.py", "-k", "read_again or what_is_new")


def _mutant(file: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, file=file, old=old, new=new, tests=tests)


LAYERS = (
    _mutant(
        "engine/layers.py",
        "entries are read one place too far",
        "return self.end - (self.lengths[row] - position)",
        "return self.end - (self.lengths[row] - position) - 1",
        _LAYERS,
    ),
    _mutant(
        "engine/windows.py",
        "a window shows one entry too few",
        "return min(self.held, max(self.lengths), self.kind.size - 1)",
        "return min(self.held, max(self.lengths), max(0, self.kind.size - 2))",
        _LAYERS,
    ),
    _mutant(
        "engine/layers.py",
        "joined rows are padded on the right",
        "plane[row : row + layer.num_rows, :, held - have : held, :] = view",
        "plane[row : row + layer.num_rows, :, 0:have, :] = view",
        _LAYERS,
    ),
    _mutant(
        "engine/layers.py",
        "padding of shorter rows is seen",
        "padding = mx.array([longest - length for length in self.lengths])",
        "padding = mx.array([0 for _ in self.lengths])",
        _LAYERS,
    ),
    _mutant(
        "engine/layers.py",
        "a token that was undone stays held",
        "        self.end -= 1\n        self.held -= 1\n",
        "        self.held -= 1\n",
        _LAYERS,
    ),
    _mutant(
        "engine/windows.py",
        "kept positions that were undone stay",
        "if self.lengths[0] < self.kind.keep:",
        "if self.lengths[0] < 0:",
        _LAYERS,
    ),
    _mutant(
        "engine/layers.py",
        "a restored window stands where its entries end, not at its position",
        "        self.end = self.held = held\n        self.lengths = [position]\n",
        "        self.end = self.held = held\n        self.lengths = [held]\n",
        _LAYERS,
    ),
    _mutant(
        "engine/layers.py",
        "rows that stay take the lengths of those that leave",
        "lengths = [self.lengths[row] for row in rows]",
        "lengths = self.lengths[: len(rows)]",
        _LAYERS,
    ),
)

PAYLOADS = (
    _mutant(
        "engine/payloads.py",
        "a shared buffer: a piece of a segment keeps all of it",
        "mx.array(stack[:, :, start:stop, :])",
        "stack[:, :, start:stop, :]",
        _PAYLOADS,
    ),
    _mutant(
        "engine/payloads.py",
        "a part is read from the segment's first entry on",
        "return self.stacks[stack][place : place + 1, :, start:stop, :]",
        "return self.stacks[stack][place : place + 1, :, 0 : stop - start, :]",
        _PAYLOADS,
    ),
    _mutant(
        "engine/payloads.py",
        "wrong layer: all planes are the first",
        "places[index] = (stack, place)",
        "places[index] = (stack, 0)",
        _PAYLOADS,
    ),
    _mutant(
        "engine/columns.py",
        "wrong layer: all are restored from the first",
        "left.popleft() for _",
        "left[0] for _",
        _COLUMNS,
    ),
    _mutant(
        "engine/payloads.py",
        "a part is restored from the segment's first entry on",
        "as_words(stack)[:, :, start:stop, :]",
        "as_words(stack)[:, :, 0 : stop - start, :]",
        _COLUMNS,
    ),
    _mutant(
        "engine/columns.py",
        "a shared buffer: a restored layer keeps what it was restored from",
        "return mx.array(like).view(self.dtype)",
        "return like.view(self.dtype)",
        _COLUMNS,
    ),
    _mutant(
        "engine/columns.py",
        "room to grow before the entries",
        "[*self.parts, space]",
        "[space, *self.parts]",
        _COLUMNS,
    ),
    _mutant(
        "engine/columns.py",
        "rows are cut into words that they are not made of",
        "if row_nbytes % size == 0",
        "if row_nbytes >= size",
        _COLUMNS,
    ),
    _mutant(
        "engine/columns.py",
        "kept positions are taken for recent ones",
        "rest = self.parts[:num_parts], self.parts[num_parts:]",
        "rest = self.parts[:num_parts], self.parts",
        _COLUMNS,
    ),
    _mutant(
        "engine/payloads.py",
        "what is handed over stays held",
        "segment, self._segment = self._segment, None",
        "segment = self._segment",
        _COLUMNS,
    ),
    _mutant(
        "engine/rows.py",
        "a snapshot of another sequence of the batch",
        "row = slice(self.row, self.row + 1)",
        "row = slice(0, 1)",
        _PAYLOADS,
    ),
    _mutant(
        "engine/rows.py",
        "a shared buffer: a model that writes into its state writes into the snapshot",
        "[copy.copy(array) for array in next(self._recurrent)]",
        "list(next(self._recurrent))",
        _PAYLOADS,
    ),
    _mutant(
        "engine/opaque.py",
        "a shared buffer: a cache of its own goes on with what was saved of it",
        "[_own(kept) for kept in self.beside]",
        "self.beside",
        _OPAQUE,
    ),
    _mutant(
        "engine/loans.py",
        "a piece of a loan stands at the loan's beginning",
        "Span(at + start, at + stop), self._nbytes_each)",
        "Span(at, at + stop - start), self._nbytes_each)",
        _PARKED,
    ),
)

FILING = (
    _mutant(
        "engine/filing.py",
        "what was read begins at the record, and not at the position",
        "found.append((segment, both.start - own.start, both.stop - own.start))",
        "found.append((segment, 0, len(both)))",
        _RESTARTS,
    ),
    _mutant(
        "engine/filing.py",
        "files lack the snapshot's first layer",
        "for arrays in snapshot.states\n",
        "for arrays in snapshot.states[1:]\n",
        _RESTARTS,
    ),
    _mutant(
        "engine/filing.py",
        "numbers are read as their machine words",
        "return words.view(dtype).reshape(section.shape)",
        "return words.astype(dtype).reshape(section.shape)",
        _RESTARTS,
    ),
)

ENGINE_MUTANTS = (*LAYERS, *PAYLOADS, *FILING)

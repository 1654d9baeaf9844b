"""A namespace's note: kept whole over restarts, within the bound, and gone when the namespace is cleared."""

import errno
import os
from pathlib import Path

import pytest

from tests.disk.chains import all_files, cleared, opened, put_path

CHAT = list(range(40))


def notes(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/notes/*"))


def test_a_note_is_read_by_the_next_process_and_goes_with_its_namespace(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        assert cache.read_note("a") is None
        for text in ("first", "second é"):
            cache.keep_note("a", text)
        cache.keep_note("b", "of b")
        put_path(cache, CHAT, namespace="a")
        cache.check()
    assert [file.stat().st_mode & 0o777 for file in notes(tmp_path)] == [0o600] * 2
    with opened(tmp_path) as cache, opened(tmp_path, fingerprint="other") as other:
        cache.check()
        assert (cache.read_note("a"), cache.read_note("b"), other.read_note("a")) == ("second é", "of b", None)
        assert cache.stats().num_quarantined == 0
        cleared(cache.clear("a"))
        assert cache.read_note("a") is None and len(notes(tmp_path)) == 1
        cleared(cache.clear(None))
        assert notes(tmp_path) == []
        cache.check()


def test_the_bound_holds_and_takes_records_before_notes(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        cache.keep_note("", "x" * 3000)
        put_path(cache, CHAT)
        held = cache.stats().nbytes
    with opened(tmp_path, max_bytes=held - 1) as cache:
        assert cache.stats().num_evicted > 0 and cache.read_note("") == "x" * 3000
        cache.keep_note("", "y" * held)
        assert cache.read_note("") == "x" * 3000
        cache.keep_note("", "z" * 2000)
        assert cache.read_note("") == "z" * 2000
        cache.check()
        assert sum(file.stat().st_size for file in all_files(tmp_path)) < held
    # Nobody serves that model any more: its note goes like its records.
    with opened(tmp_path, max_bytes=1000, fingerprint="other"):
        assert notes(tmp_path) == []


def test_a_note_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with opened(tmp_path) as cache:
        cache.keep_note("", "as it was")
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", broken)
            cache.keep_note("", "half")
        assert cache.read_note("") == "as it was" and len(notes(tmp_path)) == 1
        cache.check()
        (note,) = notes(tmp_path)
    # What a process that died had not finished is removed, and what is no text is left out.
    note.with_suffix(".tmp").write_bytes(b"half")
    note.write_bytes(b"\xff\xff")
    with opened(tmp_path) as cache:
        assert cache.read_note("") is None and len(notes(tmp_path)) == 1

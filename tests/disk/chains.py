"""Prompts as chains of records, for tests; and a cache on a directory, closed at the end."""

import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from reprise.core.tokens import as_tokens
from reprise.disk.records.record import DiskMatch, DiskRecord, Section
from reprise.disk.store.cache import DiskCache, Fetch

BLOCK = 4
PATIENCE_S = 60.0
"""Longer than anything takes: who waits so long has found a bug."""


class DirectoryClock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def opened(directory: Path, **options: Any) -> Generator[DiskCache]:
    given: dict[str, Any] = {"fingerprint": "model", "max_bytes": 10**9, "block": BLOCK, "resumes_anywhere": False}
    cache = DiskCache(directory, **(given | options))
    try:
        yield cache
    finally:
        cache.close(PATIENCE_S)


def sections_of(ids: Sequence[int], nbytes: int) -> tuple[Section, ...]:
    """Bytes that belong to these tokens, so that any mix-up shows."""
    seed = int(np.frombuffer(as_tokens(ids).tobytes() + bytes(4), dtype=np.uint8).sum()) + len(ids) * 7919
    content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    cut = nbytes - nbytes * 2 // 3 // 2 * 2
    return (
        Section(dtype="uint8", shape=(cut,), data=content[:cut]),
        Section(dtype="bfloat16", shape=((nbytes - cut) // 2, 1), data=memoryview(content[cut:])),
    )


def records_for(
    cache: DiskCache, ids: Sequence[int], *, namespace: str = "", nbytes: int = 100, has_tail: bool = True
) -> list[DiskRecord]:
    """What the cache says is missing for this path, as records in order."""
    tokens = as_tokens(ids)
    root, block = cache.root(namespace), cache.block
    [missing] = cache.missing(tokens, [len(tokens)], namespace=namespace)
    records = [
        DiskRecord(
            root=root,
            parent=parent,
            is_tail=False,
            start=k * block,
            tokens=tokens[k * block : (k + 1) * block],
            about={"k": k},
            sections=sections_of(ids[: (k + 1) * block], nbytes),
        )
        for k, parent in missing.blocks
    ]
    if has_tail and missing.needs_tail:
        start = len(ids) // block * block
        records.append(
            DiskRecord(
                root=root,
                parent=missing.tail_parent,
                is_tail=True,
                start=start,
                tokens=tokens[start:],
                about={"mark": True},
                sections=sections_of(ids, nbytes),
            )
        )
    return records


def put_path(cache: DiskCache, ids: Sequence[int], **how: Any) -> list[DiskRecord]:
    """Put what is missing for this path, and wait until it is written. Gives what was put."""
    records = records_for(cache, ids, **how)
    for record in records:
        assert cache.put(record)
    assert cache.flush(PATIENCE_S)
    return records


def find(cache: DiskCache, ids: Sequence[int], *, namespace: str = "", limit: int | None = None) -> DiskMatch | None:
    return cache.find(as_tokens(ids), namespace=namespace, limit=len(ids) if limit is None else limit)


def keys_in(cache: DiskCache, namespace: str = "") -> set[bytes]:
    """The keys of everything of a namespace that can be found."""
    return {key for key, _, _ in cache.runs(namespace)}


def look(cache: DiskCache) -> None:
    """Have the cache take up what other servers have done."""
    cache.scan().result(PATIENCE_S)


def position(found: DiskMatch | None) -> int:
    return 0 if found is None else found.position


def cleared(future: Future[None]) -> None:
    """Wait until what was cleared is gone. Raises what prevented that."""
    future.result(PATIENCE_S)


def read_all(cache: DiskCache, found: DiskMatch) -> tuple[list[DiskRecord], Fetch]:
    """Take everything that a fetch gives, as it comes."""
    woken = threading.Event()
    fetch = cache.fetch(found, woken.set)
    taken: list[DiskRecord] = []
    is_done = False
    while not is_done:
        assert woken.wait(PATIENCE_S), "a fetch that says nothing"
        woken.clear()
        is_done = fetch.is_done
        taken += fetch.take()
    return taken, fetch


def same(a: DiskRecord, b: DiskRecord) -> bool:
    """Whether two records say the same, byte for byte."""
    return content_of(a) == content_of(b)


def content_of(record: DiskRecord) -> tuple[Any, ...]:
    return (
        (record.root, record.parent, record.key, record.is_tail, record.start),
        record.tokens.tolist(),
        dict(record.about),
        [(s.dtype, s.shape, bytes(s.data)) for s in record.sections],
    )


def all_files(directory: Path) -> dict[Path, int]:
    """Every file below a directory, with its size."""
    found: dict[Path, int] = {}
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            # It may go meanwhile.
            with suppress(FileNotFoundError):
                if not path.is_symlink():
                    found[path] = path.stat().st_size
    return found


def record_files(directory: Path) -> list[Path]:
    return sorted(path for path in all_files(directory) if path.suffix == ".kv" and path.parent.name != "quarantine")


def damage(path: Path, at: int) -> None:
    """Change one byte; from the end if `at` is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)

"""How fast records are read and verified, beside a plain read of the same files: `python -m bench.reading`.

Records of random bytes are written to a directory and read in turn, from the page cache or the disk as it is: plainly,
verified on one thread, and verified on several. A restore is bound by the disk where verifying on several is as fast as
the plain read, and by the hash where it is not. Each way is measured in every round, and the best of all rounds counts.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from reprise.core.tokens import as_tokens
from reprise.disk.records.format import encode, read_record
from reprise.disk.records.record import DiskRecord, Section, root_key

_TOKENS = 256


def write_records(folder: Path, *, num: int, nbytes: int) -> list[Path]:
    """Files of so many records of `nbytes` each."""
    random = np.random.default_rng(0)
    root = root_key(fingerprint="bench", namespace="")
    tokens = as_tokens(np.arange(_TOKENS))
    data = random.integers(0, 256, nbytes, dtype=np.uint8)
    files: list[Path] = []
    for number in range(num):
        section = Section(dtype="uint8", shape=(nbytes,), data=np.roll(data, number).data)
        record = DiskRecord(
            root=root, parent=root, is_tail=False, start=0, tokens=tokens, about={}, sections=(section,)
        )
        files.append(folder / f"{number}.rec")
        with files[-1].open("wb") as file:
            for chunk in encode(record).chunks:
                file.write(chunk)
    return files


def verified(path: Path) -> None:
    with path.open("rb") as file:
        read_record(file, os.fstat(file.fileno()).st_size)


def plain(path: Path) -> None:
    buffer = np.empty(path.stat().st_size, dtype=np.uint8).data
    with path.open("rb", buffering=0) as file:
        assert file.readinto(buffer) == len(buffer)


def read_all(files: list[Path], read: Callable[[Path], None], *, num_threads: int) -> float:
    """Bytes per second."""
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, files))
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - begun_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=8, help="of one record")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    ways: dict[str, tuple[Callable[[Path], None], int]] = {"plain, 1 thread": (plain, 1)}
    ways |= {f"verified, {num} thread{'s' * (num > 1)}": (verified, num) for num in given.threads}
    best = dict.fromkeys(ways, 0.0)
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        files = write_records(Path(folder), num=given.records, nbytes=given.megabytes * 10**6)
        for _ in range(given.rounds):
            for name, (read, num_threads) in ways.items():
                best[name] = max(best[name], read_all(files, read, num_threads=num_threads))
    print(f"{given.records} records of {given.megabytes} MB on {os.cpu_count()} cores, best of {given.rounds} rounds")
    for name, rate in best.items():
        print(f"  {name:<22} {rate / 1e9:6.2f} GB/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

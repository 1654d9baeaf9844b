"""A process that writes records until it is killed: `python server.py DIRECTORY FINGERPRINT MAX_BYTES`.

It says "open" when it has the folder and "written" after each path.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from reprise.disk.store.cache import DiskCache
from tests.disk.chains import BLOCK, put_path


def main() -> None:
    directory, fingerprint, max_bytes = sys.argv[1:]
    # A process that is killed loses nothing that it has written, whether it waited for the disk or not.
    os.fsync = lambda descriptor: None
    cache = DiskCache(
        Path(directory), fingerprint=fingerprint, max_bytes=int(max_bytes), block=BLOCK, resumes_anywhere=False
    )
    print("open", flush=True)
    for number in range(100_000):
        put_path(cache, [number % 65_536, *range(11)], nbytes=20_000)
        print("written", flush=True)


if __name__ == "__main__":
    main()

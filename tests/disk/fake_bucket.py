"""An object store in memory that can be unavailable, deny, lose and damage; several servers may use it at once."""

import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from reprise.disk.folders.bucket import BucketUnavailable
from reprise.disk.folders.model_folder import FileInfo


class FakeBucket:
    """Objects by name. `failing`: the verbs that fail, with what they say."""

    url = "s3://bucket/prefix"

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.failing: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.now_ns = 10**18
        self._lock = threading.RLock()

    def _ask(self, verb: str, name: str) -> None:
        self.asked.append((verb, name))
        if verb in self.failing:
            raise BucketUnavailable(self.failing[verb])

    def put(self, name: str, content: bytes) -> None:
        self._ask("put", name)
        with self._lock:
            self.now_ns += 1000
            self.objects[name] = (bytes(content), self.now_ns)

    def get(self, name: str, nbytes: int) -> memoryview:
        self._ask("get", name)
        with self._lock:
            if name not in self.objects:
                raise FileNotFoundError(errno.ENOENT, "there is no such object")
            return memoryview(self.objects[name][0][:nbytes])

    def listing(self, prefix: str) -> Iterator[FileInfo]:
        self._ask("list", prefix)
        with self._lock:
            found = [
                FileInfo(path=Path(name), nbytes=len(content), mtime_ns=at_ns)
                for name, (content, at_ns) in self.objects.items()
                if not prefix or name.startswith(f"{prefix}/")
            ]
        return iter(found)

    def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        self._ask("delete", ",".join(names))
        with self._lock:
            for name in names:
                self.objects.pop(name, None)

    # For tests.

    def records(self) -> list[str]:
        with self._lock:
            return sorted(name for name in self.objects if name.endswith(".kv"))

    def num(self, verb: str) -> int:
        """How often records were asked for so."""
        return sum(each == verb and name.endswith(".kv") for each, name in list(self.asked))

    @property
    def nbytes(self) -> int:
        """Of all but leases, which the bound need not know."""
        with self._lock:
            return sum(len(content) for name, (content, _) in self.objects.items() if "/servers/" not in name)

    def damage(self, name: str) -> None:
        with self._lock:
            content, at_ns = self.objects[name]
            self.objects[name] = (content[:-1] + bytes([content[-1] ^ 0x40]), at_ns)

"""The interface to object stores: a few operations on names below a prefix, all with bounded time.

The client is `obstore` (S3, Google Cloud Storage, Azure and compatible stores). Credentials, region and endpoint are
read from the environment variables that the vendors' own tools use. Every failure is an OSError whose `strerror` is a
short phrase: FileNotFoundError for a missing object, `BucketUnavailable` for everything else.
"""

import errno
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from reprise.core.errors import DiskUnusable
from reprise.core.installation import mend_line
from reprise.disk.folders.model_folder import FileInfo

SCHEMES = ("s3", "gs", "az", "file", "memory")
REQUEST_S = 10.0
"""Timeout of a request, which is retried once."""

_CONNECT_S = 3.0
_PART_NBYTES = 4 << 20
"""Larger objects are read in parts of this size, in parallel."""

_LISTED_AT_ONCE = 1000


class BucketUnavailable(OSError):
    """A failed request: the store is unreachable or slow, denies access, or the bucket does not exist."""

    def __init__(self, phrase: str) -> None:
        super().__init__(errno.EREMOTEIO if hasattr(errno, "EREMOTEIO") else errno.EHOSTUNREACH, phrase)


class ObjectBucket(Protocol):
    """Objects by name, written completely or not at all. Thread-safe; every method raises OSError."""

    url: str
    """Its URL in messages, without credentials."""

    def put(self, name: str, content: bytes) -> None: ...

    def get(self, name: str, nbytes: int) -> memoryview:
        """The first `nbytes` of an object; fewer if it is shorter."""
        ...

    def listing(self, prefix: str) -> Iterator[FileInfo]:
        """All objects whose names start with this path ("": all), with the times when they were written."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects, if they exist."""
        ...


def is_url(place: str) -> bool:
    """Whether this is the URL of an object store and not a directory."""
    return "://" in place


def open_bucket(url: str) -> ObjectBucket:
    """The store at a URL such as ``s3://bucket/prefix``, without contacting it. Raises DiskUnusable."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise DiskUnusable(
            f"--disk-cache {scheme}://… is not a supported object store: choose from "
            f"{', '.join(f'{each}://' for each in SCHEMES)}, or give a directory."
        )
    if find_spec("obstore") is None:
        raise DiskUnusable(f"An object store needs the package obstore. Install it with: {mend_line('s3')}")
    return ObstoreBucket(url)


class ObstoreBucket:
    """A bucket accessed with obstore. Raises DiskUnusable if the URL or the environment is incomplete."""

    def __init__(self, url: str) -> None:
        self._client = cast("Any", import_module("obstore"))
        self._errors = cast("Any", import_module("obstore.exceptions"))
        stores = cast("Any", import_module("obstore.store"))
        scheme, _, place = url.partition("://")
        self.url = f"{scheme}://{place.rpartition('@')[2]}"
        try:
            if scheme == "memory":
                self._store = stores.MemoryStore()
            elif scheme == "file":
                self._store = stores.from_url(url, mkdir=True)
            else:
                self._store = stores.from_url(
                    url,
                    client_options={
                        "timeout": f"{REQUEST_S:g}s",
                        "connect_timeout": f"{_CONNECT_S:g}s",
                        # For endpoints that are given as http://.
                        "allow_http": True,
                    },
                    retry_config={"max_retries": 1},
                )
        except (self._errors.BaseError, ValueError, OSError) as error:
            raise DiskUnusable(f"--disk-cache {self.url} cannot be used: {_phrase(error)}.") from error

    def put(self, name: str, content: bytes) -> None:
        # One request: an interrupted multipart upload leaves parts, which cost money and are in no listing.
        self._ask(self._client.put, name, content, use_multipart=False, is_read=False)

    def get(self, name: str, nbytes: int) -> memoryview:
        if nbytes <= _PART_NBYTES:
            return memoryview(self._ask(self._client.get_range, name, start=0, length=nbytes))
        starts = range(0, nbytes, _PART_NBYTES)
        stops = [min(nbytes, start + _PART_NBYTES) for start in starts]
        parts = self._ask(self._client.get_ranges, name, starts=list(starts), ends=stops, coalesce=0)
        return memoryview(b"".join(memoryview(part) for part in parts))

    def listing(self, prefix: str) -> Iterator[FileInfo]:
        pages = iter(self._ask(self._client.list, prefix or None, chunk_size=_LISTED_AT_ONCE, is_read=False))
        while (page := self._run(lambda: next(pages, None), is_read=False)) is not None:
            for meta in page:
                changed_ns = round(meta["last_modified"].timestamp() * 1e6) * 1000
                yield FileInfo(path=Path(meta["path"]), nbytes=meta["size"], mtime_ns=changed_ns)

    def delete(self, names: Sequence[str]) -> None:
        left = list(names)
        try:
            if left:
                self._ask(self._client.delete, left)
        except FileNotFoundError:
            # The error does not say which one is missing. Only some stores raise it, and they delete one by one anyway.
            for name in left if len(left) > 1 else ():
                self.delete([name])

    def _ask(self, verb: Any, *given: Any, is_read: bool = True, **options: Any) -> Any:
        return self._run(lambda: verb(self._store, *given, **options), is_read=is_read)

    def _run(self, call: Any, *, is_read: bool) -> Any:
        try:
            return call()
        except FileNotFoundError as error:
            if is_read:
                raise FileNotFoundError(errno.ENOENT, "there is no such object") from error
            raise BucketUnavailable("the bucket does not exist") from error
        except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError) as error:
            raise BucketUnavailable("access is denied") from error
        except (self._errors.BaseError, ValueError, OSError) as error:
            raise BucketUnavailable(_phrase(error)) from error


def _phrase(error: Exception) -> str:
    """The client's message, without its debugging details."""
    text = str(error).partition("\n")[0].strip() or type(error).__name__
    if "404 Not Found" in text:
        return "the bucket does not exist"
    return text.partition(" error: ")[2][:200].rstrip(".") or text[:200]

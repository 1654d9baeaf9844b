"""The disk tier in S3, as the moto server speaks it, through the real client."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import httpx
import pytest

from reprise.disk.folders.bucket import BucketUnavailable, open_bucket
from reprise.disk.store import watcher
from reprise.lab.bench.server_process import free_port
from tests.agents.packages import python_with
from tests.disk.chains import PATIENCE_S, find, look, opened, position, put_path, read_all, same

pytestmark = pytest.mark.agents

MOTO = "5.2.5"
CHAT = list(range(10))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with an empty bucket, in the environment as users set it."""
    pytest.importorskip("obstore")
    python = python_with("moto", [f"moto[server]=={MOTO}"])
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    command = [str(python.parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        command, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server, closing(httpx.Client(base_url=url)) as client:  # fmt: skip
        try:
            until_s = time.monotonic() + PATIENCE_S
            while True:
                try:
                    client.put("/bucket").raise_for_status()
                    break
                except httpx.TransportError:
                    assert time.monotonic() < until_s and server.poll() is None
                    time.sleep(0.1)
            yield url
        finally:
            server.kill()


def test_servers_share_a_bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "REMOTE_AGAIN_S", 0.0)
    monkeypatch.setattr(watcher, "MAX_SCAN_SHARE", 1e9)

    def bucket() -> Path:
        return cast("Path", open_bucket("s3://bucket/some/prefix"))

    with opened(bucket()) as one, opened(bucket()) as other:
        look(one)
        records = put_path(one, CHAT, nbytes=9_000_000)
        look(other)
        found = find(other, CHAT)
        assert found is not None and found.position == 10 and other.is_shared
        taken, fetch = read_all(other, found)
        assert not fetch.failed and all(map(same, taken, records))
        one.clear(None).result(PATIENCE_S)
        look(other)
        assert find(other, CHAT) is None and not list(open_bucket("s3://bucket").listing("some/prefix/0"))
        put_path(other, CHAT)
        other.check()
    assert httpx.get(f"{s3}/bucket?list-type=2").text.count("<Key>some/prefix/") == 3, "the leases have gone"


@pytest.mark.usefixtures("s3")
def test_what_a_store_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BucketUnavailable, match="does not exist"):
        list(open_bucket("s3://nothing/here").listing(""))
    with pytest.raises(BucketUnavailable, match="does not exist"):
        open_bucket("s3://nothing/here").put("a", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with opened(cast("Path", open_bucket("s3://bucket"))) as cache:
        look(cache)
        assert "s3://bucket" in (cache.stats().trouble or "") and position(find(cache, CHAT)) == 0

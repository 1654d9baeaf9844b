"""What a page in a browser may do to a server that its user runs."""

from collections.abc import Sequence

import pytest

from reprise.api.web_access import WebAccess, WrongHost
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "Hi"}]
URL = "/v1/chat/completions"
EVIL = "https://evil.example"

ANSWERED = (
    ["localhost"],
    ["LocalHost:8080"],
    ["localhost.:8080"],
    ["127.0.0.1:8080"],
    ["192.168.1.7"],
    ["[::1]:8080"],
    ["[FE80::1%25eth0]"],
    ["gpu"],
    ["Chat.Example.:443"],
    # Of a client that is no browser.
    [],
)
REFUSED = (
    ["evil.example"],
    ["evil.example:8080"],
    ["localhost.evil.example"],
    ["127.0.0.1.evil.example"],
    ["localhost", "evil.example"],
    ["127.0.0.1@evil.example"],
    ["localhost:8080:80"],
    ["localhost.."],
    ["[localhost]"],
    ["::1"],
    ["[127.0.0.1]"],
    ["evil.example#[::1]"],
    [""],
)


def headers_of(hosts: Sequence[str]) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), *((b"host", host.encode()) for host in hosts)]


@pytest.mark.parametrize("hosts", ANSWERED)
def test_addresses_localhost_and_the_servers_names_are_answered(hosts: Sequence[str]):
    WebAccess(Settings(model=MODEL, host="GPU", allowed_hosts=("chat.example",))).check_host(headers_of(hosts))


@pytest.mark.parametrize("hosts", REFUSED)
def test_other_host_names_are_refused(hosts: Sequence[str]):
    access = WebAccess(Settings(model=MODEL, host="gpu", allowed_hosts=("chat.example",)))
    with pytest.raises(WrongHost, match="--allowed-host"):
        access.check_host(headers_of(hosts))


def test_any_host_name_can_be_allowed():
    WebAccess(Settings(model=MODEL, allowed_hosts=("*",))).check_host(headers_of(["evil.example"]))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/tree/search?q=private"),
        ("DELETE", "/v1/cache"),
        ("POST", URL),
        ("POST", "/v1/messages"),
        ("POST", "/api/chat"),
        ("GET", "/health"),
        ("GET", "/"),
        ("OPTIONS", URL),
    ],
)
async def test_a_rebound_name_reaches_nothing(method: str, path: str):
    async with api() as a:
        rebound = {"host": "evil.example:8080", "origin": "http://evil.example:8080", "sec-fetch-site": "same-origin"}
        refused = await a.client.request(method, path, headers=rebound)
    assert refused.status_code == 421
    error = refused.json()["error"]
    assert "--allowed-host" in (error if isinstance(error, str) else error["message"])
    assert ("type" in refused.json()) == (path == "/v1/messages")

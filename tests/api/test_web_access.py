"""What a page in a browser may do to a server that its user runs."""

import json
from collections.abc import Mapping, Sequence

import pytest

from reprise.api.http.web_access import ForeignPage, WebAccess, WrongHost
from reprise.core.settings import Settings
from tests.api.servers import MODEL, api

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "Hi"}]
URL = "/v1/chat/completions"
EVIL = "https://evil.example"

ANSWERED: tuple[list[str], ...] = (
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


SERVER = {"host": "127.0.0.1:8080"}
FOREIGN: tuple[dict[str, str], ...] = (
    {"origin": EVIL},
    {"origin": EVIL, "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
    # Another program's page on this machine.
    {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://127.0.0.1:3000"},
    {"origin": "http://127.0.0.1"},
    {"origin": "null"},
    {"origin": ""},
)
OWN: tuple[dict[str, str], ...] = (
    {},
    {"origin": "http://127.0.0.1:8080"},
    {"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
    # A gateway takes TLS away, or names this server itself.
    {"host": "chat.example", "origin": "https://chat.example"},
    {"host": "Chat.Example:443", "origin": "https://chat.example"},
    {"origin": "https://chat.example", "sec-fetch-site": "same-origin"},
)
CHANGES = (
    ("POST", "/v1/models/other/unload"),
    ("POST", URL),
    ("DELETE", "/v1/cache"),
    ("PUT", "/v1/nothing"),
    ("GET", "/v1/cache/budgets"),
    ("HEAD", "/v1/cache/budgets"),
    ("GET", "/v1/cache/tree/search"),
    ("GET", "/v1/cache/requests/some"),
    ("GET", "/v1/events"),
)
READS = (("GET", "/health"), ("GET", "/v1/models"), ("HEAD", "/"), ("OPTIONS", URL), ("OPTIONS", "/v1/cache/budgets"))


def check(headers: Mapping[str, str], *requests: tuple[str, str], origins: tuple[str, ...] = ()) -> None:
    sent = [(name.encode(), value.encode()) for name, value in {**SERVER, **headers}.items()]
    access = WebAccess(Settings(model=MODEL, cors_origins=origins))
    for method, path in requests:
        access.check_origin(method, path, sent)


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_foreign_page_changes_nothing_and_asks_for_nothing_costly(headers: Mapping[str, str]):
    check(headers, *READS)
    for request in CHANGES:
        with pytest.raises(ForeignPage, match="--cors-origin"):
            check(headers, request)
    if headers.get("origin"):
        check(headers, *CHANGES, origins=("https://other.example", headers["origin"]))
    check(headers, *CHANGES, origins=("*",))


@pytest.mark.parametrize("headers", OWN)
def test_the_page_and_clients_that_are_none_do_everything(headers: Mapping[str, str]):
    check(headers, *READS, *CHANGES)


def test_an_origin_without_a_host_is_foreign():
    with pytest.raises(ForeignPage):
        WebAccess(Settings(model=MODEL)).check_origin("POST", URL, [(b"origin", b"http://127.0.0.1:8080")])


@pytest.mark.parametrize("path", ["/v1/cache/budgets", "/cache/budgets", "/v1/v1/cache/budgets"])
async def test_other_spellings_of_an_address_are_guarded(path: str):
    async with api() as a:
        refused = await a.client.get(path, headers={"origin": EVIL})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin")


@pytest.mark.parametrize("path", [URL, "/v1/messages", "/api/chat"])
async def test_a_body_needs_no_type_unless_a_web_page_sends_it(path: str):
    content = json.dumps({"messages": HI, "stream": False, "max_tokens": 4, "options": {"num_predict": 4}}).encode()
    kinds: tuple[dict[str, str], ...] = (
        {},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/plain"},
    )
    async with api(settings=Settings(model=MODEL, cors_origins=("https://app.example",))) as a:
        own = str(a.client.base_url).rstrip("/")
        for kind in kinds:
            assert (await a.client.post(path, content=content, headers=kind)).status_code == 200
            for page, status in ((EVIL, 403), ("https://app.example", 400), (own, 400)):
                sent = await a.client.post(path, content=content, headers={**kind, "origin": page})
                assert sent.status_code == status, (kind, page, sent.text)
            sent = await a.client.post(path, content=content, headers={**kind, "sec-fetch-site": "same-origin"})
            assert sent.status_code == 400
            assert "Content-Type: application/json" in sent.text
        wrong = await a.client.post(path, content=b"a=b&c=d", headers=kinds[1])
    assert wrong.status_code == 400
    assert "not valid JSON" in wrong.text


async def test_a_page_that_is_allowed_reads_internal_errors(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise RuntimeError("planted")

    async with api(settings=Settings(model=MODEL, cors_origins=("https://app.example",))) as a:
        monkeypatch.setattr(a.service, "status", fail)
        failed = await a.client.get("/health", headers={"origin": "https://app.example"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert failed.headers["access-control-allow-origin"] == "https://app.example"

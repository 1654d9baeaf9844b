"""What a web page may do here: the host names of this server, and which requests come from pages of other origins.

Any page that a user opens can send requests to this machine. A name of its author's that is made to point here (DNS
rebinding) makes the page this server's own origin, unless the server insists on its names. Imports the standard
library alone, since the socket is there before everything else.
"""

import ipaddress
import re
from collections.abc import Sequence

from reprise.core.errors import RepriseError
from reprise.core.settings import Settings

Headers = Sequence[tuple[bytes, bytes]]
"""As in ASGI: names in lower case."""

_ANY = "*"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_COSTLY = ("/v1/cache/", "/v1/events")
"""What a GET below these paths asks for takes the engine's time, or a thread's: a page of another origin cannot read
it, and an image's address is enough to ask for it."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+(?:%[^\[\]\s]*)?\]|[^\[\]:/@?#\s]+)(?::(?P<port>[0-9]*))?")
"""`host[:port]`, with the brackets of IPv6."""
_SHOWN = 100


class WrongHost(RepriseError):
    """The request is for a host name that is not one of the server's."""

    status = 421
    code = "wrong_host"


class ForeignPage(RepriseError):
    """The request was sent by a web page of an origin that the server does not allow."""

    status = 403
    code = "foreign_origin"


class WebAccess:
    """The rules of one server, by its `--host`, `--allowed-host` and `--cors-origin`."""

    def __init__(self, settings: Settings) -> None:
        self._origins = frozenset(settings.cors_origins)
        names = [settings.host, *settings.allowed_hosts]
        self._names = frozenset({"localhost", *(_bare(name) for name in names)})

    def check_host(self, headers: Headers) -> None:
        """Raise WrongHost unless every `Host` is an IP address, `localhost`, or a name that the server was given.

        Browsers always send one, so a request without (HTTP/1.0) is no page's.
        """
        for host in _values(headers, b"host"):
            if not self._answers_to(host):
                raise WrongHost(
                    f"This server does not answer to the host name {host[:_SHOWN]!r}. Use its IP address or localhost, "
                    "or start it with `--allowed-host NAME` if that name is meant to lead here."
                )

    def check_origin(self, method: str, path: str, headers: Headers) -> None:
        """Raise ForeignPage for what changes or costs something, if a page of an origin asks that is not allowed."""
        if method in _READING and not (method != "OPTIONS" and path.startswith(_COSTLY)):
            return
        if _ANY in self._origins:
            return
        origins = _values(headers, b"origin")
        if origins and self._origins.issuperset(origins):
            return
        # What browsers of today say themselves, also behind a gateway that changes `Host`.
        sites = _values(headers, b"sec-fetch-site")
        if sites:
            is_foreign = not {"same-origin", "none"}.issuperset(sites)
        else:
            hosts = _values(headers, b"host")
            is_foreign = not all(_is_own(origin, hosts) for origin in origins)
        if is_foreign:
            page = f"pages of {origins[0][:_SHOWN]!r}" if origins else "pages of other origins"
            raise ForeignPage(f"This server does not take requests of {page}. --cors-origin allows an origin.")

    def _answers_to(self, host: str) -> bool:
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        name = _bare(found["host"])
        return _ANY in self._names or name in self._names or _is_address(found["host"])


def is_from_page(headers: Headers) -> bool:
    """Whether a browser sends it for a page, as far as it says so: other clients send neither of these headers."""
    return any(name in (b"origin", b"sec-fetch-site") for name, _ in headers)


def _is_own(origin: str, hosts: Sequence[str]) -> bool:
    """Whether a page's origin is where the request went; a gateway may have taken TLS away."""
    scheme, _, authority = origin.partition("://")
    wanted = _place(authority, scheme)
    return wanted is not None and len(hosts) > 0 and all(_place(host, scheme) == wanted for host in hosts)


def _place(authority: str, scheme: str) -> tuple[str, str | None] | None:
    """Name and port, by default the scheme's."""
    found = _AUTHORITY.fullmatch(authority)
    return None if found is None else (_bare(found["host"]), found["port"] or _DEFAULT_PORTS.get(scheme))


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _bare(name: str) -> str:
    """A host name as it is compared: names have no case, and one with its root's dot is the same."""
    return name.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    """Whether it is an IP address, which no DNS server can point elsewhere."""
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").removesuffix("."))
    except ValueError:
        return False
    return (found.version == 6) == host.startswith("[")

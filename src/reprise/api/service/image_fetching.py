"""Fetches images from hosts that `--allow-image-urls` names: a public address, a bounded time, a bounded size.

Whoever may send a request chooses the URL, so the request that leaves from here must reach nothing that the sender
could not: the host is one of those that were allowed, all its addresses are public, the connection goes to an address
that was looked at (a name may have another one a moment later), and a redirect is checked like the first URL.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from reprise.core.errors import BadRequest

FETCH_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 3
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}

Resolve = Callable[[str, int], Collection[str]]
"""The addresses of a host."""


def addresses_of(host: str, port: int) -> Collection[str]:
    """The addresses of a host, as this machine knows them."""
    return {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's, for a single machine."""
    known = ipaddress.ip_address(address.partition("%")[0])
    inner = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
    return (known if inner is None else inner).is_global and not known.is_multicast


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFetcher:
    """Fetches images. May be used from several threads; each call takes one for at most `timeout_s`."""

    hosts: frozenset[str]
    max_nbytes: int
    timeout_s: float = FETCH_TIMEOUT_S
    resolve: Resolve = addresses_of
    is_allowed: Callable[[str], bool] = is_public

    def fetch(self, url: str, *, where: str) -> bytes:
        """The content of a URL. Raises BadRequest naming the field."""
        until_s = time.monotonic() + self.timeout_s
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                content, target = self._get(url, until_s, where)
                if target is None:
                    return content
                url = urljoin(url, target)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise BadRequest("An image could not be fetched. Send it as a data URL.", param=where) from error
        raise BadRequest("The URL of an image leads to others too often. Send it as a data URL.", param=where)

    def _get(self, url: str, until_s: float, where: str) -> tuple[bytes, str | None]:
        """The content, or where a redirect leads to."""
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), _PORTS.get(parts.scheme)
        if port is None or host not in self.hosts or parts.port not in (None, port) or parts.username is not None:
            raise BadRequest(
                f"The URL of an image leads to {host or 'no host'}, which --allow-image-urls does not name.",
                param=where,
            )
        addresses = sorted(self.resolve(host, port))
        if not addresses or not all(map(self.is_allowed, addresses)):
            raise BadRequest(f"The host {host} of an image's URL has no public address.", param=where)
        connection = _connection(parts.scheme, host, addresses[0], port, until_s)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Host": host, "Accept": "image/*", "Connection": "close"})
            response = connection.getresponse()
            if response.status in _REDIRECTS:
                return b"", response.getheader("Location") or ""
            if response.status != http.client.OK:
                raise BadRequest(f"The host {host} answered {response.status} for an image.", param=where)
            return self._content(response, connection, until_s, where), None
        finally:
            connection.close()

    def _content(
        self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection, until_s: float, where: str
    ) -> bytes:
        taken = bytearray()
        while True:
            if connection.sock is not None:
                connection.sock.settimeout(_left(until_s))
            chunk = response.read1(_CHUNK)
            if not chunk:
                return bytes(taken)
            taken += chunk
            if len(taken) > self.max_nbytes:
                raise BadRequest(f"An image at a URL is longer than {self.max_nbytes:,} bytes.", param=where)
            _left(until_s)


def _connection(scheme: str, host: str, address: str, port: int, until_s: float) -> http.client.HTTPConnection:
    """A connection to this address, whose certificate has to be the host's."""
    stream = socket.create_connection((address, port), timeout=_left(until_s))
    if scheme == "http":
        connection = http.client.HTTPConnection(host, port)
    else:
        connection = http.client.HTTPSConnection(host, port)
        try:
            stream = ssl.create_default_context().wrap_socket(stream, server_hostname=host)
        except BaseException:
            stream.close()
            raise
    connection.sock = stream
    return connection


def _left(until_s: float) -> float:
    left = until_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("an image took too long")
    return left

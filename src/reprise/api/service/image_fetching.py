"""Fetches images from hosts that `--allow-image-urls` names: a public address, a bounded time, a bounded size.

Whoever may send a request chooses the URL, so the request that leaves from here must reach nothing that the sender
could not: the host is one of those that were allowed, all its addresses are public, the connection goes to an address
that was looked at (a name may have another one a moment later), and a redirect is checked like the first URL.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from reprise.core.errors import UnreadableImage

FETCH_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 3
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}

Resolve = Callable[[str, int], Collection[str]]
"""The addresses of a host."""


def addresses_of(host: str, port: int) -> Collection[str]:
    """The addresses of a host, as this machine knows them, the one to try first in front."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's, for a single machine."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        if any(known in network for network in _HOUSES):
            return False
        known = _inside(known)
    return known.is_global and not known.is_multicast


_HOUSES = [ipaddress.IPv6Network(network) for network in ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "fec0::/10")]
"""Called global by Python: old forms of IPv4 addresses, a house's own translators, and its networks of old."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


def _inside(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that packets to this one may go to, or the same."""
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or address


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFetcher:
    """Fetches images. May be used from several threads; each call takes one for at most `timeout_s`."""

    hosts: frozenset[str]
    max_nbytes: int
    timeout_s: float = FETCH_TIMEOUT_S
    resolve: Resolve = addresses_of
    is_allowed: Callable[[str], bool] = is_public

    def fetch(self, url: str, *, where: str) -> bytes:
        """The content of a URL. Raises UnreadableImage naming the field."""
        until_s = time.monotonic() + self.timeout_s
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                content, target = self._get(url, until_s, where)
                if target is None:
                    return content
                url = urljoin(url, target)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UnreadableImage("An image could not be fetched. Send it as a data URL.", param=where) from error
        raise UnreadableImage("The URL of an image leads to others too often. Send it as a data URL.", param=where)

    def _get(self, url: str, until_s: float, where: str) -> tuple[bytes, str | None]:
        """The content, or where a redirect leads to."""
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), _PORTS.get(parts.scheme)
        if port is None or host not in self.hosts or parts.port not in (None, port) or parts.username is not None:
            raise UnreadableImage(
                f"The URL of an image leads to {host or 'no host'}, which --allow-image-urls does not name.",
                param=where,
            )
        addresses = list(self.resolve(host, port))
        if not addresses or not all(map(self.is_allowed, addresses)):
            raise UnreadableImage(f"The host {host} of an image's URL has no public address.", param=where)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        stream = _connected(addresses, port, until_s)
        with _shut_at(until_s, stream), closing(_connection(parts.scheme, host, port, stream)) as connection:
            connection.request("GET", path, headers={"Host": host, "Accept": "image/*", "Connection": "close"})
            response = connection.getresponse()
            if response.status in _REDIRECTS:
                return b"", response.getheader("Location") or ""
            if response.status != http.client.OK:
                raise UnreadableImage(f"The host {host} answered {response.status} for an image.", param=where)
            return self._content(response, until_s, where), None

    def _content(self, response: http.client.HTTPResponse, until_s: float, where: str) -> bytes:
        taken = bytearray()
        while True:
            chunk = response.read1(_CHUNK)
            # Asked first: a connection that was shut has no more, like one whose end was read.
            _left(until_s)
            if not chunk:
                return bytes(taken)
            taken += chunk
            if len(taken) > self.max_nbytes:
                raise UnreadableImage(f"An image at a URL is longer than {self.max_nbytes:,} bytes.", param=where)


def _connected(addresses: Sequence[str], port: int, until_s: float) -> socket.socket:
    """A connection to the first of these addresses that can be reached."""
    for num_left in range(len(addresses), 1, -1):
        try:
            return socket.create_connection((addresses[-num_left], port), timeout=_left(until_s) / num_left)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout=_left(until_s))


@contextmanager
def _shut_at(until_s: float, stream: socket.socket) -> Generator[None]:
    """Ends what is read from a connection: a socket's own timeout begins again with each byte."""
    stream.settimeout(_left(until_s))
    # A separate socket: TLS takes over the other one.
    same = stream.dup()

    def shut() -> None:
        with suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(until_s), shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        same.close()


def _connection(scheme: str, host: str, port: int, stream: socket.socket) -> http.client.HTTPConnection:
    """The same connection for HTTP, whose certificate has to be the host's."""
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

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
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+(?:%[^\[\]\s]*)?\]|[^\[\]:/@?#\s]+)(?::(?P<port>[0-9]*))?")
"""`host[:port]`, with the brackets of IPv6."""
_SHOWN = 100


class WrongHost(RepriseError):
    """The request is for a host name that is not one of the server's."""

    status = 421
    code = "wrong_host"


class WebAccess:
    """The rules of one server, by its `--host` and `--allowed-host`."""

    def __init__(self, settings: Settings) -> None:
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

    def _answers_to(self, host: str) -> bool:
        found = _AUTHORITY.fullmatch(host)
        if found is None:
            return False
        name = _bare(found["host"])
        return _ANY in self._names or name in self._names or _is_address(found["host"])


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

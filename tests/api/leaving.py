"""A client that hangs up."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


@contextmanager
def asking(server: str, path: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A request under way. When the block ends its client is gone, whatever it has read by then."""
    address = urlsplit(server)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()

"""Servers in this process in place of those that the command starts, and one that only talks."""

import json
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from reprise.lab.bench.sides import Side
from tests.api.real_server import real_server


class InProcess(Side):
    """Our server with a tiny model. `records` are its own, taken before it stops."""

    is_ours = True

    def __init__(self, name: str, architecture: str = "llama", **settings: Any) -> None:
        super().__init__(name)
        self._architecture, self._settings = architecture, {"settles": False, "is_audit_off": True, **settings}
        self.records: dict[str, dict[str, Any]] = {}
        self.num_starts = 0

    def _connect(self, running: ExitStack) -> httpx.Client:
        self.num_starts += 1
        client = running.enter_context(real_server(self._architecture, **self._settings))
        running.callback(self._take_records)
        return client

    def _take_records(self) -> None:
        page = self.get("/v1/cache/requests?limit=200")["data"]
        self.records |= {record["id"]: record for record in page}


@contextmanager
def talking(answer: dict[str, Any], *, status: int = 200, models: tuple[str, ...] = ("one",)) -> Generator[str]:
    """The address of a server that answers each request with this."""

    class RivalHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": model} for model in models]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._say(status, answer)

        def _say(self, code: int, what: dict[str, Any]) -> None:
            body = json.dumps(what).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *told: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), RivalHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

"""A hub on this machine, which speaks as much of the hub's API as fetching a model takes."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(eq=False)
class FakeHub:
    """What it has, by id; how it refuses; and what was asked for.

    `breaks`: files whose connection is cut after so many bytes, the first time that they are fetched.
    """

    models: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    breaks: dict[str, int] = field(default_factory=dict[str, int])
    asked: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    url: str = ""

    def add(self, model: str, directory: Path, **others: bytes) -> None:
        files = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
        self.models[model] = {**files, **others}

    def listed(self, query: dict[str, list[str]]) -> list[dict[str, object]]:
        """What a search finds: all models are for MLX, and have so many downloads as their names have letters."""
        assert (query["filter"], query["sort"]) == (["mlx"], ["downloads"])
        named = sorted((name for name in self.models if query["search"][0] in name), key=len, reverse=True)
        return [
            {
                "id": name,
                "downloads": len(name),
                "config": json.loads(self.models[name]["config.json"]),
                "safetensors": {"parameters": {"U32": 10**9, "BF16": 10**8}, "total": 11 * 10**8},
            }
            for name in named
        ][: int(query["limit"][0])]

    def fetched(self) -> Counter[str]:
        """How often the content of each file was asked for."""
        return Counter(
            path.rsplit("/", 1)[-1] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path
        )


@contextmanager
def running_hub() -> Generator[FakeHub]:
    hub = FakeHub()

    class HubHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append((self.command, path, self.headers.get("Range", "")))
            if path in ("", "/"):
                self.answer(200, b"", {})
                return
            if path == "/api/models":
                self.answer(200, json.dumps(hub.listed(parse_qs(urlsplit(self.path).query))).encode(), {})
                return
            found = re.fullmatch(
                r"(?:/api/models)?/([^/]+/[^/]+?)(?:/(revision|tree|resolve)/([^/]+))?(?:/(.+))?", path
            )
            assert found is not None, path
            model, what, _, name = found.groups()
            if model in hub.refusals:
                status, code = hub.refusals[model]
                self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
            elif model not in hub.models:
                self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif what == "resolve":
                self.answer_file(hub.models[model].get(name), name)
            elif what == "tree":
                files = hub.models[model].items()
                tree = [{"type": "file", "path": p, "size": len(c), "oid": etag(c)} for p, c in files]
                self.answer(200, json.dumps(tree).encode(), {})
            else:
                siblings = [{"rfilename": path} for path in hub.models[model]]
                body = {
                    "id": model,
                    "modelId": model,
                    "sha": COMMIT,
                    "private": False,
                    "tags": [],
                    "siblings": siblings,
                }
                self.answer(200, json.dumps(body).encode(), {})

        def answer_file(self, content: bytes | None, name: str) -> None:
            if content is None:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start = int((re.findall(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["0"])[0])
            if start > 0:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            cut = hub.breaks.pop(name, None) if self.command == "GET" else None
            self.answer(206 if start > 0 else 200, content[start:], headers, cut=cut)

        def answer(self, status: int, body: bytes, headers: dict[str, str], *, cut: int | None = None) -> None:
            self.send_response(status)
            for header, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()

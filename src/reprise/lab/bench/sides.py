"""Who is asked: this server with reuse and without, mlx-lm's, or any other that runs already."""

import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import httpx
import psutil

from reprise.core.errors import RepriseError
from reprise.lab.bench.client import Body, ClientReply, Post, Unreachable, send
from reprise.lab.bench.server_process import ServerFailed, ServerProcess, free_port, mlx_lm_command, reprise_command

_START_S = 900.0
"""A large model is read from a slow disk."""
_CONNECT_S = 10.0
_SAMPLE_S = 0.25

ON, OFF, MLX_LM = "reuse on", "reuse off", "mlx-lm"


class BenchFailed(RepriseError):
    """The benchmark cannot go on; the sentence says why."""

    code = "bench_failed"


class Side(ABC):
    """A server that takes part, between `start` and `stop`."""

    is_ours = False
    can_restart = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.start_s = 0.0
        """How long it took to start, the last time."""
        self._running = ExitStack()

    @abstractmethod
    def _connect(self, running: ExitStack) -> httpx.Client:
        """Start it if it has to be; what has to be closed is entered into `running`."""

    def start(self) -> None:
        """Raises BenchFailed."""
        began_s = time.perf_counter()
        try:
            with ExitStack() as running:
                self._client = self._connect(running)
                self._running = running.pop_all()
        except (ServerFailed, Unreachable) as error:
            raise BenchFailed(f"{self.name}: {error}") from error
        self.start_s = time.perf_counter() - began_s

    def stop(self) -> None:
        self._running.close()

    def restart(self) -> None:
        """Stop it and start it again. It has nothing then but what it kept on disk."""
        self._running.close()
        self.start()

    @property
    def pid(self) -> int | None:
        """Of the process, if it is on this machine and we started it."""
        return None

    def cpu_s(self) -> float | None:
        """Processor seconds that the process has taken since its start; None where that is not known."""
        try:
            times = psutil.Process(self.pid).cpu_times() if self.pid is not None else None
        except psutil.Error:
            return None
        return None if times is None else float(times.user + times.system)

    def check_runs(self) -> None:
        """Raises ServerFailed with the server's last words if it is known to have died."""
        return

    def adapted(self, post: Post) -> Post:
        """The request as this server takes it."""
        return post

    def ask(self, posts: Sequence[Post], *, timeout_s: float) -> list[ClientReply]:
        """Send the requests at once, and read all answers. Raises Refused, or BenchFailed if the server has gone."""
        self._client.timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            if len(posts) == 1:
                return [send(self._client, self.adapted(posts[0]))]
            with ThreadPoolExecutor(len(posts)) as pool:
                sent = [pool.submit(send, self._client, self.adapted(post)) for post in posts]
                return [reply.result() for reply in sent]
        except Unreachable as error:
            try:
                self.check_runs()
            except ServerFailed as death:
                raise BenchFailed(f"{self.name}: {death}") from error
            raise BenchFailed(f"{self.name} no longer responds: {error}.") from error

    def get(self, path: str) -> dict[str, Any]:
        """A JSON object that the server tells; empty if it does not."""
        return self._told("GET", path)

    def post(self, path: str, body: Body) -> dict[str, Any]:
        """The same for what is asked with a body."""
        return self._told("POST", path, json=body)

    def _told(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **more)
            return response.json() if response.is_success else {}
        except (httpx.TransportError, ValueError):
            return {}


class _LocalSide(Side):
    """A server that the bench starts as a process."""

    _process: ServerProcess

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def check_runs(self) -> None:
        self._process.check_runs()


class RepriseSide(_LocalSide):
    """`reprise serve`, without what it does while idle: counts would depend on how long that was."""

    is_ours = True

    def __init__(self, name: str, model: str, *options: str) -> None:
        super().__init__(name)
        self._model, self._options = model, ("--no-settle", "--no-audit", "--quiet", *options)
        self._disk: tempfile.TemporaryDirectory[str] | None = None

    def _connect(self, running: ExitStack) -> httpx.Client:
        options = self._options
        if self._disk is not None:
            options = (*options, "--disk-cache", self._disk.name)
        self._process = running.enter_context(ServerProcess(reprise_command(self._model, *options), start_s=_START_S))
        return running.enter_context(httpx.Client(base_url=self._process.url))

    def begin_restarts(self) -> None:
        """Start with a disk, in a separate folder, for a workload in which the server is restarted."""
        if self._disk is None and "--no-prefix-cache" not in self._options:
            self._disk = tempfile.TemporaryDirectory(prefix="reprise-bench-")
            self.restart()

    def stop(self) -> None:
        super().stop()
        if self._disk is not None:
            self._disk.cleanup()
            self._disk = None


class MlxLmSide(_LocalSide):
    """mlx-lm's own server, from the same environment."""

    def __init__(self, model: str) -> None:
        super().__init__(MLX_LM)
        self._model = model

    def _connect(self, running: ExitStack) -> httpx.Client:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = mlx_lm_command(self._model, port)
        self._process = running.enter_context(ServerProcess(command, url=url, start_s=_START_S))
        return running.enter_context(httpx.Client(base_url=url))


class UrlSide(Side):
    """A server that runs already, by its address: with or without the `/v1` of its API."""

    can_restart = False

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        super().__init__(self._url.partition("://")[2] or self._url)
        self._model, self._key = model, key

    def _connect(self, running: ExitStack) -> httpx.Client:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            client = running.enter_context(httpx.Client(base_url=self._url, headers=headers, timeout=_CONNECT_S))
            response = client.get("/v1/models")
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise BenchFailed(f"Invalid URL {self._url}: {error}. Example: http://127.0.0.1:8000.") from error
        except httpx.TransportError as error:
            raise BenchFailed(f"No server answers at {self._url}: {error}.") from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise BenchFailed(f"{self._url} requires an API key: pass it with --vs-key.")
        if self._model is None:
            self._model = self._only_model(response)
        return client

    def _only_model(self, response: httpx.Response) -> str:
        try:
            models = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            models = []
        if len(models) != 1:
            listed = f"It has {', '.join(models[:8])}." if models else "It lists no models."
            raise BenchFailed(f"Choose a model of {self._url} with --vs-model. {listed}")
        return models[0]

    def adapted(self, post: Post) -> Post:
        return replace(post, body={**post.body, "model": self._model})


@contextmanager
def started(sides: Sequence[Side]) -> Generator["MemorySampler"]:
    """The servers, started at once, with their memory watched; stopped at the end. Raises BenchFailed."""
    with ExitStack() as running:
        for side in sides:
            running.callback(side.stop)
        with ThreadPoolExecutor(len(sides)) as pool:
            for starting in [pool.submit(side.start) for side in sides]:
                starting.result()
        yield running.enter_context(MemorySampler(sides))


class MemorySampler:
    """Samples what the servers' processes hold, on a thread, within a `with` block."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)
        self.samples: dict[str, list[tuple[float, int]]] = {side.name: [] for side in sides}
        """By side: seconds since the beginning, and bytes."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        began_s = time.perf_counter()
        every_s = _SAMPLE_S
        while not self._is_over.wait(every_s):
            for side in self._sides:
                nbytes = _process_nbytes(side)
                if nbytes is not None:
                    self.samples[side.name].append((time.perf_counter() - began_s, nbytes))
            # A few hundred samples are a plot, however long it takes.
            every_s = max(_SAMPLE_S, (time.perf_counter() - began_s) / 300)


def _process_nbytes(side: Side) -> int | None:
    """What the system says that a process holds, from outside: without CUDA's own memory, on macOS what it shares."""
    try:
        if side.pid is None:
            return None
        process = psutil.Process(side.pid)
        if sys.platform == "darwin":
            return int(process.memory_full_info().uss)
        return int(process.memory_info().rss)
    except (psutil.Error, AttributeError):
        # It is just being stopped or started.
        return None

"""Groups of real processes on the loopback, with the ring of MLX. They end with the test, whatever happens."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

PATIENCE_S = 240.0


class RankProcesses:
    """One command, run as each of several ranks; with `only`, as the first so many of them."""

    def __init__(self, command: Sequence[str], directory: Path, *, num_ranks: int = 2, only: int | None = None) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ranks)]
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
        for each in sockets:
            each.close()
        hostfile = directory / "hosts.json"
        hostfile.write_text(json.dumps(hosts))
        root = str(Path(__file__).parents[2])
        base = {**os.environ, "MLX_HOSTFILE": str(hostfile), "PYTHONPATH": root, "REPRISE_CONFIG": os.devnull}
        self._logs: list[IO[str]] = [(directory / f"{rank}.log").open("w+") for rank in range(num_ranks)[:only]]
        self.processes = [
            subprocess.Popen(
                list(command), env={**base, "MLX_RANK": str(rank)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            for rank, log in enumerate(self._logs)
        ]

    def log(self, rank: int) -> str:
        """What a rank has written so far."""
        log = self._logs[rank]
        return os.pread(log.fileno(), 1 << 24, 0).decode(errors="replace")

    def wait_for(self, text: str, *, rank: int = 0) -> str:
        """Wait until a rank has written this; gives all that it wrote."""
        due_s = time.monotonic() + PATIENCE_S
        while text not in (written := self.log(rank)):
            has_ended = self.processes[rank].poll() is not None and text not in self.log(rank)
            assert not has_ended and time.monotonic() < due_s, (rank, written, [self.log(r) for r in self.ranks])
            time.sleep(0.05)
        return written

    def wait(self, patience_s: float = PATIENCE_S) -> list[int]:
        """The exit status of each rank, when all have ended."""
        due_s = time.monotonic() + patience_s
        try:
            return [process.wait(max(0.1, due_s - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError([self.log(rank) for rank in self.ranks]) from error

    @property
    def ranks(self) -> range:
        return range(len(self.processes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for log in self._logs:
            log.close()

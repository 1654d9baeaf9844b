"""`reprise serve` of a tiny model in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.models.tiny import tiny_model


@contextmanager
def server_process(
    log: Path, *options: str, architecture: str = "qwen3_5", program: tuple[str, ...] = ("-m", "reprise.cli.main")
) -> Generator[tuple[subprocess.Popen[str], int]]:
    """The process, and the port that it serves on when it is given; `log` is its standard error. `program`: what Python
    runs."""
    model = str(tiny_model(architecture))
    command = [sys.executable, *program, "serve", model, "--port", "0", *options]
    with log.open("w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.search(r":(\d+) ", process.stdout.readline())
            assert said is not None, log.read_text()
            yield process, int(said.group(1))
        finally:
            process.kill()

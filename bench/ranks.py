"""Processor time that rank 0 takes to tell the other ranks what to run, per decode step, and its share of a step.

    python -m bench.ranks [--model llama] [--hidden 512] [--ranks 2] [--tokens 200]

Starts the ranks on this machine, with the ring of MLX on the loopback.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rivals import MODELS
from bench.tiny.build import build_model
from reprise.cluster.ranks.group import LeadingRank, follow
from reprise.cluster.ranks.leader import Leader
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Sampling
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens
from reprise.loop import EngineClient

PROMPT = 2048
SHARE = 0.05
"""Telling takes less than this share of a decode step: a step of these small models is shorter than any real one."""

_ids = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMoment:
    """When a token came, and what had been told until then."""

    at_s: float
    told_s: float
    num_told: int


class Streams:
    """Jobs that run at the same time. The engine's thread calls `hear`."""

    def __init__(self, loop: EngineClient, leader: Leader) -> None:
        self._loop = loop
        self._leader = leader

    def moment(self) -> TokenMoment:
        leader = self._leader
        return TokenMoment(at_s=time.perf_counter(), told_s=leader.spent_s, num_told=leader.num_operations)

    def run(self, prompts: Sequence[Sequence[int]], *, num: int) -> list[TokenMoment]:
        """The moments of the tokens of the job that began last: then all decode together."""
        left = [threading.Event() for _ in prompts]
        tokens: list[list[TokenMoment]] = [[] for _ in prompts]
        failures: list[Exception] = []

        def hear(event: Event, which: int) -> None:
            if isinstance(event, Sampled):
                tokens[which].append(self.moment())
            if isinstance(event, Finished):
                failures.extend([event.error] if event.error is not None else [])
                left[which].set()

        for which, prompt in enumerate(prompts):
            job = Job(
                id=f"job-{next(_ids)}",
                prompt=Prompt(tokens=as_tokens(prompt)),
                max_tokens=num,
                sampling=Sampling(temperature=0),
            )
            self._loop.submit(job, lambda event, which=which: hear(event, which))
        for ended in left:
            ended.wait()
        assert not failures, failures
        return max(tokens, key=lambda moments: moments[0].at_s)


def lead(settings: Settings, *, num: int) -> int:
    """Be rank 0; gives 1 if telling takes more than `SHARE` of a step of one stream."""
    ranks = LeadingRank(settings)
    loop = EngineClient(settings, load=ranks.load)
    loop.start()
    assert ranks.leader is not None
    streams = Streams(loop, ranks.leader)
    share = 0.0
    try:
        streams.run([range(20, 60)], num=8)
        for at_once in (1, 4):
            prompts = [[10 + which, *range(20, 60)] for which in range(at_once)]
            moments = streams.run(prompts, num=num)
            # Others may still be ending with the last tokens, and beginning with the first.
            first, last = moments[num // 8], moments[num // 2]
            steps = num // 2 - num // 8
            step_us, told_us = (1e6 * each / steps for each in (last.at_s - first.at_s, last.told_s - first.told_s))
            share = max(share, told_us / step_us) if at_once == 1 else share
            print(
                f"decoding, {at_once} at once: {told_us:6.1f} us of {step_us:8.1f} us a step "
                f"({100 * told_us / step_us:.2f} %), {(last.num_told - first.num_told) / steps:.1f} operations",
                flush=True,
            )
        before = streams.moment()
        after = streams.run([[9, *(20 + i % 400 for i in range(PROMPT - 1))]], num=1)[0]
        told_us, took_us = 1e6 * (after.told_s - before.told_s), 1e6 * (after.at_s - before.at_s)
        print(f"a prompt of {PROMPT:,}:    {told_us:6.1f} us of {took_us:8.1f} us", flush=True)
        return int(share > SHARE)
    finally:
        loop.close(timeout_s=30)
        ranks.close()


def launch(options: argparse.Namespace) -> int:
    """Start this bench as each of the ranks, on a model of random weights; gives what rank 0 gave."""
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        config = dict(MODELS[options.model])
        sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "num_hidden_layers": 4}
        config |= {"text_config": {**config["text_config"], **sizes}} if "text_config" in config else sizes
        model = Path(folder) / "model"
        build_model(model, config)
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(options.ranks)]
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in listeners]
        for each in listeners:
            each.close()
        hostfile = Path(folder) / "hosts.json"
        hostfile.write_text(json.dumps(hosts), encoding="utf-8")
        command = [sys.executable, "-m", "bench.ranks", "--directory", str(model), "--tokens", str(options.tokens)]
        started = [
            subprocess.Popen(command, env={**os.environ, "MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)})
            for rank in range(options.ranks)
        ]
        try:
            leading, *others = [process.wait() for process in started]
            return leading or max(others)
        finally:
            for process in started:
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size: the larger, the more a pass costs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200, help="length of an answer")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory is None:
        return launch(options)
    settings = Settings(model=options.directory, prefill_chunk=PROMPT, drafts="off", is_audit_off=True)
    if os.environ["MLX_RANK"] == "0":
        return lead(settings, num=options.tokens)
    follow(settings, on_ready=lambda: None, on_end=lambda: os._exit(75))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What streams feel of a restore from disk beside them: the longest gap between two of their tokens.

    python -m bench.disk [--megabytes 1000] [--streams 4]

The records of a long prompt are made of random entries and put on disk, no model has computed them; then an engine
starts, streams answer short prompts, and the long prompt is asked for. Bytes are exact and gate (exit status 1): one
part of the restore copies no more than one layer's share of a record, and makes room for one layer once; nothing is
copied as a whole; all of the prompt is resumed. Times are for reading: they depend on the machine.
"""

import argparse
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np

from bench.rivals import LLAMA
from reprise.cache.lookup import SegmentSlice
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Purpose, Sampling
from reprise.core.kinds import Full
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.demo.tiny.build import build_model
from reprise.disk.record import DiskRecord
from reprise.engine.load import load_model
from reprise.engine.payloads import pack
from reprise.engine.records import RecordEncoder, RestoringSequence
from reprise.engine.runner import Runner
from reprise.loop import EngineLoop
from reprise.loop.disk import open_disk

# As many layers as a real model, so that one layer's share is as small.
MODEL = {**LLAMA, "num_hidden_layers": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
STALL_MS = 100
NUM_USUAL = 40
_PATIENCE_S = 600.0


class Heard:
    """The times of a job's tokens, and its end."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.end: Finished | None = None
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, Sampled):
                self.token_s.append(time.perf_counter())
            elif isinstance(event, Finished):
                self.end = event
            self._changed.notify_all()

    def wait(self, num: int | None = None) -> None:
        """Until so many tokens have come; None: until the end."""
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: self.end is not None or (num is not None and len(self.token_s) >= num), _PATIENCE_S
            )
        assert has_come, "the engine says nothing"


def put_on_disk(settings: Settings, num: int) -> tuple[Tokens, int]:
    """A prompt of about `num` tokens that the disk has all of, and the bytes of a token's entries."""
    loaded = load_model(settings.model)
    runner = Runner(loaded, can_batch=True)
    disk = open_disk(settings, loaded, runner.footprint)
    assert disk is not None
    tokens = as_tokens(np.random.default_rng(0).integers(0, 500, num // disk.block * disk.block))
    shape = (1, MODEL["num_key_value_heads"], disk.block, MODEL["head_dim"])
    for k, parent in disk.missing(tokens, namespace="").blocks:
        span = Span(k * disk.block, (k + 1) * disk.block)
        segment = pack([mx.random.normal(shape) for _ in range(2 * MODEL["num_hidden_layers"])])
        encoder = RecordEncoder(kind=None)
        encoder.add_entries([SegmentSlice(segment, 0, disk.block, span)], Full(), span)
        record = DiskRecord.of(
            root=disk.root(""),
            parent=parent,
            is_tail=False,
            start=span.start,
            tokens=tokens[span.start : span.stop],
            about=encoder.about,
            sections=encoder.sections,
        )
        assert disk.put(record) and disk.flush(_PATIENCE_S)
    disk.close(_PATIENCE_S)
    return tokens, runner.footprint.full


def job(name: str, tokens: Tokens, *, purpose: Purpose, num: int) -> Job:
    return Job(id=name, prompt=Prompt(tokens=tokens), purpose=purpose, max_tokens=num, sampling=Sampling(temperature=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    parts: list[int] = []
    part_s: list[float] = []
    starts: list[int] = []
    work, start = RestoringSequence.work, Runner.start

    def counted(sequence: RestoringSequence) -> int:
        begun_s = time.process_time()
        parts.append(work(sequence))
        part_s.append(time.process_time() - begun_s)
        return parts[-1]

    def started(runner: Runner, restore, *, reserve: int):
        starts.append(restore.position)
        return start(runner, restore, reserve=reserve)

    RestoringSequence.work, Runner.start = counted, started
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        build_model(Path(folder, "model"), MODEL)
        settings = Settings(
            model=str(Path(folder, "model")),
            disk_directory=str(Path(folder, "disk")),
            disk_bytes=Bytes(4 * options.megabytes * 10**6),
            cache_bytes=Bytes(4 * options.megabytes * 10**6),
            max_stall_ms=STALL_MS,
        )
        per_token = 2 * 4 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"]
        tokens, full = put_on_disk(settings, options.megabytes * 10**6 // per_token)
        loop = EngineLoop(settings)
        loop.start()
        streams = [Heard() for _ in range(options.streams)]
        for i, stream in enumerate(streams):
            loop.submit(job(f"stream-{i}", as_tokens([i + 1] * 20), purpose=Purpose.GENERATE, num=10**5), stream)
        for stream in streams:
            stream.wait(NUM_USUAL)
        sent_s = time.perf_counter()
        long = Heard()
        loop.submit(job("long", tokens, purpose=Purpose.PREFILL, num=0), long)
        long.wait()
        done_s = time.perf_counter()
        loop.close(now=True, timeout_s=_PATIENCE_S)
    gaps = [b - a for s in streams for a, b in pairwise(s.token_s) if sent_s < b and a < done_s]
    usual = sorted(b - a for s in streams for a, b in pairwise(s.token_s) if b <= sent_s)
    assert long.end is not None
    nbytes = len(tokens) * full
    # A record's share of a layer, and the layer's room for all entries and some more.
    most = (2 * len(tokens) + 4096) * full // MODEL["num_hidden_layers"] + (4 << 20)
    holds = bool(parts) and max(parts) <= most and starts.count(len(tokens)) == 0
    holds &= long.end.outcome.num_loaded == len(tokens)
    print(f"{len(tokens):,} tokens, {nbytes / 1e6:,.0f} MB, restored beside {options.streams} streams")
    print(f"  took {done_s - sent_s:.2f} s, {nbytes / (done_s - sent_s) / 1e6:,.0f} MB/s")
    print(f"  longest gap of a stream {1000 * max(gaps):.0f} ms (target {STALL_MS})", end="")
    print(f", before: median {1000 * usual[len(usual) // 2]:.0f}, longest {1000 * usual[-1]:.0f} ms")
    print(
        f"  {len(parts):,} parts, the largest {max(parts, default=0) / 1e6:.1f} MB{'' if holds else '  <- too much'}",
        end="",
    )
    print(f", the longest {1000 * max(part_s, default=0):.0f} ms of processor time")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""What streams feel of a restore from disk beside them: the longest gap between two of their tokens.

    python -m bench.disk [--megabytes 1000] [--streams 4] [--layers full] [--held 0]

The records of a long prompt are made of random entries and put on disk, no model has computed them; then an engine
starts, streams answer short prompts, and the long prompt is asked for. `--held`: the share of it that is in memory by
then, which the rest joins. Bytes are exact and gate (exit status 1): no step holds more at its worst than what it may
decode, a plane with its room to grow and a section of a record; all of the prompt is resumed. Times are for reading:
they depend on the machine. The streams' gaps without a restore, before it and after, are measured in the same run.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from bench.rivals import LLAMA
from bench.tiny.build import QWEN3_5, build_model
from reprise.cache.lookup import SegmentSlice
from reprise.core.allowance import TAKEN_AT_ONCE
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Purpose, Sampling
from reprise.core.kinds import Footprint, Full, KvKind
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.disk.records.record import DiskRecord
from reprise.disk.store.cache import DiskCache
from reprise.engine.models.load import load_model
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.records import RecordEncoder
from reprise.engine.running.runner import Runner
from reprise.engine.states.payloads import PackedSegment, pack, save
from reprise.loop import EngineClient
from reprise.loop.disk import open_disk
from reprise.loop.sequences import SequencePool
from reprise.loop.tier import DiskTier
from reprise.loop.worker import Worker
from reprise.loop.write_behind import SECTION_NBYTES

_LAYERS = 32
"""As many as a real model has, so that one layer's share is as small."""
_HEADS: Mapping[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_QWEN: Mapping[str, Any] = QWEN3_5["text_config"]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "full": {**LLAMA, **_HEADS, "num_hidden_layers": _LAYERS},
    "state": {
        **QWEN3_5,
        "text_config": {**_QWEN, **_HEADS, "num_hidden_layers": _LAYERS, "full_attention_interval": 2},
    },
    "window": {
        **LLAMA,
        **_HEADS,
        "model_type": "gemma3_text",
        "num_hidden_layers": _LAYERS,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
    },
}
STALL_MS = 100
NUM_USUAL = 100
"""Tokens of each stream, before the restore and after it, whose gaps the others are compared with."""
_NUM_FIRST = 20
"""Of each stream's first tokens nothing is said: buffers grow and pages are new."""
_PATIENCE_S = 600.0


class TokenTimes:
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


class RecordMaker:
    """Puts a path of random states on disk, in the forms that the layers of this model have."""

    def __init__(self, runner: Runner, disk: DiskCache) -> None:
        self._disk = disk
        self._layout = runner.loaded.blueprint.layout
        self._like: LiveSequence = runner.begin()
        runner.prefill([self._like], [as_tokens([1] * 16)])

    def put(self, tokens: Tokens) -> None:
        """All records of this prompt, the last of which makes its end resumable."""
        [missing] = self._disk.missing(tokens, [len(tokens)], namespace="")
        for k, parent in missing.blocks:
            span = Span(k * self._disk.block, (k + 1) * self._disk.block)
            encoder = RecordEncoder(kind=None)
            if Full() in self._layout.kinds:
                self._add(encoder, Full(), span)
            self._put(encoder, tokens[span.start : span.stop], start=span.start, parent=parent, is_tail=False)
        if missing.needs_tail:
            encoder = RecordEncoder(kind=BoundaryKind.STABLE)
            for kind in self._layout.kinds:
                for need in () if isinstance(kind, Full) else kind.needs(len(tokens)):
                    self._add(encoder, kind, need)
            recurrent = self._like.rows.recurrent()
            if recurrent:
                states = [
                    [None if a is None else mx.random.normal(a.shape).astype(a.dtype) for a in s] for s in recurrent
                ]
                encoder.add_snapshot(save(states))
            self._put(encoder, tokens[:0], start=len(tokens), parent=missing.tail_parent, is_tail=True)

    def _add(self, encoder: RecordEncoder, kind: KvKind, span: Span) -> None:
        planes = [plane for layer in self._like.rows.layers(kind) for plane in layer.planes]
        each = sum(plane.shape[1] * plane.shape[3] * plane.dtype.size for plane in planes)
        for start in range(span.start, span.stop, max(1, SECTION_NBYTES // each)):
            part = Span(start, min(span.stop, start + max(1, SECTION_NBYTES // each)))
            segment: PackedSegment = pack(
                [mx.random.normal((1, p.shape[1], len(part), p.shape[3])).astype(p.dtype) for p in planes]
            )
            encoder.add_entries([SegmentSlice(segment, 0, len(part), part)], kind, part)

    def _put(self, encoder: RecordEncoder, tokens: Tokens, *, start: int, parent: bytes, is_tail: bool) -> None:
        record = DiskRecord(
            root=self._disk.root(""),
            parent=parent,
            is_tail=is_tail,
            start=start,
            tokens=tokens,
            about=encoder.about,
            sections=encoder.sections,
        )
        assert self._disk.put(record) and self._disk.flush(_PATIENCE_S)


def put_on_disk(settings: Settings, num_megabytes: int, *, held: float) -> tuple[Tokens, int, Footprint]:
    """A prompt whose states take so much, of which the disk has all, and how many of its tokens memory will have."""
    loaded = load_model(settings.model)
    runner = Runner(loaded, can_batch=True)
    disk = open_disk(settings, loaded)
    assert disk is not None
    num = (num_megabytes * 10**6 - runner.footprint.checkpoint) // runner.footprint.full
    tokens = as_tokens(np.random.default_rng(0).integers(0, 500, num // disk.block * disk.block))
    num_held = int(held * len(tokens)) // disk.block * disk.block
    maker = RecordMaker(runner, disk)
    for stop in (num_held, len(tokens)):
        if stop > 0:
            maker.put(tokens[:stop])
    disk.close(_PATIENCE_S)
    return tokens, num_held, runner.footprint


def job(name: str, tokens: Tokens, *, purpose: Purpose, num: int) -> Job:
    return Job(id=name, prompt=Prompt(tokens=tokens), purpose=purpose, max_tokens=num, sampling=Sampling(temperature=0))


@dataclass(slots=True)
class CountedStep:
    """One step of the engine: the bytes that it held more at its worst, and its seconds."""

    nbytes: int = 0
    step_s: float = 0.0
    taken_s: float = 0.0
    """What of it was for decoding what was read, and for restoring."""


def count_steps(steps: list[CountedStep]) -> None:
    """Count every step of the engine from now on."""

    def timed(owner: type, name: str) -> None:
        work: Callable[..., object] = getattr(owner, name)

        def working(*given: Any, **named: Any) -> object:
            begun_s = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                if steps:
                    steps[-1].taken_s += time.perf_counter() - begun_s

        setattr(owner, name, working)

    for owner, name in ((DiskTier, "advance"), (SequencePool, "start"), (SequencePool, "restore")):
        timed(owner, name)
    step = Worker.step

    def counted(self: Worker) -> None:
        now = CountedStep()
        steps.append(now)
        before, begun_s = mx.get_active_memory(), time.perf_counter()
        mx.reset_peak_memory()
        step(self)
        now.nbytes, now.step_s = max(0, mx.get_peak_memory() - before), time.perf_counter() - begun_s

    Worker.step = counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--layers", choices=MODELS, default="full")
    parser.add_argument("--held", type=float, default=0.0)
    options = parser.parse_args()
    steps: list[CountedStep] = []
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        build_model(Path(folder, "model"), MODELS[options.layers])
        settings = Settings(
            model=str(Path(folder, "model")),
            disk_directory=str(Path(folder, "disk")),
            disk_bytes=Bytes(4 * options.megabytes * 10**6),
            cache_bytes=Bytes(8 * options.megabytes * 10**6 + 2 * 10**9),
            max_stall_ms=STALL_MS,
        )
        tokens, num_held, footprint = put_on_disk(settings, options.megabytes, held=options.held)
        loop = EngineClient(settings)
        loop.start()
        if num_held > 0:
            first = TokenTimes()
            loop.submit(job("first", tokens[:num_held], purpose=Purpose.PREFILL, num=0), first)
            first.wait()
        streams = [TokenTimes() for _ in range(options.streams)]
        for i, stream in enumerate(streams):
            loop.submit(job(f"stream-{i}", as_tokens([i + 1] * 20), purpose=Purpose.GENERATE, num=10**5), stream)
        for stream in streams:
            stream.wait(_NUM_FIRST + NUM_USUAL)
        count_steps(steps)
        sent_s = time.perf_counter()
        long = TokenTimes()
        loop.submit(job("long", tokens, purpose=Purpose.PREFILL, num=0), long)
        long.wait()
        done_s, num_steps = time.perf_counter(), len(steps)
        for stream, num in [(stream, len(stream.token_s)) for stream in streams]:
            stream.wait(num + NUM_USUAL)
        loop.close(now=True, timeout_s=_PATIENCE_S)
    between = [(a, b) for s in streams for a, b in pairwise(s.token_s[_NUM_FIRST:])]
    beside = sorted(b - a for a, b in between if sent_s < b and a < done_s)
    usual = sorted(b - a for a, b in between if b <= sent_s or done_s <= a)
    steps = steps[:num_steps]
    assert long.end is not None
    nbytes = footprint.at(len(tokens))
    # What a step may take, a plane with its room to grow, and a section of a record.
    plane = max(each * (len(tokens) + 4096) // 2 for each in footprint.each.values())
    most, worst = TAKEN_AT_ONCE + plane + (8 << 20), max(step.nbytes for step in steps)
    holds = worst <= most and long.end.outcome.num_loaded == len(tokens) - num_held
    where = f", {num_held:,} of them in memory" if num_held > 0 else ""
    print(f"{options.layers}: {len(tokens):,} tokens{where}, {nbytes / 1e6:,.0f} MB, beside {options.streams} streams")
    print(f"  took {done_s - sent_s:.2f} s, {nbytes / (done_s - sent_s) / 1e6:,.0f} MB/s, in {len(steps):,} steps")
    print(f"  gaps of a stream (target {STALL_MS} ms)      median   longest   over the target")
    for name, gaps in (("without it", usual), ("beside it", beside)):
        over = sum(1000 * gap > STALL_MS for gap in gaps)
        print(f"    {name:<32} {1000 * gaps[len(gaps) // 2]:6.1f}    {1000 * gaps[-1]:6.1f}   {over} of {len(gaps)}")
    print(f"    ratio {beside[len(beside) // 2] / usual[len(usual) // 2]:33.2f}    {beside[-1] / usual[-1]:6.2f}")
    taken_s, rest_s = sorted(step.taken_s for step in steps), sorted(step.step_s - step.taken_s for step in steps)
    print(
        f"  of a step, median and most: {1000 * taken_s[len(steps) // 2]:.1f} and {1000 * taken_s[-1]:.1f} ms", end=""
    )
    print(f" to decode, {1000 * rest_s[len(steps) // 2]:.1f} and {1000 * rest_s[-1]:.1f} ms for the rest")
    print(f"  {worst / 1e6:.1f} MB in one step at most", end="")
    print("" if holds else "  <- too much, or not all restored")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""What a pass takes at its peak beside what it leaves: what is reserved for it against what MLX reports.

    python -m bench.peak [--kinds "full attention" towers guesses] [--chunks 128 512] [--depth 4096]

A model of each layer kind with random weights, wider than those of the tests. A prompt is prefilled in chunks of each
length. Per chunk: the price by the model's dimensions alone (a model's outline, `doctor`); the price once one pass of
128 tokens was measured, as when a model is loaded; the price as it is when the pass comes, from all passes before it;
and what it took. Of each prompt the chunk is shown that was underpriced most. Behind a prompt, rows of like length
decode a token each, sampled, and eight each, as drafts are verified. Gates (exit status 1): no pass is priced below
`LEAST` of what it takes, by the dimensions or by what was learnt; and a prompt that was seen once is priced at what it
takes, less a tenth and `VARIES`, and at no more than `MOST` times that.

`towers`: of two families that see, one whose images are as large as they are and one that scales all to one size; the
price as measured at load, by two images, and when an image comes. `guesses`: of a head, with and without entries that
it has still to write, and of a companion, one token and eight. Their gates are the same, but for a guess's `MOST`.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from bench.heads import random_model
from bench.restore import Gates
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.clock import monotonic
from reprise.core.job import Job, Sampling
from reprise.core.pass_price import PassPrice
from reprise.core.prompt import Prompt
from reprise.core.sizes import nbytes_text
from reprise.core.tokens import as_tokens
from reprise.engine import memory as device_memory
from reprise.engine.models.companion import with_companion
from reprise.engine.models.load import load_model
from reprise.engine.models.vision import blank_image
from reprise.engine.running.pass_dimensions import price_by_dimensions
from reprise.engine.running.runner import Runner, footprint_of
from reprise.engine.running.sampler import sample
from reprise.engine.states.blueprint import blueprint_of
from reprise.engine.states.seeing import SeeingModel
from reprise.engine.states.sequence_batch import SequenceBatch
from reprise.loop.executor import Executor
from reprise.loop.sequences import SequencePool
from reprise.memory import Memory
from tests.zoo.build import build_config
from tests.zoo.catalogue import ZOO

_WIDE = {
    "vocab_size": 16384,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
MEASURED = 128
ROWS = 4
LEAST = 0.8
MOST = 2.6
VARIES = 1 << 20
"""Bytes by which passes of one shape differ, as MLX's thread lets go of what it has read sooner or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedKind:
    """A kind of layer: an architecture of the zoo, what is changed of its configuration, and the KV bits."""

    architecture: str
    changes: Mapping[str, Any]
    kv_bits: int | None = None


KINDS: Mapping[str, PricedKind] = {
    "full attention": PricedKind(architecture="qwen3", changes=_WIDE),
    "full attention, 8-bit": PricedKind(architecture="qwen3", changes=_WIDE, kv_bits=8),
    "full + window": PricedKind(architecture="gemma3_text", changes={**_WIDE, "sliding_window": 512}),
    "window + sinks": PricedKind(architecture="gpt_oss", changes={**_WIDE, "sliding_window": 512}),
    "chunked": PricedKind(architecture="llama4", changes={}),
    "full + recurrent": PricedKind(architecture="qwen3_5", changes={}),
    "recurrent": PricedKind(architecture="mamba2", changes={}),
    "latent": PricedKind(architecture="deepseek_v2", changes={"hidden_size": 256, "num_attention_heads": 8}),
    "experts": PricedKind(architecture="qwen3_moe", changes={**_WIDE, "moe_intermediate_size": 256}),
}


def model_of(kind: PricedKind) -> tuple[nn.Module, dict[str, Any]]:
    config = ZOO[kind.architecture]
    assert isinstance(config, dict), config
    # At least three layers: of the last one, nobody computes more than its entries.
    config = {**config, **kind.changes}
    return build_config(config), config


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPass:
    """A pass at `position`: its price by dimensions, after a first pass, when it came, and what it took at least."""

    position: int
    by_dimensions: int
    at_load: int
    learnt: int
    taken: int


def passes(
    model: nn.Module, kind: PricedKind, plain: PassPrice, learnt: PassPrice, *, chunk: int, depth: int
) -> tuple[list[PricedPass], PassPrice]:
    """A prompt in chunks; and the price after it."""
    rows = SequenceBatch(blueprint_of(model, kv_bits=kind.kv_bits, kv_group_size=32))
    rows.reserve(depth + chunk)
    at_load, found = learnt, list[PricedPass]()
    for position in range(0, depth, chunk):
        tokens = mx.array([[token % 200 for token in range(chunk)]])
        mx.eval(tokens)
        mx.synchronize()
        before = device_memory.watch_peak()
        rows.forward(model, tokens)
        mx.eval(rows.arrays())
        reading = device_memory.read_peak(before)
        found.append(
            PricedPass(
                position=position,
                by_dimensions=plain.of(chunk, position),
                at_load=at_load.of(chunk, position),
                learnt=learnt.of(chunk, position),
                taken=reading.least,
            )
        )
        learnt = learnt.after_pass(chunk, position, reading)
    return found, learnt


def examine(name: str, kind: PricedKind, chunks: Sequence[int], depth: int, gates: Gates) -> None:
    model, config = model_of(kind)
    blueprint = blueprint_of(model, kv_bits=kind.kv_bits, kv_group_size=32)
    plain = price_by_dimensions(model, blueprint, config, footprint_of(model, blueprint))
    _, loaded = passes(model, kind, plain, plain, chunk=MEASURED, depth=MEASURED)
    for chunk in chunks:
        first, seen = passes(model, kind, plain, loaded, chunk=chunk, depth=depth)
        again, _ = passes(model, kind, plain, seen, chunk=chunk, depth=depth)
        worst = max(first, key=lambda each: each.taken / each.learnt)
        shown = (worst.by_dimensions, worst.at_load, worst.learnt, worst.taken)
        low = min(each.learnt / max(1, each.taken) for each in again)
        # Below 1024 all depths have one price.
        high = max((each.learnt / max(1, each.taken) for each in again if each.position >= 1024), default=1.0)
        is_covered = all(each.learnt + VARIES >= 0.9 * each.taken for each in again)
        is_enough = is_covered and all(min(e.by_dimensions, e.learnt) >= LEAST * e.taken for e in first)
        print(
            f"  {name:22} {chunk:5} {worst.position:6}  {'  '.join(f'{nbytes_text(n):>10}' for n in shown)}"
            f"  {low:6.2f} to {high:5.2f}{gates.check(is_enough and high <= MOST)}",
            flush=True,
        )


def examine_decoding(name: str, kind: PricedKind, depth: int, gates: Gates) -> None:
    """Passes over rows behind a prompt in chunks of 512."""
    model, config = model_of(kind)
    blueprint = blueprint_of(model, kv_bits=kind.kv_bits, kv_group_size=32)
    price = price_by_dimensions(model, blueprint, config, footprint_of(model, blueprint))
    _, loaded = passes(model, kind, price, price, chunk=MEASURED, depth=MEASURED)
    _, seen = passes(model, kind, price, loaded, chunk=512, depth=depth)
    each: list[SequenceBatch] = []
    for row in range(ROWS if blueprint.joins else 1):
        rows = SequenceBatch(blueprint)
        rows.reserve(depth + 64)
        for start in range(0, depth - row, 512):
            stop = min(start + 512, depth - row)
            rows.forward(model, mx.array([[token % 200 for token in range(start, stop)]]))
            mx.eval(rows.arrays())
        each.append(rows)
    rows, *others = each
    rows.join(others)
    for num in (1, 8):
        total = num * rows.num_rows
        shown: list[tuple[int, ...]] = []
        for _ in range(4):
            known = (price, loaded, seen)
            prices = [p.of(total, depth, num_outputs=total, num_decoding=rows.num_rows) for p in known]
            mx.synchronize()
            before = device_memory.watch_peak()
            logits = rows.forward(model, mx.array([[7] * num] * rows.num_rows)).reshape(total, -1)
            wide = logits.astype(mx.float32)
            logprobs = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
            keys = [mx.random.key(at) for at in range(total)]
            mx.eval(sample(logprobs, Sampling(temperature=1.0), keys), rows.arrays())
            shown.append((*prices, device_memory.read_peak(before).least))
            del logits, wide, logprobs
        worst = max(shown, key=lambda each: each[-1])
        is_enough = min(worst[0], worst[2]) + VARIES >= LEAST * worst[-1]
        numbers = "  ".join(f"{nbytes_text(n):>10}" for n in worst)
        print(f"  {name:22} {rows.num_rows} x {num}  {depth:5}  {numbers}{gates.check(is_enough)}", flush=True)


_WIDE_TOWER = {
    **{"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 64, "global_head_dim": 64},
}
SIDES = (96, 256, 512, 768)
"""Pixels of the images that a tower encodes, one after the other."""


def examine_tower(family: str, gates: Gates) -> None:
    from tests.vision.families import FAMILIES  # noqa: PLC0415 (an extra)
    from tests.vision.tiny import write_seeing_model  # noqa: PLC0415

    tiny = FAMILIES[family]

    def config(of: Any) -> dict[str, Any]:
        known = tiny.config(of)
        tower = known["vision_config"]
        return {**known, "vision_config": tower | {key: value for key, value in _WIDE_TOWER.items() if key in tower}}

    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        write_seeing_model(Path(folder) / family, replace(tiny, config=config))
        loaded = load_model(str(Path(folder) / family))
    runner = Runner(loaded, can_batch=False)
    runner.try_tower()
    model, vision, at_load = loaded.model, loaded.vision, runner.features.tower
    assert isinstance(model, SeeingModel) and vision is not None
    price = at_load
    for side in SIDES:
        prepared = vision.reader.prepare(blank_image(side, side))
        num = len(prepared.places)
        prices = at_load.of(num, 0), price.of(num, 0)
        mx.synchronize()
        before = device_memory.watch_peak()
        model.encode(prepared)
        reading = device_memory.read_peak(before)
        price = price.after_pass(num, 0, reading)
        again = price.of(num, 0) / reading.least
        numbers = "  ".join(f"{nbytes_text(n):>10}" for n in (*prices, reading.least))
        is_right = min(prices) >= LEAST * reading.least and 1 <= again <= MOST
        print(
            f"  tower of {family:13} {num:5} {'':6}  {'':10}  {numbers}  {again:6.2f}{gates.check(is_right)}",
            flush=True,
        )


def examine_guesses(gates: Gates) -> None:
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        directory = str(random_model(Path(folder) / "model", 256))
        headed = load_model(directory, mtp="auto")
        alone = load_model(directory)
        accompanied = with_companion(alone, load_model(directory))
    for name, loaded in {"head": headed, "companion": accompanied}.items():
        runner, memory = Runner(loaded, can_batch=True), Memory()
        cache = PrefixCache(loaded.blueprint.layout, memory=memory)
        executor = Executor(SequencePool(runner, cache, memory, chunk=512), context=None, clock=monotonic)
        executor.try_a_pass(MEASURED)
        prompt = Prompt(tokens=as_tokens(np.arange(1025) % loaded.vocab_size))
        live = runner.begin()
        for start in (0, 512):
            runner.prefill([live], [prompt.tokens[start : start + 512]])
        runner.begin_decode(live, Job(id="job", prompt=prompt, max_tokens=1000, sampling=Sampling(temperature=1.0)))
        for num_decoded in (1, 200):
            for num in (8, 1):
                for _ in range(num_decoded):
                    runner.decode([live], may_run_ahead=False)
                price = executor.price_to_guess(live, num)
                mx.synchronize()
                before = device_memory.watch_peak()
                runner.guess(live, num)
                taken = device_memory.read_peak(before).least
                is_enough = price + VARIES >= LEAST * taken
                numbers = f"{nbytes_text(price):>10}  {nbytes_text(taken):>10}"
                where = f"{num:5} {live.position:6}  {'':10}  {'':10}"
                print(
                    f"  guesses of {name:11} {where}  {numbers}  {price / taken:6.2f}{gates.check(is_enough)}",
                    flush=True,
                )


def examine_towers(gates: Gates) -> None:
    for family in ("qwen3_vl", "gemma4"):
        examine_tower(family, gates)


BESIDE = {"towers": examine_towers, "guesses": examine_guesses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *BESIDE], default=[*KINDS, *BESIDE])
    parser.add_argument("--chunks", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--depth", type=int, default=4096)
    options = parser.parse_args()
    gates = Gates()
    heads = ("dimensions", "at load", "learnt", "taken")
    print(f"  {'':22} chunk     at  {'  '.join(f'{head:>10}' for head in heads)}  again, of what it took")
    for name in options.kinds:
        if name in BESIDE:
            BESIDE[name](gates)
            continue
        examine(name, KINDS[name], options.chunks, options.depth, gates)
        examine_decoding(name, KINDS[name], options.depth, gates)
    if gates.num_broken > 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

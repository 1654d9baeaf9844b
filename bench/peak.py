"""What a pass takes at its peak beside the layer states: what is reserved for it against what MLX reports.

    python -m bench.peak [--kinds "full attention" experts] [--chunks 128 512] [--depth 4096]

A model of each layer kind with random weights, wider than those of the tests. A prompt is prefilled in chunks of each
length. Per chunk: the price by the model's dimensions alone (a model's outline, `doctor`); the price once one pass of
128 tokens was measured, as when a model is loaded; the price as it is when the pass comes, from all passes before it;
and what it took. Of each prompt the chunk is shown that was underpriced most. Behind a prompt, rows of like length
decode a token each, sampled, and eight each, as drafts are verified. Gates (exit status 1): no pass is priced below
`LEAST` of what it takes, by the dimensions or by what was learnt; and a prompt that was seen once is priced at what it
takes, less a tenth and `VARIES`, and at no more than `MOST` times that.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from bench.restore import Gates
from reprise.core.job import Sampling
from reprise.core.pass_price import PassPrice
from reprise.core.sizes import nbytes_text
from reprise.engine import memory as device_memory
from reprise.engine.running.pass_dimensions import price_by_dimensions
from reprise.engine.running.runner import footprint_of
from reprise.engine.running.sampler import sample
from reprise.engine.states.blueprint import blueprint_of
from reprise.engine.states.sequence_batch import SequenceBatch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--chunks", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--depth", type=int, default=4096)
    options = parser.parse_args()
    gates = Gates()
    heads = ("dimensions", "at load", "learnt", "taken")
    print(f"  {'':22} chunk     at  {'  '.join(f'{head:>10}' for head in heads)}  again, of what it took")
    for name in options.kinds:
        examine(name, KINDS[name], options.chunks, options.depth, gates)
        examine_decoding(name, KINDS[name], options.depth, gates)
    if gates.num_broken > 0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""What to run where a GPU or Apple silicon is at hand: speeds against mlx-lm's generate, and what moving state costs.

    python -m bench.device [--minutes 8] [--tiny] [--json device.json]

Models with random 4-bit weights and real dimensions: a dense one of 1B, a hybrid of 4B, a small mixture of experts. For
each: prefill and decode in tokens a second, ours through the whole engine loop, theirs through `stream_generate`;
what the engine's thread works for one decode step; restoring and storing a prompt's state, as a ratio to copying as
many bytes; where a model has a head (MTP), what a guess and passes over several tokens cost, from which follows what
drafts bring at which acceptance. At last the same steps of a model of no size, where all time is the host's. What
does not fit into the memory or the time is said and left out. `--tiny` runs all of it on models of no size.
"""

import argparse
import gc
import json
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage] -- the one way to a model without weights
    save_config,
)

from bench.tiny.build import thinking_template, write_tokenizer
from bench.tiny.tokenizer import MARKUP, demo_texts, train_tokenizer
from reprise.cache.prefix_cache import PrefixCache
from reprise.core.events import Event, Finished
from reprise.core.job import Job, Purpose, Sampling
from reprise.core.outcome import Outcome
from reprise.core.prompt import BoundaryKind, Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import Tokens, as_tokens
from reprise.engine.memory import computing_device, device_bytes
from reprise.engine.models.heads import FORMATS
from reprise.engine.states.restoration import restored
from reprise.engine.states.sequence_batch import SequenceSource
from reprise.loop import EngineClient
from reprise.loop.worker import Worker

BITS, GROUP = 4, 64
_WORDS = 512
"""Of the tokenizer. The models' vocabularies are larger, and prompts use all of them."""

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
HYBRID: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    },
    "tie_word_embeddings": True,
}
EXPERTS: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = {"dense 1B": LLAMA, "hybrid 4B": HYBRID, "experts 3B": EXPERTS}

_SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
}
_NO_SIZE = "no size"
_PREFILL_S = 12.0
_PASSES = (1, 2, 4, 8)
"""Sizes of passes that verify drafts."""
_MEASURING = 0.7
"""Of a model's time; the rest is for restoring and storing, and for what takes longer than expected."""
_FREE_BUFFERS = mx.set_cache_limit(0)
mx.set_cache_limit(_FREE_BUFFERS)
"""MLX's own limit. Ours is lower, and is not to slow down the other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`lengths` of prompts that are tried, the longest that does not take long first; tokens that are decoded, and the
    few that are taken off where prefill is not to count; how often."""

    lengths: tuple[int, ...] = (8192, 2048, 512, 128)
    num: int = 128
    num_few: int = 16
    repeats: int = 3

    def within(self, seconds: float, *, prefill_s: float, token_s: float) -> "Effort":
        """As much of it as both sides can do in this time, where a prompt takes `prefill_s` and a token `token_s`."""

        def needed_s(effort: Effort) -> float:
            tokens = effort.num + 2 * effort.num_few + effort.num
            return 2 * effort.repeats * (prefill_s + tokens * token_s)

        tried = [replace(self, repeats=n, num=self.num // k) for k in (1, 2, 4) for n in range(self.repeats, 0, -1)]
        return next((effort for effort in tried if needed_s(effort) <= seconds), tried[-1])


TINY = Effort(lengths=(256,), num=12, num_few=4, repeats=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line. `ratio` is ours to theirs; None where nothing was measured, and `note` says why."""

    model: str
    what: str
    unit: str = ""
    ours: float | None = None
    theirs: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.theirs is None or self.theirs == 0 else self.ours / self.theirs


def tiny_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture of no size."""
    inner = config.get("text_config")
    small = {**config, **{key: value for key, value in _SMALL.items() if key in config}}
    return small | {"text_config": tiny_config(inner)} if inner is not None else small


def lazy_model(config: Mapping[str, Any]) -> nn.Module:
    """The model with random 4-bit weights, none of which is there before it is asked for."""
    model_class, arguments = _get_classes(dict(config))
    model: nn.Module = model_class(arguments.from_dict(dict(config)))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, GROUP, BITS)
    return model


def nbytes_of(model: nn.Module) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def largest_size(model: nn.Module) -> int:
    """The most elements that one weight has before it is quantized."""
    return max(
        value.size * (32 // BITS if value.dtype == mx.uint32 else 1) for _, value in tree_flatten(model.parameters())
    )


def write_model(directory: Path, config: Mapping[str, Any], model: nn.Module) -> None:
    """A directory that mlx-lm and this server load."""
    weights = dict(tree_flatten(model.parameters()))
    for value in weights.values():
        # One at a time: before it is quantized each is four times as large.
        mx.eval(value)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    quantization = {"group_size": GROUP, "bits": BITS}
    save_config({**config, "quantization": quantization, "eos_token_id": 2}, config_path=directory / "config.json")
    write_tokenizer(
        directory,
        _tokenizer(),
        template=thinking_template(),
        eos="<|im_end|>",
    )


@cache
def _tokenizer() -> Any:
    return train_tokenizer(_WORDS, demo_texts(), markup=MARKUP)


class Ours:
    """The engine loop, one request at a time."""

    def __init__(self, directory: Path, *, mtp: str = "off") -> None:
        self._loop = EngineClient(Settings(model=str(directory), settles=False, is_audit_off=True, mtp=mtp))
        self.vocab_size = self._loop.start().vocab_size
        self._num = 0

    def close(self) -> None:
        self._loop.close(now=True, timeout_s=60)

    def prompt(self, length: int) -> Tokens:
        self._num += 1
        return as_tokens(np.random.default_rng(self._num).integers(3, self.vocab_size, length))

    def run(self, tokens: Tokens, num: int) -> Outcome:
        """Generate `num` tokens behind this prompt, greedily."""
        self._num += 1
        ended: Future[Finished] = Future()

        def hear(event: Event) -> None:
            if isinstance(event, Finished):
                ended.set_result(event)

        job = Job(
            id=str(self._num),
            prompt=Prompt(tokens=tokens),
            purpose=Purpose.GENERATE,
            sampling=Sampling(temperature=0.0),
            max_tokens=num,
        )
        self._loop.submit(job, hear)
        finished = ended.result()
        if finished.error is not None:
            raise finished.error
        return finished.outcome

    def ask(self, question: Callable[[Worker], Any]) -> Any:
        """Between two steps, on the engine's thread."""
        answer: Future[Any] = Future()

        def give(worker: Worker) -> None:
            try:
                answer.set_result(question(worker))
            except Exception as error:
                answer.set_exception(error)

        self._loop.call(give)
        return answer.result()

    def thread_s(self) -> float:
        return self.ask(lambda _: time.thread_time())


def fitted(ours: Ours, effort: Effort, *, end_s: float) -> tuple[int, Effort]:
    """The longest prompt that is computed in a few seconds, and how much can be measured until `end_s`."""
    ours.run(ours.prompt(64), 2)
    shortest = effort.lengths[-1]
    first = ours.run(ours.prompt(shortest), effort.num_few)
    a_token_s = first.prefill_s / shortest
    decode_s = (first.total_s - (first.ttft_s or 0.0)) / effort.num_few
    left_s = max(0.0, end_s - time.monotonic())
    most_s = min(_PREFILL_S, left_s / (3 * effort.repeats))
    length = next((length for length in effort.lengths if length * a_token_s <= most_s), shortest)
    return length, effort.within(_MEASURING * left_s, prefill_s=length * a_token_s, token_s=decode_s)


def our_speeds(ours: Ours, length: int, effort: Effort) -> tuple[float, float, float]:
    """Prefill and decode in tokens a second, and the thread's own time for a decode step in ms."""
    outcomes = [ours.run(ours.prompt(length), effort.num) for _ in range(effort.repeats)]
    prefill = median(o.num_prefilled / o.prefill_s for o in outcomes)
    decode = median((o.num_generated - 1) / (o.total_s - o.ttft_s) for o in outcomes if o.ttft_s is not None)

    def thread_s(num: int) -> float:
        before_s = ours.thread_s()
        ours.run(ours.prompt(32), num)
        return ours.thread_s() - before_s

    return prefill, decode, _step_ms(thread_s, effort)


def _step_ms(thread_s: Callable[[int], float], effort: Effort) -> float:
    """What a thread works for one token: for many of them, less what it works for few."""
    few, many = (
        median(thread_s(num) for _ in range(effort.repeats)) for num in (effort.num_few, effort.num_few + effort.num)
    )
    return 1000 * max(0.0, many - few) / effort.num


def their_speeds(directory: Path, length: int, effort: Effort, *, vocab_size: int) -> tuple[float, float, float]:
    """The same of mlx-lm's `stream_generate`, whose own figures they are."""
    model, tokenizer = load(str(directory))[:2]
    numbers = np.random.default_rng(0)

    def run(num_prompt: int, num_tokens: int) -> tuple[float, float, float]:
        started_s = time.thread_time()
        prompt = numbers.integers(3, vocab_size, num_prompt).tolist()
        *_, last = stream_generate(model, tokenizer, prompt, max_tokens=num_tokens)
        return last.prompt_tps, last.generation_tps, time.thread_time() - started_s

    run(64, 2)
    found = [run(length, effort.num) for _ in range(effort.repeats)]
    step_ms = _step_ms(lambda num: run(32, num)[2], effort)
    return median(f[0] for f in found), median(f[1] for f in found), step_ms


def moved(worker: Worker, tokens: Tokens) -> tuple[float, float, int]:
    """Restoring a stored prompt and storing it in another cache, as ratios to copying its bytes; and the bytes."""
    runner, cache = worker.runner, worker.cache
    match = cache.match(tokens)
    at = cache.resume_at(match, limit=len(tokens) - 1)
    what = cache.read(match, at)
    nbytes = runner.footprint.at(at)
    parts = [mx.random.normal((max(1, nbytes // 8),)) for _ in range(2)]
    mx.eval(parts)

    def copy() -> object:
        whole = mx.concatenate(parts)
        mx.eval(whole)
        return whole

    copied_s = _quickest_s(copy)
    blueprint = runner.loaded.blueprint
    restored_s = _quickest_s(lambda: restored(blueprint, what))
    rows = restored(blueprint, what)

    def store() -> object:
        other = PrefixCache(cache.layout)
        other.commit(tokens[:at], SequenceSource(rows, 0), kind=BoundaryKind.STABLE)
        return other

    stored_s = _quickest_s(store)
    return restored_s / copied_s, stored_s / copied_s, nbytes


def _quickest_s(work: Callable[[], object]) -> float:
    """Others use the machine, too."""
    taken: list[float] = []
    for _ in range(5):
        mx.synchronize()
        started_s = time.perf_counter()
        result = work()
        mx.synchronize()
        taken.append(time.perf_counter() - started_s)
        del result
    return min(taken)


def measure(name: str, config: Mapping[str, Any], effort: Effort, *, end_s: float) -> list[Measured]:
    """The lines of one model, until `end_s` or a little later."""
    model = lazy_model(config)
    # With what stands beside the weights: while they are made, the largest in 32 and in 16 bits.
    needed = nbytes_of(model) + max(nbytes_of(model) // 2, 6 * largest_size(model)) + 2**28
    there = device_bytes()
    if needed > there:
        note = f"left out: it needs {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are there"
        return [Measured(model=name, what="all", note=note)]
    with tempfile.TemporaryDirectory(prefix="reprise-device-") as folder:
        directory = Path(folder)
        write_model(directory, config, model)
        del model
        _give_back()
        ours = Ours(directory)
        try:
            length, effort = fitted(ours, effort, end_s=end_s)
            vocab_size = ours.vocab_size
            prefill, decode, host_ms = our_speeds(ours, length, effort)
            tokens = ours.prompt(length)
            ours.run(tokens, 1)
            restored, stored, nbytes = ours.ask(lambda worker: moved(worker, tokens))
        finally:
            ours.close()
        del ours
        _give_back()
        mx.set_cache_limit(_FREE_BUFFERS)
        theirs = their_speeds(directory, length, effort, vocab_size=vocab_size)
        _give_back()
        costs: dict[str, float] = {}
        if write_head(directory, config):
            headed = Ours(directory, mtp="auto")
            try:
                costs = headed.ask(lambda worker: guess_costs(worker, tokens))
            finally:
                headed.close()
            del headed
            _give_back()
    state = f"{nbytes / 1e6:,.0f} MB"
    return [
        Measured(model=name, what=f"prefill of {length}", unit="tokens/s", ours=prefill, theirs=theirs[0]),
        Measured(model=name, what="decode", unit="tokens/s", ours=decode, theirs=theirs[1]),
        Measured(model=name, what="host time of a decode step", unit="ms", ours=host_ms, theirs=theirs[2]),
        Measured(model=name, what="restore", unit="of a copy", ours=restored, theirs=1.0, note=state),
        Measured(model=name, what="store", unit="of a copy", ours=stored, theirs=1.0, note=state),
        *(Measured(model=name, what=what, unit="of a pass", ours=cost) for what, cost in costs.items()),
    ]


def step_of_nothing(config: Mapping[str, Any], effort: Effort, *, end_s: float) -> list[Measured]:
    """A decode step of a model of no size takes what the host takes, on any device."""
    lines = measure(_NO_SIZE, tiny_config(config), replace(effort, lengths=TINY.lengths), end_s=end_s)
    decode = next((line for line in lines if line.what == "decode"), None)
    if decode is None or decode.ours is None or decode.theirs is None:
        return lines
    step = Measured(model=_NO_SIZE, what="decode step", unit="ms", ours=1000 / decode.ours, theirs=1000 / decode.theirs)
    return [step]


def write_head(directory: Path, config: Mapping[str, Any]) -> bool:
    """A head with random weights beside the model's. False if its family has none that is known."""
    form = FORMATS.get(str(config["model_type"]))
    text = config.get("text_config")
    if form is None or text is None:
        return False
    width = int(text["hidden_size"])
    layer = dict(tree_flatten(lazy_model({**config, "text_config": {**text, **form.one_layer}}).parameters()))
    weights = {"mtp." + name[name.index("layers.0.") :]: value for name, value in layer.items() if "layers.0." in name}
    mixed = mx.quantize(mx.random.normal((width, 2 * width)).astype(mx.bfloat16), GROUP, BITS)
    weights |= {f"mtp.fc.{part}": value for part, value in zip(("weight", "scales", "biases"), mixed, strict=True)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = mx.ones((width,), dtype=mx.bfloat16)
    mx.eval(weights)
    mx.save_safetensors(str(directory / "mtp.safetensors"), weights, metadata={"format": "mlx"})
    return True


def guess_costs(worker: Worker, tokens: Tokens) -> dict[str, float]:
    """What a guess and passes over several tokens cost behind this prompt, in passes over one token."""
    runner = worker.runner
    live = runner.begin()
    try:
        for at in range(0, len(tokens) - 1, 512):
            runner.prefill([live], [tokens[at : min(at + 512, len(tokens) - 1)]])
        job = Job(id="guess", prompt=Prompt(tokens=tokens), max_tokens=64, sampling=Sampling(temperature=0.0))
        runner.begin_decode(live, job)
        guess_s = _quickest_s(lambda: runner.guess(live, 4)) / 4
        passes = {size: _quickest_s(lambda size=size: runner.logits(live, tokens[:size])) for size in _PASSES}
    finally:
        runner.drop(live)
    one_s = passes.pop(1)
    return {"a guess": guess_s / one_s} | {f"pass over {size} tokens": s / one_s for size, s in passes.items()}


def _give_back() -> None:
    gc.collect()
    mx.clear_cache()


def shown(line: Measured) -> str:
    """A line of the table."""
    if line.ours is None:
        return f"  {line.model:12} {line.what:28} {line.note}"
    theirs = "" if line.theirs is None else f"{line.theirs:12,.2f}"
    ratio = "" if line.ratio is None else f"{line.ratio:8.2f}"
    return f"  {line.model:12} {line.what:28} {line.ours:12,.2f} {theirs:>12} {ratio:>8}  {line.unit:10} {line.note}"


def run(configs: Mapping[str, Mapping[str, Any]], effort: Effort, *, minutes: float) -> list[Measured]:
    """All lines, printed as they come. The one that fails says why, and the others go on."""
    end_s = time.monotonic() + 60 * minutes
    lines: list[Measured] = []
    slowest_s = 0.0
    names = (_NO_SIZE, *configs)
    print(f"  {'':41} {'ours':>12} {'mlx-lm':>12} {'ratio':>8}", flush=True)
    for number, name in enumerate(names):
        started_s = time.monotonic()
        left_s = end_s - started_s
        until_s = started_s + left_s / (len(names) - number)
        # Half of it is what is fitted to the time: the rest is making the model and loading it.
        if left_s < slowest_s / 2:
            new = [Measured(model=name, what="all", note="left out: the time is over")]
        else:
            try:
                new = (
                    step_of_nothing(HYBRID, effort, end_s=until_s)
                    if name == _NO_SIZE
                    else measure(name, configs[name], effort, end_s=until_s)
                )
            except Exception as error:
                new = [Measured(model=name, what="all", note=f"failed: {str(error)[:100] or type(error).__name__}")]
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        for line in new:
            print(shown(line), flush=True)
        lines += new
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="what has no time left is left out")
    parser.add_argument("--tiny", action="store_true", help="models of no size")
    parser.add_argument("--model", choices=list(MODELS), help="this one alone")
    parser.add_argument("--json", type=Path, default=Path("device.json"))
    options = parser.parse_args()
    configs = {name: tiny_config(config) for name, config in MODELS.items()} if options.tiny else MODELS
    device, machine = computing_device(), platform.platform()
    versions = {name: version(name) for name in ("mlx-reprise", "mlx", "mlx-lm")}
    head = {"device": device, "machine": machine, "versions": versions, "tiny": options.tiny}
    print(f"  {device}, {machine}, mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}")
    chosen = {name: config for name, config in configs.items() if options.model in (None, name)}
    lines = run(chosen, TINY if options.tiny else Effort(), minutes=options.minutes)
    rows = [asdict(line) | {"ratio": line.ratio} for line in lines]
    options.json.write_text(json.dumps({"head": head, "lines": rows}, indent=1), encoding="utf-8")
    print(f"  in {options.json}")


if __name__ == "__main__":
    main()

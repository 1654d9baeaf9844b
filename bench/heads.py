"""Chats with the demo's model and what guesses its next tokens: accepted shares and passes, by count.

    python -m bench.heads [--chats 2] [--turns 20] [--costs memory]
    python -m bench.heads --measure 3 [--turns 20] [--temperature 3] [--hidden 512]

Every pass and every guess has a fixed cost, as in `bench.draft_replay`, so that the counts are the same on any machine
and say what a device with such costs would gain. `head` is the trained head that ships with the demo's model. The
others are companions (`--draft-model`) in its place: `same` is the model itself, the most that there is; `random` has
other weights and is of no use. All sides look earlier text up, too; `looked up` is that alone.

With `--measure` nothing is fixed. Each turn is answered by one engine several times, in another order each time: with
its drafts, and twice without them (`again`: by as much as that differs from `without`, equal answers differ anyhow),
once the trials behind `--drafts auto` are over. Engines of one process that do the same differ by up to 7 %, so none is
compared with another. What is compared is the time that answers took from their first tokens to their last (of the
middle three fifths of the turns), by the clock and of processors (which other programs disturb less, and of which a
pass over several tokens takes more threads), and by the clock to their end, when they are stored. The interval is a
bootstrap over the turns. What a head takes where it never guesses, its entries, is compared apart: a model with it and
without, on the same weights.
"""

import argparse
import itertools
import json
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

import mlx.core as mx

from bench.draft_replay import COSTS, DEMO, FixedCosts, ReplayTurn, demo_turns
from bench.rivals import MODELS
from bench.tiny.build import build_model, random_weights
from reprise.core.events import Event, Finished, Sampled
from reprise.core.job import Job, Sampling
from reprise.core.outcome import Outcome
from reprise.core.prompt import Prompt
from reprise.core.settings import Settings
from reprise.core.tokens import as_tokens
from reprise.drafts.benefit import DraftCosts, PassCosts
from reprise.engine.models.headed import HeadedModel, blueprint_with_head
from reprise.engine.models.heads import FORMATS
from reprise.engine.models.load import LoadedModel, load_model
from reprise.engine.running.live_sequence import LiveSequence
from reprise.engine.running.runner import Runner, TokenFailure, TokenResult
from reprise.loop import EngineClient
from reprise.loop.worker import Worker

HEAD = DEMO.parent / "head"
STEPS: Mapping[str, float] = {"head": 0.03, "same": 0.1, "random": 0.1}
"""What a guess costs, in passes: a head of 2 to 3 % of the weights and the output matrix; a companion of a tenth."""
_PATIENCE_S = 600.0
_LONG_ANSWER = 60
"""Tokens of an answer whose speed is measured, beyond where the model would end it."""
_IDLE_S, _IDLE_SHARE = 3.0, 0.05
_NUM_DRAWS = 2_000
ANSWERS = ("drafts", "without", "again")
_BLOCKS_OF_ANSWER, _TOKENS_OF_BLOCK = 8, 8
UNITS = ("by the clock", "of processor time", "to the end")
GREEDY = Sampling(temperature=0)
_ids = itertools.count()


class FixedStep(DraftCosts):
    """A guess that takes a share of a pass."""

    def step_s(self, passes: PassCosts) -> float:
        return passes.one_s * self.relative

    def note_steps(self, num: int, seconds: float) -> None:
        """Nothing is learnt."""


@dataclass(slots=True, kw_only=True)
class HeadCounts:
    """What some answers took. Costs are in passes over one token."""

    answers: list[list[int]] = field(default_factory=list[list[int]])
    num_generated: int = 0
    num_computed: int = 0
    """Tokens of prompts that were not reused."""
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    """By what guesses, not by look-ups."""
    num_guesses: int = 0
    num_first_right: int = 0
    """Of these, those whose first token was right."""
    cost: float = 0.0

    @property
    def first_share(self) -> float:
        return self.num_first_right / max(1, self.num_guesses)

    @property
    def passes_per_token(self) -> float:
        return self.num_passes / self.num_generated

    @property
    def speed(self) -> float:
        """Tokens in the time of a pass over one."""
        return self.num_generated / self.cost


class GuessedSide:
    """An engine whose passes and guesses have fixed costs, and which counts them."""

    def __init__(self, costs: Mapping[int, float], step: float, *, model: Path = DEMO, **settings: Any) -> None:
        """`costs`: of passes, by their size; `step`: of a guess, in passes."""
        self.counts = HeadCounts()
        self._costs, self._step = FixedCosts(costs), step
        self._text: list[int] = []
        self._guesses: list[tuple[int, int]] = []
        """The position of the first token of each guess, and the token."""
        self.engine = EngineClient(Settings(model=str(model), drafts="always", is_audit_off=True, **settings))
        self.engine.start()
        self.engine.call(self._prepare)

    def _prepare(self, worker: Worker) -> None:
        assert worker.drafts is not None
        worker.drafts.costs = self._costs
        if worker.head is not None:
            worker.head.costs = FixedStep(relative=self._step)
        guess = worker.runner.guess

        def noted(live: LiveSequence, num: int) -> list[int]:
            tokens = guess(live, num)
            self._guesses.append((live.position + len(live.unfed) + 1, tokens[0]))
            self.counts.cost += self._step * num
            return tokens

        worker.runner.guess = noted  # type: ignore[method-assign]
        verify = worker.runner.verify

        def counted(lives: Sequence[LiveSequence], drafts: Sequence[Sequence[int]]) -> list[TokenResult | TokenFailure]:
            (live,), (draft,) = lives, drafts
            self.counts.cost += self._costs.relative(1 + len(live.unfed) + len(draft)) - 1
            return verify(lives, drafts)

        worker.runner.verify = counted  # type: ignore[method-assign]

    def run(self, prompt: Sequence[int], num: int, stop: int) -> list[int]:
        """The answer to a prompt, which is counted."""
        self._guesses.clear()
        asked = ask(self.engine, prompt, num=num, stop=stop)
        answer, outcome = asked.tokens, asked.outcome
        counts, text = self.counts, [*prompt, *answer]
        counts.answers.append(answer)
        counts.num_generated += len(answer) - 1
        counts.num_computed += outcome.num_prefilled
        counts.num_passes += len(answer) - 1 - outcome.num_accepted
        counts.cost += len(answer) - 1 - outcome.num_accepted
        for source, drafted in outcome.drafted.items():
            if source in ("head", "draft-model"):
                counts.num_drafted += drafted.num
                counts.num_accepted += drafted.num_accepted
        known = [(text[at], token) for at, token in self._guesses if at < len(text)]
        counts.num_guesses += len(known)
        counts.num_first_right += sum(right == token for right, token in known)
        return answer

    def close(self) -> None:
        self.engine.close(timeout_s=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """An answer, what it took, and the time from its first token to the last and to the end."""

    tokens: list[int]
    outcome: Outcome
    decode_s: float
    processor_s: float
    ended_s: float


def ask(
    engine: EngineClient, prompt: Sequence[int], *, num: int, stop: int, sampling: Sampling = GREEDY
) -> TimedAnswer:
    """The answer to a prompt, as it was sampled."""
    ended, end, answer, times = threading.Event(), list[Finished](), list[int](), list[tuple[float, float]]()

    def hear(event: Event) -> None:
        times.append((time.perf_counter(), time.process_time()))
        if isinstance(event, Sampled):
            if not answer:
                times.clear()
                times.append((time.perf_counter(), time.process_time()))
            answer.append(event.token)
        elif isinstance(event, Finished):
            end.append(event)
            ended.set()

    job = Job(
        id=f"job-{next(_ids)}",
        prompt=Prompt(tokens=as_tokens(prompt)),
        max_tokens=num,
        sampling=sampling,
        stop_tokens=frozenset({stop}),
    )
    engine.submit(job, hear)
    assert ended.wait(_PATIENCE_S) and end[0].error is None, end
    (first_s, processor_first_s), (last_s, processor_last_s), (ended_s, _) = times[0], times[-2], times[-1]
    return TimedAnswer(
        tokens=answer,
        outcome=end[0].outcome,
        decode_s=last_s - first_s,
        processor_s=processor_last_s - processor_first_s,
        ended_s=ended_s - first_s,
    )


def hold(side: GuessedSide, turns: Sequence[ReplayTurn]) -> HeadCounts:
    """Hold these chats."""
    for turn in turns:
        side.run(turn.prompt, 2 * len(turn.answer), turn.answer[-1])
    return side.counts


def chats(num: int, num_turns: int) -> list[ReplayTurn]:
    """Turns of chats as the demo's model is trained to answer them."""
    return [turn for seed in range(num) for turn, _ in demo_turns(Random(700 + seed), num_turns)]


def random_companion(directory: Path) -> Path:
    """The demo's model with random weights."""
    shutil.copytree(DEMO, directory)
    weights = random_weights(json.loads((directory / "config.json").read_text()), seed=1)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def random_head(directory: Path) -> Path:
    """The demo's head with random weights."""
    shutil.copytree(HEAD, directory)
    weights = cast(dict[str, mx.array], mx.load(str(directory / "model.safetensors")))
    drawn = {
        name: mx.random.normal(array.shape, scale=array.shape[-1] ** -0.5, key=mx.random.key(number))
        for number, (name, array) in enumerate(sorted(weights.items()))
        if array.ndim > 1
    }
    # The file is where the others are still to be read from.
    mx.eval(weights, drawn)
    mx.save_safetensors(str(directory / "model.safetensors"), weights | drawn, metadata={"format": "mlx"})
    return directory


class TimedSide:
    """An engine as it is, and the time of its answers with its drafts and without."""

    def __init__(self, model: Path, **settings: Any) -> None:
        settings = {"drafts": "auto", "is_audit_off": True, "settles": False, **settings}
        self.engine = EngineClient(Settings(model=str(model), **settings))
        self.engine.start()
        wait_until_idle()
        self._worker = self._call(lambda worker: worker)
        self._drafts = self._worker.drafts, self._worker.head
        self.num_drafted = self.num_accepted = 0

    def _call(self, work: Callable[[Worker], Worker]) -> Worker:
        found: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.engine.call(lambda worker: found.put(work(worker)))
        return found.get(timeout=_PATIENCE_S)

    def times(self, turn: ReplayTurn, sampling: Sampling, *, has_drafts: bool) -> tuple[float, ...]:
        """Seconds per token of the answer to this turn behind the first, as in `UNITS`."""

        def switch(worker: Worker) -> Worker:
            worker.drafts, worker.head = self._drafts if has_drafts else (None, None)
            return worker

        self._call(switch)
        found = ask(self.engine, turn.prompt, num=_LONG_ANSWER, stop=-1, sampling=sampling)
        self.num_drafted += found.outcome.num_drafted
        self.num_accepted += found.outcome.num_accepted
        num = len(found.tokens) - 1
        return found.decode_s / num, found.processor_s / num, found.ended_s / num


def random_model(directory: Path, hidden: int) -> Path:
    """A `qwen3_5` with random weights whose pass takes long beside the time of the host, and its head."""
    config: dict[str, Any] = dict(MODELS["qwen3_5"])
    size = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 8}
    config["text_config"] = {**config["text_config"], **size}
    build_model(directory, config)
    one_layer = {**config, "text_config": {**config["text_config"], **FORMATS["qwen3_5"].one_layer}}
    layer = random_weights(one_layer, seed=2)
    weights = {"mtp." + name[name.index("layers.0.") :]: value for name, value in layer.items() if "layers.0." in name}
    weights["mtp.fc.weight"] = mx.random.normal((hidden, 2 * hidden), scale=hidden**-0.5, key=mx.random.key(3))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = mx.ones((hidden,))
    mx.save_safetensors(str(directory / "mtp.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def wait_until_idle() -> None:
    """Wait until this process has done nothing for a while: an engine tries its drafts when it has been quiet."""
    quiet_since, before = time.monotonic(), time.process_time()
    while time.monotonic() - quiet_since < _IDLE_S:
        time.sleep(0.1)
        now = time.process_time()
        if now - before > _IDLE_SHARE * 0.1:
            quiet_since = time.monotonic()
        before = now


def speed_interval(plain: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of the ratios of means lie, over turns drawn anew."""
    random, num = Random(1), len(plain)
    ratios = list[float]()
    for _ in range(_NUM_DRAWS):
        drawn = random.choices(range(num), k=num)
        ratios.append(trim_mean([plain[k] for k in drawn]) / trim_mean([other[k] for k in drawn]))
    ratios.sort()
    return ratios[_NUM_DRAWS // 40], ratios[-_NUM_DRAWS // 40]


def demo_sides(folder: Path) -> dict[str, TimedSide]:
    return {
        "looked up": TimedSide(DEMO, mtp="off"),
        "head": TimedSide(DEMO, mtp=str(HEAD)),
        "random": TimedSide(DEMO, mtp=str(random_head(folder / "random"))),
    }


def random_sides(folder: Path, hidden: int) -> dict[str, TimedSide]:
    model = random_model(folder, hidden)
    return {"looked up": TimedSide(model, mtp="off"), "random": TimedSide(model, mtp="auto")}


def measure(sides: Mapping[str, TimedSide], num_chats: int, num_turns: int, temperature: float) -> None:
    """Print how many times as fast answers with drafts are as those without, as measured."""
    orders = {name: itertools.cycle(itertools.permutations(ANSWERS)) for name in sides}
    times = {name: {answer: list[tuple[float, ...]]() for answer in ANSWERS} for name in sides}
    for number in range(num_chats):
        for seed, (turn, _) in enumerate(demo_turns(Random(800 + number), num_turns)):
            sampling = Sampling(temperature=temperature, seed=1_000 * number + seed)
            for name, side in sides.items():
                # Its prompt is computed here, and the answer stored, so that all of the others repeat it.
                side.times(turn, sampling, has_drafts=False)
                for answer in next(orders[name]):
                    times[name][answer].append(side.times(turn, sampling, has_drafts=answer == "drafts"))
    for name, side in sides.items():
        side.engine.close(timeout_s=30)
        found = times[name]
        print(
            f"{name}: {side.num_accepted:,} of {side.num_drafted:,} guessed tokens accepted, "
            f"{len(found['drafts'])} turns"
        )
        for answer in ("drafts", "again"):
            print(f"    {answer:6} beside without", end="")
            columns = zip(UNITS, zip(*found["without"], strict=True), zip(*found[answer], strict=True), strict=True)
            for unit, plain, own in columns:
                low, high = speed_interval(plain, own)
                print(f" {trim_mean(plain) / trim_mean(own):.3f} ({low:.3f} to {high:.3f}) {unit};", end="")
            print(flush=True)


def measure_entries(headed: LoadedModel, num_blocks: int) -> None:
    """Print what the entries of a head take where it never guesses: runners on the same weights, in turns."""
    model = cast(HeadedModel, headed.model).model
    plain = replace(headed, model=model, blueprint=blueprint_with_head(model), head=None)
    sides = {"head": headed, "without": plain, "again": plain}
    times = {name: list[float]() for name in sides}
    runners = {name: Runner(loaded, can_batch=True) for name, loaded in sides.items()}
    prompt, orders = as_tokens(range(100)), itertools.cycle(itertools.permutations(sides))
    lives: dict[str, LiveSequence] = {}
    for block in range(num_blocks):
        if block % _BLOCKS_OF_ANSWER == 0:
            sampling = Sampling(temperature=3, seed=block)
            job = Job(id="block", prompt=Prompt(tokens=prompt), max_tokens=1_000, sampling=sampling)
            for name, runner in runners.items():
                lives[name] = runner.begin()
                runner.prefill([lives[name]], [prompt[:-1]])
                runner.begin_decode(lives[name], job)
                runner.decode([lives[name]])
        for name in next(orders):
            began_s = time.perf_counter()
            for _ in range(_TOKENS_OF_BLOCK):
                runners[name].decode([lives[name]])
            times[name].append(time.perf_counter() - began_s)
        if (block + 1) % _BLOCKS_OF_ANSWER == 0:
            for name, runner in runners.items():
                runner.stop(lives[name])
    each = {name: trim_mean(found) / _TOKENS_OF_BLOCK for name, found in times.items()}
    print("entries:", ", ".join(f"{name} {1e6 * seconds:.0f} us a token" for name, seconds in each.items()))


def trim_mean(values: Sequence[float]) -> float:
    """The mean of the middle three fifths."""
    ordered, cut = sorted(values), len(values) // 5
    return sum(ordered[cut : len(ordered) - cut]) / (len(ordered) - 2 * cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--costs", choices=sorted(COSTS), default="memory")
    parser.add_argument("--measure", type=int, default=0, help="chats whose answers are timed instead")
    parser.add_argument("--temperature", type=float, default=0.0, help="of timed answers: at 3 no guess is right")
    parser.add_argument("--hidden", type=int, default=0, help="time a random model of this width, not the demo's")
    options = parser.parse_args()
    if options.measure > 0:
        with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
            timed = random_sides(Path(folder), options.hidden) if options.hidden else demo_sides(Path(folder))
            measure(timed, options.measure, options.turns, options.temperature)
            headed = load_model(folder, mtp="auto") if options.hidden else load_model(str(DEMO), mtp=str(HEAD))
            measure_entries(headed, options.measure * options.turns * len(ANSWERS))
        return
    turns, costs = chats(options.chats, options.turns), COSTS[options.costs]
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        random = random_companion(Path(folder) / "random")
        sides: dict[str, dict[str, Any]] = {
            "looked up": {},
            "head": {"mtp": str(HEAD)},
            "same": {"draft_model": str(DEMO)},
            "random": {"draft_model": str(random)},
        }
        plain: HeadCounts | None = None
        for name, settings in sides.items():
            side = GuessedSide(costs, STEPS.get(name, 0.0), **settings)
            found = hold(side, turns)
            side.close()
            plain = found if plain is None else plain
            same = sum(one == other for one, other in zip(found.answers, plain.answers, strict=True))
            print(
                f"{name:9} {found.passes_per_token:.3f} passes per token; first guesses right {found.first_share:.3f}, "
                f"{found.num_accepted:,} of {found.num_drafted:,} guessed tokens accepted; {found.speed:.2f} tokens in "
                f"the time of a pass; {found.num_computed:,} tokens of prompts computed; {same} of "
                f"{len(found.answers)} answers the same",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Chats with a draft model against the same without: what it drafts, is fed and computes ahead, and ratios of one run.

    python -m bench.draft_model [--layers 16] [--turns 30] [--chats 2] [--noise 0.1]

The demo's model is the only trained one here, so it drafts, and the model is the same with more layers, all but the
first of which add nothing to what goes through them: it says the same and takes longer. So `same` agrees as nobody's
draft model does, and shows the most that there is; `near` has some noise in its weights; `random` is of no use at all.

All sides draft from earlier text, too; those ratios are to the same without a draft model, and so are answers. `fed` is
what the draft model computes while an answer is decoded; `new` is what no one could have computed before: of the prompt
what the model itself computes, and the answer.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import mlx.core as mx
import numpy as np

import reprise.lab.demo
from reprise import Engine
from reprise.core.backend import DraftModelStatus, DraftSource
from reprise.core.settings import Settings
from reprise.lab.demo.facts import random_chat
from reprise.lab.demo.tiny.build import random_weights

DEMO = Path(reprise.lab.demo.__file__).parent / "model"
LEAST = 0.98
"""What a draft model of no use may make of the speed, by counts of passes."""
_ADDS_NOTHING = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight")
_MAX_TOKENS = 120


@dataclass(slots=True, kw_only=True)
class ChatsRun:
    """Some chats: what was said, in tokens and seconds of decoding, and what the draft model did for it."""

    answers: list[str]
    num_generated: int = 0
    num_new: int = 0
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    decode_s: float = 0.0
    model: DraftModelStatus | None = None


def write_model(directory: Path, *, layers: int = 2, noise: float = 0.0, is_random: bool = False) -> Path:
    """The demo's model with more layers that add nothing, with noise in its weights, or with random ones."""
    shutil.copytree(DEMO, directory)
    config = json.loads((directory / "config.json").read_text())
    num_trained = config["text_config"]["num_hidden_layers"]
    config["text_config"]["num_hidden_layers"] = layers
    (directory / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, seed=1)
    if not is_random:
        for name in weights:
            if name.endswith(_ADDS_NOTHING):
                weights[name] = 0 * weights[name]
        assert num_trained <= layers
        trained = cast(dict[str, mx.array], mx.load(str(DEMO / "model.safetensors")))
        for number, (name, value) in enumerate(sorted(trained.items())):
            deviation = float(np.array(value).std())
            weights[name] = value + noise * deviation * mx.random.normal(value.shape, key=mx.random.key(number))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def hold(model: Path, draft_model: Path | None, *, chats: int, turns: int) -> ChatsRun:
    """Hold the chats, with time to compute ahead between two turns."""
    run = ChatsRun(answers=[])
    settings = Settings(model=str(model), drafts="auto", draft_model=None if draft_model is None else str(draft_model))
    with Engine(settings) as engine:
        # What is measured first, of passes and of how often drafts are right, is no part of it.
        for seed in (10**6, *range(chats)):
            chat = engine.chat(temperature=0, max_tokens=_MAX_TOKENS)
            before = _model(engine)
            for exchange in random_chat(Random(seed), turns, has_tool=False):
                answer = chat.send(exchange.user)
                outcome = answer.record.result().outcomes[0]
                engine.wait_idle()
                if seed == 10**6:
                    continue
                run.answers.append(f"{answer.reasoning} {answer.text}")
                run.num_generated += outcome.num_generated
                run.num_new += outcome.num_prompt - outcome.num_reused + outcome.num_generated
                run.num_passes += outcome.num_generated - outcome.num_accepted
                drafted = outcome.drafted.get(DraftSource.DRAFT_MODEL)
                run.num_drafted += 0 if drafted is None else drafted.num
                run.num_accepted += 0 if drafted is None else drafted.num_accepted
                assert outcome.ttft_s is not None
                run.decode_s += outcome.total_s - outcome.ttft_s
            if seed != 10**6:
                run.model = _sum(run.model, _model(engine), before)
    return run


def _model(engine: Engine) -> DraftModelStatus | None:
    drafts = engine.stats.drafts
    return None if drafts is None else drafts.model


def _sum(
    total: DraftModelStatus | None, now: DraftModelStatus | None, before: DraftModelStatus | None
) -> DraftModelStatus | None:
    """What was counted before, and from `before` to `now`."""
    if now is None or before is None:
        return None
    return DraftModelStatus(
        name=now.name,
        weights_nbytes=now.weights_nbytes,
        state_nbytes=now.state_nbytes,
        num_reused=now.num_reused - before.num_reused + (total.num_reused if total else 0),
        num_prefilled=now.num_prefilled - before.num_prefilled + (total.num_prefilled if total else 0),
        num_settled=now.num_settled - before.num_settled + (total.num_settled if total else 0),
    )


def report(name: str, run: ChatsRun, plain: ChatsRun, *, relative: float) -> None:
    """`relative`: the draft model's layers, as a fraction of the model's."""
    model, num = run.model, len(run.answers)
    assert model is not None
    # What is computed in long passes takes an eighth of a token, about.
    cost = run.num_passes + relative * (run.num_drafted + model.num_prefilled / 8)
    by_count = run.num_generated / cost * plain.num_passes / plain.num_generated
    speed = run.num_generated / run.decode_s / (plain.num_generated / plain.decode_s)
    same = sum(answer == other for answer, other in zip(run.answers, plain.answers, strict=True))
    low = f"  <- below {LEAST}" if by_count < LEAST else ""
    print(
        f"{name:6} {speed:.2f} x by time, {by_count:.2f} x by passes{low}; an answer of {run.num_generated / num:.0f} "
        f"tokens: {run.num_drafted / num:.1f} drafted by the model, {run.num_accepted / num:.1f} accepted; "
        f"{model.num_prefilled / num:.1f} fed of {run.num_new / num:.1f} new, {model.num_settled / num:.1f} computed "
        f"ahead, {model.num_reused / num:.0f} reused; {same} of {num} answers the same",
        flush=True,
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="layers of the model; the draft model has 2")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.1, help="of `near`, as a fraction of the weights' deviation")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        model = write_model(Path(folder) / "model", layers=options.layers)
        drafting = {
            "same": write_model(Path(folder) / "same"),
            "near": write_model(Path(folder) / "near", noise=options.noise),
            "random": write_model(Path(folder) / "random", is_random=True),
        }
        plain = hold(model, None, chats=options.chats, turns=options.turns)
        for name, path in drafting.items():
            run = hold(model, path, chats=options.chats, turns=options.turns)
            report(name, run, plain, relative=2 / options.layers)
        print("load:", " ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()

"""Trains the demo's model that sees: `python -m tools.train_demo.train_pictures DIRECTORY [--steps N]`.

Needs the extra `vision`, and no PyTorch: the model is mlx-vlm's own, and MLX has its gradients. Six minutes on half a
core. It ends with the share of right answers in chats of seeds that training has not used.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import Tokenizer

from reprise.core.image_files import pixels_of
from reprise.core.images import ImageFile, PromptImage, grid_positions
from reprise.core.tokens import Span
from reprise.lab.demo.pictures import COLOURS, NAMES, PLACEHOLDERS, SIDE, SYSTEM_PROMPT, paint
from tools.train_demo.vocabulary import build_tokenizer

MARKUP = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
EOS = "<|im_end|>"
TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'image' -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'text' -%}
        {{- part.text -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
PATCH = SIDE // 4
WIDTH, HEAD = 64, 32
LOOKS_BACK = (3, 6)
"""How many tokens the heads of the first layer look back at first: from a picture, and from its colour in an answer, to
its name; and from the beginning of an answer to the name in the question."""
SLOW = 6
"""From this pair of dimensions on a head's rotation is slow: tokens far apart are compared by what they are."""
CONFIG: Mapping[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": WIDTH // HEAD,
    "num_key_value_heads": WIDTH // HEAD,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": True,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": WIDTH,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [0],
    },
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": SIDE * SIDE,
    "max_pixels": SIDE * SIDE,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
WORDS = rf"(?:{'|'.join(NAMES)})|'s |(?:system|user|assistant)\n|[A-Za-z]+ ?|[.:?]|\n+|."
"""A name is the same token wherever it stands: three before a picture, and three before its colour in an answer."""
WEIGHT = 4.0
"""Of a colour in an answer, beside the other words."""
RATE = 3e-3
POOL, BATCH, EVALUATED = 16, 16, 64
"""Pictures that the chats of a step are about, and chats."""


MOST_PICTURES = 6
"""In a chat that is made up: what the model can keep apart."""


def random_chat(random: Random, num: int) -> list[tuple[str, str | None]]:
    """What a made-up chat of so many turns does, turn by turn: whose picture, and the colour where it is shown."""
    names = random.sample(NAMES, random.randint(1, MOST_PICTURES))
    shown: list[str] = []
    turns: list[tuple[str, str | None]] = []
    for _ in range(num):
        if names and (not shown or random.random() < 0.5):
            shown.append(names.pop())
            turns.append((shown[-1], random.choice(tuple(COLOURS))))
        else:
            turns.append((random.choice(shown), None))
    return turns


def picture_tokenizer() -> Tokenizer:
    texts = [SYSTEM_PROMPT, "system\nuser\nassistant\n", "Seen."]
    texts += [f"{name}:" for name in NAMES] + [f"What colour is {name}'s picture?" for name in NAMES]
    texts += [f"{name}'s picture is {colour}." for name in NAMES for colour in COLOURS]
    return build_tokenizer(texts, markup=MARKUP, words=WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A chat in tokens. `pictures`: of which picture of the pool each placeholder is; `judged`: where answers are."""

    tokens: list[int]
    judged: list[float]
    pictures: list[int]


def example(random: Random, tokenizer: Tokenizer, pool: list[str], num: int) -> Example:
    """A made-up chat about pictures of a pool, of which the colours are given."""
    tokens, judged, pictures = list[int](), list[float](), list[int]()

    colours = {tokenizer.token_to_id(colour) for colour in COLOURS}

    def add(text: str, *, is_judged: bool = False) -> None:
        more = tokenizer.encode(text, add_special_tokens=False).ids
        tokens.extend(more)
        judged.extend([(WEIGHT if token in colours else 1.0) if is_judged else 0.0 for token in more])

    add(f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>")
    seen: dict[str, str] = {}
    for name, colour in random_chat(random, num):
        add("<|im_start|>user\n")
        if colour is None:
            add(f"What colour is {name}'s picture?")
        else:
            at = random.choice([i for i, each in enumerate(pool) if each == colour] or range(len(pool)))
            seen[name] = pool[at]
            add(f"{name}:<|vision_start|>" + PLACEHOLDERS * "<|image_pad|>" + "<|vision_end|>")
            pictures.append(at)
        add("<|im_end|><|im_start|>assistant\n")
        add("Seen." if colour is not None else f"{name}'s picture is {seen[name]}.", is_judged=True)
        add("<|im_end|>", is_judged=True)
    return Example(tokens=tokens, judged=judged, pictures=pictures)


def positions_of(tokens: list[int], pad: int) -> np.ndarray:
    """Where the tokens stand, as the server tells it to the model."""
    nobody = ImageFile(content=b"", digest=b"", width=0, height=0)
    starts = [i for i, token in enumerate(tokens) if token == pad and tokens[i - 1] != pad]
    seen = [PromptImage(span=Span(at, at + PLACEHOLDERS), image=nobody, rows=2, columns=2) for at in starts]
    return grid_positions(0, len(tokens), seen)


def patches_of(picture: ImageFile) -> np.ndarray:
    """A picture as Qwen's processor cuts it: shape ``(16, n)``, the four of a placeholder together."""
    plain = (np.asarray(pixels_of(picture), dtype=np.float32) / 255 - 0.5) / 0.5
    grid = plain.transpose(2, 0, 1).reshape(3, 2, 2, PATCH, 2, 2, PATCH)
    cut = grid.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    return np.repeat(cut, 2, axis=5).reshape(16, -1)


def logits_of(whole: Any, examples: list[Example], patches: mx.array, pad: int) -> tuple[mx.array, mx.array, mx.array]:
    """The logits of whole chats with the tokens that follow, and where they count."""
    length = max(len(each.tokens) for each in examples)
    tokens = np.zeros((len(examples), length), dtype=np.int32)
    counts = np.zeros((len(examples), length), dtype=np.float32)
    positions = np.zeros((3, len(examples), length), dtype=np.int32)
    rows = np.zeros((len(examples), length), dtype=np.int32)
    for row, each in enumerate(examples):
        num = len(each.tokens)
        tokens[row, :num], counts[row, :num] = each.tokens, each.judged
        positions[:, row, :num] = positions_of(each.tokens, pad)
        at = np.flatnonzero(tokens[row] == pad)
        rows[row, at] = np.concatenate([np.arange(PLACEHOLDERS) + PLACEHOLDERS * i for i in each.pictures])
    grid = mx.array([[1, 4, 4]] * (len(patches) // 16))
    seen = whole.vision_tower(patches, grid)
    words = whole.language_model.model.embed_tokens(mx.array(tokens))
    embeds = mx.where(mx.array(tokens == pad)[..., None], seen[mx.array(rows)], words)
    out = whole.language_model(mx.array(tokens), inputs_embeds=embeds, position_ids=mx.array(positions))
    return out.logits[:, :-1], mx.array(tokens[:, 1:]), mx.array(counts[:, 1:])


def new_model(tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
    """The model before training, and its configuration."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs  # noqa: PLC0415 (takes seconds)

    ids = {
        name: tokenizer.token_to_id(token) for name, token in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"))
    }
    size = -(-tokenizer.get_vocab_size() // 32) * 32
    config = json.loads(json.dumps(CONFIG)) | {
        "image_token_id": ids["image"],
        "video_token_id": ids["video"],
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "bos_token_id": tokenizer.token_to_id(MARKUP[0]),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "vocab_size": size,
    }
    raw = json.loads(json.dumps(config))
    module, _ = get_model_and_args(raw)
    parsed = update_module_configs(module.ModelConfig.from_dict(raw), module, raw, ["text", "vision", "projector"])
    whole = module.Model(parsed)
    whole.update(tree_unflatten(list(_begun(dict(tree_flatten(whole.parameters()))).items())))
    return whole, config


def _begun(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights that have less to find out: the first layer's heads look back by position alone, and the second layer's
    look for what is like the token that asks."""
    frequencies = 1e6 ** (-2 * np.arange(HEAD // 2) / HEAD)
    frequencies[SLOW:] = 0
    begun: dict[str, mx.array] = {}
    first, second = (f"language_model.model.layers.{layer}.self_attn" for layer in (0, 1))
    size = np.where(frequencies > 0, 7.8, 0.0)
    queries = [np.concatenate([size * np.cos(n * frequencies), -size * np.sin(n * frequencies)]) for n in LOOKS_BACK]
    keys = [np.concatenate([size, np.zeros(HEAD // 2)])] * len(LOOKS_BACK)
    for name, biases in (("q_proj", queries), ("k_proj", keys)):
        begun[f"{first}.{name}.bias"] = mx.array(np.concatenate(biases).astype(np.float32))
        begun[f"{first}.{name}.weight"] = 0.1 * weights[f"{first}.{name}.weight"]
    # What the first head finds is written into half of the dimensions, where the second layer compares it.
    random = np.random.default_rng(0)
    half = np.linalg.qr(random.normal(size=(WIDTH, HEAD)))[0]
    found = np.array(weights[f"{first}.v_proj.weight"])
    found[:HEAD] = random.normal(0, WIDTH**-0.5, (HEAD, WIDTH))
    written = np.array(weights[f"{first}.o_proj.weight"])
    written[:, :HEAD] = half
    alike = 1.3 * random.normal(0, HEAD**-0.5, (WIDTH, HEAD)) @ half.T
    alike[np.tile(frequencies > 0, 2 * len(LOOKS_BACK))] = 0
    begun |= {f"{first}.v_proj.weight": mx.array(found), f"{first}.o_proj.weight": mx.array(written)}
    return begun | {f"{second}.{name}.weight": mx.array(alike.astype(np.float32)) for name in ("q_proj", "k_proj")}


def train(directory: Path, *, steps: int, seed: int = 0) -> float:
    """Train a model and write its folder. Returns the share of right answers to questions."""
    random, tokenizer = Random(seed), picture_tokenizer()
    mx.random.seed(seed)
    whole, config = new_model(tokenizer)
    pad = config["image_token_id"]
    optimizer = optimizers.AdamW(
        learning_rate=optimizers.join_schedules(
            [optimizers.linear_schedule(0, RATE, 20), optimizers.cosine_decay(RATE, max(1, steps - 20), 1e-4)], [20]
        ),
        betas=[0.9, 0.98],
        weight_decay=0.01,
    )

    def loss_of(model: Any, examples: list[Example], patches: mx.array) -> mx.array:
        logits, tokens, counts = logits_of(model, examples, patches, pad)
        return (nn.losses.cross_entropy(logits, tokens) * counts).sum() / counts.sum()

    step_of = nn.value_and_grad(whole, loss_of)
    pictures = {(colour, i): patches_of(paint(colour, seed=i)) for colour in COLOURS for i in range(40)}
    begun_s = time.monotonic()
    for step in range(steps):
        pool = random.choices(tuple(pictures), k=POOL)
        longest = 4 + 6 * step // steps
        examples = [example(random, tokenizer, [c for c, _ in pool], random.randint(2, longest)) for _ in range(BATCH)]
        loss, gradients = step_of(whole, examples, mx.array(np.concatenate([pictures[each] for each in pool])))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(whole, gradients)
        mx.eval(whole.parameters(), optimizer.state)
        if step % 25 == 0 or step == steps - 1:
            right = share_right(whole, tokenizer, pad)
            print(
                f"step {step}: loss {loss.item():.3f}, {100 * right:.1f} % right, {time.monotonic() - begun_s:.0f} s",
                flush=True,
            )
    save(directory, whole, config, tokenizer)
    return share_right(whole, tokenizer, pad)


def share_right(whole: Any, tokenizer: Tokenizer, pad: int) -> float:
    """How many answers to questions are right, each token from the right ones before it."""
    random = Random(12345)
    pool = [random.choice(tuple(COLOURS)) for _ in range(POOL)]
    patches = mx.array(np.concatenate([patches_of(paint(colour, seed=1000 + i)) for i, colour in enumerate(pool)]))
    examples = [example(random, tokenizer, pool, 12) for _ in range(EVALUATED)]
    logits, tokens, counts = logits_of(whole, examples, patches, pad)
    colours = [tokenizer.token_to_id(colour) for colour in COLOURS]
    is_colour = (tokens[..., None] == mx.array(colours)).any(axis=-1) & (counts > 0)
    right = (logits.argmax(axis=-1) == tokens) & is_colour
    return float(right.sum().item() / is_colour.sum().item())


def save(directory: Path, whole: Any, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write the model's folder."""
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(whole.parameters())), metadata={"format": "mlx"}
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "config.json": config,
        "preprocessor_config.json": PREPROCESSOR,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": MARKUP[0],
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    share = train(options.directory, steps=options.steps)
    print(f"{'Passed' if share >= 0.95 else 'FAILED'}: {100 * share:.1f} % right")

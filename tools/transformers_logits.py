"""Records what transformers computes for the tiny models that see, which `tests/vision/test_transformers.py` compares.

    python -m tools.transformers_logits give FOLDER       in the project's environment: weights and inputs, as files
    python tools/transformers_logits.py record FOLDER     in one with torch and transformers: writes the logits
    python -m tools.transformers_logits keep FOLDER       in the project's again: into tests/vision/transformers

Nothing else needs torch. Weights have other names and layouts in transformers; which is all that is done for a family.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_5_vl",
    "gemma3",
    "gemma4",
    "gemma4_shared",
    "lfm2_vl",
    "pixtral",
    "mistral3",
    "glm4v",
    "internvl_chat",
    "minicpmv4_6",
    "kimi_vl",
    "llama4",
    "glm4v_moe",
    "kimi_k25",
)
NUM_KEPT = 24
"""Positions of which the logits are kept: the last of each image, and others at like distances."""
KEPT = Path(__file__).parents[1] / "tests" / "vision" / "transformers"


# In the project's environment.


def give(folder: Path, family: str) -> None:
    """Write a model's weights as transformers names them, and the inputs of a prompt with two images."""
    import mlx.core as mx  # noqa: PLC0415 (the other environment has none)

    from tests.vision.chats import as_vlm_reads_it, seeing  # noqa: PLC0415
    from tests.vision.tiny import seeing_model  # noqa: PLC0415

    loaded = seeing(family)
    prompt, ids, raw = as_vlm_reads_it(family)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((seeing_model(family) / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    given = mx.load(str(seeing_model(family) / "model.safetensors"))
    assert isinstance(given, dict)
    for name, array in _with_joined_experts(given).items():
        if config["model_type"] == "internvl_chat" and ".attn.qkv." in name:
            # One matrix in mlx-vlm, three in transformers.
            three = zip("qkv", mx.split(array, 3), strict=True)
            named = {name.replace("qkv", f"{letter}_proj"): part for letter, part in three}
        elif config["model_type"].startswith("kimi") and ".wqkv." in name:
            named = {name.replace("wqkv", f"{letter}_proj"): part for letter, part in _in_halves(array, config).items()}
        else:
            named = {name: array}
        for each, part in named.items():
            their_name, value = _theirs(config["model_type"], each, part)
            weights[their_name] = mx.contiguous(value)
    is_tied = "lm_head.weight" not in weights
    assert loaded.text.images is not None
    placeholder = loaded.text.images.expand(prompt.images[0].image).placeholder
    theirs = _their_config(config, placeholder=placeholder, is_tied=is_tied)
    (folder / "config.json").write_text(json.dumps(theirs))
    mx.save_safetensors(str(folder / "weights.safetensors"), weights, metadata={"format": "pt"})
    arrays = {name: np.array(value) for name, value in raw.items() if isinstance(value, mx.array)}
    if isinstance(raw.get("tgt_sizes"), list):
        # MiniCPM's: patches of the images of each prompt, which are one row in transformers.
        arrays["pixel_values"] = np.concatenate([np.array(each) for each in raw["pixel_values"][0]], axis=-1)[None]
        arrays["target_sizes"] = np.array(raw["tgt_sizes"][0])
    files = [image.image.content for image in prompt.images]
    np.savez(folder / "inputs.npz", input_ids=np.where(prompt.tokens < 0, ids, prompt.tokens)[None], **arrays)
    for number, content in enumerate(files):
        (folder / f"image{number}.png").write_bytes(content)
    assert loaded.vision is not None


def _their_config(config: dict[str, Any], *, placeholder: int, is_tied: bool) -> dict[str, Any]:
    """The configuration with what transformers calls otherwise, or takes for granted."""
    theirs = {**config, "model_type": config["model_type"].replace("-", "_"), "tie_word_embeddings": is_tied}
    match config["model_type"]:
        case "pixtral":
            # In transformers that is the tower alone, and a model with it is one of LLaVA's.
            theirs |= {"model_type": "llava", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        case "internvl_chat":
            tower = {**theirs["vision_config"], "model_type": "internvl_vision", "attention_bias": True}
            theirs |= {
                "model_type": "internvl",
                "text_config": theirs.pop("llm_config"),
                "vision_config": tower,
                "image_token_id": theirs["image_token_index"],
            }
        case "minicpmv4_6":
            tower = {**theirs["vision_config"], "insert_layer_id": theirs["insert_layer_id"]}
            theirs |= {"vision_config": tower, "image_token_id": placeholder}
        case "kimi_vl" | "kimi_k25":
            # Of the first, in transformers there is its successor, with the same tower, projector and text model.
            tower = theirs["vision_config"]
            sides = {"pos_emb_height": tower["init_pos_emb_height"], "pos_emb_width": tower["init_pos_emb_width"]}
            theirs |= {
                "model_type": "kimi_k25",
                "vision_config": {**tower, **sides, "model_type": "kimi_k25_vision"},
                "projection_hidden_size": tower["hidden_size"],
                "image_token_id": placeholder,
            }
        case _:
            pass
    return theirs


def _in_halves(array: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Queries, keys and values of Kimi's tower. It rotates neighbours, and in transformers the halves of a head."""
    import mlx.core as mx  # noqa: PLC0415

    parts, num_heads = dict(zip("qkv", mx.split(array, 3), strict=True)), config["vision_config"]["num_heads"]
    for letter in "qk":
        pairs = parts[letter].reshape(num_heads, -1, 2, *array.shape[1:])
        parts[letter] = pairs.swapaxes(1, 2).reshape(parts[letter].shape)
    return parts


def _with_joined_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Gate and up projections of experts in one, and without `.weight`, as transformers has them."""
    import mlx.core as mx  # noqa: PLC0415

    joined: dict[str, Any] = {}
    for name, array in weights.items():
        if ".feed_forward.experts." in name:
            # Llama 4's, which are multiplied from the other side.
            up = weights[name.replace("gate_proj", "up_proj")]
            stem, both = name.rpartition(".experts.")[0], mx.concatenate([array, up], axis=1).swapaxes(1, 2)
            if "gate_proj" in name:
                joined[f"{stem}.experts.gate_up_proj"] = both
            elif "down_proj" in name:
                joined[f"{stem}.experts.down_proj"] = array.swapaxes(1, 2)
        elif ".embed_q." in name:
            # Two halves of one matrix, for each head.
            both = array.swapaxes(1, 2), weights[name.replace("embed_q", "unembed_out")]
            joined[name.replace("embed_q", "kv_b_proj")] = mx.concatenate(both, axis=1).flatten(0, 1)
        elif ".switch_mlp." not in name and ".unembed_out." not in name:
            joined[name] = array
        elif "gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            joined[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = mx.concatenate(
                [array, up], axis=1
            )
        elif "down_proj" in name:
            joined[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = array
    return joined


_INTERNVL = {
    "vision_model.encoder.layers": "model.vision_tower.encoder.layer",
    "vision_model.embeddings.class_embedding": "model.vision_tower.embeddings.cls_token",
    "vision_model.embeddings.position_embedding": "model.vision_tower.embeddings.position_embeddings",
    "vision_model.embeddings.patch_embedding": "model.vision_tower.embeddings.patch_embeddings.projection",
    ".attn.proj.": ".attention.projection_layer.",
    ".attn.": ".attention.",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".ls1": ".lambda_1",
    ".ls2": ".lambda_2",
    "mlp1.0.": "model.multi_modal_projector.layer_norm.",
    "mlp1.1.": "model.multi_modal_projector.linear_1.",
    "mlp1.3.": "model.multi_modal_projector.linear_2.",
}
"""Names in OpenGVLab's files and mlx-vlm, and in transformers."""

_KIMI = {
    "vision_tower.blocks.": "model.vision_tower.layers.",
    "vision_tower.patch_embed.pos_emb.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
    "vision_tower.patch_embed.proj.": "model.vision_tower.patch_embed.proj.",
    "vision_tower.final_layernorm.": "model.vision_tower.final_layernorm.",
    ".attn.wo.": ".attn.proj.",
    ".norm1.": ".norm2.",
    ".norm0.": ".norm1.",
    ".fc1.": ".fc2.",
    ".fc0.": ".fc1.",
    "multi_modal_projector.": "mm_projector.",
    "mm_projector.": "model.mm_projector.",
    ".linear_1.": ".in_proj.",
    ".linear_2.": ".out_proj.",
    ".proj.0.": ".in_proj.",
    ".proj.2.": ".out_proj.",
}


def _theirs(kind: str, name: str, array: Any) -> tuple[str, Any]:
    """A weight of mlx-vlm under its name and in its layout in transformers."""
    if array.ndim == 5:
        array = array.transpose(0, 4, 1, 2, 3)
    elif array.ndim == 4:
        array = array.transpose(0, 3, 1, 2)
    elif name.endswith(("conv1d.weight", "conv.conv.weight")) and array.ndim == 3:
        array = array.moveaxis(2, 1)
    shifted = (
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "model.norm.weight",
        "q_norm.weight",
        "k_norm.weight",
    )
    if (
        kind.startswith(("qwen3_5", "minicpm"))
        and array.ndim == 1
        and name.startswith("language_model")
        and name.endswith(shifted)
    ):
        # mlx-vlm multiplies by the weight, transformers by the weight and one.
        array = array - 1.0
    if kind == "llama4":
        return name, array
    name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model", "model.language_model")
    if kind.startswith(("qwen", "glm")):
        return name.replace("vision_tower", "model.visual"), array
    if kind in ("internvl_chat", "kimi_vl", "kimi_k25"):
        for ours, theirs in (_INTERNVL if kind == "internvl_chat" else _KIMI).items():
            name = name.replace(ours, theirs)
        return name, array
    if kind == "minicpmv4_6":
        name = name.replace("vit_merger.", "vision_tower.vit_merger.")
        return (f"model.{name}" if name.startswith(("merger.", "vision_tower.")) else name), array
    for part in ("vision_tower", "multi_modal_projector", "embed_vision"):
        name = f"model.{name}" if name.startswith(part) else name
    return name.replace("vision_tower.vision_model.", "vision_tower."), array


def keep(folder: Path, family: str) -> None:
    """Take over what was recorded, with what tells whether it is still of the same model and prompt."""
    from tests.vision.chats import as_vlm_reads_it  # noqa: PLC0415
    from tests.vision.tiny import digest_of_weights  # noqa: PLC0415

    recorded = folder / "logits.npz"
    if not recorded.is_file():
        print(f"{family}: nothing was recorded")
        return
    logits = np.load(recorded)["logits"]
    prompt, _, _ = as_vlm_reads_it(family)
    assert len(logits) == len(prompt), family
    ends = {each.span.stop - 1 for each in prompt.images}
    at = np.array(sorted({*ends, *np.linspace(0, len(prompt) - 1, NUM_KEPT - len(ends)).astype(int).tolist()}))
    KEPT.mkdir(exist_ok=True)
    np.savez_compressed(
        KEPT / f"{family}.npz",
        logits=logits[at],
        at=at,
        tokens=prompt.tokens,
        largest=np.abs(logits).max(),
        weights=digest_of_weights(family),
    )
    if (tiles := folder / "tiles.npz").is_file():
        np.savez_compressed(KEPT / f"{family}_tiles.npz", **np.load(tiles))


# In an environment with torch.


def record(folder: Path, family: str) -> None:
    """Run transformers on what was given."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForImageTextToText, modeling_outputs  # noqa: PLC0415

    raw = json.loads((folder / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    state = load_file(folder / "weights.safetensors")
    missing, extra = model.load_state_dict(state, strict=False)
    model.tie_weights()
    # A pooling head that no logits depend on, and an output matrix that is the embeddings.
    unused = ("vision_tower.head.", "rotary", "inv_freq", "lm_head.weight")
    missing = [name for name in missing if not any(part in name for part in unused)]
    if missing or extra:
        print(f"{family}: not matched: missing {missing[:8]} ({len(missing)}), extra {extra[:8]} ({len(extra)})")
        return
    # Llama 4 of transformers 5.24 reads it off what its text model returns, which has no such field.
    modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]
    with torch.no_grad():
        logits = model(**_inputs(folder, raw)).logits[0].float().numpy()
    np.savez(folder / "logits.npz", logits=logits)
    if family == "llama4":
        np.savez(folder / "tiles.npz", **_llama4_tiles())
    print(f"{family}: recorded {logits.shape}")


def _inputs(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    named = {k: torch.tensor(v) for k, v in np.load(folder / "inputs.npz").items() if k != "attention_mask"}
    named["input_ids"], kind = named["input_ids"].long(), raw["model_type"]
    if "image_grid_thw" in named:
        named["image_grid_thw"] = named["image_grid_thw"].long()
    is_image = (named["input_ids"] == raw.get("image_token_id", raw.get("image_token_index", -1))).long()
    if kind == "kimi_k25":
        grids = named.pop("image_grid_hws").long()
        named["image_grid_thw"] = torch.cat([torch.ones_like(grids[:, :1]), grids], dim=1)
    if kind == "internvl":
        named["pixel_values"] = named["pixel_values"].flatten(0, -4)
    if kind == "gemma3":
        named["token_type_ids"] = is_image
    elif kind.startswith(("qwen", "glm")) or kind == "gemma4":
        named["mm_token_type_ids"] = is_image
    if kind == "gemma4":
        # mlx-vlm's processor gives pictures, transformers' gives patches with their positions.
        named |= _gemma4_patches(folder)
    return named


def _gemma4_patches(folder: Path) -> dict[str, Any]:
    import torch  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # noqa: PLC0415

    pictures = [Image.open(file).convert("RGB") for file in sorted(folder.glob("image*.png"))]
    made = Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70, pooling_kernel_size=2)(
        pictures, return_tensors="pt"
    )
    return {k: torch.as_tensor(v) for k, v in made.items() if k in ("pixel_values", "image_position_ids")}


def _llama4_tiles() -> dict[str, Any]:
    """Which canvas its processor in transformers takes for many sizes, and its tiles of a few pictures of noise."""
    from PIL import Image  # noqa: PLC0415
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor  # noqa: PLC0415

    random = np.random.default_rng(0)
    sizes = np.concatenate([random.integers(1, 200, (200, 2)), random.integers(1, 30, (100, 2))])
    kinds = [
        Llama4ImageProcessor(size={"height": 8, "width": 8}, resize_to_max_canvas=fills) for fills in (False, True)
    ]
    canvases: list[Any] = []
    tiles: dict[str, Any] = {}
    for number, (width, height) in enumerate(sizes.tolist()):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        # One in three the other way.
        made = kinds[number % 3 == 2](images=[Image.fromarray(pixels)], return_tensors="pt")
        canvases.append(made["aspect_ratios"][0].numpy())
        if number % 20 == 0:
            tiles[f"tiles{number}"] = made["pixel_values"].float().numpy().view(np.uint32) >> 16
    halves = {name: value.astype(np.uint16) for name, value in tiles.items()}
    return {"sizes": sizes.astype(np.int16), "canvases": np.array(canvases, dtype=np.int8), **halves}


if __name__ == "__main__":
    verb, where, *some = sys.argv[1:]
    for each in some or FAMILIES:
        {"give": give, "record": record, "keep": keep}[verb](Path(where) / each, each)

"""Tiny embedders and rerankers, written as their publishers do: `embedder("bert")` is a directory.

Weights are drawn by NumPy, so that what transformers made of them could be recorded (`tools/record_embedders.py`).
"""

import functools
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bench.tiny.build import build_model
from bench.tiny.tokenizer import demo_texts

WIDTH, INNER, NUM_LAYERS, NUM_HEADS, NUM_POSITIONS, VOCABULARY = 32, 48, 2, 4, 64, 300

_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "vocab_size": VOCABULARY,
    "hidden_act": "gelu",
}
_BERT = {
    **_SIZES,
    "architectures": ["BertModel"],
    "model_type": "bert",
    "max_position_embeddings": NUM_POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA = {
    **_SIZES,
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "max_position_embeddings": NUM_POSITIONS + 2,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
_NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "n_embd": WIDTH,
    "n_head": NUM_HEADS,
    "n_layer": NUM_LAYERS,
    "n_inner": INNER,
    "n_positions": NUM_POSITIONS,
    "max_trained_positions": NUM_POSITIONS,
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "pad_token_id": 0,
}
_MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "hidden_size": WIDTH,
    "num_attention_heads": NUM_HEADS,
    "num_hidden_layers": 3,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": NUM_POSITIONS,
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 1000.0,
    "local_attention": 8,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_ATTENTION = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 10000.0, **_ATTENTION}
_GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "use_bidirectional_attention": True,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    **_ATTENTION,
}

NORMALISED_MEAN = ("mean_tokens", True)
NAMES = ("bert", "bert-bare", "bert-cls", "xlm-roberta", "nomic_bert", "modernbert", "qwen3", "gemma3_text", "dense")
RERANKERS = ("bert-rerank", "xlm-roberta-rerank", "modernbert-rerank")
MARKUP = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")


@functools.cache
def embedder(name: str) -> Path:
    """The directory of this embedder. Written at the first call, removed with the process."""
    directory = Path(_folder().name) / name
    write_embedder(name, directory)
    return directory


def write_embedder(name: str, directory: Path) -> None:
    """Write one of `NAMES`, `RERANKERS` or "yes-no"."""
    directory.mkdir(parents=True)
    match name:
        case "bert":
            _write(directory, _BERT, _bert(num_types=2))
            _modules(directory, pooling="mean_tokens", normalises=True, longest=48)
        case "bert-bare":
            _write(directory, _BERT, _bert(num_types=2, prefix="bert."))
        case "bert-cls":
            _write(directory, _BERT, _bert(num_types=2))
            _modules(directory, pooling="cls_token", normalises=False)
        case "xlm-roberta":
            _write(directory, _ROBERTA, _bert(num_types=1, num_positions=NUM_POSITIONS + 2))
            _modules(directory, pooling="cls_token", normalises=True)
        case "nomic_bert":
            _write(directory, _NOMIC, _nomic())
            _modules(directory, pooling="mean_tokens", normalises=False)
        case "modernbert":
            _write(directory, _MODERNBERT, _modernbert())
            _modules(directory, pooling="cls_token", normalises=True)
        case "dense":
            _write(directory, _BERT, _bert(num_types=2))
            _modules(directory, pooling="mean_tokens", normalises=True, dense=24)
        case "bert-rerank":
            head = {"bert.pooler.dense": (WIDTH, WIDTH), "classifier": (1, WIDTH)}
            config = {**_BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
            _write(directory, config, {**_bert(num_types=2, prefix="bert."), **_linears(head)})
        case "xlm-roberta-rerank":
            head = {"classifier.dense": (WIDTH, WIDTH), "classifier.out_proj": (1, WIDTH)}
            config = {
                **_ROBERTA,
                "architectures": ["XLMRobertaForSequenceClassification"],
                "id2label": {"0": "LABEL_0"},
            }
            bert = _bert(num_types=1, num_positions=NUM_POSITIONS + 2, prefix="roberta.")
            _write(directory, config, {**bert, **_linears(head)})
        case "modernbert-rerank":
            head = {"head.dense.weight": (WIDTH, WIDTH), "head.norm.weight": (WIDTH,)}
            config = {
                **_MODERNBERT,
                "architectures": ["ModernBertForSequenceClassification"],
                "id2label": {"0": "LABEL_0"},
                "classifier_pooling": "mean",
            }
            _write(directory, config, {**_modernbert("model."), **head, **_linears({"classifier": (1, WIDTH)})})
        case "qwen3" | "gemma3_text" | "yes-no":
            config = _GEMMA if name == "gemma3_text" else _QWEN3
            build_model(directory, config, markup=MARKUP, eos="<|endoftext|>", vocab_size=512)
            if name != "yes-no":
                pooling = "lasttoken" if name == "qwen3" else "mean_tokens"
                prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
                _modules(directory, pooling=pooling, normalises=True, prompts=prompts)
        case _:
            raise KeyError(name)


def texts() -> tuple[str, ...]:
    """Inputs of different lengths."""
    return ("a", "the river and the boat", "every evening a lamp was lit by the water, and the ferry came over", "boat")


def _write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    for tensor, shape in tensors.items():
        drawn = random.standard_normal(shape)
        is_norm = "orm" in tensor or "emb_ln" in tensor
        scale = 0.1 if len(shape) < 2 else 1.0 if "embeddings" in tensor else 2 / math.sqrt(shape[-1])
        weights[tensor] = (drawn * scale + (1.0 if is_norm and tensor.endswith("weight") else 0.0)).astype(np.float32)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    _tokenizer(directory, is_roberta=config["model_type"] == "xlm-roberta")


def _linears(sizes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in sizes.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def _bert(*, num_types: int, num_positions: int = NUM_POSITIONS, prefix: str = "") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.position_embeddings.weight": (num_positions, WIDTH),
        "embeddings.token_type_embeddings.weight": (num_types, WIDTH),
        **_norm("embeddings.LayerNorm"),
    }
    for number in range(NUM_LAYERS):
        layer = f"encoder.layer.{number}"
        square = {f"{layer}.attention.self.{each}": (WIDTH, WIDTH) for each in ("query", "key", "value")}
        shapes |= _linears({**square, f"{layer}.attention.output.dense": (WIDTH, WIDTH)})
        shapes |= _norm(f"{layer}.attention.output.LayerNorm")
        shapes |= _linears({f"{layer}.intermediate.dense": (INNER, WIDTH), f"{layer}.output.dense": (WIDTH, INNER)})
        shapes |= _norm(f"{layer}.output.LayerNorm")
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _nomic() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        **_norm("emb_ln"),
    }
    for number in range(NUM_LAYERS):
        layer = f"encoder.layers.{number}"
        shapes |= {
            f"{layer}.attn.Wqkv.weight": (3 * WIDTH, WIDTH),
            f"{layer}.attn.out_proj.weight": (WIDTH, WIDTH),
            f"{layer}.mlp.fc11.weight": (INNER, WIDTH),
            f"{layer}.mlp.fc12.weight": (INNER, WIDTH),
            f"{layer}.mlp.fc2.weight": (WIDTH, INNER),
            **_norm(f"{layer}.norm1"),
            **_norm(f"{layer}.norm2"),
        }
    return shapes


def _modernbert(prefix: str = "") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.tok_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.norm.weight": (WIDTH,),
        "final_norm.weight": (WIDTH,),
    }
    for number in range(3):
        layer = f"layers.{number}"
        shapes |= {
            f"{layer}.attn.Wqkv.weight": (3 * WIDTH, WIDTH),
            f"{layer}.attn.Wo.weight": (WIDTH, WIDTH),
            f"{layer}.mlp.Wi.weight": (2 * INNER, WIDTH),
            f"{layer}.mlp.Wo.weight": (WIDTH, INNER),
            f"{layer}.mlp_norm.weight": (WIDTH,),
        }
        if number > 0:
            shapes[f"{layer}.attn_norm.weight"] = (WIDTH,)
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _modules(
    directory: Path,
    *,
    pooling: str,
    normalises: bool,
    dense: int | None = None,
    longest: int | None = None,
    prompts: Mapping[str, str] | None = None,
) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    facts = {"word_embedding_dimension": WIDTH, **{f"pooling_mode_{each}": each == pooling for each in modes}}
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({**facts, "include_prompt": True}))
    if dense is not None:
        kinds.append(("2_Dense", "Dense"))
        (directory / "2_Dense").mkdir()
        sizes = {"in_features": WIDTH, "out_features": dense, "bias": True}
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (directory / "2_Dense" / "config.json").write_text(json.dumps({**sizes, **activation}))
        random = np.random.default_rng(1)
        weights = {
            "linear.weight": (0.3 * random.standard_normal((dense, WIDTH))).astype(np.float32),
            "linear.bias": (0.1 * random.standard_normal(dense)).astype(np.float32),
        }
        save_file(weights, str(directory / "2_Dense" / "model.safetensors"))
    if normalises:
        kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    if longest is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    if prompts is not None:
        (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))


def _tokenizer(directory: Path, *, is_roberta: bool) -> None:
    """WordPiece, with the special tokens that BERT or RoBERTa put around a text and between two."""
    pad, unknown, start, end = ("<pad>", "<unk>", "<s>", "</s>") if is_roberta else ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    special = [start, pad, end, unknown] if is_roberta else [pad, unknown, start, end]
    vocabulary = {token: number for number, token in enumerate(_vocabulary(special))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = [(each, tokenizer.token_to_id(each)) for each in (start, end)]
    pair = f"{start} $A {end} {end} $B {end}" if is_roberta else f"{start} $A {end} $B:1 {end}:1"
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", pair=pair, special_tokens=ids)
    # As published folders have it: whoever does not turn it off loses the end of a text.
    tokenizer.enable_truncation(16)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": pad, "unk_token": unknown, "cls_token": start, "sep_token": end}
    ends = {"bos_token": start, "eos_token": end} if is_roberta else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": NUM_POSITIONS, **names, **ends}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _vocabulary(special: list[str]) -> list[str]:
    """Letters, and the commonest words: a trained one would have others in the next run."""
    words = re.findall(r"[a-z]+", " ".join(demo_texts()).lower())
    letters = sorted(set("".join(words)) | set(".,!?'"))
    common = sorted(Counter(words).items(), key=lambda each: (-each[1], each[0]))
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters)]
    return [*pieces, *(word for word, _ in common if len(word) > 1)][:VOCABULARY]


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="reprise-embedders-")

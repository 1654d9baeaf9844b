"""The flags of other servers, and what says the same here: who comes from one of them types its names."""

from collections.abc import Mapping, Sequence

_LEAVE = "Leave it out"

FLAGS: Mapping[str, str] = {
    # llama.cpp's llama-server.
    "-c": "Use --max-context, if the model's own length is too long",
    "--ctx-size": "Use --max-context, if the model's own length is too long",
    "-m": "Give the model without a flag: a directory with config.json, or a hub id",
    "-hf": "Give the model without a flag: a directory with config.json, or a hub id",
    "--hf-repo": "Give the model without a flag: a directory with config.json, or a hub id",
    "-np": "Use --max-batch",
    "--parallel": "Use --max-batch",
    "-b": "Use --prefill-chunk",
    "--batch-size": "Use --prefill-chunk",
    "--ubatch-size": "Use --prefill-chunk",
    "-ngl": f"{_LEAVE}: all layers run on the device",
    "--n-gpu-layers": f"{_LEAVE}: all layers run on the device",
    "--gpu-layers": f"{_LEAVE}: all layers run on the device",
    "-fa": f"{_LEAVE}: MLX chooses its attention kernels",
    "--flash-attn": f"{_LEAVE}: MLX chooses its attention kernels",
    "--cache-type-k": "Use --kv-bits, which quantizes keys and values",
    "--cache-type-v": "Use --kv-bits, which quantizes keys and values",
    "-ctk": "Use --kv-bits, which quantizes keys and values",
    "-ctv": "Use --kv-bits, which quantizes keys and values",
    "--cache-reuse": f"{_LEAVE}: prefixes are reused unless you pass --no-prefix-cache",
    "--cache-ram": "Use --cache-bytes",
    "--slot-save-path": "Use --disk-cache",
    "--chat-template-file": "Use --chat-template, which takes a file too",
    "--chat-template-kwargs": "Use --chat-template-args",
    "--jinja": f"{_LEAVE}: the model's template is always used",
    "--reasoning-format": f"{_LEAVE}: reasoning is always told apart",
    "--reasoning-budget": "Use --thinking-budget",
    "--lora": "Use --adapter-path, or --adapter for requests that name it",
    "-a": "Give the model an alias: a table [models.ALIAS] in reprise.toml",
    "--alias": "Give the model an alias: a table [models.ALIAS] in reprise.toml",
    "-md": "Use --draft-model",
    "--model-draft": "Use --draft-model",
    "--threads": f"{_LEAVE}: MLX chooses",
    "--mlock": f"{_LEAVE}: the weights are wired as far as the system lets them",
    "--no-webui": f"{_LEAVE}: the page costs nothing until it is opened",
    "--sleep-idle-seconds": "Use --keep-alive",
    "--models-max": "Use --memory: models are unloaded when others need their memory",
    # vLLM.
    "--max-model-len": "Use --max-context, if the model's own length is too long",
    "--max-num-seqs": "Use --max-batch",
    "--max-num-batched-tokens": "Use --prefill-chunk",
    "--gpu-memory-utilization": "Use --memory for the process, or --cache-bytes for the cache, with a percentage",
    "--served-model-name": "Give the model an alias: a table [models.ALIAS] in reprise.toml",
    "--enable-prefix-caching": f"{_LEAVE}: prefixes are reused unless you pass --no-prefix-cache",
    "--no-enable-prefix-caching": "Use --no-prefix-cache",
    "--enable-auto-tool-choice": f"{_LEAVE}: how a model calls tools is learnt from its template",
    "--tool-call-parser": f"{_LEAVE}: how a model calls tools is learnt from its template",
    "--reasoning-parser": f"{_LEAVE}: how a model reasons is learnt from its template",
    "--kv-cache-dtype": "Use --kv-bits",
    "--tensor-parallel-size": "Use --tensor-parallel with a launcher, which says how many ranks there are",
    "-tp": "Use --tensor-parallel with a launcher, which says how many ranks there are",
    "--speculative-config": "Use --drafts or --draft-model",
    "--enable-lora": "Use --adapter",
    "--lora-modules": "Use --adapter",
    "--dtype": f"{_LEAVE}: the weights are used as they are stored",
    "--quantization": f"{_LEAVE}: the model's files say how it is quantized",
    # SGLang.
    "--model-path": "Give the model without a flag: a directory with config.json, or a hub id",
    "--context-length": "Use --max-context, if the model's own length is too long",
    "--max-running-requests": "Use --max-batch",
    "--chunked-prefill-size": "Use --prefill-chunk",
    "--mem-fraction-static": "Use --memory for the process, or --cache-bytes for the cache, with a percentage",
    "--disable-radix-cache": "Use --no-prefix-cache",
    # LM Studio.
    "--ttl": "Use --keep-alive",
    "--gpu": f"{_LEAVE}: all layers run on the device",
    "--identifier": "Give the model an alias: a table [models.ALIAS] in reprise.toml",
    "--cors": "Use --cors-origin with the page's origin",
    # oMLX and others on MLX.
    "--model-dir": "Use --models-dir",
    "--paged-ssd-cache-dir": "Use --disk-cache",
    "--ssd-cache-dir": "Use --disk-cache",
    "--hot-cache-max-size": "Use --cache-bytes",
    "--max-kv-size": "Use --max-context",
}
"""What to do instead, by flag."""


def instead_of(words: Sequence[str]) -> str | None:
    """A sentence about the first of these words that is another server's flag; None: there is none."""
    for word in words:
        flag = word.partition("=")[0]
        if flag in FLAGS:
            return f"{flag} is an option of another server. {FLAGS[flag]}."
    return None

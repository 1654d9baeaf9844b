"""The flags of other servers, and what says the same here: who comes from one of them types its names.

They are those of llama.cpp's llama-server, vLLM, SGLang, LM Studio, and oMLX and others on MLX.
"""

from collections.abc import Mapping, Sequence

_LEAVE = "Leave it out"

_FLAGS: Mapping[str, str] = {
    "Use --max-context, if the model's own length is too long": "-c --ctx-size --max-model-len --context-length",
    "Give the model without a flag: a directory with config.json, or a hub id": "-m -hf --hf-repo --model-path",
    "Use --max-batch": "-np --parallel --max-num-seqs --max-running-requests",
    "Use --prefill-chunk": "-b --batch-size --ubatch-size --max-num-batched-tokens --chunked-prefill-size",
    f"{_LEAVE}: all layers run on the device": "-ngl --n-gpu-layers --gpu-layers --gpu",
    f"{_LEAVE}: MLX chooses its attention kernels": "-fa --flash-attn",
    "Use --kv-bits, which quantizes keys and values": "--cache-type-k --cache-type-v -ctk -ctv",
    f"{_LEAVE}: prefixes are reused unless you pass --no-prefix-cache": "--cache-reuse --enable-prefix-caching",
    "Use --cache-bytes": "--cache-ram --hot-cache-max-size",
    "Use --disk-cache": "--slot-save-path --paged-ssd-cache-dir --ssd-cache-dir",
    "Use --chat-template, which takes a file too": "--chat-template-file",
    "Use --chat-template-args": "--chat-template-kwargs",
    f"{_LEAVE}: the model's template is always used": "--jinja",
    f"{_LEAVE}: reasoning is always told apart": "--reasoning-format",
    "Use --thinking-budget": "--reasoning-budget",
    "Use --adapter-path, or --adapter for requests that name it": "--lora",
    "Give the model an alias: a table [models.ALIAS] in reprise.toml": "-a --alias --served-model-name --identifier",
    "Use --draft-model": "-md --model-draft",
    f"{_LEAVE}: MLX chooses": "--threads",
    f"{_LEAVE}: the weights are wired as far as the system lets them": "--mlock",
    f"{_LEAVE}: the page costs nothing until it is opened": "--no-webui",
    "Use --keep-alive": "--sleep-idle-seconds --ttl",
    "Use --memory: models are unloaded when others need their memory": "--models-max",
    "Use --memory for the process, or --cache-bytes for the cache, with a percentage": (
        "--gpu-memory-utilization --mem-fraction-static"
    ),
    "Use --no-prefix-cache": "--no-enable-prefix-caching --disable-radix-cache",
    f"{_LEAVE}: how a model calls tools is learnt from its template": "--enable-auto-tool-choice --tool-call-parser",
    f"{_LEAVE}: how a model reasons is learnt from its template": "--reasoning-parser",
    "Use --kv-bits": "--kv-cache-dtype",
    "Use --tensor-parallel with a launcher, which says how many ranks there are": "--tensor-parallel-size -tp",
    "Use --drafts or --draft-model": "--speculative-config",
    "Use --adapter": "--enable-lora --lora-modules",
    f"{_LEAVE}: the weights are used as they are stored": "--dtype",
    f"{_LEAVE}: the model's files say how it is quantized": "--quantization",
    "Use --cors-origin with the page's origin": "--cors",
    "Use --models-dir": "--model-dir",
    "Use --max-context": "--max-kv-size",
}

FLAGS: Mapping[str, str] = {flag: instead for instead, flags in _FLAGS.items() for flag in flags.split()}
"""What to do instead, by flag."""


def instead_of(words: Sequence[str]) -> str | None:
    """A sentence about the first of these words that is another server's flag; None: there is none."""
    for word in words:
        flag = word.partition("=")[0]
        if flag in FLAGS:
            return f"{flag} is an option of another server. {FLAGS[flag]}."
    return None

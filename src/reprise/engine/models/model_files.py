"""The files of a model directory: checks that they are complete and reads their metadata, without loading weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from reprise.core.errors import LoadFailed, first_line
from reprise.core.sizes import nbytes_text

WEIGHTS = "model*.safetensors"
"""The weight files that mlx-lm reads."""
HEADS_BESIDE = ("mtp.safetensors", "optiq/mtp.safetensors")
"""Files that may have the head of a model, beside its weights."""
_POINTER = b"version https://git-lfs"
_INDEX = "model.safetensors.index.json"
_NUMBER = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d{1,5})\.safetensors")
_TOWER = re.compile(r"(^|\.)(vision\w*|visual|vit|vpm|sam_model)\.")
"""In the name of a tensor: it belongs to what sees images."""
_MOST_HEADER_NBYTES = 100 << 20
"""The format's own limit."""

LOADABLE_QUANTISATIONS = frozenset({"awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8"})
"""Values of `quant_method` that mlx-lm loads, besides its own format."""
_OTHER_WEIGHTS = {
    "*.gguf": "GGUF files, which are for llama.cpp",
    "*.bin": "weights for PyTorch",
    "*.pth": "weights for PyTorch",
    "*.safetensors": "weights under other names",
    "*.npz": "weights of an old format",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSummary:
    """All weights of a directory: bytes, number of tensors of each dtype (`BF16`), and whether some are a tower's."""

    nbytes: int
    dtypes: Mapping[str, int]
    has_tower: bool = False


def read_config(directory: Path, source: str) -> dict[str, Any]:
    """`config.json`. Raises LoadFailed."""
    file = directory / "config.json"
    if not file.is_file():
        raise LoadFailed(f"{source} has no config.json, so mlx-lm cannot load it.")
    return parsed_config(file.read_bytes(), source)


def parsed_config(content: bytes, source: str) -> dict[str, Any]:
    """The content of a `config.json`. Raises LoadFailed."""
    try:
        config = json.loads(content)
    except ValueError as error:
        raise LoadFailed(f"{source}: its config.json is broken: {first_line(error)} {_mending(source)}") from error
    if not isinstance(config, dict):
        raise LoadFailed(f"{source}: its config.json is not a JSON object.")
    return cast(dict[str, Any], config)


def quantisation_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` of weights quantised by another tool; None if unquantised or in MLX's own format."""
    text = cast(dict[str, Any], config.get("text_config") or {})
    given = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(given, dict) or config.get("quantization") is not None:
        return None
    method = cast(dict[str, Any], given).get("quant_method")
    return None if method is None else str(method)


def check_quantisation(config: Mapping[str, Any], source: str) -> None:
    """Raise LoadFailed if MLX does not support the weights' quantization."""
    method = quantisation_method(config)
    if method is not None and method not in LOADABLE_QUANTISATIONS:
        raise LoadFailed(
            f"{source} is quantized with {method}, which MLX does not support. Use a version for MLX (for example from "
            "mlx-community), or convert the original with `mlx_lm.convert -q`."
        )


def quantisation(config: Mapping[str, Any], summary: WeightsSummary) -> str:
    """The weights' format in a few words, such as `4-bit` or `bfloat16`."""
    given = config.get("quantization") or config.get("quantization_config")
    if isinstance(given, dict):
        facts = cast(dict[str, Any], given)
        if (bits := facts.get("bits")) is not None:
            of_layers = [cast(dict[str, Any], value) for value in facts.values() if isinstance(value, dict)]
            others = sorted({str(layer["bits"]) for layer in of_layers if "bits" in layer} - {str(bits)})
            return f"{bits}-bit" if not others else f"{bits}-bit, in part {', '.join(others)}-bit"
        return str(facts.get("quant_method", "quantized"))
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    most = max(summary.dtypes, key=lambda dtype: summary.dtypes[dtype])
    return names.get(most, most)


def check_weights(directory: Path, source: str) -> WeightsSummary:
    """Check the headers of all weight files. Raises LoadFailed if one is missing or truncated."""
    files = sorted(directory.glob(WEIGHTS))
    expected = _numbered([file.name for file in files]) if files else _indexed(directory, source)
    lacking = sorted(name for name in expected if not (directory / name).is_file())
    if lacking:
        raise LoadFailed(
            f"{source}: {len(lacking)} of {len(expected)} weight files are missing, such as {lacking[0]}. "
            f"{_mending(source)}"
        )
    if not files:
        raise no_weights([file.name for file in directory.iterdir()], source)
    dtypes: Counter[str] = Counter()
    nbytes, has_tower = 0, False
    for file in files:
        tensors = _header(file, source)
        has_tower = has_tower or any(_TOWER.search(name) for name in tensors)
        dtypes.update(str(tensor["dtype"]) for tensor in tensors.values())
        nbytes += file.stat().st_size
    return WeightsSummary(nbytes=nbytes, dtypes=dtypes, has_tower=has_tower)


def no_weights(names: list[str], source: str) -> LoadFailed:
    """The error for a directory or repository without weight files that mlx-lm reads."""
    for pattern, words in _OTHER_WEIGHTS.items():
        if any(Path(name).match(pattern) for name in names):
            return LoadFailed(
                f"{source} has {words}, but mlx-lm reads {WEIGHTS}. Use a version for MLX (such as from "
                "mlx-community), or convert it with `mlx_lm.convert`."
            )
    return LoadFailed(f"{source} holds no weights ({WEIGHTS}). {_mending(source)}")


def _numbered(names: list[str]) -> set[str]:
    """All files of the numbered series that these belong to (`model-00001-of-00003.safetensors`)."""
    expected: set[str] = set()
    for name in names:
        if (found := _NUMBER.fullmatch(name)) is not None:
            width, total = len(found["number"]), found["total"]
            expected |= {f"{found['stem']}-{i:0{width}}-of-{total}.safetensors" for i in range(1, int(total) + 1)}
    return expected


def _indexed(directory: Path, source: str) -> set[str]:
    """The files named in the index, if there is one. Only used without weight files: an index may be outdated."""
    file = directory / _INDEX
    if not file.is_file():
        return set()
    try:
        return set(json.loads(file.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadFailed(f"{source}: its {_INDEX} is broken. {_mending(source)}") from error


def _header(file: Path, source: str) -> dict[str, dict[str, Any]]:
    """The tensors in the header of a safetensors file, by name. Raises LoadFailed if the file is damaged."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        content = opened.read(length) if length <= min(size, _MOST_HEADER_NBYTES) else b""
    try:
        header = cast(dict[str, dict[str, Any]], json.loads(content))
        header.pop("__metadata__", None)
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_POINTER)) == _POINTER
        if is_pointer:
            raise LoadFailed(f"{source}: {file.name} is only a Git LFS pointer: run `git lfs pull` there.") from error
        raise LoadFailed(f"{source}: {file.name} is broken ({nbytes_text(size)}). {_mending(source)}") from error
    if size < end:
        raise LoadFailed(f"{source}: {file.name} is cut off after {size:,} of {end:,} bytes. {_mending(source)}")
    return header


def _mending(source: str) -> str:
    if Path(source).expanduser().exists():
        return "Is the download complete?"
    return f"`reprise rm {source}` and `reprise pull {source}` fetch it anew."

"""Where mlx-vlm computes something else than a model's reference code, and it is small: put right when it is loaded.

The reference is transformers'. A changed model is another one for what is stored (`Sight.files`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_unflatten
from PIL import Image as Pictures

_GELU: Mapping[str, Mapping[str, str]] = {
    "kimi_k25": {"vision_tower.blocks.": "tanh"},
    "kimi_vl": {"vision_tower.blocks.": "tanh"},
    "llama4": {"vision_model.": "none"},
    "minicpmv4_6": {"merger.": "none"},
    "qwen3_vl_moe": {
        "vision_tower.blocks.": "tanh",
        "vision_tower.merger.": "none",
        "vision_tower.deepstack_merger_list.": "none",
    },
}
"""Model type → beginnings of modules' names → which GELU the reference has where mlx-vlm has another: the tanh
approximation ("tanh") or the exact one ("none")."""


def _at_grid(table: mx.array, grid: mx.array) -> mx.array:
    """`table`: shape ``(1, height, width, dim)``; `grid`: ``(1, n, 1, 2)``, x and y from -1 to 1 between the edges."""
    x, y = ((np.array(grid)[0, :, 0, axis] + 1) * table.shape[2 - axis] / 2 - 0.5 for axis in (0, 1))
    return _bicubic(table[0], y, x)[None, :, None]


def _to_size(table: mx.array, *, size: tuple[int, int]) -> mx.array:
    """`table`: shape ``(1, dim, height, width)``, for as many positions between its edges as `size` says."""
    y, x = ((np.arange(num) + 0.5) * (side / num) - 0.5 for num, side in zip(size, table.shape[2:], strict=True))
    found = _bicubic(table[0].transpose(1, 2, 0), np.repeat(y, size[1]), np.tile(x, size[0]))
    return found.transpose(1, 0).reshape(1, -1, *size)


def _bicubic(table: mx.array, y: npt.NDArray[np.floating], x: npt.NDArray[np.floating]) -> mx.array:
    """Rows at n positions of a table of shape ``(height, width, dim)``: ``(n, dim)``, as PyTorch interpolates them.

    Beyond its edges, the table has its outermost rows.
    """
    height, width, dim = table.shape
    rows, columns, flat = _taps(y, height), _taps(x, width), table.reshape(-1, dim).astype(mx.float32)
    # One after the other: all at once would take sixteen times the memory.
    found = mx.zeros((len(y), dim))
    for row, by_row in rows:
        for column, by_column in columns:
            found += flat[mx.array(row * width + column)] * mx.array(by_row * by_column)[:, None]
    return found.astype(table.dtype)


def _taps(at: npt.NDArray[np.floating], size: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """The four neighbours of positions, and their weights (Keys' kernel with a = -0.75)."""
    first = np.floor(at)
    found: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
    for offset in (-1, 0, 1, 2):
        far = np.abs(at - first - offset)
        near = (1.25 * far - 2.25) * far * far + 1
        weight = near if offset in (0, 1) else ((-0.75 * far + 3.75) * far - 6) * far + 3
        found.append((np.clip(first + offset, 0, size - 1).astype(np.int32), weight.astype(np.float32)))
    return found


_INTERPOLATION: Mapping[str, tuple[str, Callable[..., mx.array]]] = {
    "glm4v": ("grid_sample", _at_grid),
    "glm4v_moe": ("grid_sample", _at_grid),
    "kimi_k25": ("bicubic_interpolate", _to_size),
    "kimi_vl": ("bicubic_interpolate", _to_size),
}
"""Model type → what its tower calls for positions in a picture of another size than its own, and what the reference
does: mlx-vlm interpolates linearly, or leaves out what is beyond the table's edges."""


def correct_model(whole: nn.Module, kind: str) -> str:
    """Have a model of this type compute as its reference does; returns what was changed, for `Sight.files`."""
    rules = _GELU.get(kind, {})
    for name, module in whole.named_modules():
        approximation = next((rules[start] for start in rules if name.startswith(start)), None)
        if isinstance(module, nn.GELU) and approximation is not None:
            whole.update_modules(tree_unflatten([(name, nn.GELU(approximation))]))
    if kind == "llama4":
        # The same to the bit: mlx-vlm slices each pixel of each patch by itself, which takes seconds an image.
        patches = cast(Any, whole).vision_model.patch_embedding
        patches.unfold = partial(_unfold, size=patches.stride)
    changes = [f" {start}{approximation}" for start, approximation in rules.items()]
    if kind in _INTERPOLATION:
        function, ours = _INTERPOLATION[kind]
        setattr(sys.modules[type(cast(Any, whole).vision_tower).__module__], function, ours)
        changes.append(" positions bicubic")
    if kind.startswith("glm4v"):
        for block in cast(Any, whole).vision_tower.blocks:
            block.norm1.eps = block.norm2.eps = cast(Any, whole).config.vision_config.rms_norm_eps
        changes.append(" eps")
    return "".join(changes)


def _unfold(pixels: mx.array, *, size: int) -> mx.array:
    """Pictures of shape ``(n, channels, height, width)``, cut: ``(n, channels · size², patches)``."""
    num, channels, height, width = pixels.shape
    cut = pixels.reshape(num, channels, height // size, size, width // size, size).transpose(0, 1, 3, 5, 2, 4)
    return cut.reshape(num, channels * size * size, -1)


def correct_processor(processor: Any, kind: str, directory: Path) -> None:
    """Have the processor that was read from a folder with a model of this type cut images as its reference does."""
    if kind == "llama4":
        own, joined = (_read(directory / f"{name}_config.json") for name in ("preprocessor", "processor"))
        processor.image_processor = Tiles(own | joined.get("image_processor", {}))


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {}


class Tiles:
    """Llama 4's image processor: an image is scaled, padded to a canvas of tiles and cut, and stands behind them whole.

    After `image_processing_llama4.py` of transformers 5.24, with Pillow's resizing in place of torchvision's (of the
    same kind, at most one level of 255 apart). mlx-vlm's makes no tile of the whole image, for which its processor
    writes placeholders, knows 8 of 50 canvases, and distorts.
    """

    model_input_names = ("pixel_values",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        size: Any = settings.get("size", 336)
        self._side = int(cast(dict[str, Any], size)["height"] if isinstance(size, dict) else size)
        most = int(settings.get("max_patches", 16))
        self._canvases = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
        self._fills_canvas = bool(settings.get("resize_to_max_canvas"))
        self._resample = Pictures.Resampling(settings.get("resample", Pictures.Resampling.BILINEAR))
        levels = _bfloat16(np.arange(256) * np.float32(settings.get("rescale_factor", 1 / 255)))
        self._values = np.stack(
            [
                _bfloat16(_bfloat16(levels - _bfloat16(np.float32(mean))) / _bfloat16(np.float32(std)))
                for mean, std in zip(
                    settings.get("image_mean", (0.5,) * 3), settings.get("image_std", (0.5,) * 3), strict=True
                )
            ]
        )
        """What each level of a channel becomes: the reference computes it in bfloat16."""

    def fetch_images(self, images: Sequence[Pictures.Image]) -> list[Pictures.Image]:
        return list(images)

    def __call__(self, images: Sequence[Pictures.Image]) -> dict[str, Any]:
        """`pixel_values` of all tiles, shape ``(tiles, 3, side, side)``, and rows and columns of each image's."""
        canvases = [self._canvas(each) for each in images]
        tiles = [tile for each, canvas in zip(images, canvases, strict=True) for tile in self._tiles(each, canvas)]
        return {"pixel_values": np.stack(tiles), "aspect_ratios": canvases}

    def _canvas(self, picture: Pictures.Image) -> tuple[int, int]:
        """The canvas that enlarges least, else the one that shrinks least, and of those the smallest."""
        fits = {
            canvas: min(self._length(canvas[0]) / picture.height, self._length(canvas[1]) / picture.width)
            for canvas in self._canvases
        }
        enlarging = [fit for fit in fits.values() if fit >= 1]
        best = (max if self._fills_canvas or not enlarging else min)(enlarging or fits.values())
        return min((canvas for canvas in fits if fits[canvas] == best), key=math.prod)

    def _length(self, num: int) -> np.float32:
        # In the reference's precision: it compares and rounds down in it.
        return np.float32(num * self._side)

    def _tiles(self, picture: Pictures.Image, canvas: tuple[int, int]) -> list[npt.NDArray[np.float32]]:
        side, (rows, columns) = self._side, canvas
        target = self._length(rows), self._length(columns)
        given = picture.height, picture.width
        if not self._fills_canvas:
            # Nothing is enlarged beyond a tile.
            most = [min(max(has, side), length) for has, length in zip(given, target, strict=True)]
        else:
            most = list(target)
        by_height, by_width = most[0] / given[0], most[1] / given[1]
        if by_width < by_height:
            height, width = min(math.floor(given[0] * by_width), most[0]), most[1]
        else:
            height, width = most[0], min(math.floor(given[1] * by_height), most[1])
        padded = Pictures.new("RGB", (columns * side, rows * side))
        padded.paste(picture.resize((max(int(width), 1), max(int(height), 1)), self._resample))
        cut = self._pixels(padded).reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        tiles = list(cut.reshape(rows * columns, 3, side, side))
        return tiles if len(tiles) == 1 else [*tiles, self._pixels(picture.resize((side, side), self._resample))]

    def _pixels(self, picture: Pictures.Image) -> npt.NDArray[np.float32]:
        levels = np.asarray(picture)
        return np.stack([values[levels[..., channel]] for channel, values in enumerate(self._values)])


def _bfloat16(values: Any) -> npt.NDArray[np.float32]:
    """The nearest numbers of bfloat16, of two the even one."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

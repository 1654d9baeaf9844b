"""Models that see, from mlx-vlm: the only module that imports it, itself imported when such a model is loaded.

There is no code for a family but for mistakes (`vlm_corrections.py`). What an image looks like comes from the model's
own `get_input_embeddings` of the image's tokens alone, and a trial with a small picture finds out the rest: which token
the template writes for an image, which one stands for its rows, and how it counts positions. A model that does not fit
what was found is refused.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, cast

import mlx.core as mx
import numpy as np
from cachetools import LRUCache
from mlx import nn
from mlx_vlm import utils as vlm_utils
from mlx_vlm.models.cache import make_prompt_cache
from PIL import Image as Pictures

from reprise.chat.text_model import TextModel
from reprise.core.errors import LoadFailed, UnreadableImage, first_line
from reprise.core.image_files import pixels_of
from reprise.core.images import ImageExpansion, ImageFile, PromptImage, grid_positions
from reprise.core.kinds import Full, KvKind, Window
from reprise.core.tokens import Span, Tokens, as_tokens
from reprise.engine.models.vlm_corrections import correct_model, correct_processor
from reprise.engine.states.seeing import (
    Embedded,
    ImageFeatures,
    PassInputs,
    Positions,
    PreparedImage,
    SeeingModel,
    Sight,
)

log = logging.getLogger(__name__)

SOURCE = f"mlx-vlm {version('mlx-vlm')}"

_BOTH_WAYS: Mapping[str, frozenset[type[KvKind]]] = {"gemma3": frozenset((Full, Window))}
"""Model type → the kinds of layers in which images attend both ways, where the configuration does not say."""

_MOST_EXPANSIONS = 512
_HANDED_OVER_NBYTES = 64 << 20
"""Of images that were prepared when their prompt was read, and that the engine has not encoded yet."""
_TRIAL_PIXELS = (96, 64)


def supports(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm has a model of this type whose images enter as rows of embeddings."""
    kind = vlm_utils.get_model_type(dict(config))
    # Asked first: mlx-vlm logs an error of its own for a type that it does not have.
    if kind is None or find_spec(f"mlx_vlm.models.{kind}") is None:
        return False
    try:
        module, _ = vlm_utils.get_model_and_args(dict(config))
    except (ImportError, KeyError, ValueError):
        return False
    return hasattr(getattr(module, "Model", None), "get_input_embeddings")


class VlmModel(SeeingModel):
    """A model of mlx-vlm, tower and all, as the engine runs it."""

    def __init__(self, whole: nn.Module, sight: Sight, *, placeholder: int) -> None:
        super().__init__()
        self.whole = whole
        self.sight = sight
        self.placeholder = placeholder

    @property
    def _language(self) -> Any:
        return cast(Any, self.whole).language_model

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self._language)

    def embed(self, tokens: mx.array) -> Embedded:
        found = _input_embeddings(self.whole, mx.where(tokens < 0, self.placeholder, tokens))
        return Embedded(embeds=found.inputs_embeds, per_layer=found.per_layer_inputs)

    def encode(self, prepared: PreparedImage) -> ImageFeatures:
        features = self.lazy_features(prepared)
        mx.eval(features.rows, features.deep)
        return features

    def lazy_features(self, prepared: PreparedImage) -> ImageFeatures:
        """The features, not computed yet: their size is known, and no weights were read."""
        found = _input_embeddings_of(self.whole, prepared.inputs)
        at = mx.array(prepared.first + prepared.places)
        deep = tuple(found.deepstack_visual_embeds) if found.deepstack_visual_embeds is not None else ()
        # Some make them wider than the embeddings among which they stand.
        rows = found.inputs_embeds[0][at].astype(self.embed(mx.array([[0]])).embeds.dtype)
        return ImageFeatures(rows=rows, deep=deep, places=prepared.places)

    def __call__(
        self, tokens: mx.array, *, cache: list[Any], positions: mx.array | None = None, inputs: PassInputs | None = None
    ) -> mx.array:
        return self._run(tokens, cache, positions, inputs).logits

    def with_hidden(
        self, tokens: mx.array, *, cache: list[Any], positions: mx.array | None = None, inputs: PassInputs | None = None
    ) -> tuple[mx.array, mx.array]:
        found = self._run(tokens, cache, positions, inputs, return_hidden=True)
        # Some give what is before the last norm, and how their own drafters have it behind that.
        behind_norm, hidden = getattr(self._language, "speculative_draft_hidden", None), found.hidden_states[-1]
        return found.logits, hidden if behind_norm is None else behind_norm(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        language = self._language
        return language.lm_head(hidden) if "lm_head" in language else language.model.embed_tokens.as_linear(hidden)

    def head_layers(self, changes: Mapping[str, Any]) -> list[nn.Module]:
        language = self._language
        own = replace(language.args, **changes)
        return list(type(language)(own, language.config).model.layers)

    def _run(
        self, tokens: mx.array, cache: list[Any], positions: mx.array | None, inputs: PassInputs | None, **more: Any
    ) -> Any:
        # What a pass is not told, mlx-vlm's models look up on the model object, where another request has left its own.
        assert (positions is None) == (self.sight.positions is Positions.OWN), "a pass is told where its tokens stand"
        named: dict[str, Any] = more if positions is None else {"position_ids": positions, **more}
        if inputs is not None:
            tokens = mx.where(tokens < 0, self.placeholder, tokens)
            named["inputs_embeds"] = inputs.embedded.embeds
            if inputs.embedded.per_layer is not None:
                named["per_layer_inputs"] = inputs.embedded.per_layer
            if inputs.deep:
                named["visual_pos_masks"] = mx.array(inputs.is_placeholder)
                named["deepstack_visual_embeds"] = list(inputs.deep)
        return self._language(tokens, cache=cache, **named)


class VlmReader:
    """The image side of a model of mlx-vlm (`ImageReader`): its processor, and what that made of the latest images."""

    def __init__(self, processor: Any, *, marker: str, placeholder: int, merge: int, numbering: _Numbering) -> None:
        """`merge`: patches that a placeholder stands for, in each direction."""
        self._processor = processor
        self._marker = marker
        self._placeholder = placeholder
        self._merge = merge
        self._numbering = numbering
        self._expansions = LRUCache[bytes, ImageExpansion](maxsize=_MOST_EXPANSIONS)
        self._prepared = LRUCache[bytes, PreparedImage](_HANDED_OVER_NBYTES, getsizeof=lambda each: each.nbytes)
        self._own = Lock()
        """Of what is remembered."""
        self._running = Lock()
        """Of the processor, whose tokenizer is for one thread at a time."""

    @property
    def marker(self) -> str:
        return self._marker

    def expand(self, image: ImageFile) -> ImageExpansion:
        """What stands in a prompt for this image. Raises UnreadableImage for a file that cannot be decoded."""
        with self._own:
            known = self._expansions.get(image.digest)
        if known is not None:
            return known
        expansion, prepared = self._read(image)
        with self._own:
            self._expansions[image.digest] = expansion
            if prepared.nbytes <= _HANDED_OVER_NBYTES:
                self._prepared[image.digest] = prepared
        return expansion

    def prepare(self, image: ImageFile) -> PreparedImage:
        """The image as the tower takes it. Raises UnreadableImage for a file that cannot be decoded."""
        with self._own:
            known = self._prepared.pop(image.digest, None)
        return known if known is not None else self._read(image)[1]

    def forget_prepared(self) -> None:
        """Drop what was prepared of images that nobody has encoded: they are prepared again if they are needed."""
        with self._own:
            self._prepared.clear()

    def for_template_of(self, text: TextModel) -> VlmReader | None:
        """The same for another template of the model; None if that has no place for images."""
        return self if self._marker in _written_for_image(text) else None

    def _read(self, image: ImageFile) -> tuple[ImageExpansion, PreparedImage]:
        picture = pixels_of(image)
        try:
            with self._running:
                inputs = _processed(self._processor, self._marker, picture)
                return self._numbering.cut(
                    *_expansion(self._processor, inputs, placeholder=self._placeholder, merge=self._merge)
                )
        except Exception as error:
            # A processor may raise anything for a shape that it does not take.
            size = f"{picture.width} x {picture.height}"
            raise UnreadableImage(f"The model takes no image of {size} pixels: {first_line(error)}") from error


def unfilled(config: Mapping[str, Any]) -> VlmModel:
    """A model of mlx-vlm whose weights nobody has read, to look at its layers."""
    raw = copy.deepcopy(dict(config))
    module, _ = vlm_utils.get_model_and_args(raw)
    # As mlx-vlm does it: parsing also completes the dictionary.
    raw.setdefault("text_config", raw.pop("llm_config", {}))
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    parsed = vlm_utils.update_module_configs(module.ModelConfig.from_dict(raw), module, raw, parts)
    whole = module.Model(parsed)
    is_told = hasattr(whole.language_model, "get_rope_index")
    positions = Positions.INDEX if is_told else Positions.OWN
    return VlmModel(whole, Sight(source=SOURCE, positions=positions, both_ways=_both_ways(config)), placeholder=0)


def load_seeing(directory: Path, source: str, *, trusts_remote_code: bool) -> tuple[nn.Module, Any]:
    """A model of mlx-vlm and its processor. Raises LoadFailed."""
    try:
        whole = vlm_utils.load_model(directory, lazy=True)
        # Only now: importing a model's module is what makes its processor known.
        # Said in any case: some of mlx-vlm's processors run a folder's code unless they are told not to.
        processor = vlm_utils.load_processor(directory, add_detokenizer=False, trust_remote_code=trusts_remote_code)
        correct_processor(processor, str(cast(Any, whole).config.model_type), directory)
    except Exception as error:
        # A model's code may raise anything.
        log.debug("mlx-vlm failed to load %s", source, exc_info=True)
        raise LoadFailed(
            f"{source}: mlx-vlm failed to load this model: {first_line(error)} Start it with --images off."
        ) from error
    if not hasattr(processor, "image_processor") and not hasattr(processor, "process"):
        raise LoadFailed(f"{source} has no image processor (preprocessor_config.json). Start it with --images off.")
    return whole, processor


def model_and_reader(
    whole: nn.Module, processor: Any, text: TextModel, config: Mapping[str, Any], *, files: str
) -> tuple[VlmModel, VlmReader]:
    """The loaded model as the engine and `chat` have it. Raises LoadFailed where it does what is not known here.

    `files`: see `Sight`.
    """
    facts = cast(Any, whole).config
    files += correct_model(whole, str(config.get("model_type")))
    merge = int(getattr(facts.vision_config, "spatial_merge_size", 0) or getattr(facts, "spatial_merge_size", 0) or 1)
    picture = _trial_picture()
    written = _written_for_image(text)
    for marker in _marks_in(written, text):
        inputs = _try_marker(processor, marker, picture)
        placeholder = None if inputs is None else _find_placeholder(whole, inputs)
        if inputs is None or placeholder is None:
            continue
        expansion, prepared = _expansion(processor, inputs, placeholder=placeholder, merge=merge)
        # Some models count only what stands between the marks that the template writes.
        positions = _positions(whole, _processed(processor, written, picture), expansion)
        sight = Sight(source=SOURCE, positions=positions, both_ways=_both_ways(config), files=files)
        model = VlmModel(whole, sight, placeholder=placeholder)
        model.sight = replace(sight, row_nbytes=model.lazy_features(prepared).nbytes // len(prepared.places))
        numbering = _numbering(processor, marker, picture, expansion.tokens)
        return model, VlmReader(processor, marker=marker, placeholder=placeholder, merge=merge, numbering=numbering)
    raise LoadFailed("its chat template has no place for images, or its processor does not know how to fill it.")


def _both_ways(config: Mapping[str, Any]) -> frozenset[type[KvKind]]:
    text = cast(dict[str, Any], config.get("text_config") or {})
    if text.get("use_bidirectional_attention") == "vision":
        return frozenset((Window,))
    return _BOTH_WAYS.get(str(config.get("model_type")), frozenset())


# What the processor makes of an image.


def _processed(processor: Any, text: str, *pictures: Pictures.Image) -> dict[str, Any]:
    """What the processor makes of a text with images, as plain arrays: MLX's would be bound to this thread."""
    made = vlm_utils.prepare_inputs(processor, images=list(pictures), prompts=text)
    return {name: _plain(value) for name, value in made.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return np.array(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast(Sequence[Any], value)]
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return mx.array(value)
    if isinstance(value, list):
        return [_arrays(each) for each in cast(list[Any], value)]
    return value


def _tokens(inputs: Mapping[str, Any]) -> Tokens:
    return as_tokens(np.asarray(inputs["input_ids"]).reshape(-1))


def _expansion(
    processor: Any, inputs: Mapping[str, Any], *, placeholder: int, merge: int
) -> tuple[ImageExpansion, PreparedImage]:
    tokens, tokenizer = _tokens(inputs), getattr(processor, "tokenizer", processor)
    marks = {*map(int, getattr(tokenizer, "added_tokens_decoder", {})), placeholder}
    around = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    inside = [i for i, token in enumerate(tokens.tolist()) if token in marks]
    low = inside[1] if tokens[inside[0]] in around else inside[0]
    high = inside[-2] if tokens[inside[-1]] in around else inside[-1]
    run = as_tokens(tokens[low : high + 1])
    places = np.flatnonzero(run == placeholder)
    assert len(places) > 0, "an image without placeholders"
    rows, columns = _grid(inputs, len(places), merge)
    expansion = ImageExpansion(
        tokens=run,
        placeholder=placeholder,
        rows=rows,
        columns=columns,
        text_before=_text(tokenizer, tokens[:low], around),
        text_after=_text(tokenizer, tokens[high + 1 :], around),
    )
    return expansion, PreparedImage(inputs=inputs, first=low, places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbering:
    """How a processor numbers the images of a prompt: the number stands behind `text`, `num` tokens in all.

    None of them where it does not.
    """

    text: str = ""
    num: int = 0
    counts_from: int | None = None

    def cut(self, expansion: ImageExpansion, prepared: PreparedImage) -> tuple[ImageExpansion, PreparedImage]:
        """The same with the number in the text before the image's run, which is then the same in every prompt."""
        num, counts_from = self.num, self.counts_from
        text = expansion.text_before + self.text
        return (
            replace(expansion, tokens=expansion.tokens[num:], text_before=text, counts_from=counts_from),
            replace(prepared, first=prepared.first + num, places=prepared.places - num),
        )


def _numbering(processor: Any, marker: str, picture: Pictures.Image, run: Tokens) -> _Numbering:
    """What differs between the runs of a prompt's first two images. Raises LoadFailed for what is no number.

    `run`: the image's if it is the only one.
    """
    try:
        both = _tokens(_processed(processor, marker * 2, picture, picture))
    except Exception as error:
        # A processor may raise anything for a second image.
        log.debug("the processor takes no second image: %r", error)
        return _Numbering()
    starts = np.flatnonzero(both == run[0]).tolist()
    firsts = [start for start in starts if np.array_equal(both[start : start + len(run)], run)]
    if len(firsts) > 1:
        return _Numbering()
    tokenizer = getattr(processor, "tokenizer", processor)
    for start in starts:
        second = both[start : start + len(run)]
        differs = np.flatnonzero(second != run) if len(second) == len(run) else np.empty(0)
        if len(differs) == 1 and start not in firsts:
            at = int(differs[0])
            here, there = (_text(tokenizer, tokens[at : at + 1], set()).strip() for tokens in (run, second))
            if here.isdecimal() and there == str(int(here) + 1):
                return _Numbering(text=_text(tokenizer, run[:at], set()), num=at + 1, counts_from=int(here))
    raise LoadFailed("it tells the images of a prompt apart in a way that is not known here.")


def _text(tokenizer: Any, tokens: Tokens, around: set[int]) -> str:
    return cast(str, tokenizer.decode([token for token in tokens.tolist() if token not in around]))


def _grid(inputs: Mapping[str, Any], num: int, merge: int) -> tuple[int, int]:
    """Rows and columns of the placeholders; one row where the processor knows no grid of them."""
    grid = inputs.get("image_grid_thw")
    if grid is not None:
        _, height, width = np.asarray(grid).reshape(-1, 3)[0].tolist()
        if (height // merge) * (width // merge) == num:
            return height // merge, width // merge
    return 1, num


# What the model makes of it.


@contextmanager
def _state_as_it_was(whole: nn.Module) -> Generator[None]:
    """What mlx-vlm remembers of a prompt on the model object is not seen, and left as it was."""
    language = cast(Any, whole).language_model
    names = ("_rope_deltas", "_position_ids")
    before = {name: getattr(language, name) for name in names if hasattr(language, name)}
    try:
        for name in before:
            setattr(language, name, None)
        yield
    finally:
        for name, value in before.items():
            setattr(language, name, value)


def _input_embeddings(whole: nn.Module, tokens: mx.array) -> Any:
    with _state_as_it_was(whole):
        return cast(Any, whole).get_input_embeddings(tokens, None)


def _input_embeddings_of(whole: nn.Module, inputs: Mapping[str, Any]) -> Any:
    with _state_as_it_was(whole):
        return _embedded_with_pixels(whole, inputs)


def _embedded_with_pixels(whole: nn.Module, inputs: Mapping[str, Any]) -> Any:
    named = {name: _arrays(value) for name, value in inputs.items()}
    tokens, pixels = named.pop("input_ids"), named.pop("pixel_values")
    mask = named.pop("attention_mask", None)
    mask = mx.ones_like(tokens) if mask is None else mask
    return cast(Any, whole).get_input_embeddings(tokens, pixels, mask=mask, **named)


def _find_placeholder(whole: nn.Module, inputs: Mapping[str, Any]) -> int | None:
    """The token whose embeddings the model replaces by an image's rows; None if there is no such token."""
    tokens = _tokens(inputs)
    try:
        seen = _input_embeddings_of(whole, inputs).inputs_embeds
        blind = _input_embeddings(whole, mx.array(tokens)[None]).inputs_embeds
        differs = np.array((seen.astype(mx.float32) != blind.astype(mx.float32)).any(axis=-1))[0]
    except Exception as error:
        # A model's code may raise anything for tokens that are not those of an image.
        log.debug("a trial image was refused: %r", error)
        return None
    replaced = set(tokens[differs].tolist())
    if len(replaced) != 1 or not differs[tokens == next(iter(replaced))].all():
        return None
    return replaced.pop()


def _positions(whole: nn.Module, inputs: Mapping[str, Any], expansion: ImageExpansion) -> Positions:
    """How the model counts positions. Raises LoadFailed if in a way that is not known here."""
    language, tokens = cast(Any, whole).language_model, _tokens(inputs)
    if not hasattr(language, "get_rope_index"):
        return Positions.OWN
    with _state_as_it_was(whole):
        found = _embedded_with_pixels(whole, inputs)
        given = found.position_ids if found.position_ids is not None else language._position_ids
        theirs = np.array(given).reshape(-1, len(tokens))
    if (theirs == np.arange(len(tokens))).all():
        return Positions.INDEX
    (places,) = np.nonzero(tokens == expansion.placeholder)
    span = Span(int(places[0]), int(places[-1]) + 1)
    if len(span) == expansion.rows * expansion.columns:
        nobody = ImageFile(content=b"", digest=b"", width=0, height=0)
        seen = PromptImage(span=span, image=nobody, rows=expansion.rows, columns=expansion.columns)
        if np.array_equal(theirs, grid_positions(0, len(tokens), [seen])):
            return Positions.GRID
    raise LoadFailed("it counts the positions of images in a way that is not known here.")


# What the template writes for an image.


def _written_for_image(text: TextModel) -> str:
    """What the template writes for an image between two texts; empty where it has no place for images."""
    if text.render is None:
        return ""
    words: list[dict[str, str]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    try:
        without = text.render([{"role": "user", "content": words}], add_generation_prompt=True)
        seeing = [words[0], {"type": "image"}, words[1]]
        with_image = text.render([{"role": "user", "content": seeing}], add_generation_prompt=True)
    except Exception as error:
        # A template may raise anything for a content in parts.
        log.debug("the template refuses an image: %r", error)
        return ""
    low = _num_shared(without, with_image)
    rest = with_image[low:]
    return rest[: len(rest) - _num_shared(without[low:][::-1], rest[::-1])]


def _num_shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _marks_in(written: str, text: TextModel) -> list[str]:
    """The special tokens in what the template writes for an image, likeliest to stand for it first."""
    marks = [mark for mark in text.splitters if mark in written]
    return sorted(marks, key=lambda mark: (not ("image" in mark.lower() or "img" in mark.lower()), written.index(mark)))


def _try_marker(processor: Any, marker: str, picture: Pictures.Image) -> dict[str, Any] | None:
    try:
        inputs = _processed(processor, marker, picture)
    except Exception as error:
        # A processor may raise anything for a text without its marker.
        log.debug("the processor takes no %s for an image: %r", marker, error)
        return None
    return inputs if inputs.get("pixel_values") is not None else None


def _trial_picture() -> Pictures.Image:
    width, height = _TRIAL_PIXELS
    return Pictures.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))

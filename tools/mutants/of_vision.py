"""Planted bugs in what models see: layers, positions, features, and the source."""

from tools.mutants.mutant import Mutant

_WARM = ("tests/vision/test_warm_is_cold.py", "-k", "[qwen3_5] or [gemma3]")
_LOOP = ("tests/vision/test_seen_by_the_loop.py", "-k")
_CONTRACT = ("tests/vision/test_vlm_contract.py",)
_LOADING = ("tests/vision/test_loading_sight.py",)
_BLOCKS = ("tests/engine/test_blocks.py",)
_POSITIONS = ("tests/core/test_grid_positions.py",)
_FEATURES = ("tests/engine/test_image_features.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


VISION_MUTANTS = (
    _mutant(
        "grid_positions",
        "the shift of images before is forgotten",
        "shift += each.shift",
        "shift += 0",
        _POSITIONS,
    ),
    _mutant(
        "grid_positions",
        "a slice that begins in an image begins its rows anew",
        "np.divmod(np.arange(at - span.start, end - span.start), each.columns)",
        "np.divmod(np.arange(end - at), each.columns)",
        _POSITIONS,
    ),
    _mutant(
        "SequenceBatch.positions",
        "images do not shift what is behind them",
        "images if has_grids else ()",
        "()",
        (*_CONTRACT, "-k", "makes_of_it and qwen3"),
    ),
    _mutant(
        "SequenceBatch.join",
        "the images of rows that join stay behind",
        "self.images = [images for rows in (self, *others) for images in rows.images]",
        "self.images = [self.images[0] for rows in (self, *others) for _ in rows.images]",
        (*_LOOP, "decode_together and [qwen3_5]"),
    ),
    _mutant(
        "path_tokens",
        "one id for all images",
        "shake_128(digest)",
        "shake_128(b'')",
        _WARM,
    ),
    _mutant(
        "SequenceBatch._forward_seeing",
        "the mask of images is dropped",
        "layer.blocks = inputs.blocks if inputs is not None else ()",
        "layer.blocks = ()",
        (*_CONTRACT, "-k", "sees_all_of_itself"),
    ),
    _mutant(
        "KvLayer.with_blocks",
        "an image sees what a window has dropped",
        "is_near = True if window is None else at[None] > at[:, None] - window",
        "is_near = True",
        _BLOCKS,
    ),
    _mutant(
        "ColdRun.step",
        "an audit cuts images",
        "self._whole(start, min(self._chunk, last - start))",
        "min(self._chunk, last - start)",
        (*_CONTRACT, "-k", "audit_holds"),
    ),
    _mutant(
        "inputs_of",
        "an image cut by a chunk begins anew",
        "features.rows[first:last]",
        "features.rows[: last - first]",
        _WARM,
    ),
    _mutant(
        "FeatureCache.find",
        "features of another image",
        "features = self._kept.get(image.digest)",
        "features = next(iter(self._kept.values()), None)",
        (*_LOOP, "[qwen3_5] and (other_images or encodes_each_once)"),
    ),
    _mutant(
        "FeatureCache.release_one",
        "what a request needs goes first",
        "(digest for digest in self._kept if digest not in self._holders)",
        "iter(self._kept)",
        _FEATURES,
    ),
    _mutant(
        "correct_model",
        "a tower keeps the wrong activation",
        "isinstance(module, nn.GELU) and approximation is not None",
        "False",
        ("tests/vision/test_transformers.py", "-k", "kimi"),
    ),
    _mutant(
        "correct_model",
        "positions in a picture are interpolated as mlx-vlm does it",
        "kind in _INTERPOLATION",
        "False",
        ("tests/vision/test_transformers.py", "-k", "glm4v"),
    ),
    _mutant(
        "_taps",
        "beyond the edge of a table of positions is nothing",
        "np.clip(first + offset, 0, size - 1)",
        "np.maximum(first + offset, 0)",
        ("tests/vision/test_transformers.py", "-k", "kimi"),
    ),
    _mutant(
        "Tiles._tiles",
        "no tile of the whole image is made",
        "len(tiles) == 1",
        "True",
        ("tests/vision/test_transformers.py", "-k", "cuts_pictures"),
    ),
    _mutant(
        "_Numbering.cut",
        "every image of a prompt has the number of the first",
        "num, counts_from = self.num, self.counts_from",
        "num, counts_from = self.num, None",
        (*_CONTRACT, "-k", "makes_of_it and minicpm"),
    ),
    _mutant(
        "_pass",
        "the next image is encoded before the one before it is computed",
        "any(head.position < span.stop <= unseen[0].start for span in head.spans)",
        "False",
        ("tests/schedule/test_tower.py",),
    ),
    _mutant(
        "SequencePool.estimate_to_admit",
        "a request is admitted without room for its images",
        "states + copied + self._features_nbytes(images, resume_at)",
        "states + copied",
        (*_LOOP, "counts_before"),
    ),
    _mutant(
        "SequencePool._promised",
        "another request gets the room for images that are not encoded yet",
        "self._features_nbytes(request.prompt.images, request.position)",
        "0",
        (*_LOOP, "given_to_another"),
    ),
    _mutant(
        "SequencePool.available",
        "another request gets the room of images that are encoded",
        "self.runner.features.held_nbytes",
        "0",
        (*_LOOP, "given_to_another"),
    ),
    _mutant(
        "Preemption.release_features",
        "features are released before the slice that needs them",
        "each.span.stop > r.position",
        "False",
        (*_LOOP, "never_released"),
    ),
    _mutant(
        "PromptRoom.refusal",
        "a prompt whose image never fits is let in",
        "self.needed(num_prompt + num_slots, spans)",
        "self.needed(num_prompt + num_slots, ())",
        (*_LOOP, "images_do_not_fit"),
    ),
    _mutant(
        "PromptRoom.needed",
        "an image whose tower never fits is let in",
        "max(self.passes(position), self.tower(max(map(len, images), default=0)))",
        "self.passes(position)",
        (*_LOOP, "whose_tower_never_fits"),
    ),
    _mutant(
        "FeatureCache.make_room",
        "no room is made for the tower",
        "num_rows * self._row_nbytes + self.tower_nbytes(num_rows)",
        "num_rows * self._row_nbytes",
        (*_LOOP, "tower_is_charged"),
    ),
    _mutant(
        "FeatureCache.running_tower",
        "the tower is not charged",
        "self.tower.of(num_rows, 0)",
        "0",
        (*_LOOP, "tower_is_charged"),
    ),
    _mutant(
        "_tower_nbytes",
        "a request is admitted without room for its tower",
        "features.tower_nbytes(len(each.span))",
        "0",
        (*_LOOP, "tower_has_no_room"),
    ),
    _mutant(
        "StateLayer.update_window",
        "a convolution remembers its first inputs",
        "source[:, source.shape[1] - width :]",
        "source[:, :width]",
        _WARM,
    ),
    _mutant(
        "KvLayer.offset",
        "masks are cut to the longest row where it is behind others",
        "max(self.behind, default=0) if self.is_told else 0",
        "0",
        (*_LOOP, "right_to_different_lengths and qwen3_5"),
    ),
    _mutant(
        "_facts",
        "another processor finds what the first has stored",
        "[vision.sight.source, vision.sight.files]",
        "[vision.sight.source]",
        (*_LOADING, "-k", "settings_of_the_processor"),
    ),
)

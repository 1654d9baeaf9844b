"""Which models mlx-lm splits, and which machine has least to give."""

import ast
from pathlib import Path

import mlx_lm.models

from reprise.cluster.ranks.group import SHARDED
from reprise.core.follow import MemoryReading, tightest


def test_the_table_has_the_models_that_mlx_lm_splits() -> None:
    (folder,) = mlx_lm.models.__path__
    found = {file.stem for file in Path(folder).glob("*.py") if _has_shard(file)}
    assert found == set(SHARDED)


def _has_shard(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    models = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"]
    return any(isinstance(each, ast.FunctionDef) and each.name == "shard" for model in models for each in model.body)


def test_the_machine_with_least_to_give_counts() -> None:
    plenty = MemoryReading(available=50 * 2**30, total=64 * 2**30)
    # A small machine keeps less for others: what is left of it counts.
    small = MemoryReading(available=3 * 2**30, total=8 * 2**30)
    pressed = MemoryReading(available=60 * 2**30, total=64 * 2**30, is_pressed=True)
    assert tightest(plenty) is plenty and tightest(plenty, small) is small
    assert tightest(small, plenty, pressed) is pressed

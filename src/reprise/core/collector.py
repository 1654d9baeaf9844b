"""Python's garbage collector in a server: a full collection stops every thread, and so every stream."""

import gc
from typing import Any
from weakref import ref


def freeze_heap() -> None:
    """Exclude everything that exists now from later collections.

    Modules, models and tokenizers are about 500,000 objects that live as long as the process. Traversing them takes a
    tenth of a second or more, during which no thread runs.
    """
    gc.collect()
    gc.freeze()


def collect_all(*models: ref[Any]) -> None:
    """Free every unreachable object, including frozen ones, and freeze the rest again if anything was frozen.

    Frozen objects are not traversed if a collection without them already frees all of `models`, that is, models loaded
    after the heap was frozen.
    """
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    if not was_frozen or (models and all(model() is None for model in models)):
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()

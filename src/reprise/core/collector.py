"""Python's garbage collector in a process that serves: a full collection stops every thread, streams included."""

import gc
from typing import Any
from weakref import ref


def freeze_heap() -> None:
    """Leave everything that exists now out of all later collections.

    Modules, models and tokenizers are some 500,000 objects that stay for as long as the process does. To search them
    takes a tenth of a second or more, during which no thread runs.
    """
    gc.collect()
    gc.freeze()


def collect_all(*models: ref[Any]) -> None:
    """Free every unreachable object, also among what was frozen, and freeze the rest again if anything was.

    Nothing frozen is searched where a collection without it already frees all of `models`: those that were loaded
    after the heap was frozen.
    """
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    if not was_frozen or (models and all(model() is None for model in models)):
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()

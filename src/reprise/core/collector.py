"""Python's garbage collector in a process that serves: a full collection stops every thread, streams included."""

import gc


def freeze_heap() -> None:
    """Leave everything that exists now out of all later collections.

    Modules, models and tokenizers are some 500,000 objects that stay for as long as the process does. To search them
    takes a tenth of a second or more, during which no thread runs.
    """
    gc.collect()
    gc.freeze()


def collect_all() -> None:
    """Free every unreachable object, also among what was frozen, and freeze the rest again if anything was."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()

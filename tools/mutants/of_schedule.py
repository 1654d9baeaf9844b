"""Planted bugs in the scheduler: who runs next, which chunk, which rows together."""

from tools.mutants.mutant import Mutant

_TESTS = ("tests/schedule",)


def _mutant(file: str, name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, file=f"schedule/{file}", old=old, new=new, tests=_TESTS)


SCHEDULE_MUTANTS = (
    _mutant(
        "decide.py",
        "settling goes on while requests wait",
        "    if settling:\n        return Step(give_up=settling)\n",
        "",
    ),
    _mutant(
        "decide.py",
        "a job that is too big for now is overtaken",
        "if job.live_nbytes > room and not is_first:\n                break",
        "if job.live_nbytes > room and not is_first:\n                continue",
    ),
    _mutant(
        "decide.py",
        "room is given to each job as if it came alone",
        "            room -= job.live_nbytes\n",
        "",
    ),
    _mutant(
        "decide.py",
        "more rows than the batch has",
        "if num_free - len(chosen) < rows:",
        "if num_free < rows:",
    ),
    _mutant(
        "decide.py",
        "what two jobs share is computed twice",
        "if not any(is_worth_waiting(job, parting(job, other), limits) for other in chosen):",
        "if len(chosen) >= 0:",
    ),
    _mutant(
        "decide.py",
        "nothing is committed for those who wait",
        "    if sharing.commit:\n        return Step(commit=sharing.commit)\n",
        "",
    ),
    _mutant(
        "sharing.py",
        "a follower has no token left to compute",
        "return min(common, reach, follower.prompt_len - 1)",
        "return min(common, reach, follower.prompt_len)",
    ),
    _mutant(
        "sharing.py",
        "a follower waits for a leader that has passed the parting",
        "if leader.position < until and is_worth_waiting(job, until, limits):",
        "if is_worth_waiting(job, until, limits):",
    ),
    _mutant(
        "sharing.py",
        "of two leaders the one that goes less far together",
        "if best is None or worth > best[0]:",
        "if best is None or worth < best[0]:",
    ),
    _mutant(
        "chunks.py",
        "a slice runs past its checkpoint",
        "stops = (*job.checkpoints, *partings.get(job.id, ()), job.end)",
        "stops = (*partings.get(job.id, ()), job.end)",
    ),
    _mutant(
        "chunks.py",
        "slices of different lengths share a pass",
        "taking = [job for job in short if to_stop[job.id] == length]",
        "taking = [job for job in short if to_stop[job.id] >= length]",
    ),
    _mutant(
        "chunks.py",
        "the budget holds for each slice and not for the pass",
        "taking[: budget // length]",
        "taking[:budget]",
    ),
    _mutant(
        "chunks.py",
        "rows without state join rows with state",
        "return job.can_batch and (low > 0 or high == 0) and high",
        "return job.can_batch and high",
    ),
    _mutant(
        "buckets.py",
        "groups are merged whatever the padding",
        "        if total + added > allowed:\n            break\n",
        "",
    ),
    _mutant(
        "order.py",
        "what takes long starves among short jobs",
        "job.arrived_s + grace + limits.patience * left / state.speed.prefill_tokens_per_s,",
        "left / state.speed.prefill_tokens_per_s,",
    ),
)

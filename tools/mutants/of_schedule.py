"""Planted bugs in the scheduler: who runs next, which chunk, which rows together."""

from tools.mutants.mutant import Mutant

_TESTS = ("tests/schedule",)


def _mutant(function: str, name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=_TESTS)


SCHEDULE_MUTANTS = (
    _mutant(
        "decide",
        "settling goes on while requests wait",
        "if settling:\n    return Step(give_up=settling)",
        "",
    ),
    _mutant(
        "_only_answer",
        "what one answer starts is settled beside others",
        "len(requests.decoding) != 1",
        "not requests.decoding",
    ),
    _mutant(
        "_settle_beside",
        "what is there takes a row to compute nothing",
        "num_left(job) > 1",
        "num_left(job) > 0",
    ),
    _mutant(
        "_admissible",
        "a job that is too big for now is overtaken",
        "if job.live_nbytes + dearest > room and (not is_first):\n    break",
        "if job.live_nbytes + dearest > room and (not is_first):\n    continue",
    ),
    _mutant(
        "_admissible",
        "what was preempted is admitted again beside the same jobs",
        "if job.preempted_beside and job.preempted_beside <= running:\n    break",
        "",
    ),
    _mutant(
        "_admissible",
        "more rows than the batch has",
        "num_free - len(chosen) < rows",
        "num_free < rows",
    ),
    _mutant(
        "_admissible",
        "what two jobs share is computed twice",
        "not any(is_worth_waiting(job, divergence_point(job, other), limits) for other in chosen)",
        "len(chosen) >= 0",
    ),
    _mutant(
        "_serve",
        "nothing is committed for those who wait",
        "if sharing.commit:\n    return Step(commit=sharing.commit)",
        "",
    ),
    _mutant(
        "divergence_point",
        "a follower has no token left to compute",
        "min(common, reach, follower.prompt_len - 1)",
        "min(common, reach, follower.prompt_len)",
    ),
    _mutant(
        "next_stop",
        "a slice runs past its checkpoint",
        "stops = (*job.checkpoints, *divergence_points.get(job.id, ()), job.end)",
        "stops = (*divergence_points.get(job.id, ()), job.end)",
    ),
    _mutant(
        "plan_pass",
        "slices of different lengths share a pass",
        "taking = [job for job in short if to_stop[job.id] == length]",
        "taking = [job for job in short if to_stop[job.id] >= length]",
    ),
    _mutant(
        "plan_pass",
        "the budget holds for each slice and not for the pass",
        "taking[: budget // length]",
        "taking[:budget]",
    ),
    _mutant(
        "_merge",
        "groups are merged whatever the padding",
        "if total + added > allowed:\n    break",
        "",
    ),
    _mutant(
        "priority_of",
        "what takes long starves among short jobs",
        "job.arrived_s + grace + limits.patience * left / state.speed.prefill_tokens_per_s",
        "left / state.speed.prefill_tokens_per_s",
    ),
)

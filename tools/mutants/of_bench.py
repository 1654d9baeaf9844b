"""Planted bugs in recordings, in their replays, and in what `reprise bench` counts."""

from tools.mutants.mutant import Mutant

_RECORDING = ("tests/api/test_recording.py",)
_REPLAY = ("tests/benchmark/test_replay.py", "-k", "counts or refused")
_RUN = ("tests/benchmark/test_run.py",)
_WORDS = (*_RUN, "-k", "other_words")
_TIME = (*_RUN, "-k", "given_up")


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


BENCH_MUTANTS = (
    _mutant(
        "RecordedCalls.__call__",
        "a body is not kept",
        'message.get("body", b"")',
        'message.get("bodies", b"")',
        _RECORDING,
    ),
    _mutant(
        "ReplayBench._send_all",
        "a turn overtakes the one before",
        "other.ended_s <= call.at_s",
        "other is None",
        _REPLAY,
    ),
    _mutant(
        "BenchResult._summary", "answers that differ count as the same", "_answer(other)", "_answer(reply)", _WORDS
    ),
    _mutant("Bench._ask", "the time is not looked at", "self.left_s < 0", "self.left_s is None", _TIME),
)

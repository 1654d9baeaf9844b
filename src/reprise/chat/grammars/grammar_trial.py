"""Tries grammars out in another process, which can be ended: a compilation that has begun cannot.

llguidance bounds most of what a grammar costs, but not all of it: 60 kB of a regular expression take a second and 270
MB, and both grow with the square. So every grammar that is not known is first compiled beside the server, and one that
takes too much time or memory there, or ends the process, is refused. What passes costs the server the same again.

The process runs this module. It has no tokenizer of the model, which would take seconds and some hundred MB, but one
that writes everything in single bytes and has the model's special tokens: what is tried is the grammar.
"""

import atexit
import contextlib
import json
import os
import queue
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import IO, Any

import psutil
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from reprise.core.errors import QueueFull

STACKS = (512 * 2**20, 64 * 2**20)
"""Bytes of the stack of a thread that compiles, of which only what is used takes memory; the second where the first is
not to be had. llguidance recurses as deeply as rules refer to one another."""

MAX_CPU_S = 1.5
_MAX_WALL_S = 20.0
"""For a machine on which so much processor time takes long."""
MAX_NBYTES = 400 * 2**20
_LOOK_S = 0.02

_IDLE_S = 60.0
_LARGE_NBYTES = 128 * 2**20
"""A process that has become so large is ended after its reply."""

_NUM_PROCESSES = 2

TOO_SLOW = "The grammar takes too long to compile. Simplify it."
TOO_LARGE = "The grammar takes too much memory to compile. Simplify it."
TOO_DEEP = "The grammar cannot be compiled: it crashed the compiler process. Simplify it."


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarTrial:
    """A grammar, the texts of the tokenizer's special tokens, and llguidance's limits."""

    text: str
    vocab_size: int
    special: tuple[str, ...]
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """`refusal`: a sentence for the user, None where the grammar can be compiled. It took `nbytes` of memory."""

    refusal: str | None
    nbytes: int = 0


def compile_grammar(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> tuple[LLMatcher, str | None]:
    """The matcher of a grammar, and what is wrong with it: also what is too large for its first step, or for that
    into an object, which is reported now, and not by the answer."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
    if matcher.is_error():
        return matcher, f"The grammar cannot be used: {sentence_of(matcher)}"
    trial = matcher.deep_copy()
    mask = trial.compute_bitmask()
    brace, *_ = tokenizer.tokenize_str("{")
    if not trial.is_error() and mask[brace // 8] >> (brace % 8) & 1:
        trial.consume_token(brace)
    if trial.is_error():
        return matcher, f"The grammar is too large for its first token: {sentence_of(trial)}. Simplify it."
    return matcher, None


def sentence_of(matcher: LLMatcher) -> str:
    """The error of a matcher, without the insides of llguidance."""
    text = matcher.get_error().partition("<backtrace>")[0].strip().removeprefix("panic: ")
    # All hundred thousand of them.
    text = text.partition("; following special tokens are available")[0]
    return text if len(text) <= 400 else f"{text[:400]} …"


class TrialProcess:
    """One process that tries one grammar after another. It is started when it is needed and ends when it is not."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, trial: GrammarTrial) -> TrialVerdict:
        """The result of trying the grammar. Raises QueueFull where no process can be started."""
        line = json.dumps(asdict(trial)).encode() + b"\n"
        for _ in range(2):
            process = self._running()
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).write(line)
                _pipe(process.stdin).flush()
            verdict = self._watch(process)
            if verdict is not None:
                return verdict
            # It had ended by itself, for want of work.
        raise QueueFull("The process that compiles grammars ended. Try again in a moment.", retry_after_s=5)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            command = [sys.executable, "-P", "-m", __spec__.name if __name__ == "__main__" else __name__]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                sentence = f"Cannot start a process to compile the grammar ({error.strerror}). Try again later."
                raise QueueFull(sentence, retry_after_s=5) from error
        return self._process

    def _watch(self, process: "subprocess.Popen[bytes]") -> TrialVerdict | None:
        """Wait for the reply, and end a process that takes too much; None if it had ended before it began."""
        out = _pipe(process.stdout)
        seen = psutil.Process(process.pid)
        begun_s, begun_cpu_s = time.monotonic(), _cpu_s(seen)
        while not select.select([out], [], [], _LOOK_S)[0]:
            refusal = None
            with contextlib.suppress(psutil.Error):
                if _cpu_s(seen) - begun_cpu_s > MAX_CPU_S or time.monotonic() - begun_s > _MAX_WALL_S:
                    refusal = TOO_SLOW
                elif seen.memory_info().rss > MAX_NBYTES:
                    refusal = TOO_LARGE
            if refusal is not None:
                self.close()
                return TrialVerdict(refusal=refusal)
        reply = out.readline()
        if reply:
            return TrialVerdict(**json.loads(reply))
        status = process.wait()
        self.close()
        return None if status == 0 else TrialVerdict(refusal=TOO_DEEP)

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for each in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    _pipe(each).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the process was started with pipes"
    return pipe


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


class TrialProcesses:
    """The processes of a whole program: as many as there are threads to wait for them. Safe to use from all threads."""

    def __init__(self) -> None:
        self._free: queue.LifoQueue[TrialProcess] = queue.LifoQueue()
        for _ in range(_NUM_PROCESSES):
            self._free.put(TrialProcess())
        atexit.register(self._close)

    def judge(self, trial: GrammarTrial) -> TrialVerdict:
        """See `TrialProcess`."""
        process = self._free.get()
        try:
            return process.judge(trial)
        finally:
            self._free.put(process)

    def _close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()


# In the process.


def _judge(trial: GrammarTrial) -> TrialVerdict:
    tokenizer = _byte_tokenizer(trial.vocab_size, tuple(trial.special))
    before = psutil.Process().memory_info().rss
    _, refusal = compile_grammar(tokenizer, trial.text, trial.limits)
    return TrialVerdict(refusal=refusal, nbytes=max(0, psutil.Process().memory_info().rss - before))


@lru_cache(maxsize=2)
def _byte_tokenizer(vocab_size: int, special: tuple[str, ...]) -> LLTokenizer:
    """A tokenizer of single bytes and special tokens. Those have other ids than the model's, but all ids exist."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    texts = [*_byte_letters(), *special]
    added = [
        {"id": 256 + number, "content": text, "special": True, "normalized": False,
         "single_word": False, "lstrip": False, "rstrip": False}
        for number, text in enumerate(special)
    ]  # fmt: skip
    definition: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {text: number for number, text in enumerate(texts)}, "merges": []},
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "added_tokens": added,
    }
    return LLTokenizer(json.dumps(definition), n_vocab=max(vocab_size, len(texts)))


def _byte_letters() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary: printable ones for themselves, the
    others for those from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _serve() -> None:
    """Reply to each line of the standard input with one."""
    while select.select([sys.stdin.buffer], [], [], _IDLE_S)[0]:
        line = sys.stdin.buffer.readline()
        if not line:
            break
        _end_oneself()
        reply = _judge(GrammarTrial(**json.loads(line)))
        sys.stdout.buffer.write(json.dumps(asdict(reply)).encode() + b"\n")
        sys.stdout.buffer.flush()
        if psutil.Process().memory_info().rss > _LARGE_NBYTES:
            break


def _end_oneself() -> None:
    """Let the kernel end this process where the server is no longer there to do it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + 2 * MAX_CPU_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """The process: on a thread with a large stack."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status: list[int] = []

    def serve() -> None:
        _serve()
        status.append(0)

    for stack in STACKS:
        threading.stack_size(stack)
        thread = threading.Thread(target=serve)
        try:
            thread.start()
        except RuntimeError:
            continue
        thread.join()
        break
    # Without destructors: there may be much to free, and nothing waits for it.
    os._exit(status[0] if status else 1)


if __name__ == "__main__":
    main()

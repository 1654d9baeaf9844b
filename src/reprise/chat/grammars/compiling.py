"""Compiles grammars on separate threads, within limits of size, time, memory and depth.

New grammars are tried in another process first (`grammar_trial.py`), since a compilation cannot be interrupted.
llguidance recurses as deeply as rules refer to one another, and a stack overflow kills the process:
90 kB of rules are enough for the 8 MiB of an ordinary thread. So the threads here have a large stack, and what is
longer than it bears is refused.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cachetools import TTLCache
from llguidance import LLMatcher, LLTokenizer

from reprise.chat.grammars.grammar_trial import STACKS, GrammarTrial, TrialProcesses, compile_grammar
from reprise.core.errors import BadRequest, QueueFull

_STACK_PER_CHARACTER = 1024
"""A rule takes up to 3 kB of the stack, and eight characters at least."""

_NUM_THREADS = 2
_MAX_WAITING = 16
_MAX_COMPILED = 64
_MAX_COMPILED_CHARACTERS = 4 * 2**20
_MAX_COMPILED_NBYTES = 512 * 2**20
"""What the compiled grammars hold, as far as their trials showed it; one is kept whatever it holds."""

_MAX_REFUSED = 1024
_REFUSED_S = 300.0
"""So many refusals are remembered for so long: what costs most to try is sent again most. Not for ever, since a busy
machine may have been to blame."""

MAX_CHARACTERS = STACKS[0] // _STACK_PER_CHARACTER
"""A longer grammar is refused."""

LIMITS = {"max_grammar_size": 200_000, "max_lexer_states": 64_000}
"""A state of the lexer takes up to 2 kB, in every answer that is being written."""

_stack_size_lock = threading.Lock()
"""Held while the stack size of new threads is another one: it is the process's, and models compile at once."""

_trials = TrialProcesses()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A matcher, to be copied and never advanced, and about how much memory it holds."""

    matcher: LLMatcher
    nbytes: int


def check_length(text: str, *, param: str, most: int = MAX_CHARACTERS) -> None:
    """Raise BadRequest if a grammar is too long to be looked at."""
    if len(text) > most:
        raise BadRequest(
            f"The grammar of `{param}` has {len(text):,} characters; at most {most:,} are accepted. Simplify it.",
            param=param,
        )


class GrammarCompiler:
    """Compiled grammars by their text, the latest ones. Safe to use from several threads."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer], *, special: Iterable[str] = ()) -> None:
        """`tokenizer` is called once, on a thread of the compiler; it may raise BadRequest. `special`: the texts of its
        special tokens."""
        self._make_tokenizer = tokenizer
        self._special = tuple(special)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()
        self._refused = TTLCache[bytes, str](_MAX_REFUSED, _REFUSED_S)
        """Sentences, by the hash of the grammar. Under the lock."""
        self._pool: ThreadPoolExecutor | None = None
        self._stack = STACKS[0]

    def compiled(self, text: str, *, param: str) -> Future[Compiled]:
        """The matcher of a grammar, at once if it is known. Do not cancel it: others may wait for the same.

        Its errors are BadRequest. Raises BadRequest if it was refused lately, and QueueFull if too many wait already.
        """
        check_length(text, param=param)
        with self._lock:
            known = self._compiled.pop(text, None)
            refusal = self._refused.get(_digest(text)) if known is None else None
            if refusal is not None:
                raise BadRequest(refusal, param=param)
            if known is None:
                if sum(not future.done() for future in self._compiled.values()) >= _MAX_WAITING:
                    raise QueueFull("Too many grammars are being compiled. Try again in a moment.", retry_after_s=5)
                known = self._start(text, param)
            self._compiled[text] = known
            self._forget_oldest()
        return known

    def _forget_oldest(self) -> None:
        # One that failed is tried again with the next request for it; one with waiters stays.
        gone = [text for text, future in self._compiled.items() if future.done() and future.exception() is not None]
        for text in gone:
            del self._compiled[text]
        while self._holds_too_much():
            if not next(iter(self._compiled.values())).done():
                return
            self._compiled.popitem(last=False)

    def _holds_too_much(self) -> bool:
        done = [each for each in self._compiled.values() if each.done() and each.exception() is None]
        nbytes = sum(each.result().nbytes for each in done)
        return (
            len(self._compiled) > _MAX_COMPILED
            or sum(map(len, self._compiled)) > _MAX_COMPILED_CHARACTERS
            or (nbytes > _MAX_COMPILED_NBYTES and len(self._compiled) > 1)
        )

    def _start(self, text: str, param: str) -> Future[Compiled]:
        """Begin to compile. Threads get the stack that is set when they start."""
        for stack in STACKS[STACKS.index(self._stack) :]:
            self._stack = stack
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
            with _stack_size_lock:
                before = threading.stack_size(stack)
                try:
                    return self._pool.submit(self._compile, text, param)
                except (RuntimeError, MemoryError):
                    # The address space is limited (`ulimit -v`).
                    self._pool = None
                finally:
                    threading.stack_size(before)
        raise BadRequest(
            "There is not enough memory to compile the grammar. Raise `ulimit -v` of the server.", param=param
        )

    def _compile(self, text: str, param: str) -> Compiled:
        if len(text) > self._stack // _STACK_PER_CHARACTER:
            raise BadRequest("The grammar is too long for this server's memory. Simplify it.", param=param)
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        trial = GrammarTrial(text=text, vocab_size=self._tokenizer.vocab_size, special=self._special, limits=LIMITS)
        verdict = _trials.judge(trial)
        refusal = verdict.refusal
        if refusal is None:
            matcher, refusal = compile_grammar(self._tokenizer, text, LIMITS)
            if refusal is None:
                return Compiled(matcher=matcher, nbytes=verdict.nbytes)
        with self._lock:
            self._refused[_digest(text)] = refusal
        raise BadRequest(refusal, param=param)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

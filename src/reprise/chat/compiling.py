"""Compiles grammars, off every thread that others wait for, and within bounds of size, time and depth.

llguidance recurses as deeply as rules refer to one another, and a stack that ends takes the process down: 90 kB of
rules are enough for the 8 MiB of an ordinary thread. So the threads here have a large stack, and what is longer than it
bears is refused. A compilation that has begun cannot be ended; who waits for it is told after a time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from reprise.core.errors import BadRequest, QueueFull

_STACKS = (512 * 2**20, 64 * 2**20)
"""Bytes of a thread's stack, of which only what is used takes memory; the second where the first is not to be had."""

_STACK_PER_CHARACTER = 1024
"""A rule takes up to 3 kB of the stack, and eight characters at least."""

_NUM_THREADS = 2
_MAX_WAITING = 16
_MAX_COMPILED = 64
_MAX_COMPILED_CHARACTERS = 4 * 2**20

MAX_CHARACTERS = _STACKS[0] // _STACK_PER_CHARACTER
"""A longer grammar is refused."""

_LIMITS = LLParserLimits(max_grammar_size=200_000, verbose_errors=False)


def check_length(text: str, *, param: str, most: int = MAX_CHARACTERS) -> None:
    """Raise BadRequest if a grammar is too long to be looked at."""
    if len(text) > most:
        raise BadRequest(
            f"The grammar of `{param}` has {len(text):,} characters; at most {most:,} are taken. "
            "Ask for less structure.",
            param=param,
        )


class GrammarCompiler:
    """Compiled grammars by their text, the latest ones. Safe to use from several threads.

    A matcher that is given is to be copied, never advanced.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """`tokenizer` is called once, on a thread of the compiler; it may raise BadRequest."""
        self._make_tokenizer = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._stack = _STACKS[0]

    def compiled(self, text: str, *, param: str) -> Future[LLMatcher]:
        """The matcher of a grammar, at once if it is known. Do not cancel it: others may wait for the same.

        Its errors are BadRequest; raises QueueFull if too many wait already.
        """
        check_length(text, param=param)
        with self._lock:
            known = self._compiled.pop(text, None)
            if known is None:
                if sum(not future.done() for future in self._compiled.values()) >= _MAX_WAITING:
                    raise QueueFull("Too many grammars are being compiled. Try again in a moment.", retry_after_s=5)
                known = self._start(text, param)
            self._compiled[text] = known
            self._forget_oldest()
        return known

    def _forget_oldest(self) -> None:
        # One that failed is tried again when it comes again; one that is waited for stays.
        gone = [text for text, future in self._compiled.items() if future.done() and future.exception() is not None]
        for text in gone:
            del self._compiled[text]
        while len(self._compiled) > _MAX_COMPILED or sum(map(len, self._compiled)) > _MAX_COMPILED_CHARACTERS:
            if not next(iter(self._compiled.values())).done():
                return
            self._compiled.popitem(last=False)

    def _start(self, text: str, param: str) -> Future[LLMatcher]:
        """Begin to compile. Threads get the stack that is set when they start."""
        before = threading.stack_size()
        for stack in _STACKS[_STACKS.index(self._stack) :]:
            self._stack = stack
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
            threading.stack_size(stack)
            try:
                return self._pool.submit(self._compile, text, param)
            except (RuntimeError, MemoryError):
                # The address space is limited (`ulimit -v`).
                self._pool = None
            finally:
                threading.stack_size(before)
        raise BadRequest("There is no memory to compile a grammar; raise `ulimit -v` of the server.", param=param)

    def _compile(self, text: str, param: str) -> LLMatcher:
        if len(text) > self._stack // _STACK_PER_CHARACTER:
            raise BadRequest("The grammar is too long for the memory of this server.", param=param)
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(f"The grammar cannot be used: {sentence_of(matcher)}", param=param)
        # What is too large for its first step is told now, and not by the answer.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise BadRequest(
                f"The grammar is too large for its first token: {sentence_of(trial)} Ask for less structure.",
                param=param,
            )
        return matcher


def sentence_of(matcher: LLMatcher) -> str:
    """What a matcher says is wrong, without the insides of llguidance."""
    text = matcher.get_error().partition("<backtrace>")[0].strip().removeprefix("panic: ")
    return text if len(text) <= 400 else f"{text[:400]} …"

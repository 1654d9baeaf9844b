"""The screen of `reprise chat`: prompt_toolkit reads, rich writes."""

import asyncio
import base64
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.output import Output
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from reprise.cli.chat_model import AnswerPiece
from reprise.cli.chat_session import COMMANDS, Screen

_PAUSE_S = 0.3
"""After this pause in typing, the text so far is prefilled."""
_FRAMES_PER_S = 12
_CLIPBOARDS = (("pbcopy",), ("wl-copy",), ("xclip", "-selection", "clipboard"))
_CLIPBOARD_S = 2.0
_THOUGHTS_SHOWN = 4
"""Lines of reasoning shown while the model thinks."""


class Terminal(Screen):
    """Reads lines from the user and shows answers as Markdown while they are generated."""

    def __init__(
        self,
        *,
        history: Path,
        typed: str = "",
        console: Console | None = None,
        source: Input | None = None,
        target: Output | None = None,
    ) -> None:
        """`typed`: what the next prompts read first. `source`, `target`: used instead of the terminal."""
        self._console = Console() if console is None else console
        self._typing = _Typing()
        self._is_folded = True
        self._failure: Exception | None = None
        history.parent.mkdir(parents=True, exist_ok=True)
        # The history is private: create the file readable only by its owner before anything is written.
        os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(history)),
            multiline=True,
            key_bindings=_keys(),
            completer=_Commands(),
            complete_while_typing=False,
            auto_suggest=AutoSuggestFromHistory(),
            prompt_continuation=FormattedText([("class:dim", "· ")]),
            input=source,
            output=target,
        )
        self._session.default_buffer.on_text_changed += self._typing.change
        keys: list[KeyPress] = []
        Vt100Parser(keys.append).feed_and_flush(typed)
        store_typeahead(self._session.app.input, keys)

    def on_typed(self, typed: Callable[[str], None]) -> None:
        """Call `typed` with the text so far when the user pauses."""
        self._typing.typed = typed

    def fail(self, error: Exception) -> None:
        """Have `read` raise this, now if it waits for a line. From any thread."""
        self._failure = error
        loop = self._session.app.loop
        if loop is not None:
            # It may have ended, and the next `read` raises.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._leave_if_failed)

    def _leave_if_failed(self) -> None:
        if self._failure is not None and self._session.app.is_running and not self._session.app.is_done:
            self._session.app.exit(exception=self._failure)

    def read(self, prompt: str) -> str | None:
        """The line that the user enters; None at the end (Ctrl-D). Ctrl-C cancels the line. Raises what `fail` got."""
        try:
            return self._session.prompt(FormattedText([("bold", prompt)]), pre_run=self._leave_if_failed)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        finally:
            self._typing.stop()

    @contextmanager
    def answer(self) -> Generator[Callable[[AnswerPiece], None]]:
        view = MarkdownView(self._console, folds=lambda: self._is_folded)
        with view.shown():
            yield view.add

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def complain(self, text: str) -> None:
        self._console.print(Text(text, style="red"))

    def ask(self, prompt: str, default: str) -> str | None:
        try:
            return self._session.prompt(FormattedText([("bold", prompt)]), default=default)
        except (KeyboardInterrupt, EOFError):
            return None
        finally:
            self._typing.stop()

    def fold_reasoning(self, *, is_folded: bool) -> None:
        self._is_folded = is_folded

    def copy(self, text: str) -> bool:
        """Ask the terminal (OSC 52), which also works over SSH, and the system's own program where there is one."""
        self._session.output.write_raw(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
        self._session.output.flush()
        for words in _CLIPBOARDS:
            if shutil.which(words[0]) is not None:
                with suppress(OSError, subprocess.SubprocessError):
                    subprocess.run(words, input=text.encode(), timeout=_CLIPBOARD_S, check=True, capture_output=True)
                    break
        return True


class MarkdownView:
    """One answer: complete blocks are printed once, the last one is redrawn as it grows."""

    def __init__(self, console: Console, *, folds: Callable[[], bool]) -> None:
        self._console = console
        self._folds = folds
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._text = ""
        self._reasoning = ""
        self._is_thinking = False
        self._drawn_s = 0.0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Draw until the block ends; what is incomplete then is printed as it is."""
        with self._live:
            try:
                yield
            finally:
                self._end_reasoning()
                self._live.update(Text(""), refresh=True)
                if self._text.strip():
                    self._console.print(Markdown(self._text))

    def add(self, piece: AnswerPiece) -> None:
        if piece.reasoning:
            self._is_thinking = True
            self._reasoning += piece.reasoning
        if piece.text:
            self._end_reasoning()
            self._text += piece.text
            done = complete_blocks(self._text)
            if done > 0:
                self._live.console.print(Markdown(self._text[:done]))
                self._text = self._text[done:]
        self._draw()

    def _draw(self) -> None:
        now_s = self._console.get_time()
        if now_s - self._drawn_s < 1 / _FRAMES_PER_S:
            return
        self._drawn_s = now_s
        if self._is_thinking:
            self._live.update(_Tail(Text(self._reasoning.strip(), style="dim italic"), _THOUGHTS_SHOWN), refresh=True)
        else:
            self._live.update(_Tail(Markdown(self._text), None), refresh=True)

    def _end_reasoning(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        thought = self._reasoning.strip()
        shown = f"reasoning, {len(thought.split()):,} words (/think shows it)" if self._folds() else thought
        self._live.console.print(Text(shown, style="dim italic"))


class _Tail:
    """The last lines of something that may not fit into the terminal. None: as many as fit."""

    def __init__(self, inner: Markdown | Text, num_lines: int | None) -> None:
        self._inner = inner
        self._num_lines = num_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options, pad=False)
        most = max(1, console.height - 2) if self._num_lines is None else self._num_lines
        for line in lines[-most:]:
            yield from line
            yield Text("")


def complete_blocks(text: str) -> int:
    """How many leading characters are complete Markdown blocks, which later text cannot change."""
    end = at = 0
    fence = ""
    is_blank_before = False
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if fence == "" and is_blank_before and stripped != "" and indent == 0:
            # Indented lines belong to the list before them; other lines start a block.
            end = at
        if stripped.startswith(("```", "~~~")):
            mark = stripped[:3]
            if fence == "":
                fence = mark
            elif mark == fence and stripped.strip(mark[0]) == "":
                fence = ""
        is_blank_before = stripped == ""
        at += len(line)
    return end


class _Typing:
    """Waits for a pause and reports the text once for every new complete word."""

    def __init__(self) -> None:
        self.typed: Callable[[str], None] = lambda text: None
        self._words = ""
        self._timer: asyncio.TimerHandle | None = None

    def change(self, buffer: Buffer) -> None:
        self.stop()
        text = buffer.text
        # An incomplete word changes nothing.
        words = text[: len(text) - len(text.split()[-1])].rstrip() if text.split() else ""
        if words not in (self._words, ""):
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._tell, text, words)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, text: str, words: str) -> None:
        self._words = words
        self.typed(text)


class _Commands(Completer):
    """The commands, after a slash."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if line.startswith("/") and " " not in line:
            for name, (text, _) in COMMANDS.items():
                if name.startswith(line[1:]):
                    yield Completion(f"/{name}", start_position=-len(line), display_meta=text)


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J insert a line break."""
    keys = KeyBindings()

    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    bind: Any = keys.add
    bind("enter")(send)
    bind("escape", "enter")(new_line)
    bind("c-j")(new_line)
    return keys

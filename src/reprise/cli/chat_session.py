"""The state of `reprise chat`: the history, its branches, and the commands. `chat_terminal.py` has the terminal."""

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from reprise.chat.message_format import content_of, joined_text, text_runs
from reprise.cli.chat_model import AnswerPiece, ChatModel, Message, NoAnswer, TurnCounts
from reprise.core.errors import BadRequest, RepriseError
from reprise.core.settings import OPTIONS
from reprise.library.image import Image

_MAIN = "main"
_LEAST_S = 0.1
"""A shorter decode has no tokens per second."""
_MOST_IN_PIECE = 16
"""Tokens in a piece of an answer, at most, as far as it is sent as it is generated."""
_ROLES = frozenset({"system", "developer", "user", "assistant"})


class Screen:
    """Shows the session as plain text, for pipes: answers on standard output, everything else on standard error."""

    @contextmanager
    def answer(self) -> Generator[Callable[[AnswerPiece], None]]:
        """A block in which an answer is shown; call the function it yields with each piece. Reasoning is left out."""

        def show(piece: AnswerPiece) -> None:
            sys.stdout.write(piece.text)
            sys.stdout.flush()

        yield show
        sys.stdout.write("\n")

    def say(self, text: str) -> None:
        """Show output that the user requested."""
        print(text)

    def note(self, text: str) -> None:
        """Show a dim line beside the chat."""
        print(text, file=sys.stderr)

    def complain(self, text: str) -> None:
        print(f"reprise: {text}", file=sys.stderr)

    def ask(self, prompt: str, default: str) -> str | None:
        """Have the user edit a text; None if cancelled, or nobody is there."""
        return None

    def fold_reasoning(self, *, is_folded: bool) -> None:
        """Set whether reasoning is folded to one line."""

    def copy(self, text: str) -> bool:
        """Put a text on the clipboard; False if there is none to be had."""
        return False


class Session:
    """A chat with branches. `take` is called with each line that the user enters."""

    def __init__(self, model: ChatModel, screen: Screen, *, system: str | None = None) -> None:
        self._model = model
        self._screen = screen
        self._branches: dict[str, list[Message]] = {_MAIN: []}
        self._branch = _MAIN
        self._is_folded = True
        self._reasoning = ""
        self._images: list[dict[str, Any]] = []
        """Those that go with the next message."""
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    @property
    def messages(self) -> list[Message]:
        """The history of the current branch."""
        return self._branches[self._branch]

    @property
    def branch(self) -> str:
        return self._branch

    def take(self, line: str) -> bool:
        """Handle a line: a command, or a message to answer. False: the user is done."""
        text = line.strip()
        if text == "":
            return True
        pasted = _pasted_image(text)
        if pasted is not None:
            text = f"/image {pasted}"
        if not text.startswith("/") or text.startswith("//"):
            # Two slashes: a message that starts with a slash.
            self.say(text.removeprefix("/"))
            return True
        name, _, rest = text[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        known = [command for command in COMMANDS if command == name] or [c for c in COMMANDS if c.startswith(name)]
        if len(known) != 1:
            self._screen.complain(
                f"Unknown command /{name}. /help lists the commands; // starts a message with a slash."
            )
            return True
        try:
            COMMANDS[known[0]][1](self, rest.strip())
        except (RepriseError, OSError) as error:
            self._screen.complain(str(error))
        return True

    def typed(self, text: str) -> None:
        """Prefill what the user has typed of the next message."""
        if not text.startswith("/"):
            try:
                self._model.prefill([*self.messages, self._said(text)])
            except RepriseError:
                return  # Reported when the message is sent.

    def say(self, text: str) -> bool:
        """Send a message, even one that starts with a slash. False if there was no answer."""
        message = self._said(text)
        has_answer = self._answer([*self.messages, message])
        if any(each is message for each in self.messages):
            self._images = []
        return has_answer

    def _said(self, text: str) -> Message:
        """The message with this text, and the images that were added for it."""
        content = [*self._images, {"type": "text", "text": text}] if self._images else text
        return {"role": "user", "content": content}

    def _answer(self, messages: Sequence[Message]) -> bool:
        """Answer the chat, or continue its half answer. If interrupted, what there is of both is kept."""
        *before, half = messages if messages[-1]["role"] == "assistant" else (*messages, Message(content=""))
        said: list[str] = [half["content"]]
        thought: list[str] = [half.get("reasoning_content", "")]
        was_interrupted = False
        try:
            with closing(self._model.stream(messages)) as pieces, self._screen.answer() as show:
                for piece in pieces:
                    said.append(piece.text)
                    thought.append(piece.reasoning)
                    show(piece)
        except KeyboardInterrupt:
            was_interrupted = True
        except RepriseError as error:
            self._screen.complain(str(error))
            if isinstance(error, BadRequest) and self._images:
                # They may be why: the next message is not to be refused for them, too.
                self._images = []
                self._screen.note("the images of this message are dropped; /image FILE adds one again")
            return False
        self._reasoning = "".join(thought)
        if was_interrupted and not any(said):
            self._branches[self._branch] = before
            self._screen.note("stopped; /continue answers the message")
            return False
        answer: Message = {"role": "assistant", "content": "".join(said)}
        if self._reasoning:
            answer["reasoning_content"] = self._reasoning
        self._branches[self._branch] = [*before, answer]
        if was_interrupted:
            self._screen.note("stopped; /continue continues the answer")
        elif self._model.last is not None:
            self._screen.note(counts_line(self._model.last))
        return True

    # Commands.

    def regenerate(self, _: str) -> None:
        """Answer the last message again."""
        self._answer(self.messages[: self._user_at(-1) + 1])

    def resume(self, _: str) -> None:
        """Continue an answer that was stopped or cut off."""
        if not self.messages or self.messages[-1]["role"] not in ("user", "assistant"):
            raise NoAnswer("There is nothing to continue.")
        self._answer(self.messages)

    def edit(self, rest: str) -> None:
        """Change your last message (or number N) and continue from there: /edit [N] [TEXT]"""
        first, _, more = rest.partition(" ")
        number, text = (int(first), more.strip()) if first.isdecimal() else (0, rest)
        at = self._user_at(number - 1 if number > 0 else -1)
        if text == "":
            text = (self._screen.ask("edit> ", joined_text(self.messages[at]["content"])) or "").strip()
        if text == "":
            self._screen.note("nothing changed")
            return
        self._answer([*self.messages[:at], {**self.messages[at], "content": _with_text(self.messages[at], text)}])

    def go_to_branch(self, name: str) -> None:
        """Start a branch here, or switch to one: /branch NAME; without a name, list them"""
        if name == "":
            marks = (("*" if each == self._branch else " ", each, len(self._branches[each])) for each in self._branches)
            self._screen.say("\n".join(f"{mark} {each}: {num} messages" for mark, each, num in marks))
            return
        if len(name.splitlines()) > 1:
            raise NoAnswer("The name of a branch is one line: /branch NAME.")
        if name not in self._branches:
            self._branches[name] = list(self.messages)
        self._branch = name
        self._screen.note(f"on branch {name}, {len(self.messages)} messages")

    def set_system(self, text: str) -> None:
        """Change the system prompt and keep the chat: /system TEXT; without a text, show it"""
        has_one = bool(self.messages) and self.messages[0]["role"] in ("system", "developer")
        if text == "":
            self._screen.say(self.messages[0]["content"] if has_one else "There is no system prompt.")
            return
        rest = self.messages[1:] if has_one else self.messages
        self._branches[self._branch] = [{"role": "system", "content": text}, *rest]
        self._screen.note("set; the next turn computes the whole chat, since its beginning changed" if rest else "set")

    def image(self, file: str) -> None:
        """Show an image with your next message: /image FILE; pasting its path does the same"""
        if file == "":
            raise NoAnswer("Name a file: /image FILE.")
        path = _file(file)
        self._images.append(Image(path).part)
        more = f", {len(self._images)} images" if len(self._images) > 1 else ""
        self._screen.note(f"{path.name} goes with your next message{more}")

    def save(self, file: str) -> None:
        """Save the chat with its branches: /save FILE"""
        if file == "":
            raise NoAnswer("Name a file: /save FILE.")
        path = Path(file).expanduser()
        _write(path, {"branch": self._branch, "branches": self._branches, "messages": self.messages})
        self._screen.note(f"saved to {path}")

    def load(self, file: str) -> None:
        """Load a saved chat, or a list of messages as JSON: /load FILE"""
        if file == "":
            raise NoAnswer("Name a file: /load FILE.")
        path = _file(file)
        text = path.read_bytes()
        if text.strip() in (b"", b"[]", b"{}", b"null"):
            raise NoAnswer(f"There is no chat in {path}.")
        try:
            body: Any = json.loads(text)
        except ValueError as error:
            raise NoAnswer(f"{path} is not JSON: {error}.") from error
        branches, branch = _branches_of(body, path)
        self._branches, self._branch = branches, branch
        self._screen.note(f"{len(self.messages)} messages on branch {branch}")

    def use_model(self, name: str) -> None:
        """Answer with another model of the server: /model NAME; without a name, list them"""
        if name == "":
            marks = (("*" if each == self._model.name else " ", each) for each in self._model.names())
            self._screen.say("\n".join(f"{mark} {each}" for mark, each in marks))
            return
        self._model.use(name)
        self._screen.note(f"{self._model.name} answers from now on")

    def set_option(self, rest: str) -> None:
        """Set how answers are sampled: /set NAME VALUE (or `default`); without a name, show what is set"""
        name, _, text = rest.partition(" ")
        options = self._model.options
        if name == "":
            told = [f"{each} {options.get(each, 'default')}" for each in ANSWER_OPTIONS]
            self._screen.say("\n".join(told))
            return
        field = _field_of(name)
        if text.strip() in ("", "default"):
            options.pop(field, None)
        else:
            try:
                options[field] = OPTIONS[field].kind.read(text.strip(), Path())
            except ValueError as error:
                raise NoAnswer(f"Invalid {field}: it {error}.") from error
        self._screen.note(f"{field}: {options.get(field, 'default')}")

    def copy(self, rest: str) -> None:
        """Copy the last answer to the clipboard; /copy code copies its last block of code"""
        answers = [str(message["content"]) for message in self.messages if message["role"] == "assistant"]
        if not answers:
            raise NoAnswer("There is no answer yet.")
        text = answers[-1]
        if rest == "code":
            blocks = [block.group(3) for block in _FENCED.finditer(text)]
            if not blocks:
                raise NoAnswer("The last answer has no block of code.")
            text = blocks[-1]
        if not self._screen.copy(text):
            raise NoAnswer("There is no clipboard here.")
        self._screen.note(f"copied {len(text):,} characters")

    def why(self, _: str) -> None:
        """Explain why no more of the last prompt was reused."""
        self._screen.say(self._model.why())

    def think(self, _: str) -> None:
        """Show the reasoning of the last answer, and toggle folding of reasoning."""
        self._is_folded = not self._is_folded
        self._screen.fold_reasoning(is_folded=self._is_folded)
        if not self._is_folded and self._reasoning:
            self._screen.note(self._reasoning.strip())
        self._screen.note("reasoning is folded" if self._is_folded else "reasoning is shown")

    def help(self, _: str) -> None:
        """List the commands."""
        lines = [f"/{name:11} {text}" for name, (text, _) in COMMANDS.items()]
        keys = "/quit        Leave (also Ctrl-D). Ctrl-C stops an answer, Alt-Enter starts a new line."
        self._screen.say("\n".join([*lines, keys]))

    def _user_at(self, number: int) -> int:
        """The index of the user's message with this number, counted from the end if negative. Raises NoAnswer."""
        at = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not -len(at) <= number < len(at):
            raise NoAnswer("You have sent no messages yet." if not at else f"You have sent {len(at)} messages so far.")
        return at[number]


COMMANDS: dict[str, tuple[str, Callable[[Session, str], None]]] = {
    name: (cast(str, method.__doc__), method)
    for name, method in {
        "regenerate": Session.regenerate,
        "continue": Session.resume,
        "edit": Session.edit,
        "branch": Session.go_to_branch,
        "system": Session.set_system,
        "model": Session.use_model,
        "set": Session.set_option,
        "copy": Session.copy,
        "image": Session.image,
        "save": Session.save,
        "load": Session.load,
        "why": Session.why,
        "think": Session.think,
        "help": Session.help,
    }.items()
}
"""Help and method by name. Any unambiguous prefix of a name works."""


ANSWER_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "thinking_budget")
"""What `/set` sets: options of a server that a request may set, too."""


def _field_of(name: str) -> str:
    """The field that a person means by an option's name or by its own. Raises NoAnswer."""
    for field in ANSWER_OPTIONS:
        if name.replace("-", "_") == field or name == OPTIONS[field].name:
            return field
    raise NoAnswer(f"Unknown option {name!r}. The options are {', '.join(ANSWER_OPTIONS)}.")


_FENCED = re.compile(r"^ {0,3}(```+|~~~+)([^\n]*)\n(.*?)^ {0,3}\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)


def counts_line(counts: TurnCounts) -> str:
    """The cost of a turn in one line."""
    parts: list[str] = []
    if counts.cached_tokens is not None:
        computed = counts.prompt_tokens - counts.cached_tokens
        parts.append(f"{counts.cached_tokens:,} of {counts.prompt_tokens:,} tokens reused, {computed:,} computed")
    if counts.ttft_s is not None:
        parts.append(f"first token after {counts.ttft_s:.2f} s")
        decode_s = counts.total_s - counts.ttft_s
        # What arrived at once, or with much of it held back, says nothing of the speed.
        has_rate = counts.completion_tokens > 1 and decode_s > _LEAST_S
        has_rate = has_rate and counts.completion_tokens <= _MOST_IN_PIECE * counts.num_pieces
        rate = f", {(counts.completion_tokens - 1) / decode_s:.0f} tokens/s" if has_rate else ""
        parts.append(f"{counts.completion_tokens:,} tokens{rate}")
    if counts.finish_reason == "length":
        parts.append("cut off at the token limit")
    return " · ".join(parts)


def _file(name: str) -> Path:
    """Raises NoAnswer if there is none."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise NoAnswer(f"{path} is not a file." if path.exists() else f"There is no file {path}.")
    return path


def _branches_of(body: Any, path: Path) -> tuple[dict[str, list[Message]], str]:
    """The branches in a file. Raises NoAnswer if it is not a chat."""
    found: Any = body
    if isinstance(body, dict):
        fields = cast(dict[str, Any], body)
        branches: Any = fields.get("branches")
        branch: Any = fields.get("branch")
        if isinstance(branches, dict) and isinstance(branch, str) and branch in branches:
            named = cast(dict[str, Any], branches)
            return {name: _messages_of(chat, path) for name, chat in named.items()}, branch
        found = fields.get("messages")
    return {_MAIN: _messages_of(found, path)}, _MAIN


def _messages_of(found: Any, path: Path) -> list[Message]:
    messages = cast(list[Any], found) if isinstance(found, list) else [found]
    for one in messages:
        fields = cast(Message, one) if isinstance(one, dict) else {}
        if fields.get("role") not in _ROLES or not isinstance(fields.get("content"), str | list):
            raise NoAnswer(f"{path} is not a chat: expected a list of messages, each with a role and text.")
    return messages


_IMAGE_FILES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


def _pasted_image(line: str) -> Path | None:
    """The image file of which a line is the path, as terminals write one that is dropped on them; None: it is none."""
    if not line.lower().rstrip("'\"").endswith(tuple(_IMAGE_FILES)):
        return None
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if len(words) != 1:
        return None
    path = Path(words[0].removeprefix("file://")).expanduser()
    return path if path.is_absolute() and path.is_file() else None


def _with_text(message: Message, text: str) -> str | list[Any]:
    """The content of a message with another text, and its own images."""
    images = [part for part in text_runs(message["content"]) if not isinstance(part, str)]
    return content_of([*images, text])


def _write(path: Path, body: object) -> None:
    """Write the file atomically, readable only by its owner."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".reprise-", delete=False, encoding="utf-8") as file:
        try:
            json.dump(body, file, ensure_ascii=False, indent=1)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise

"""`reprise chat`: the session on a real engine and on a real server, and the terminal on a pipe."""

import io
import json
import os
import pty
import queue
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.plain_text import PlainTextOutput
from rich.console import Console
from typer.testing import CliRunner

import reprise
from reprise.chat.message_format import joined_text
from reprise.cli.chat_model import AnswerPiece, LoadingModel, LocalModel, Message, RemoteModel, TurnCounts, remote_model
from reprise.cli.chat_session import Session, counts_line
from reprise.cli.chat_terminal import MarkdownView, Terminal, complete_blocks
from reprise.cli.main import app
from reprise.core.errors import BadRequest, LoadFailed, QueueFull
from tests.api.real_server import real_server, server_of_several
from tests.loop.driving import PATIENCE_S
from tests.models.tiny import tiny_model
from tests.pictures import png


class Paper:
    """A screen that keeps what it was shown."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.notes: list[str] = []
        self.said: list[str] = []
        self.complaints: list[str] = []
        self.reply: str | None = None
        self.copied: str | None = None

    @contextmanager
    def answer(self) -> Generator[Callable[[AnswerPiece], None]]:
        self.answers.append("")

        def show(piece: AnswerPiece) -> None:
            self.answers[-1] += piece.text

        yield show

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def complain(self, text: str) -> None:
        self.complaints.append(text)

    def ask(self, prompt: str, default: str) -> str | None:
        self.said.append(default)
        return self.reply

    def fold_reasoning(self, *, is_folded: bool) -> None:
        self.notes.append(f"folded: {is_folded}")

    def copy(self, text: str) -> bool:
        self.copied = text
        return True


class Echo:
    """A model that says the last message again."""

    name = "echo"
    last: TurnCounts | None = TurnCounts(
        prompt_tokens=1200, cached_tokens=1180, completion_tokens=11, ttft_s=0.25, total_s=1.25, num_pieces=11
    )

    def __init__(self) -> None:
        self.asked: list[Sequence[Message]] = []
        self.typed: list[str] = []
        self.error: BaseException | None = None
        self.says_nothing = False
        self.heard = threading.Event()
        self.options: dict[str, Any] = {}

    def names(self) -> Sequence[str]:
        return ("echo", "other")

    def use(self, name: str) -> None:
        self.name = name

    def stream(self, messages: Sequence[Message]) -> Generator[AnswerPiece]:
        self.asked.append([dict(message) for message in messages])
        yield AnswerPiece(reasoning="Hm.")
        if not self.says_nothing:
            yield AnswerPiece(text=joined_text(messages[-1]["content"]))
        if self.error is not None:
            raise self.error

    def prefill(self, messages: Sequence[Message]) -> None:
        self.typed.append(joined_text(messages[-1]["content"]))
        self.heard.set()

    def why(self) -> str:
        return "because"

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def paper() -> Paper:
    return Paper()


def texts(session: Session) -> list[str]:
    return [message["content"] for message in session.messages]


def test_a_chat_with_branches_edits_and_files(paper: Paper, tmp_path: Path) -> None:
    echo = Echo()
    session = Session(echo, paper, system="Be brief.")
    for line in ("one", "two", "  ", "/branch other", "three", "/branch main", "four", "/edit 1 uno"):
        assert session.take(line)
    assert texts(session) == ["Be brief.", "uno", "uno"]
    session.take("/branch other")
    assert texts(session) == ["Be brief.", "one", "one", "two", "two", "three", "three"]
    session.take("/regenerate")
    assert [message["content"] for message in echo.asked[-1]] == ["Be brief.", "one", "one", "two", "two", "three"]
    # Reasoning goes back with the history: a template that keeps it finds it.
    assert session.messages[2] == {"role": "assistant", "content": "one", "reasoning_content": "Hm."}
    session.take("/system Be kind.")
    assert texts(session)[0] == "Be kind."
    file = tmp_path / "chat.json"
    session.take(f"/save {file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = Session(Echo(), paper)
    other.take(f"/load {file}")
    assert (texts(other), other.branch) == (texts(session), "other")
    other.take("/branch main")
    assert texts(other) == ["Be brief.", "uno", "uno"]
    session.take("/br")
    assert paper.said[-1].splitlines() == ["  main: 3 messages", "* other: 7 messages"]
    session.take("/why")
    assert paper.said[-1] == "because"
    session.take("//etc is a folder")
    assert texts(session)[-1] == "/etc is a folder"
    paper.reply = "drei"
    session.take("/edit 3")
    assert paper.said[-1] == "three"
    assert texts(session)[-1] == "drei"
    assert paper.complaints == []
    assert (
        paper.notes[0]
        == "1,180 of 1,200 tokens reused, 20 computed · first token after 0.25 s · 11 tokens, 10 tokens/s"
    )
    assert not session.take("/quit")


def test_images_go_with_the_next_message(paper: Paper, tmp_path: Path) -> None:
    echo = Echo()
    session = Session(echo, paper)
    for name in ("a.png", "b c.png"):
        (tmp_path / name).write_bytes(png())
    session.take(f"/image {tmp_path / 'a.png'}")
    # A terminal writes the path of a file that is dropped on it like this.
    session.take(str(tmp_path / "b c.png").replace(" ", "\\ "))
    session.typed("What are")
    session.take("What are these?")
    assert [part["type"] for part in echo.asked[-1][0]["content"]] == ["image_url", "image_url", "text"]
    assert echo.typed == ["What are"]
    session.take("And this?")
    assert echo.asked[-1][-1]["content"] == "And this?"
    session.take("/edit 1 What is there?")
    assert [part.get("text") for part in echo.asked[-1][0]["content"]] == [None, None, "What is there?"]
    session.take(f"/image {tmp_path / 'c.png'}")
    session.take(f"{tmp_path / 'a.png'} is a file of mine")
    assert paper.complaints == [f"There is no file {tmp_path / 'c.png'}.", *paper.complaints[1:]]
    session.take(f"/save {tmp_path / 'chat.json'}")
    other = Session(Echo(), paper)
    other.take(f"/load {tmp_path / 'chat.json'}")
    assert other.messages == session.messages


def test_an_image_that_is_refused_is_not_sent_again_and_one_that_has_to_wait_is(paper: Paper, tmp_path: Path) -> None:
    echo = Echo()
    session = Session(echo, paper)
    (tmp_path / "a.png").write_bytes(png())
    session.take(f"/image {tmp_path / 'a.png'}")
    echo.error = QueueFull("The queue is full.")
    session.take("What is this?")
    echo.error = BadRequest("The image has too many pixels.")
    session.take("What is this?")
    assert [part["type"] for part in echo.asked[-1][0]["content"]] == ["image_url", "text"]
    echo.error = None
    session.take("And now?")
    assert echo.asked[-1][-1]["content"] == "And now?" and texts(session) == ["And now?", "And now?"]


def test_an_image_of_a_message_that_was_stopped_is_sent_once(paper: Paper, tmp_path: Path) -> None:
    echo = Echo()
    session = Session(echo, paper)
    (tmp_path / "a.png").write_bytes(png())
    session.take(f"/image {tmp_path / 'a.png'}")
    echo.error, echo.says_nothing = KeyboardInterrupt(), True
    session.take("What is this?")
    echo.error, echo.says_nothing = None, False
    session.take("And now?")
    assert echo.asked[-1][-1]["content"] == "And now?"


def test_a_model_is_chosen_options_are_set_and_answers_copied(paper: Paper) -> None:
    echo = Echo()
    session = Session(echo, paper)
    session.take("/model")
    assert paper.said[-1] == "* echo\n  other"
    session.take("/model other")
    assert echo.name == "other" and paper.notes[-1] == "other answers from now on"
    for line in ("/set temp 0.5", "/set max-tokens 7", "/set top_k 3", "/set top_k default"):
        session.take(line)
    assert echo.options == {"temperature": 0.5, "max_tokens": 7}
    session.take("/set")
    assert paper.said[-1].splitlines()[:2] == ["temperature 0.5", "top_p default"]
    assert paper.complaints == []
    for wrong in ("/set temperature hot", "/set colour red", "/copy", "/copy code"):
        session.take(wrong)
    assert len(paper.complaints) == 4 and echo.options == {"temperature": 0.5, "max_tokens": 7}
    session.take("Look:\n```py\na = 1\n```\nor\n~~~\nb = 2\n\n~~~\nend")
    session.take("/copy")
    assert paper.copied == texts(session)[-1]
    session.take("/copy code")
    assert paper.copied == "b = 2\n\n"
    session.take("/help")
    assert "Alt-Enter" in paper.said[-1] and "/model" in paper.said[-1]


def test_a_server_of_several_is_asked_for_another_model(paper: Paper) -> None:
    with server_of_several("llama", "qwen3_5", settles=False) as client:
        model = remote_model(str(client.base_url), api_key=None, model=None, options={"max_tokens": 3})
        session = Session(model, paper)
        session.take("/model qwen3_5")
        session.take("/set max_tokens 5")
        session.take("Hello!")
        assert (model.name, paper.complaints) == ("qwen3_5", [])
        assert model.last is not None and model.last.completion_tokens == 5
        session.take("/model nothing")
        assert "It serves llama, qwen3_5." in paper.complaints[-1]
        model.close()


def test_an_answer_goes_to_the_clipboard_of_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    (tmp_path / "wl-copy").write_text(f"#!/bin/sh\ncat > {kept}\n")
    (tmp_path / "wl-copy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    out = io.StringIO()
    with create_pipe_input() as pipe:
        screen = Terminal(history=tmp_path / "h", source=pipe, target=PlainTextOutput(out))
        assert screen.copy("grüße")
    assert "\x1b]52;c;Z3LDvMOfZQ==\x07" in out.getvalue()
    assert kept.read_text() == "grüße"


def test_what_goes_wrong_changes_nothing(paper: Paper, tmp_path: Path) -> None:
    echo = Echo()
    session = Session(echo, paper)
    session.take("one")
    before = list(session.messages)
    bad = tmp_path / "bad.json"
    bad.write_text('[{"role": "user"}]')
    echo.error = QueueFull("Many wait.")
    for line in ("two", "/edit 9 x", "/nonsense", "/save", f"/load {bad}", f"/load {tmp_path / 'none'}"):
        assert session.take(line)
    assert session.messages == before
    assert len(paper.complaints) == 6
    echo.error = KeyboardInterrupt()  # type: ignore[assignment]
    session.take("three")
    assert texts(session)[-2:] == ["three", "three"]
    assert paper.notes[-1] == "stopped; /continue continues the answer"
    echo.error = None
    session.take("/continue")
    # It was asked to go on with the half answer, and both are one.
    assert [message["content"] for message in echo.asked[-1]][-2:] == ["three", "three"]
    assert texts(session)[-2:] == ["three", "threethree"]


def test_a_question_that_was_stopped_before_its_answer_is_kept(paper: Paper) -> None:
    echo = Echo()
    echo.says_nothing = True
    echo.error = KeyboardInterrupt()  # type: ignore[assignment]
    session = Session(echo, paper)
    session.take("/continue")
    assert paper.complaints == ["There is nothing to continue."]
    session.take("one")
    assert texts(session) == ["one"]
    echo.says_nothing, echo.error = False, None
    session.take("/continue")
    assert texts(session) == ["one", "one"]


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"branches": {"a": []}, "branch": ["a"]}'])
def test_a_file_without_a_chat_is_not_loaded(content: str, paper: Paper, tmp_path: Path) -> None:
    session = Session(Echo(), paper)
    session.take("one")
    before = list(session.messages)
    file = tmp_path / "chat.json"
    file.write_text(content)
    for place in (file, tmp_path, tmp_path / "none"):
        session.take(f"/load {place}")
    session.take("/branch a\nb")
    assert session.messages == before and session.branch == "main"
    assert len(paper.complaints) == 4 and all(each.endswith(".") for each in paper.complaints), paper.complaints
    assert "Errno" not in "".join(paper.complaints)


def test_in_process_a_branch_and_what_was_typed_cost_nothing(paper: Paper) -> None:
    settings = reprise.Settings(model=str(tiny_model("qwen3_5")), temperature=0, max_tokens=12, thinking_budget=4)
    model = LocalModel(reprise.Engine(settings))
    try:
        session = Session(model, paper, system="You are brief, and you answer in one sentence.")
        session.take("Who are you, and what can you do for me today?")
        session.take("/branch b")
        session.take("Thank you!")
        session.take("/branch main")
        session.take("Thank you!")
        assert model.last is not None and model.last.cached_tokens is not None
        assert model.last.prompt_tokens == model.last.cached_tokens
        session.take("/why")
        assert "reused" in paper.said[-1]
        assert paper.complaints == []
        assert "0 computed" in paper.notes[-1]
    finally:
        model.close()


def test_a_server_answers_like_the_engine(paper: Paper) -> None:
    options = {"temperature": 0, "max_tokens": 12, "thinking_budget": 4}
    with real_server("qwen3_5", settles=False) as client:
        model = remote_model(str(client.base_url), api_key=None, model=None, options=options)
        session = Session(model, paper, system="You are brief, and you answer in one sentence.")
        session.typed("Who are you, and what can you do for m")
        deadline_s = time.monotonic() + PATIENCE_S
        while (health := client.get("/health").json())["prefilled"] == 0 or not health["idle"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        session.take("Who are you, and what can you do for me?")
        assert model.last is not None and model.last.cached_tokens is not None
        assert model.last.cached_tokens > 20
        session.take("/why")
        assert "reused" in paper.said[-1]
        session.take("Thank you!")
        assert [message["role"] for message in session.messages][1:] == ["user", "assistant"] * 2
        assert paper.complaints == []
        model.close()


def test_a_stream_of_another_server_is_read_as_the_standard_says() -> None:
    text = "one\u2028two\x85three\u2029four"
    chunk = json.dumps({"id": "a", "choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    stream = f": hello\r\n\r\nid: 1\r\nevent: chunk\r\ndata: {chunk}\r\n\r\n: still here\r\n\r\ndata: [DONE]\r\n\r\n"
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, text=stream))
    client = httpx.Client(transport=transport, base_url="http://other")
    model = RemoteModel(client, name="theirs", is_reprise=False, options={})
    assert [piece.text for piece in model.stream([{"role": "user", "content": "Hello!"}])] == [text]


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_of_something_else_is_named_in_one_line(status: int) -> None:
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>\n<p>Hello\n</html>\n")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{pages.server_port}"
        refused = CliRunner().invoke(app, ["chat", url], input="Hello!\n")
        launched = CliRunner().invoke(app, ["launch", "--url", url, "claude"])
        pages.shutdown()
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
    told = "The server answered: <html> <p>Hello" if status == 500 else "does not have the OpenAI API"
    assert told in refused.stderr
    assert (launched.exit_code, launched.stderr.count("\n")) == (2, 1), launched.stderr
    assert f"The server at {url} is not Reprise." in launched.stderr


def test_lines_history_and_what_is_typed(tmp_path: Path) -> None:
    echo = Echo()
    with create_pipe_input() as pipe:
        console = Console(file=io.StringIO(), force_terminal=True, width=60)
        screen = Terminal(history=tmp_path / "s" / "h", console=console, source=pipe, target=DummyOutput())
        session = Session(echo, screen)
        screen.on_typed(session.typed)
        pipe.send_text("first line\x1b\rsecond line\r")
        assert screen.read("> ") == "first line\nsecond line"
        pipe.send_text("\x1b[A\r")
        assert screen.read("> ") == "first line\nsecond line"
        assert stat.S_IMODE((tmp_path / "s" / "h").stat().st_mode) == 0o600

        def type_slowly() -> None:
            pipe.send_text("what is the weat")
            echo.heard.wait(30)
            pipe.send_text("her\r")

        typist = threading.Thread(target=type_slowly)
        typist.start()
        assert screen.read("> ") == "what is the weather"
        typist.join()
        assert echo.typed[-1] == "what is the weat"
        pipe.send_text("\x04")
        assert screen.read("> ") is None


def test_the_first_line_is_taken_while_the_model_is_loaded(paper: Paper) -> None:
    echo, may_load = Echo(), threading.Event()

    def load() -> Echo:
        assert may_load.wait(PATIENCE_S)
        return echo

    model = LoadingModel("echo", load, when_failed=pytest.fail)
    session = Session(model, paper)
    session.typed("what is")
    assert (model.is_loading, echo.typed, model.last) == (True, [], None)
    threading.Timer(0.05, may_load.set).start()
    session.take("what is it")
    # What was typed until then is computed, and the line that was entered is answered.
    assert (echo.typed, texts(session)) == (["what is"], ["what is it", "what is it"])
    session.typed("and now")
    assert (echo.typed[-1], model.last) == ("and now", echo.last)
    session.take("/why")
    assert (paper.said, paper.complaints) == (["because"], [])
    model.close()


@pytest.mark.parametrize("is_typing", [True, False])
def test_a_model_that_cannot_be_loaded_ends_the_prompt(paper: Paper, tmp_path: Path, *, is_typing: bool) -> None:
    may_load = threading.Event()

    def load() -> Echo:
        assert may_load.wait(PATIENCE_S)
        raise LoadFailed("Its config.json is missing.")

    with create_pipe_input() as pipe:
        screen = Terminal(
            history=tmp_path / "h", console=Console(file=io.StringIO()), source=pipe, target=DummyOutput()
        )
        model = LoadingModel("echo", load, when_failed=screen.fail)
        session = Session(model, paper)
        threading.Timer(0.1, may_load.set).start()
        if not is_typing:
            session.take("Hello!")
            assert (session.messages, paper.complaints) == ([], ["The model could not be loaded."])
        with pytest.raises(LoadFailed, match="is missing"):
            screen.read("> ")


def shown(pieces: Sequence[AnswerPiece], *, folds: bool = True) -> str:
    out = io.StringIO()
    view = MarkdownView(Console(file=out, force_terminal=False, width=40, height=6), folds=lambda: folds)
    with view.shown():
        for piece in pieces:
            view.add(piece)
    return out.getvalue()


def test_markdown_is_shown_once_and_thoughts_are_folded() -> None:
    text = "# Title\n\nA *word*.\n\n```py\na = 1\n\nb = 2\n```\n\n1. one\n\n   more\n2. two\n\nend"
    pieces = [AnswerPiece(reasoning="Let me think."), *(AnswerPiece(text=letter) for letter in text)]
    page = shown(pieces)
    for word in ("Title", "A word", "a = 1", "b = 2", "one", "more", "two", "end"):
        assert page.count(word) == 1, page
    assert "*word*" not in page
    assert "Let me think" not in page and "3 words" in page
    assert "Let me think." in shown(pieces, folds=False)


def test_blocks_are_complete_when_the_next_begins() -> None:
    assert complete_blocks("one\n\ntwo") == len("one\n\n")
    assert complete_blocks("one\n\n") == 0
    assert complete_blocks("```\na\n\nb") == 0
    assert complete_blocks("- a\n\n  b") == 0
    assert complete_blocks("```\na\n\nb\n```\n\nx") == len("```\na\n\nb\n```\n\n")


def test_a_line_says_only_what_is_known() -> None:
    counts = TurnCounts(prompt_tokens=3, cached_tokens=None, completion_tokens=0, ttft_s=None, total_s=1, num_pieces=0)
    assert counts_line(counts) == ""
    held = replace(counts, completion_tokens=900, ttft_s=9.0, total_s=9.2)
    for strange in (replace(held, num_pieces=2), replace(held, num_pieces=900, total_s=9.00001)):
        assert counts_line(strange) == "first token after 9.00 s · 900 tokens"
    assert counts_line(replace(held, num_pieces=300)).endswith(" 4495 tokens/s")


def test_what_is_piped_in_is_one_message() -> None:
    words = ["chat", str(tiny_model("llama")), "--max-tokens", "8", "--thinking-budget", "2"]
    ran = CliRunner().invoke(app, words, input="Hello!\n")
    assert ran.exit_code == 0, ran.stderr
    assert ran.stdout.strip() != ""
    assert "computed" in ran.stderr
    refused = CliRunner().invoke(app, ["chat", "127.0.0.1:9"], input="Hello!\n")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert json.dumps(refused.stderr).startswith('"reprise: No server answers')


class HeldAnswers(ThreadingHTTPServer):
    """A server whose answers are two words, with a pause between them until one of `going_on` is taken."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HeldAnswerHandler)
        self.asked: queue.Queue[dict[str, Any]] = queue.Queue()
        self.going_on = threading.Semaphore(0)


class HeldAnswerHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(b'{"data": [{"id": "held"}]}' if self.path == "/v1/models" else b"{}")

    def do_POST(self) -> None:
        assert isinstance(self.server, HeldAnswers)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.reply(chunk_of(f"half{len(body['messages'])} "))
        self.server.asked.put(body)
        self.server.going_on.acquire()
        self.wfile.write(chunk_of("whole"))

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        pass


WITH_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is a signal to this process.
from reprise.cli.main import app
app()
"""


def chunk_of(text: str) -> bytes:
    return f'data: {{"id": "a", "choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'.encode()


def test_lines_typed_while_it_is_busy_are_sent_one_by_one(tmp_path: Path) -> None:
    """In a terminal: also lines typed while the program starts. Nothing is echoed into an answer, and Ctrl-C keeps the
    question and the half answer."""
    ours, theirs = pty.openpty()
    os.write(ours, b"one\rtwo\r")
    seen = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                seen.extend(part)
        except OSError:
            return

    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with HeldAnswers() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [sys.executable, "-c", WITH_TERMINAL, "chat", "--url", f"127.0.0.1:{server.server_port}"]
        process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        threading.Thread(target=read, daemon=True).start()

        def asked() -> tuple[object, list[str]]:
            body = server.asked.get(timeout=PATIENCE_S)
            return body.get("continue_final_message"), [message["content"] for message in body["messages"]]

        def await_seen(text: bytes) -> None:
            deadline_s = time.monotonic() + PATIENCE_S
            while text not in seen:
                assert time.monotonic() < deadline_s and process.poll() is None, bytes(seen)
                time.sleep(0.02)

        assert asked() == (None, ["one"])
        os.write(ours, b"/branch b\rthree\r")
        time.sleep(0.2)
        assert b"three" not in seen
        server.going_on.release()
        assert asked() == (None, ["one", "half1 whole", "two"])
        server.going_on.release()
        assert asked() == (None, ["one", "half1 whole", "two", "half3 whole", "three"])
        os.write(ours, b"/continue\r")
        # No other answer has this text: what is on the screen is kept.
        await_seen(b"half5")
        os.write(ours, b"\x03")
        assert asked() == (True, ["one", "half1 whole", "two", "half3 whole", "three", "half5 "])
        server.going_on.release(2)
        os.write(ours, b"\x04")
        assert process.wait(PATIENCE_S) == 0, bytes(seen)
        server.shutdown()
    assert b"on branch b, 4 messages" in seen
    os.close(ours)

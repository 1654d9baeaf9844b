"""Agents and client libraries, unmodified, with an image, against the real server and a tiny model that sees.

The words of the model are given; the server computes them and the images. What is looked at: each image is encoded
once, and from the second request with it on only what is new is computed.
"""

import http.server
import itertools
import json
import shutil
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.tiny.build import thinking_template
from bench.tiny.tokenizer import MARKUP
from reprise.chat.answer import Answer, ToolCall
from reprise.chat.images import shown
from reprise.cli.agents import AGENTS, ServerAddress
from reprise.core.job import Job
from tests.agents.packages import installed, python_with
from tests.agents.recording import ExchangeRecorder, recording, write
from tests.agents.test_open_webui import LEFT_OUT, open_webui
from tests.agents.test_open_webui import VERSION as OPEN_WEBUI
from tests.agents.test_real_agents import PACKAGES, run, run_claude
from tests.agents.test_real_clients import AI_SDK, CLIENTS, PYPI
from tests.pictures import png
from tests.vision.families import FAMILIES
from tests.vision.tiny import write_seeing_model
from tests.workloads.serving import Serving, serving, spoken

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
pytestmark = pytest.mark.agents

TASK = "What is on a.png?"
ANSWER = "It is red."
CONTEXT = 262_144
CLINE = {"cline": "3.0.65"}
BROWSER_USE = "0.13.14"
SLACK = 8
"""Tokens of a generation prompt, which is no part of the next request."""


def model_for_agents(directory: Path) -> Path:
    """A tiny Qwen3.5 that sees, thinks and calls tools, with room for what agents send."""
    family = FAMILIES["qwen3_5"]
    refusal = "{{- raise_exception('This model reads text only.') -}}"
    template = thinking_template()
    assert refusal in template

    def config(of: Any) -> dict[str, Any]:
        made = family.config(of)
        return {**made, "text_config": {**made["text_config"], "max_position_embeddings": CONTEXT}}

    made = replace(
        family,
        markup=tuple(dict.fromkeys((*family.markup, *MARKUP))),
        template=template.replace(refusal, "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"),
        config=config,
    )
    write_seeing_model(directory, made)
    return directory


class SeenRequests:
    """A server whose model says calls of a tool, one after the other, and then an answer."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.calls: list[Mapping[str, object]] = []
        self.tool = ""
        # What an agent has left behind may still hold its images.
        server.wait_until_idle()
        server.client.delete("/v1/cache").raise_for_status()
        server.engine.says = self.says
        self._before = {record["id"] for record in self._records()}
        url = str(server.client.base_url).rstrip("/")
        self.address = ServerAddress(url=url, api_key="none", model="tiny", context=CONTEXT, sees=True)

    def says(self, job: Job) -> str:
        text = shown(job.prompt.tokens, self.server.service.served.text.decode, images=job.prompt.images)
        number = text.count("<tool_response>\n")
        if number >= len(self.calls) or f'"{self.tool}"' not in text:
            return spoken(Answer(content=ANSWER, reasoning="That was all."))
        call = ToolCall(id="call", name=self.tool, arguments=json.dumps(self.calls[number]))
        return spoken(Answer(content=None, reasoning="I should look.", tool_calls=(call,)))

    def records(self) -> list[dict[str, Any]]:
        """Of the requests since this was made, oldest first."""
        self.server.wait_until_idle()
        return [record for record in self._records() if record["id"] not in self._before]

    def _records(self) -> list[dict[str, Any]]:
        return self.server.client.get("/v1/cache/requests", params={"limit": 200}).json()["data"][::-1]


@pytest.fixture(scope="module")
def recorder() -> Iterator[ExchangeRecorder | None]:
    with recording() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, recorder: ExchangeRecorder | None) -> Iterator[Serving]:
    model = model_for_agents(tmp_path_factory.mktemp("model") / "tiny")
    with serving(model, accepts_any_model=True, max_context=CONTEXT) as made:
        yield made


@pytest.fixture
def seen(server: Serving) -> SeenRequests:
    return SeenRequests(server)


@pytest.fixture(scope="module")
def programs() -> Path:
    return installed("agents", PACKAGES) / "node_modules"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(png(48, 32))
    (tmp_path / "a.txt").write_text("hello from the file\n")
    return tmp_path


def assert_goes_on(seen: SeenRequests, name: str) -> None:
    """Each image is encoded once at most and stays in its place, and each request computes what is new in it."""
    # A chat's title is a request of its own: for agents a short one, perhaps with the image.
    is_agent = seen.tool != ""
    everything = seen.records()
    records = [one for one in everything if one["prompt_tokens"] > 5000 or (one["images"] and not is_agent)]
    loop = [record for record in records if record["error"] is None]
    assert sum(record["images"] != [] for record in loop) >= 2, [(one["api"], one["images"]) for one in records]
    for before, after in itertools.pairwise(loop):
        known = [(image["digest"], image["start"], image["tokens"]) for image in before["images"]]
        kept = after["images"][: len(known)]
        assert [(image["digest"], image["start"], image["tokens"]) for image in kept] == known
        assert all(image["reused"] for image in kept)
        assert after["images_encoded"] == len(after["images"]) - len(known), everything
        if after["images"]:
            assert after["prefilled"] <= after["prompt_tokens"] - before["prompt_tokens"] + SLACK, (before, after)
    digests = {image["digest"] for record in everything for image in record["images"]}
    assert sum(record["images_encoded"] for record in everything) == len(digests), everything
    last = loop[-1]
    print(f"\n{name}: {last['prefilled']:,} of {last['prompt_tokens']:,} tokens computed")


def keep(recorder: ExchangeRecorder | None, name: str, version: str, seen: SeenRequests, folder: Path) -> None:
    calls = json.loads(json.dumps(seen.calls).replace(str(folder), "/project"))
    answers: list[dict[str, Any]] = [
        {"reasoning": "I should look.", "content": None, "calls": [{"name": seen.tool, "arguments": call}]}
        for call in calls
    ]
    answers.append({"reasoning": "That was all.", "content": ANSWER, "calls": []})
    write(recorder, name, source=f"{version}, recorded and trimmed: an image", answers=answers, tool=seen.tool)


def test_claude_code_reads_an_image(
    seen: SeenRequests,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    seen.tool = "Read"
    seen.calls = [{"file_path": str(folder / "a.png")}, {"file_path": str(folder / "a.txt")}]
    home = tmp_path_factory.mktemp("home")
    told = run_claude(programs, seen.address, folder, home, "--allowedTools", "Read", task=TASK)
    assert json.loads(told)["result"] == ANSWER
    assert_goes_on(seen, "Claude Code 2.1.332")
    keep(recorder, "claude_code_2_1_330", "Claude Code 2.1.330", seen, folder)


def test_codex_is_given_an_image(
    seen: SeenRequests,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    seen.tool = "exec_command"
    seen.calls = [{"cmd": "cat a.txt"}]
    home = tmp_path_factory.mktemp("home")
    (home / ".codex").mkdir()
    quiet = "check_for_update_on_startup = false\n[analytics]\nenabled = false\n"
    (home / ".codex" / "config.toml").write_text(AGENTS["codex"].edited(quiet, seen.address))
    codex = [str(programs / ".bin" / "codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    told = run([*codex, "-i", str(folder / "a.png"), "--", TASK], folder, home)
    assert ANSWER in told
    assert_goes_on(seen, "Codex 0.171.0")
    keep(recorder, "codex_0_169", "Codex 0.169.0", seen, folder)


def test_opencode_reads_an_image(
    seen: SeenRequests,
    programs: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recorder: ExchangeRecorder | None,
) -> None:
    seen.tool = "read"
    seen.calls = [{"filePath": str(folder / "a.txt")}]
    (folder / "opencode.json").write_text(json.dumps({"autoupdate": False, "share": "disabled"}))
    told = run(
        [
            str(next(programs.glob("opencode-linux-*/bin/opencode"), programs / ".bin" / "opencode")),
            *("run", TASK, "-f", str(folder / "a.png")),
        ],
        folder,
        tmp_path_factory.mktemp("home"),
        **AGENTS["opencode"].command(seen.address).variables,
    )
    assert ANSWER in told
    assert_goes_on(seen, "OpenCode 1.18.33")
    keep(recorder, "opencode_1_18_33", "OpenCode 1.18.33", seen, folder)


def test_cline_reads_images(
    seen: SeenRequests, folder: Path, tmp_path_factory: pytest.TempPathFactory, recorder: ExchangeRecorder | None
) -> None:
    """Its command line, which shares its core with the extension of VS Code; an image follows its tool result."""
    (folder / "b.png").write_bytes(png(64, 48, (20, 20, 200)))
    seen.tool = "read_files"
    seen.calls = [{"files": [{"path": str(folder / name)}]} for name in ("a.png", "b.png", "a.txt")]
    home = tmp_path_factory.mktemp("home")
    settings = home / "data" / "settings"
    settings.mkdir(parents=True)
    provider = {"provider": "openai-compatible", "apiKey": "none", "model": "tiny", "baseUrl": seen.address.openai_url}
    known = {"settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    (settings / "providers.json").write_text(
        json.dumps({"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": known}})
    )
    program = installed("cline", CLINE) / "node_modules" / ".bin" / "cline"
    told = run(
        [str(program), "--json", "--data-dir", str(home / "data"), TASK], folder, home, CLINE_NO_AUTO_UPDATE="1"
    )  # fmt: skip
    assert json.loads(told.splitlines()[-1])["text"] == ANSWER
    assert_goes_on(seen, "Cline 3.0.65")
    keep(recorder, "cline_3_0_65", "Cline 3.0.65", seen, folder)


def program_of_chromium() -> str:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return program


@contextmanager
def pages(folder: Path) -> Generator[str]:
    """The address at which a browser finds the files of this folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_browser_use_sends_screenshots(
    seen: SeenRequests, folder: Path, tmp_path: Path, recorder: ExchangeRecorder | None
) -> None:
    """Each request is its prompt and one message: history, state of the page, and the newest screenshot alone.

    So what stands behind the history is computed on each request, and a page that did not change is not encoded again.
    """
    program = program_of_chromium()
    for name, color in (("a", "#c81e1e"), ("b", "#1e1ec8")):
        (folder / f"{name}.html").write_text(f"<body style='background: {color}'><h1>Page {name}</h1></body>")
    python = python_with("browser-use", (f"browser-use=={BROWSER_USE}",))
    with pages(folder) as address:
        done = {"text": ANSWER, "success": True, "files_to_display": []}
        actions = [
            {"navigate": {"url": f"{address}/b.html", "new_tab": False}},
            {"wait": {"seconds": 1}},
            {"done": done},
        ]
        told = {"thinking": "Hm.", "evaluation_previous_goal": "Fine.", "memory": "None.", "next_goal": "Go on."}
        answers = [Answer(content=json.dumps({**told, "action": [action]}), reasoning="Hm.") for action in actions]
        left = iter(answers)
        seen.server.engine.says = lambda job: spoken(next(left, answers[-1]))
        said = run(
            [str(python), str(CLIENTS / "browser_use_image.py"), seen.address.url, f"{address}/a.html", program],
            folder,
            tmp_path,
            ANONYMIZED_TELEMETRY="false",
            BROWSER_USE_VERSION_CHECK="false",
        )
    assert said.strip().splitlines()[-1] == ANSWER
    records = seen.records()
    assert [len(record["images"]) for record in records] == [1, 1, 1]
    assert [record["images_encoded"] for record in records] == [1, 1, 0]
    for before, after in itertools.pairwise(records):
        image = after["images"][0]
        # Of a recurrent model the place where two texts part is known once it was passed.
        step = after["prompt_tokens"] - before["prompt_tokens"]
        assert after["matched"] <= image["start"] and after["matched"] - after["reused"] <= 2 * step + 64, after
    last = records[-1]
    print(f"\nbrowser-use {BROWSER_USE}: {last['prefilled']:,} of {last['prompt_tokens']:,} tokens computed")
    kept = [{"reasoning": answer.reasoning, "content": answer.content, "calls": []} for answer in answers]
    name = f"browser_use_{BROWSER_USE.replace('.', '_')}"
    write(recorder, name, source=f"browser-use {BROWSER_USE}, recorded: screenshots", answers=kept, num_chars=1100)


def test_an_image_is_uploaded_to_open_webui(
    seen: SeenRequests, folder: Path, tmp_path_factory: pytest.TempPathFactory, recorder: ExchangeRecorder | None
) -> None:
    """On its own page, with the title, tags and follow-ups that it asks for in between."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = program_of_chromium()
    python = python_with("open-webui", (f"open-webui=={OPEN_WEBUI}",), without=LEFT_OUT)
    user = {"name": "User", "email": "user@example.org", "password": "a password"}
    with (
        open_webui(python, tmp_path_factory.mktemp("data"), url=seen.address.url) as address,
        playwright.sync_playwright() as driver,
    ):
        with httpx.Client(base_url=f"{address}/api/v1", timeout=120) as api:
            token = api.post("/auths/signup", json=user).raise_for_status().json()["token"]
            # What is new in this version would be shown on top of the page, some time after the page is there.
            quiet = {"ui": {"showChangelog": False}}
            headers = {"Authorization": f"Bearer {token}"}
            api.post("/users/user/settings/update", json=quiet, headers=headers).raise_for_status()
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{address}/auth")
        page.evaluate("token => { localStorage.token = token; }", token)
        page.goto(address)
        with page.expect_response(lambda response: "/api/v1/files" in response.url):
            page.locator("input[type=file]").first.set_input_files(folder / "a.png")
        for number, question in enumerate((TASK, "Are you sure?"), 1):
            page.click("#chat-input")
            page.keyboard.type(question)
            page.keyboard.press("Enter")
            page.wait_for_function(
                "([words, num]) => document.body.innerText.split(words).length > num", arg=[ANSWER, number]
            )
            seen.server.wait_until_idle()
        browser.close()
    assert_goes_on(seen, f"Open WebUI {OPEN_WEBUI}")
    answers = [{"reasoning": "That was all.", "content": ANSWER, "calls": []}] * 2
    write(
        recorder,
        f"open_webui_{OPEN_WEBUI.replace('.', '_')}",
        source=f"Open WebUI {OPEN_WEBUI}, recorded and trimmed: an upload on its page",
        answers=answers,
        tool="get_current_timestamp",
    )


OLLAMA_JS = {"ollama": "0.6.4"}
NODE = {"ai-sdk": AI_SDK, "ollama-js": OLLAMA_JS}
LIBRARIES = [
    ("langchain", "langchain_image.py", ""),
    ("pydantic-ai", "pydantic_ai_image.py", "openai"),
    ("pydantic-ai", "pydantic_ai_image.py", "anthropic"),
    ("ollama", "ollama_image.py", ""),
    ("ollama-js", "ollama_image.mjs", ""),
    *(("ai-sdk", "ai_sdk_image.mjs", provider) for provider in ("openai", "chat", "compatible", "anthropic")),
]


@pytest.mark.parametrize("client", LIBRARIES, ids=lambda client: "-".join(client[::2]))
def test_a_library_goes_on_about_an_image(
    seen: SeenRequests, folder: Path, recorder: ExchangeRecorder | None, client: tuple[str, str, str]
) -> None:
    library, script, provider = client
    file = CLIENTS / script
    if library in NODE:
        project = installed(library, NODE[library])
        (project / script).write_text(file.read_text())
        command = ["node", str(project / script)]
    else:
        command = [str(python_with(library, PYPI[library])), str(file)]
    told = run([*command, seen.address.url, str(folder / "a.png"), *([provider] if provider else [])], folder, folder)
    assert told.strip() == ANSWER
    name = "_".join(filter(None, (library.replace("-", "_"), provider)))
    assert_goes_on(seen, name)
    answers = [{"reasoning": "That was all.", "content": ANSWER, "calls": []}] * 2
    write(recorder, name, source=f"{library}, recorded and trimmed: an image", answers=answers)

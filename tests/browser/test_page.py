"""The page in a real browser: each part has the numbers that /health and the records have, and no text is markup."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.api.service.served import served_model
from reprise.api.service.service import ChatService
from reprise.core.settings import Settings
from reprise.core.sizes import Bytes
from reprise.loop import EngineClient
from tests.agents.packages import installed
from tests.api.real_server import real_server, server_of_several
from tests.api.server_thread import ServerThread
from tests.cache.hash_model import fill_with_chats
from tests.loop.test_drafts import make_passes_free
from tests.models.tiny import tiny_model
from tests.soak.lengths import times

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

SYSTEM = "You answer briefly, and say what you do not know. " * 8
NASTY = [
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>",
    "</script></title><svg onload=alert(1)>&lt;b&gt;&amp;",
    "\u202egnp.exe\u2066\u200f مرحبا שלום \x00\x07\x1b[31mred\x7f",
    "javascript:alert(1) ${7*7} {{7*7}} '\"`",
]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """A server after a scripted session: turns, an edit, other tools, a refusal, texts full of markup."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("b", "a")]
    with real_server(drafts="off") as client:

        def ask(*contents: str, **more: Any) -> None:
            roles = ("system", "user", "assistant", "user")
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
            body = {"messages": messages, "max_tokens": 6, **more}
            client.post("/v1/chat/completions", json=body).raise_for_status()

        ask(SYSTEM, "What is a tide?")
        ask(SYSTEM, "What is a tide?", "A movement of the sea.", "And the moon?")
        ask("The time is 10:00:01. " + SYSTEM, "Hello")
        ask("The time is 10:00:02. " + SYSTEM, "Hello")
        ask(SYSTEM, "Hello", tools=tools)
        ask(SYSTEM, "Hello", tools=tools[::-1])
        for text in NASTY:
            ask(SYSTEM, text, prompt_cache_key=text[:60])
        for text in NASTY:
            called = {
                "id": "c1",
                "type": "function",
                "function": {"name": text[:60], "arguments": json.dumps({text: text})},
            }
            messages = [
                {"role": "user", "content": "Look it up.", "name": text[:60]},
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "c1", "content": text},
            ]
            made = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "user": text[:60]})
            assert made.status_code in (200, 400), made.text
        client.post("/v1/chat/completions", json={"messages": "no"})
        settle(client)
        yield client


def settle(client: httpx.Client) -> dict[str, Any]:
    while not (health := client.get("/health").json())["idle"]:
        pass
    return health


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def complaints_of(page: Any) -> list[str]:
    """What the page complains of from now on."""
    complaints: list[str] = []

    def note_message(message: Any) -> None:
        if message.type == "error":
            complaints.append(message.text)

    def note_error(error: Any) -> None:
        complaints.append(str(error))

    page.on("pageerror", note_error)
    page.on("console", note_message)
    return complaints


def urls_of(page: Any) -> list[str]:
    """What the page asks for from now on."""
    urls: list[str] = []

    def note(request: Any) -> None:
        urls.append(request.url)

    page.on("request", note)
    return urls


@pytest.fixture
def page(browser: Any, server: httpx.Client) -> Iterator[Any]:
    """The page, with everything that it complained of."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    opened = context.new_page()
    complaints = complaints_of(opened)
    urls = urls_of(opened)
    opened.goto(str(server.base_url))
    opened.wait_for_selector("#memory-process")
    opened.wait_for_selector(".edge")
    yield opened
    assert complaints == []
    assert all(url.startswith(str(server.base_url)) for url in urls)
    context.close()


def says(page: Any, place: str, text: Any) -> None:
    """Wait until this stands there. What Playwright evaluates as text, the page's policy refuses."""
    sync_api.expect(page.locator(place)).to_have_text(text)


def number(text: str) -> int:
    return int(re.sub(r"[^\d]", "", text))


def test_the_numbers_are_those_of_health_and_the_records(page: Any, server: httpx.Client) -> None:
    health = settle(server)
    records = server.get("/v1/cache/requests", params={"limit": 200}).json()["data"]
    told = server.get("/v1/cache/overview").json()
    savings = told["savings"]
    assert told["drafts"] is None and page.locator("#drafts").is_hidden()
    # What was prefilled for nobody's answer yet, as while one types, is prefilled ahead.
    assert savings["computed"] + savings["prefilled_ahead"] == health["prefilled"] + health["settled"]
    for name, value in (("reused", "reused"), ("computed", "computed"), ("ahead", "prefilled_ahead")):
        assert number(page.text_content(f"#{name}")) == savings[value]
    seconds = float(page.get_attribute("#saved", "data-seconds"))
    assert seconds == pytest.approx(health["saved_s"]) == pytest.approx(sum(r.get("saved_s", 0) for r in records))
    assert int(page.get_attribute("#memory-kept", "data-bytes")) == health["bytes_kv"]
    parts = page.eval_on_selector_all("[id^=memory-][data-bytes]", "all => all.map(e => [e.id, +e.dataset.bytes])")
    process = dict(parts).pop("memory-process")
    assert sum(nbytes for name, nbytes in parts if name != "memory-process") >= process
    assert f"{health['tokens_held']:,} tokens" in page.text_content("#tree-note")
    edges = server.get("/v1/cache/tree").json()["data"]
    sync_api.expect(page.locator(".edge[data-id]")).to_have_count(sum(edge["tokens"] > 0 for edge in edges))
    reasons = page.eval_on_selector_all(".breaker", "all => all.map(e => e.dataset.reason)")
    ranked = server.get("/v1/cache/overview").json()["breakers"]
    assert reasons == [each["reason"] for each in ranked] and {"clock changed", "tools changed"} <= set(reasons)
    changes = page.eval_on_selector_all("#changes tbody tr", "all => all.map(e => e.dataset.reason)")
    assert changes == [each["reason"] for each in server.get("/v1/cache/overview").json()["changes"]]
    assert int(page.get_attribute("#running-most", "data-bytes")) == health["bytes_live_most"] > 0


def test_a_request_shows_its_sources_its_spans_and_both_texts(page: Any, server: httpx.Client) -> None:
    records = server.get("/v1/cache/requests").json()["data"]
    record = next(r for r in records if r.get("reason") == "tools changed")
    page.click("#more-requests")
    row = page.locator(f".request[data-id='{record['id']}']")
    row.locator("button.row").click()
    said = row.locator(".row .stack").get_attribute("aria-label")
    assert f"{record['sources']['computed']:,} computed" in said
    shown = float(row.locator("[data-ttft]").get_attribute("data-ttft"))
    assert shown == pytest.approx(record["ttft_s"] + record["spans"]["render"])
    texts = row.locator(".sides pre").all_text_contents()
    assert record["explanation"]["expected_text"][:20] in texts[0]
    assert record["explanation"]["actual_text"][:20] in texts[1]
    assert record["explanation"]["advice"] in row.text_content()


def test_an_edge_shows_its_text_and_the_table_has_every_edge(page: Any, server: httpx.Client) -> None:
    edges = server.get("/v1/cache/tree").json()["data"]
    trunk = max(edges, key=lambda edge: edge["tokens"])
    page.locator(f"#edge-{trunk['id']}").focus()
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#edge .text")).to_contain_text(re.compile(".{20}"))
    text = server.get(f"/v1/cache/tree/{trunk['id']}").json()["text"]
    assert page.text_content("#edge .text")[:100] == text[:100]
    page.fill("#query", "movement of the sea")
    page.press("#query", "Enter")
    page.wait_for_selector(".edge.found")
    page.click("#as-table")
    assert page.locator("#tree-scroll tbody tr").count() == sum(edge["tokens"] > 0 for edge in edges)


def test_markup_in_texts_names_and_results_stays_text(page: Any, server: httpx.Client) -> None:
    long = "x" * 1_000_000
    refused = server.post("/v1/chat/completions", json={"messages": [{"role": NASTY[0], "content": long}]})
    assert refused.status_code == 400
    page.click("#more-requests")
    page.wait_for_selector(".request >> nth=11")
    for row in page.locator("button.row").all():
        row.click()
    page.click("#as-table")
    for edge in page.locator("#tree-scroll tbody button").all():
        edge.click()
    page.goto(f"{server.base_url}/#chat")
    page.fill("#draft", NASTY[0])
    page.press("#draft", "Enter")
    says(page, "#send", "Stop")
    page.press("#draft", "Escape")
    says(page, "#send", "Send")
    assert page.text_content(".message.user .said") == NASTY[0]
    assert "owned" not in page.title()
    assert page.locator("main script, main img, main iframe, main [onerror], main [onload]").count() == 0


def test_text_that_hides_is_shown(page: Any) -> None:
    page.goto(page.url.split("#")[0] + "#chat")
    page.fill("#draft", "a\u202eb\x07c")
    page.press("#draft", "Enter")
    page.wait_for_selector(".message.user .said")
    assert page.text_content(".message.user .said") == "a␣202eb␣0007c"
    page.press("#draft", "Escape")
    says(page, "#send", "Send")


def test_a_chat_is_prefilled_regenerated_edited_and_switched(page: Any, server: httpx.Client) -> None:
    page.goto(page.url.split("#")[0] + "#chat")
    with page.expect_response("**/v1/prefill"):
        page.fill("#draft", "Tell me about the harbour at night, please.")
    says(page, "#draft-note", re.compile("ready before you send"))
    page.press("#draft", "Enter")
    says(page, "#send", "Stop")
    page.wait_for_selector(".after strong")
    page.click("#send")
    page.wait_for_selector(".after .reuse")
    assert "stopped" in page.text_content(".after")
    settle(server)
    latest = server.get("/v1/cache/requests", params={"limit": 1}).json()["data"][0]
    assert latest["ended"] == "cancelled" and latest["reused"] > 0
    assert f"{latest['sources']['computed']:,} computed" in page.text_content(".after .reuse")
    page.get_by_role("button", name="Regenerate").click()
    says(page, "#send", "Stop")
    page.click("#send")
    page.wait_for_selector("text=2 of 2")
    page.get_by_role("button", name="Earlier branch").click()
    assert page.locator("text=1 of 2").count() == 1
    page.get_by_role("button", name="Edit").click()
    page.fill(".message textarea", "Tell me about the harbour at noon.")
    page.get_by_role("button", name="Send as a branch").click()
    says(page, "#send", "Stop")
    page.click("#send")
    says(page, "#send", "Send")
    assert page.text_content(".message.user .said") == "Tell me about the harbour at noon."
    assert page.locator(".message.user >> text=2 of 2").count() == 1


def test_a_new_request_appears_by_itself(page: Any, server: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Something new altogether."}], "max_tokens": 3}
    made = server.post("/v1/chat/completions", json=body).json()
    page.wait_for_selector(f".request[data-id='{made['id']}']")


@pytest.mark.parametrize("width", [360, 1024, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_at_any_size(browser: Any, server: httpx.Client, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(str(server.base_url))
    page.wait_for_selector(".edge")
    for view in ("cache", "chat", "connect"):
        page.goto(f"{server.base_url}/#{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["server", "several", "drafting"])
def test_axe_finds_nothing_that_bars_a_screen_reader(
    browser: Any, request: pytest.FixtureRequest, which: str, scheme: str
) -> None:
    """Roles, names, labels, order of headings and contrast, by the rules of axe-core."""
    server: httpx.Client = request.getfixturevalue(which)
    axe = installed("axe", {"axe-core": "4.14.1"}) / "node_modules" / "axe-core" / "axe.min.js"
    # The page's own policy would refuse the script.
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(str(server.base_url))
    page.wait_for_selector(".edge")
    page.wait_for_selector("#memory-process")
    if which == "drafting":
        page.wait_for_selector("#drafts-body td")
    page.evaluate(axe.read_text(encoding="utf-8"))
    for view in ("cache", "chat", "connect"):
        page.goto(f"{server.base_url}/#{view}")
        page.wait_for_selector(f"#view-{view}:not([hidden])")
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    context.close()


def test_a_line_of_a_megabyte_is_text_and_does_not_stop_the_page(browser: Any, server: httpx.Client) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.goto(f"{server.base_url}/#chat")
    page.fill("#draft", NASTY[0] + "x" * 1_000_000)
    page.press("#draft", "Enter")
    page.wait_for_selector(".message.user .said")
    said = page.text_content(".message.user .said")
    # As much of it as can be drawn.
    assert said.startswith(NASTY[0] + "xxx") and said.endswith("…") and len(said) > 100_000
    page.wait_for_selector(".message .error")
    assert "context" in page.text_content(".message .error")
    page.click("a[data-view=cache]")
    page.wait_for_selector(".edge")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    context.close()


def test_the_tree_is_walked_by_keyboard(page: Any) -> None:
    page.focus("#tree-scroll")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.classList.contains('edge')")
    assert page.locator("#tree-scroll [tabindex='0']").count() == 1
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.id")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#edge .text")).to_contain_text(re.compile("."))
    assert page.evaluate("document.activeElement.id") == second
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.id") != second
    page.keyboard.press("Tab")
    # Behind the tree stands what was chosen, and Escape leads back to it.
    assert page.evaluate("document.activeElement.closest('#edge') !== null")
    page.keyboard.press("Escape")
    assert page.locator("#edge *").count() == 0
    assert page.evaluate("document.activeElement.classList.contains('edge')")


def test_what_is_on_disk_alone_is_drawn_and_turns_into_memory_when_it_is_read(browser: Any, tmp_path: Path) -> None:
    on_disk: dict[str, Any] = {"disk_bytes": Bytes(1 << 28), "disk_directory": str(tmp_path), "settles": False}
    body = {"messages": [{"role": "user", "content": SYSTEM + "And the lighthouse?"}], "max_tokens": 2}
    with real_server(**on_disk) as server:
        server.post("/v1/chat/completions", json=body).raise_for_status()
    with real_server(**on_disk) as server:
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        page.goto(str(server.base_url))
        page.wait_for_selector(".edge.disk-only[data-id]")
        (run,) = server.get("/v1/cache/tree").json()["data"]
        assert f"{run['tokens']:,} tokens on disk alone" in page.text_content("#tree-note")
        page.locator(f"[id='edge-{run['id']}']").focus()
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#edge .text")).to_contain_text("And the lighthouse?")
        assert "In memoryno" in page.text_content("#edge dl")
        server.post("/v1/chat/completions", json=body).raise_for_status()
        sync_api.expect(page.locator(".edge.on-disk[data-id]:not(.disk-only)")).not_to_have_count(0)
        assert page.locator(f"[id='edge-{run['id']}']").count() == 0
        context.close()


def test_a_thousand_chats_are_drawn_as_far_as_they_can_be(browser: Any) -> None:
    chosen = Settings(model=str(tiny_model("llama")), settles=False)
    loop = EngineClient(chosen)
    loaded = loop.start()
    filled = threading.Event()

    def fill(worker: Any) -> None:
        # Entries that no request ever reads: what is looked at is the tree.
        fill_with_chats(worker.cache, num_chats=1000, num_turns=times(5))
        filled.set()

    loop.call(fill)
    server = ServerThread(ChatService(served=served_model(loaded, chosen), backend=loop, settings=chosen), chosen)
    try:
        assert filled.wait(300)
        told = httpx.get(f"{server.url}/v1/cache/tree?limit=1000", timeout=30)
        assert told.json()["totals"]["edges"] >= 10_000 * times(1) and len(told.json()["data"]) == 1000
        assert len(told.content) < 600_000
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        sizes: list[int] = []

        def note_size(response: Any) -> None:
            sizes.append(int(response.headers.get("content-length", "0")))

        page.on("response", note_size)
        page.goto(server.url)
        page.wait_for_selector(".edge[data-id]", timeout=30_000)
        assert 100 < page.locator(".edge[data-id]").count() <= 300 and max(sizes) < 300_000
        assert "used last are drawn" in page.text_content("#tree-note")
        page.fill("#query", "no such text")
        page.press("#query", "Enter")
        says(page, "#tree-note", re.compile("0 parts have.*used last were searched"))
        page.click("#as-table")
        assert page.locator("#tree-scroll tbody tr").count() <= 300
        context.close()
    finally:
        server.stop()
        loop.close(now=True, timeout_s=120)


@pytest.fixture(scope="module")
def several(browser: Any) -> Iterator[httpx.Client]:
    """A server of three models: one is loaded, one was, and one never."""
    with server_of_several("llama", "qwen3_5", "gemma3_text") as client:
        for model, end in (("llama", "What is a tide?"), ("qwen3_5", "Name it."), ("qwen3_5", "Say it again.")):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": end}]
            body = {"model": model, "messages": messages, "max_tokens": 4}
            client.post("/v1/chat/completions", json=body).raise_for_status()
        settle(client)
        client.post("/v1/models/qwen3_5/unload").raise_for_status()
        yield client


def cell(page: Any, model: str, name: str) -> Any:
    return page.locator(f"tr[data-model='{model}'] td[data-is='{name}']")


def test_several_models_are_shown_loaded_and_unloaded(browser: Any, several: httpx.Client) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    complaints = complaints_of(page)
    page.goto(str(several.base_url))
    page.wait_for_selector(".edge")
    told = {each["id"]: each for each in several.get("/health").json()["models"]}
    assert [each["state"] for each in told.values()] == ["ready", "unloaded", "unloaded"]
    for name, model in told.items():
        says(page, f"tr[data-model='{name}'] .weights", model["state"])
        assert int(cell(page, name, "weights").get_attribute("data-value")) == model["bytes_weights"]
        kept = model["bytes_kv"] + model["bytes_snapshots"]
        assert int(cell(page, name, "kept").get_attribute("data-value")) == kept
    weights = sum(each["bytes_weights"] for each in told.values())
    assert int(page.get_attribute("#memory-weights", "data-bytes")) == weights > 0
    kept = sum(each["bytes_kv"] for each in told.values())
    assert int(page.get_attribute("#memory-kept", "data-bytes")) == kept
    # The tree of one whose weights are unloaded.
    page.select_option("#model-choice", "qwen3_5")
    tokens = several.get("/v1/cache/tree", params={"model": "qwen3_5"}).json()["totals"]["tokens"]
    says(page, "#tree-note", re.compile(f"^{tokens} tokens in "))
    page.locator(".edge[data-id]").first.focus()
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#edge .text")).to_contain_text("You answer briefly")
    assert page.locator(".request .api", has_text="qwen3_5").count() == 2
    # One that was never loaded has none yet.
    page.click("[id='show-gemma3_text']")
    says(page, "#tree-note", "this model was not loaded yet")
    page.click("[id='load-gemma3_text']")
    says(page, "tr[data-model='gemma3_text'] .weights", "ready")
    says(page, "#tree-note", "nothing is stored yet")
    page.click("[id='unload-gemma3_text']")
    says(page, "tr[data-model='gemma3_text'] .weights", "unloaded")
    # The chat is with the one that is chosen, and has it loaded.
    page.goto(f"{several.base_url}/#chat")
    page.fill("#draft", "Hello there")
    page.press("#draft", "Enter")
    says(page, ".message.assistant .who", re.compile("gemma3_text"))
    page.wait_for_selector(".after strong")
    page.press("#draft", "Escape")
    settle(several)
    assert several.get("/v1/cache/requests").json()["data"][0]["model"] == "gemma3_text"
    several.post("/v1/models/gemma3_text/unload").raise_for_status()
    assert complaints == []
    context.close()


@pytest.mark.parametrize("width", [360, 1400])
def test_several_models_have_room_at_any_size(browser: Any, several: httpx.Client, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(str(several.base_url))
    page.wait_for_selector("#models-body tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for button in page.locator("#models-body .act button").all():
        box = button.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, "without scrolling"
    context.close()


def test_a_key_is_asked_for_and_never_stands_in_an_address(browser: Any) -> None:
    with real_server(api_keys=("the-key",)) as server:
        context = browser.new_context()
        page = context.new_page()
        urls = urls_of(page)
        page.goto(str(server.base_url))
        page.wait_for_selector("#ask-key[open]")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        says(page, "#key-error", "The server does not know this key.")
        page.fill("#key", "the-key")
        page.press("#key", "Enter")
        page.wait_for_selector("#memory-process")
        assert not any("the-key" in url for url in urls)
        assert page.evaluate("localStorage.length") == 0
        context.close()


def test_a_saving_that_is_not_known_yet_is_not_called_none(browser: Any) -> None:
    with real_server() as client:
        body = {"prompt": "Hello", "max_tokens": 2}
        for known in ("nothing was reused yet", "not known yet: too little was computed at once"):
            client.post("/v1/completions", json=body).raise_for_status()
            savings = client.get("/v1/cache/overview").json()["savings"]
            page = browser.new_page()
            page.goto(str(client.base_url))
            says(page, "#saved-sub", known)
            page.close()
        assert savings["reused"] > 0 == savings["saved_s"]


def ask_again(server: httpx.Client) -> None:
    """The second answer is drafted from the first."""
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": "Once more."}], "max_tokens": 40, "temperature": 0}
        server.post("/v1/chat/completions", json=body).raise_for_status()
    settle(server)


@pytest.fixture(scope="module")
def drafting() -> Iterator[httpx.Client]:
    """A server after an answer that was drafted."""
    with real_server(prepare=make_passes_free, drafts="always") as server:
        ask_again(server)
        yield server


def test_drafts_are_shown_by_source(browser: Any) -> None:
    with real_server(prepare=make_passes_free, drafts="always", settles=False) as server:
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        page.goto(str(server.base_url))
        says(page, "#drafts-body", re.compile("Nothing was drafted yet"))
        ask_again(server)
        told = server.get("/v1/cache/overview").json()["drafts"]
        assert told["accepted"] > 20
        counts = [*told["sources"].items(), *([("all", told)] if len(told["sources"]) > 1 else [])]
        for source, each in counts:
            cells = page.locator(f"#drafts tr[data-source={source}] td")
            share = f"{round(100 * each['accepted'] / each['drafted'])} %"
            sync_api.expect(cells).to_have_text([f"{each['drafted']:,}", f"{each['accepted']:,}", share])
        assert page.locator("#drafts tbody tr").count() == len(counts)
        assert f"{told['accepted']} tokens took no pass of their own" in page.text_content("#drafts-note")
        seconds = float(page.get_attribute("#drafts-note", "data-seconds"))
        assert seconds == pytest.approx(told["saved_s"])
        assert ("saved" if seconds >= 0 else "cost") in page.text_content("#drafts-note")
        page.locator("#request-list button.row").first.click()
        assert re.search(r"\d+ of \d+ tokens accepted", page.text_content(".detail"))
        context.close()


# The page's clock goes on by a second with each token that the page hears of: it then shows one token per second,
# however long a token took.
CLOCK_OF_TOKENS = """
    const parse = JSON.parse;
    let generated = 0;
    JSON.parse = (text) => {
        const body = parse(text), counters = body?.counters ?? body;
        if (counters?.longest_gap_s !== undefined) {
            generated = counters.generated;
            document.documentElement.dataset.generated = generated;
        }
        return body;
    };
    performance.now = () => 1000 * generated;
"""


def test_load_is_what_health_and_the_records_say(browser: Any) -> None:
    with real_server(max_batch=2, settles=False) as server:
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        page.add_init_script(CLOCK_OF_TOKENS)
        page.goto(str(server.base_url))
        page.wait_for_selector("#memory-process")

        is_seen = threading.Event()

        def ask(number: int) -> None:
            messages = [{"role": "user", "content": f"Story {number}."}]
            body = {"messages": messages, "max_tokens": 100_000, "min_tokens": 100_000, "stream": True}
            with httpx.stream("POST", f"{server.base_url}/v1/chat/completions", json=body, timeout=300) as answer:
                answer.raise_for_status()
                next(line for line in answer.iter_lines() if is_seen.is_set())

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for each in asking:
            each.start()
        # Two have room, two wait: for as long as the page is looked at.
        for place, number in (("#decoding", "2"), ("#queued", "2"), ("#prefilling", "0")):
            says(page, place, number)
        health = server.get("/health").json()
        assert (health["decoding"], health["queued"], health["prefilling"]) == (2, 2, 0)
        says(page, "#decoding + span", re.compile("in groups of (2|1, 1)"))
        says(page, "#decode-speed", "1.0")
        shown = {page.text_content("#decode-speed") for _ in range(20)}
        assert shown <= {"1.0", "0.0"}, "a token per second, or none since the page last heard of any"
        is_seen.set()
        for each in asking:
            each.join()
        health = settle(server)
        records = server.get("/v1/cache/requests").json()["data"]
        assert health["generated"] == sum(record["generated"] for record in records)
        for place in ("#decoding", "#queued", "#prefilling"):
            says(page, place, "0")
        says(page, "#decode-speed", "0.0")
        assert page.get_attribute("html", "data-generated") == str(health["generated"])
        load = server.get("/v1/cache/overview").json()["load"]
        longest = max(records, key=lambda record: record["generated"])
        assert load["longest_gap_s"] > 0.5 / longest["decode_tokens_per_s"]
        told = page.text_content("#load-note").removeprefix("longest gap between two tokens ")
        amount, unit = told.split()
        assert float(amount) * (0.001 if unit == "ms" else 1) == pytest.approx(load["longest_gap_s"], rel=0.02)
        context.close()

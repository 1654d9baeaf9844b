"""A server of `[models]`: aliases with defaults of their own, on shared weights and caches; adapters by name."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx_lm
import pytest

from bench.tiny.build import build_model
from tests.api.test_health import until
from tests.models.adapters import write_adapter
from tests.models.tiny import CONFIGS, MARKUP, tiny_model
from tests.sdks import openai

# Server processes.
pytestmark = pytest.mark.matrix

CHAT = [{"role": "user", "content": "Write a few words about the sea, the wind and the harbour, please."}]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aliases") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[httpx.Client]:
    folder = log.parent
    # Entries as wide as a group of quantisation.
    build_model(folder / "base", {**CONFIGS["llama"], "head_dim": 32}, markup=MARKUP, vocab_size=512)
    for seed, (name, kind) in enumerate((("legal", "lora"), ("brief", "dora"))):
        write_adapter(folder / "adapters" / name, mlx_lm.load(str(folder / "base"))[0], kind=kind, seed=seed)
    shutil.copytree(tiny_model("qwen3_5"), folder / "helper")
    (folder / "said.jinja").write_text("{% for m in messages %}{{ prefix }}{{ m.content }}{% endfor %}")
    (folder / "reprise.toml").write_text("""
max-tokens = 6
temp = 0
settle = false

[models.main]
model = "base"
adapter = { legal = "adapters/legal", brief = "adapters/brief" }

[models.long]
model = "base"
max-tokens = 9

[models.warm]
model = "base"
temp = 2.0

[models.said]
model = "base"
chat-template = "said.jinja"
chat-template-args = { prefix = "Well: " }
max-context = 64

[models.small]
model = "base"
kv-bits = 8
kv-group-size = 32

[models.helper]
model = "helper"
preload = true

[models.gone]
model = "./nowhere"

[models.absent]
model = "someone/absent"
""")
    command = [sys.executable, "-m", "reprise.cli.main", "serve", "--config", str(folder / "reprise.toml"), "--port=0"]
    with log.open("w") as err, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.fullmatch(r"Serving (.*) at (http\S+) .*\n", process.stdout.readline())
            assert said is not None, log.read_text()
            assert said[1] == "main, main:legal, main:brief, long, warm, said, small, helper, gone, absent"
            with httpx.Client(base_url=said[2], timeout=120) as client:
                yield client
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()


def listed(server: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in server.get("/v1/models").json()["data"]}


TOKENS: Any = {"logprobs": True, "ignore_eos": True}
"""Random weights end an answer where they like, and write what is no text."""


def tokens_of(choice: Any) -> str:
    return " ".join(each["token"] for each in choice["logprobs"]["content"])


def ask(server: httpx.Client, model: str, **options: Any) -> tuple[str, int, int]:
    """The answer's tokens, and how many tokens of the prompt there were, and were not computed."""
    reply = server.post("/v1/chat/completions", json={"model": model, "messages": CHAT, **TOKENS, **options})
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    answer = tokens_of(reply.json()["choices"][0])
    return answer, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_aliases_of_the_same_weights_share_them_and_their_cache(server: httpx.Client) -> None:
    answer, num_prompt, cached = ask(server, "main")
    assert cached == 0 and num_prompt > 20
    longer, _, cached = ask(server, "long")
    assert cached >= num_prompt - 1, "what one has computed is there for the other"
    assert longer.startswith(answer) and longer != answer, "its own bound"
    # Another KV format has a cache of its own.
    _, _, cached = ask(server, "small")
    assert cached == 0
    assert ask(server, "small")[2] >= num_prompt - 1
    states = {name: each["state"] for name, each in listed(server).items()}
    assert [states[name] for name in ("main", "long", "said", "small")] == ["ready"] * 4
    nbytes = {name: each["bytes"] for name, each in listed(server).items()}
    assert nbytes["main"] == nbytes["small"] == nbytes["long"]
    # Its weights are those of all.
    server.post("/v1/models/long/unload")
    assert listed(server)["main"]["state"] == "unloaded"
    assert ask(server, "main")[:2] == (answer, num_prompt)


def test_defaults_are_the_models_and_the_request_wins(server: httpx.Client) -> None:
    answer, num_prompt, _ = ask(server, "main")
    assert {ask(server, "warm")[0] for _ in range(4)} != {answer}
    assert ask(server, "warm", temperature=0)[0] == answer
    _, num_said, _ = ask(server, "said")
    assert num_said < num_prompt, "its template writes no markup"
    assert ask(server, "said", chat_template_kwargs={"prefix": ""})[1] < num_said
    rendered = server.post("/tokenize", json={"model": "said", "messages": CHAT}).json()
    assert rendered["count"] == num_said
    refused = server.post("/v1/chat/completions", json={"model": "said", "messages": CHAT * 9})
    assert refused.status_code == 400 and "maximum context length is 64 tokens" in refused.text
    assert server.get("/v1/models/said").json()["max_model_len"] == 64
    assert server.post("/v1/chat/completions", json={"model": "main", "messages": CHAT * 9}).status_code == 200


def test_an_adapter_is_named_in_the_request_and_has_its_own_cache(server: httpx.Client) -> None:
    answer, num_prompt, _ = ask(server, "main")
    legal, _, cached = ask(server, "main", adapters="legal")
    assert legal != answer and cached == 0
    # Back and forth, by each of its names.
    brief, _, cached = ask(server, "main", adapters="brief")
    assert brief not in (answer, legal) and cached == 0
    assert ask(server, "main")[0] == answer
    again, _, cached = ask(server, "main:legal")
    assert again == legal and cached >= num_prompt - 1
    assert ask(server, "main", adapters="brief")[0] == brief
    facts = listed(server)["main:legal"]
    assert (facts["base"], facts["state"]) == ("main", "ready")
    for model, adapter in (("main", "poetic"), ("helper", "legal")):
        refused = server.post("/v1/chat/completions", json={"model": model, "adapters": adapter, "messages": CHAT})
        assert refused.status_code == 404
        assert f"The adapter '{adapter}' is not served here" in refused.json()["error"]["message"]
        assert ("'legal' or 'brief'" in refused.text) == (model == "main")


def test_what_is_not_there_is_said_in_the_list_and_to_who_asks(server: httpx.Client, log: Path) -> None:
    until(lambda: "error" in listed(server)["absent"])
    models = listed(server)
    assert "no such directory" in models["gone"]["error"] and models["gone"]["state"] == "unloaded"
    assert "`reprise pull someone/absent`" in models["absent"]["error"]
    assert "gone cannot be loaded" in log.read_text()
    for name, words in (("gone", "no such directory"), ("absent", "does not download models for requests")):
        refused = server.post("/v1/chat/completions", json={"model": name, "messages": CHAT})
        assert refused.status_code == 500 and words in refused.json()["error"]["message"]
    assert ask(server, "main")[0]


def test_kinds_and_size_are_known_before_a_model_is_loaded(server: httpx.Client) -> None:
    until(lambda: listed(server)["helper"].get("state") == "ready")
    server.post("/v1/models/helper/unload")
    facts = listed(server)["helper"]
    assert facts["state"] == "unloaded" and facts["bytes"] > 0
    assert "full attention" in facts["layers"] and "recurrent" in facts["layers"]


def test_what_aliases_share_is_counted_once(server: httpx.Client) -> None:
    for name in ("main", "long", "small", "helper"):
        ask(server, name)

    def num_prompt(**params: str) -> int:
        return int(server.get("/health", params=params).json()["prompt_tokens"])

    apart = ("main", "small", "helper", "main:legal", "main:brief")
    # An answer is counted after its last byte, and chats settle meanwhile.
    until(lambda: num_prompt(model="main") == num_prompt(model="long") > 0)
    until(lambda: num_prompt() == sum(num_prompt(model=name) for name in apart))
    engines = {each["id"]: each["engine"] for each in server.get("/health").json()["models"]}
    assert {name for name, engine in engines.items() if engine == "main"} == {"main", "long", "warm", "said"}
    metrics = server.get("/metrics").text
    counted = set(re.findall(r'^reprise_prompt_tokens_total\{model="([^"]+)"', metrics, re.MULTILINE))
    assert {"main", "small", "helper"} <= counted and not counted & {"long", "warm", "said"}


def test_files_that_change_while_a_model_is_unloaded(server: httpx.Client, log: Path) -> None:
    """What is reloaded under one name is not served with what was known of it before."""
    before = ask(server, "helper")[0]
    server.post("/v1/models/helper/unload")
    file = str(log.parent / "helper" / "model.safetensors")
    weights = dict(mx.load(file))
    mx.save_safetensors(file, {name: 3 * array for name, array in weights.items()}, metadata={"format": "mlx"})
    after, _, cached = ask(server, "helper")
    assert cached == 0 and after != before
    assert "its files have changed" in log.read_text()


@pytest.mark.matrix
def test_the_sdk_asks_by_alias(server: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    assert {"main", "main:legal", "long", "helper"} <= {model.id for model in client.models.list()}
    messages: Any = CHAT
    answers = {
        (model, adapter): client.chat.completions.create(
            model=model,
            messages=messages,
            logprobs=True,
            extra_body={"ignore_eos": True, **({} if adapter is None else {"adapters": adapter})},
        )
        for model, adapter in (("main", None), ("long", None), ("main", "legal"), ("main:legal", None))
    }
    assert [answer.model for answer in answers.values()] == ["main", "long", "main:legal", "main:legal"]
    said = {key: tokens_of(answer.model_dump()["choices"][0]) for key, answer in answers.items()}
    assert said["main", "legal"] == said["main:legal", None] != said["main", None]
    assert said["long", None].startswith(said["main", None])
    stream = client.chat.completions.create(
        model="long", messages=messages, stream=True, logprobs=True, extra_body={"ignore_eos": True}
    )
    chunks = [chunk.model_dump()["choices"][0] for chunk in stream]
    assert " ".join(tokens_of(chunk) for chunk in chunks if chunk["logprobs"]) == said["long", None]

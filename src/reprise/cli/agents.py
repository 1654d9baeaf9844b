"""What each agent needs to use a Reprise server: for one process, and in its own settings.

An agent is a row of `AGENTS`: what it is started with, and how its settings file reads with the same in it. Everything
here is pure; `launch.py` starts processes and writes files.
"""

import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

_CONTEXT = 32768
"""Used if the server does not know its context."""
_PATIENCE_MS = 3_600_000
"""How long an agent waits for output: a long prefill on a small machine takes minutes."""
_ANSWER = 8192
"""The longest answer to leave room for, for agents that need to know."""
_KEY_VARIABLE = "REPRISE_API_KEY"
"""The variable from which agents read the key whose settings name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The server that agents are to use. `url` is without `/v1`; `context` in tokens. `sees`: its model has images."""

    url: str
    api_key: str
    model: str
    context: int = _CONTEXT
    sees: bool = False

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        """The longest answer, in tokens, that fits beside a prompt."""
        return min(_ANSWER, self.context // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """How to start an agent: its program, arguments, and variables for this process only."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    unset: tuple[str, ...] = ()
    """Variables of the user that would point it elsewhere."""

    def lines(self) -> list[str]:
        """The same as shell commands."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return [*(f"unset {name}" for name in self.unset), *exports, shlex.join(self.words)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent that can be launched, how to install it, and its settings file, if that can name a server."""

    title: str
    install: str
    command: Callable[[ServerAddress], AgentCommand]
    settings_path: str | None = None
    """Relative to the home directory. None: it gets the server from its environment alone."""
    edited: Callable[[str, ServerAddress], str] | None = None
    """The content of the settings file with the server in it, from its content now ("" if it does not exist).

    Raises ValueError for content that it cannot read."""
    needs_settings: bool = False
    """Whether it knows only servers that its settings file names."""
    has_jsonc: bool = False
    """Whether it also reads the settings file with the suffix `.jsonc`, which has comments."""
    settings_variable: str | None = None
    """An environment variable that overrides the directory of the settings file."""

    def __post_init__(self) -> None:
        assert (self.settings_path is None) == (self.edited is None), self.title
        assert self.edited is not None or not self.needs_settings, self.title

    def settings_file(self, environment: Mapping[str, str], home: Path) -> Path:
        """Where its settings file is, which it has."""
        assert self.settings_path is not None, self.title
        directory = environment.get(self.settings_variable, "") if self.settings_variable is not None else ""
        return Path(directory) / Path(self.settings_path).name if directory else home / self.settings_path


def _claude_variables(server: ServerAddress) -> dict[str, str]:
    roles = ("HAIKU", "SONNET", "OPUS")
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{role}_MODEL": server.model for role in roles},
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        # Otherwise the prompt would begin with a line that changes with every request.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # It then says which of its requests are titles and the like.
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer),
        "API_TIMEOUT_MS": str(_PATIENCE_MS),
    }


def _claude_settings(text: str, server: ServerAddress) -> str:
    return _json_with(text, {("env", name): value for name, value in _claude_variables(server).items()})


def _codex_provider(server: ServerAddress) -> dict[str, Any]:
    return {
        "name": "Reprise",
        "base_url": server.openai_url,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _PATIENCE_MS,
    }


def _codex_command(server: ServerAddress) -> AgentCommand:
    # Every user of the machine can read the arguments of a process: the key is in its environment.
    provider = {**_codex_provider(server), "env_key": _KEY_VARIABLE}
    values: dict[str, Any] = {
        "model": server.model,
        "model_provider": "reprise",
        "model_context_window": server.context,
        **{f"model_providers.reprise.{name}": value for name, value in provider.items()},
    }
    # JSON strings and numbers are valid TOML.
    words = [word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return AgentCommand(words=("codex", *words), variables={_KEY_VARIABLE: server.api_key})


def _codex_settings(text: str, server: ServerAddress) -> str:
    import tomlkit  # noqa: PLC0415 (only this agent needs it)

    try:
        wanted = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from error
    ours = {"model": server.model, "model_provider": "reprise", "model_context_window": server.context}
    # In the file itself: Codex does not start without the variable that `env_key` names.
    headers = {"Authorization": f"Bearer {server.api_key}"}
    provider = {**_codex_provider(server), "http_headers": headers}
    wanted |= {**ours, "model_providers": {**_object(wanted.get("model_providers")), "reprise": provider}}
    for is_appended in (False, True):
        try:
            # Keeps comments and order.
            body: Any = tomlkit.parse(text)
            for name, value in ours.items():
                body[name] = value
            if is_appended:
                # Behind providers that are written as dotted keys.
                table = tomlkit.dumps({"model_providers": {"reprise": provider}})
                edited = f"{tomlkit.dumps(body).rstrip()}\n\n{table}"
            else:
                providers = body.setdefault("model_providers", tomlkit.table(is_super_table=True))
                providers["reprise"] = provider
                edited = tomlkit.dumps(body)
            if tomllib.loads(edited) == wanted:
                return edited
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    raise ValueError("its tables are written in a form that cannot be edited")


def _opencode_body(server: ServerAddress) -> dict[str, Any]:
    model: dict[str, Any] = {"name": server.model, "limit": {"context": server.context, "output": server.answer}}
    if server.sees:
        # Otherwise it leaves images out.
        model |= {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Reprise",
        # `false` means no timeout.
        "options": {"baseURL": server.openai_url, "apiKey": server.api_key, "timeout": False},
        "models": {server.model: model},
    }
    name = f"reprise/{server.model}"
    return {"provider": {"reprise": provider}, "model": name, "small_model": name}


def _opencode_command(server: ServerAddress) -> AgentCommand:
    return AgentCommand(words=("opencode",), variables={"OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_body(server))})


def _opencode_settings(text: str, server: ServerAddress) -> str:
    ours = _opencode_body(server)
    providers = ours.pop("provider")
    members = {("provider", "reprise"): providers["reprise"], **{(name,): value for name, value in ours.items()}}
    try:
        body = _json_object(text)
    except ValueError:
        for path, value in members.items():
            text = _with_member(text, path, value)
        return text
    return _json_with(_json_text({"$schema": "https://opencode.ai/config.json", **body}), members)


def _qwen_command(server: ServerAddress) -> AgentCommand:
    variables = {
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.api_key,
        "OPENAI_MODEL": server.model,
    }
    return AgentCommand(words=("qwen", "--auth-type", "openai"), variables=variables)


def _qwen_settings(text: str, server: ServerAddress) -> str:
    members = {
        ("security", "auth", "selectedType"): "openai",
        ("security", "auth", "apiKey"): server.api_key,
        ("security", "auth", "baseUrl"): server.openai_url,
        ("model", "name"): server.model,
        ("model", "generationConfig", "timeout"): _PATIENCE_MS,
        ("model", "generationConfig", "contextWindowSize"): server.context,
    }
    return _json_with(text, members)


def _aider_options(server: ServerAddress) -> dict[str, str]:
    return {
        "model": f"openai/{server.model}",
        "weak-model": f"openai/{server.model}",
        "openai-api-base": server.openai_url,
        "openai-api-key": server.api_key,
        "timeout": str(_PATIENCE_MS // 1000),
        "show-model-warnings": "false",
    }


def _aider_command(server: ServerAddress) -> AgentCommand:
    variables = {f"AIDER_{name.upper().replace('-', '_')}": value for name, value in _aider_options(server).items()}
    return AgentCommand(words=("aider",), variables=variables)


def _aider_settings(text: str, server: ServerAddress) -> str:
    options = _aider_options(server)
    return _edited_yaml(text, {name: False if value == "false" else value for name, value in options.items()})


def _edited_yaml(text: str, values: Mapping[str, Any]) -> str:
    """A YAML mapping with these values, in which comments and order stay."""
    from ruamel.yaml import YAML  # noqa: PLC0415 (only these agents need it)
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString  # noqa: PLC0415

    def quoted(value: Any) -> Any:
        match value:
            case str():
                return DoubleQuotedScalarString(value)
            case dict():
                return {name: quoted(inner) for name, inner in cast(dict[str, Any], value).items()}
            case list():
                return [quoted(inner) for inner in cast(list[Any], value)]
            case _:
                return value

    yaml: Any = YAML()
    yaml.preserve_quotes = True
    yaml.width = sys.maxsize
    try:
        body: Any = yaml.load(text)
        if body is None:
            # Nothing or only comments, which belong to no node.
            kept = text if text == "" or text.endswith("\n") else f"{text}\n"
            body = {}
        else:
            kept = ""
        if not isinstance(body, dict):
            raise ValueError("it is not a YAML mapping")
        wanted = cast(dict[str, Any], body)
        for name, value in values.items():
            wanted[name] = quoted(value)
        out = io.StringIO()
        yaml.dump(body, out)
        edited = kept + out.getvalue()
    except YAMLError as error:
        raise ValueError(f"it is not one plain YAML document: {' '.join(str(error).split())[:200]}") from error
    if _yaml_object(edited) != wanted:
        raise ValueError("it is written in a form that cannot be edited")
    return edited


def _yaml_object(text: str) -> dict[str, Any]:
    """A YAML mapping as plain data. Raises ValueError."""
    from ruamel.yaml import YAML  # noqa: PLC0415 (only these agents need it)
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    try:
        body: Any = cast(Any, YAML(typ="safe", pure=True)).load(text) or {}
    except YAMLError as error:
        raise ValueError(f"it is not one plain YAML document: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(body, dict):
        raise ValueError("it is not a YAML mapping")
    return cast(dict[str, Any], body)


def _continue_settings(text: str, server: ServerAddress) -> str:
    before = _yaml_object(text)
    models: Any = before.get("models") or []
    if not isinstance(models, list) or not all(isinstance(each, dict) for each in cast(list[Any], models)):
        raise ValueError("part of it has an unexpected form")
    others = [each for each in cast(list[dict[str, Any]], models) if each.get("name") != "Reprise"]
    ours = {
        "name": "Reprise",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.openai_url,
        "apiKey": server.api_key,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": server.context, "maxTokens": server.answer},
        "requestOptions": {"timeout": _PATIENCE_MS},
    }
    head = {name: before.get(name, value) for name, value in _CONTINUE_HEAD.items()}
    # It starts with the first one.
    return _edited_yaml(text, {**head, "models": [ours, *others]})


_CONTINUE_HEAD = {"name": "Local", "version": "1.0.0", "schema": "v1"}
"""What a configuration of Continue must say of itself."""


def _copilot_variables(server: ServerAddress) -> dict[str, str]:
    return {
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_BASE_URL": server.openai_url,
        "COPILOT_PROVIDER_API_KEY": server.api_key,
        "COPILOT_MODEL": server.model,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(server.context - server.answer),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(server.answer),
        # Else it asks GitHub's servers who you are.
        "COPILOT_OFFLINE": "true",
    }


def _vibe_variables(server: ServerAddress) -> dict[str, str]:
    provider = {
        "name": "reprise",
        "api_base": server.openai_url,
        "api_key_env_var": _KEY_VARIABLE,
        "backend": "generic",
    }
    return {
        "VIBE_ACTIVE_MODEL": server.model,
        "VIBE_PROVIDERS": json.dumps([provider]),
        "VIBE_MODELS": json.dumps([{"name": server.model, "provider": "reprise", "alias": server.model}]),
        "VIBE_API_TIMEOUT": str(_PATIENCE_MS // 1000),
        _KEY_VARIABLE: server.api_key,
    }


def _openhands_command(server: ServerAddress) -> AgentCommand:
    variables = {
        "LLM_MODEL": f"openai/{server.model}",
        "LLM_BASE_URL": server.openai_url,
        "LLM_API_KEY": server.api_key,
        "LLM_TIMEOUT": str(_PATIENCE_MS // 1000),
    }
    return AgentCommand(words=("openhands", "--override-with-envs"), variables=variables)


def _pi_settings(text: str, server: ServerAddress) -> str:
    model = {"id": server.model, "contextWindow": server.context, "maxTokens": server.answer}
    provider = {
        "baseUrl": server.openai_url,
        "api": "openai-completions",
        "apiKey": server.api_key,
        "models": [model],
    }
    return _json_with(text, {("providers", "reprise"): provider})


def _crush_settings(text: str, server: ServerAddress) -> str:
    model = {
        "id": server.model,
        "name": server.model,
        "context_window": server.context,
        "default_max_tokens": server.answer,
    }
    provider = {
        "name": "Reprise",
        "type": "openai-compat",
        "base_url": server.openai_url,
        "api_key": server.api_key,
        "models": [model],
    }
    chosen = {"provider": "reprise", "model": server.model}
    return _json_with(
        text, {("providers", "reprise"): provider, ("models", "large"): chosen, ("models", "small"): chosen}
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        body: Any = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"it is not plain JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    return cast(dict[str, Any], body)


def _json_with(text: str, members: Mapping[tuple[str, ...], Any]) -> str:
    """A JSON object with these values at their paths; the objects on the way are made where there are none."""
    body = _json_object(text)
    for (*path, name), value in members.items():
        holder = body
        for key in path:
            inner = _object(holder.get(key))
            holder[key] = inner
            holder = inner
        holder[name] = value
    return _json_text(body)


def _plain_json(text: str) -> str:
    """JSON with comments and trailing commas, with blanks in their places: each character stays where it was."""
    plain: list[str] = []
    comma_at: int | None = None
    for found in _JSONC_PARTS.finditer(text):
        part = found.group()
        if part.startswith(("//", "/*")):
            part = re.sub(r"[^\n]", " ", part)
        elif part in "}]" and comma_at is not None:
            plain[comma_at] = " "
        if part.strip() != "":
            comma_at = len(plain) if part == "," else None
        plain.append(part)
    return "".join(plain)


_JSONC_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|.', re.DOTALL)


def _with_member(text: str, path: tuple[str, ...], value: object) -> str:
    """JSON with comments, with one member set where it stands, or at the beginning of its object."""
    plain, at, decoder = _plain_json(text), 0, json.JSONDecoder()
    wanted = _json_object(plain)
    found: tuple[int, int, Any] | None = None
    for depth, key in enumerate(path):
        at = plain.index("{", at) + 1
        begin, found = at, None
        while (quote := _next(plain, at)) is not None and plain[quote] == '"':
            name, at = decoder.raw_decode(plain, quote)
            start = cast(int, _next(plain, plain.index(":", at) + 1))
            inner, at = decoder.raw_decode(plain, start)
            if name == key:
                found = (start, at, inner)
            after = cast(int, _next(plain, at))
            at = after + 1 if plain[after] == "," else after
        if found is None:
            rest: object = value
            for later in reversed(path[depth + 1 :]):
                rest = {later: rest}
            comma = "" if plain[cast(int, _next(plain, begin))] == "}" else ","
            edited = f"{text[:begin]}\n  {json.dumps(key)}: {json.dumps(rest)}{comma}{text[begin:]}"
            break
        at = found[0]
        if depth < len(path) - 1:
            _object(found[2])
            if not isinstance(found[2], dict):
                raise ValueError("part of it has an unexpected form")
    else:
        assert found is not None
        edited = f"{text[: found[0]]}{json.dumps(value)}{text[found[1] :]}"
    holder = wanted
    for key in path[:-1]:
        holder = holder.setdefault(key, {})
    holder[path[-1]] = value
    if _json_object(_plain_json(edited)) != wanted:
        raise ValueError("it is written in a form that cannot be edited")
    return edited


def _next(text: str, at: int) -> int | None:
    """Where the next character that is no white space stands."""
    found = re.compile(r"\S").search(text, at)
    return None if found is None else found.start()


def _object(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError("part of it has an unexpected form")
    return dict(cast(dict[str, Any], value or {}))


def _json_text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        title="Claude Code",
        install="npm install -g @anthropic-ai/claude-code",
        command=lambda server: AgentCommand(
            words=("claude",), variables=_claude_variables(server), unset=("ANTHROPIC_API_KEY",)
        ),
        settings_path=".claude/settings.json",
        edited=_claude_settings,
        settings_variable="CLAUDE_CONFIG_DIR",
    ),
    "codex": Agent(
        title="Codex",
        install="npm install -g @openai/codex",
        command=_codex_command,
        settings_path=".codex/config.toml",
        edited=_codex_settings,
        settings_variable="CODEX_HOME",
    ),
    "opencode": Agent(
        title="OpenCode",
        install="npm install -g opencode-ai",
        command=_opencode_command,
        settings_path=".config/opencode/opencode.json",
        edited=_opencode_settings,
        has_jsonc=True,
    ),
    "qwen": Agent(
        title="Qwen Code",
        install="npm install -g @qwen-code/qwen-code",
        command=_qwen_command,
        settings_path=".qwen/settings.json",
        edited=_qwen_settings,
    ),
    "aider": Agent(
        title="aider",
        install="uv tool install aider-chat",
        command=_aider_command,
        settings_path=".aider.conf.yml",
        edited=_aider_settings,
    ),
    "copilot": Agent(
        title="GitHub Copilot CLI",
        install="npm install -g @github/copilot",
        command=lambda server: AgentCommand(words=("copilot",), variables=_copilot_variables(server)),
    ),
    "vibe": Agent(
        title="Mistral Vibe",
        install="uv tool install mistral-vibe",
        command=lambda server: AgentCommand(words=("vibe",), variables=_vibe_variables(server)),
    ),
    "openhands": Agent(
        title="OpenHands",
        install="uv tool install openhands",
        command=_openhands_command,
    ),
    "pi": Agent(
        title="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        command=lambda server: AgentCommand(words=("pi", "--provider", "reprise", "--model", server.model)),
        settings_path=".pi/agent/models.json",
        edited=_pi_settings,
        needs_settings=True,
        settings_variable="PI_CODING_AGENT_DIR",
    ),
    "crush": Agent(
        title="Crush",
        install="npm install -g @charmland/crush",
        command=lambda server: AgentCommand(words=("crush",)),
        settings_path=".config/crush/crush.json",
        edited=_crush_settings,
        needs_settings=True,
        settings_variable="CRUSH_GLOBAL_CONFIG",
    ),
    "continue": Agent(
        title="Continue",
        install="npm install -g @continuedev/cli",
        command=lambda server: AgentCommand(words=("cn",)),
        settings_path=".continue/config.yaml",
        edited=_continue_settings,
        needs_settings=True,
        settings_variable="CONTINUE_GLOBAL_DIR",
    ),
}

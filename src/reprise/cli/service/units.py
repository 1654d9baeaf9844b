"""The files that tell launchd and systemd how to run the server, as text. Pure."""

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.api.http.activation import LAUNCHD_SOCKET
from reprise.api.http.ending import RESTARTABLE
from reprise.cli.refuse import USAGE

NAME = "mlx-reprise"
"""Of the service, under both managers."""
_SOCKET = "server"
_SPARE_S = 10
"""What a server may take beyond its own time to end, before it is killed."""
_AGAIN_AFTER_S = 5
_DESCRIPTORS = 4096
"""What mlx-lm raises the limit of open files to; launchd's own is 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server to be run: its command, from which folder, with which variables, and where its log is.

    `listens_at`: the address and port that the manager listens on, to start the server with the first connection;
    None: the server starts when the user logs in.
    """

    words: Sequence[str]
    folder: Path
    log: Path
    variables: Mapping[str, str]
    grace_s: float
    listens_at: tuple[str, int] | None

    def __post_init__(self) -> None:
        assert self.words and self.folder.is_absolute() and self.log.is_absolute(), self
        assert self.listens_at is None or self.listens_at[1] > 0, self

    @property
    def stop_within_s(self) -> int:
        return int(self.grace_s) + _SPARE_S


def systemd_units(service: Service) -> dict[str, str]:
    """The units by file name (`systemd.service(5)`, `systemd.socket(5)`)."""
    has_socket = service.listens_at is not None
    lines = [
        "[Unit]",
        "Description=Reprise, a chat server for MLX language models",
        *([f"Requires={NAME}.socket", f"After={NAME}.socket"] if has_socket else ["After=network.target"]),
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word, is_command=True) for word in service.words)}",
        f"WorkingDirectory={_escaped(str(service.folder))}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(service.variables.items())),
        # What is written before the server opens its log: an option that it refuses.
        f"StandardError=append:{_escaped(str(service.log))}",
        "StandardOutput=null",
        "# A server that cannot continue ends with this status. One that was refused is not started again.",
        "Restart=on-failure",
        f"RestartForceExitStatus={RESTARTABLE}",
        f"RestartPreventExitStatus={USAGE}",
        f"RestartSec={_AGAIN_AFTER_S}",
        f"TimeoutStopSec={service.stop_within_s}",
        "KillMode=mixed",
        "LimitNOFILE=65536",
    ]
    if not has_socket:
        lines += ["", "[Install]", "WantedBy=default.target"]
    units = {f"{NAME}.service": "\n".join((*lines, ""))}
    if service.listens_at is not None:
        host, port = service.listens_at
        socket = [
            "[Unit]",
            "Description=The port of Reprise: the first connection starts the server",
            "",
            "[Socket]",
            f"ListenStream={f'[{host}]' if ':' in host else host}:{port}",
            "",
            "[Install]",
            "WantedBy=sockets.target",
            "",
        ]
        units[f"{NAME}.socket"] = "\n".join(socket)
    return units


def launchd_plist(service: Service) -> bytes:
    """The property list (`launchd.plist(5)`)."""
    content: dict[str, object] = {
        "Label": NAME,
        "ProgramArguments": [*service.words],
        "WorkingDirectory": str(service.folder),
        "EnvironmentVariables": {**service.variables},
        "StandardErrorPath": str(service.log),
        "StandardOutPath": "/dev/null",
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": service.stop_within_s,
        # Others are slowed down for whoever is in front.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": _DESCRIPTORS},
        "HardResourceLimits": {"NumberOfFiles": _DESCRIPTORS},
    }
    if service.listens_at is None:
        content["RunAtLoad"] = True
    else:
        host, port = service.listens_at
        content["Sockets"] = {_SOCKET: {"SockNodeName": host, "SockServiceName": str(port), "SockType": "stream"}}
        content["EnvironmentVariables"] = {**service.variables, LAUNCHD_SOCKET: _SOCKET}
        # One that ended by itself is started again by the next connection.
        del content["KeepAlive"]
    return plistlib.dumps(content, sort_keys=False)


def _quoted(word: str, *, is_command: bool = False) -> str:
    """A word of a command line or an assignment (`systemd.syntax(7)`: quotes, escapes, `%` and in commands `$`)."""
    text = _escaped(word).replace('"', '\\"')
    if is_command:
        text = text.replace("$", "$$")
    return text if text and all(each.isalnum() or each in "/._-:=,+@%" for each in text) else f'"{text}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "%%").replace("\n", "\\n")

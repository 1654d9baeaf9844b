"""The socket that a service manager has opened for this process, and on which somebody may be waiting.

systemd passes it as a file descriptor and names the process in the environment (`sd_listen_fds(3)`); launchd hands it
out by its name in the property list (`launch_activate_socket(3)`), which ours has in the environment too.
"""

import ctypes
import os
import socket
from collections.abc import Callable, MutableMapping

from reprise.api.http.listening import CannotListen

LAUNCHD_SOCKET = "LAUNCHD_SOCKET"
"""The variable with the name of launchd's socket."""
_FIRST_DESCRIPTOR = 3


def inherited_listener(
    environment: MutableMapping[str, str], *, activate: Callable[[str], int] | None = None
) -> socket.socket | None:
    """The socket that this process was started for; None: it was started without one. Raises CannotListen.

    The variables that name it are removed: a child of this process has no such socket. `activate` is launchd's call.
    """
    name = environment.pop(LAUNCHD_SOCKET, None)
    is_ours = environment.pop("LISTEN_PID", None) == str(os.getpid())
    num = environment.pop("LISTEN_FDS", None)
    environment.pop("LISTEN_FDNAMES", None)
    if name is not None:
        descriptor = (_launchd_descriptor if activate is None else activate)(name)
    elif is_ours and num is not None:
        if num != "1":
            raise CannotListen(
                f"systemd passed {num} sockets, but a server has one. Leave one ListenStream= in the unit."
            )
        descriptor = _FIRST_DESCRIPTOR
    else:
        return None
    listener = None
    try:
        listener = socket.socket(fileno=descriptor)
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
            raise OSError("it does not listen")
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("it has no internet address")
    except OSError as error:
        if listener is not None:
            listener.close()
        raise CannotListen(f"The socket from the service manager cannot be used: {error}.") from error
    os.set_inheritable(descriptor, False)
    return listener


def _launchd_descriptor(name: str) -> int:
    """See `launch_activate_socket(3)`: it fills an array that the caller frees."""
    libc = ctypes.CDLL(None)
    found, num = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    try:
        status: int = libc.launch_activate_socket(name.encode(), ctypes.byref(found), ctypes.byref(num))
    except AttributeError as error:
        raise CannotListen(f"{LAUNCHD_SOCKET} is set, but this system has no launchd.") from error
    if status != 0 or num.value == 0:
        raise CannotListen(f"launchd has no socket {name!r} for this process: {os.strerror(status)}.")
    descriptors = found[: num.value]
    libc.free(found)
    for other in descriptors[1:]:
        os.close(other)
    return descriptors[0]

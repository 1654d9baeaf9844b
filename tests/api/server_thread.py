"""A server on a thread of its own, on a free port of this machine."""

import asyncio
import threading

from reprise.api.app import create_app
from reprise.api.http.listening import listen, url_of
from reprise.api.run import Server
from reprise.api.service.service import ChatService
from reprise.core.settings import Settings


class ServerThread:
    """Serves until it is stopped."""

    def __init__(self, service: ChatService, settings: Settings) -> None:
        self._listener = listen("127.0.0.1", 0)
        self.url = url_of(self._listener)
        app = create_app(service, settings)
        self._server = Server(app, settings, service, answers_s=settings.grace_s)
        self._thread = threading.Thread(target=self._run, name="reprise-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        """Finish the responses under way and return."""
        if self._thread.is_alive():
            self._server.finish()
        self._thread.join()

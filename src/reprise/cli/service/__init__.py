"""`reprise service`: the server as a service of the user, under launchd or systemd."""

"""HTTP: sockets and connections, who may ask, bodies and errors in general, server-sent events. Knows no model."""

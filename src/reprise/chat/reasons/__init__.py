"""Why a prompt was not reused, and what in it changes from request to request."""

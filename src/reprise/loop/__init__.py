"""The one engine thread: sole owner of model, tree and leases."""

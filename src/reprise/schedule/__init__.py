"""Pure scheduling: who runs next, and which chunk."""

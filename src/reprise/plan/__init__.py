"""Pure planning: from match, boundaries and layer kinds to resume position and checkpoints."""

"""Pure planning: match, boundaries and layer kinds to a resume position and checkpoints."""

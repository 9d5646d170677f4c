"""Programs on files: they need no device and no compiled graph."""

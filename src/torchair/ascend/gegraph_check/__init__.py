"""Checks of task files: what a device would run on which stream, as a Chrome trace."""

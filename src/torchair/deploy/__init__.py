"""Compiled models beyond the process that traced them: exported, stored, loaded, called."""

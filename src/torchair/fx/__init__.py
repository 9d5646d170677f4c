"""Work on the FX graph: the common passes, their checks and user patterns."""

"""Which nodes of a graph run as one kernel."""

"""The graph engine: passes over GE graphs, memory plan, steps and sessions."""

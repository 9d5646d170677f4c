"""Is a compiled graph right? Runs it beside eager, node by node, and blames who made an error."""

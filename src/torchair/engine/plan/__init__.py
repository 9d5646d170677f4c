"""Where values live and which steps run: from a graph and sizes to records."""

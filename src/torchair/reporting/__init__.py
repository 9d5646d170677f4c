"""One page for a browser about all that became of a model: `torchair report`."""

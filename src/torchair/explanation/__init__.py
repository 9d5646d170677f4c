"""What became of a model, and where its time goes: graphs, kernels, limits."""

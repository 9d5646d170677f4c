"""The CPU target: generators of kernels, compiling them, the driver that walks records."""

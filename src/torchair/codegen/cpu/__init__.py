"""The CPU machine: generators of kernels, compiling them, the driver that walks records."""

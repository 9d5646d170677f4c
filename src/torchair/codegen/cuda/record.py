"""The record of an item of a persistent kernel, as it lies in shared memory: words of 64 bits."""

KIND, BLOCKS, RAISES, WAITS, FIRST_WAIT = range(5)
"""Which part of the kernel runs; how many blocks it has; the address of the counter to be raised,
or 0; how many counters are awaited; from there on address and value of each. Words of the part
follow behind as many as any item waits for."""

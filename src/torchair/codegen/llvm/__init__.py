"""LLVM IR as text, its compilation in memory, and the generators that write it."""

"""LLVM text that any target can use: writer, values, operators, reductions, maths."""

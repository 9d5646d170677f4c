"""LLVM text that any machine can use: writer, values, operators, reductions, maths."""

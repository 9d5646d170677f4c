"""The CUDA target: kernels as LLVM text for NVPTX, made into machine code by the driver."""

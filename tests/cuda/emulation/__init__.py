"""CUDA kernels on the CPU."""

"""Emulates CUDA kernels on the CPU."""

"""Every CUDA kernel and layer patch; nothing here is used on Metal or a CPU."""

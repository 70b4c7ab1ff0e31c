"""Every CUDA kernel and layer patch, with its proof; imports nothing else of specdec.

Of its kernels, Metal runs only that of :mod:`.gated_delta`, which :mod:`.to_metal`
translates, and a CPU none.
"""

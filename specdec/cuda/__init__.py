"""Every CUDA kernel and layer patch, with its proof.

It imports nothing of specdec but utils. Of its kernels, Metal runs only that of
:mod:`.gated_delta`, which :mod:`.to_metal` translates, and a CPU none.
"""

"""Every CUDA kernel and layer patch, with its proof; imports nothing else of specdec.

Nothing here is used on Metal or a CPU.
"""

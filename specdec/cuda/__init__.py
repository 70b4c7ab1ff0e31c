"""Every CUDA kernel and layer patch, with its proof; imports nothing else of specdec.

Nothing here is used on a CPU, and on Metal only the text of :mod:`.gated_delta`, which
:mod:`.to_metal` translates.
"""

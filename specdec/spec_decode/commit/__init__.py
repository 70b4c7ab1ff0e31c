"""What follows from a round: what is committed then, and what the host is to read.

By operations, or by one CUDA kernel in their place.
"""

from ...backend import defaults
from ...cuda import commit_kernel
from . import operations
from .committed import Committed
from .operations import Settled, Settler

__all__ = ["Committed", "Settled", "Settler", "settler"]


def settler() -> Settler:
    """What settles rounds here: the kernel where it is meant to, and proven."""
    return (
        commit_kernel if defaults().kernels and commit_kernel.proven() else operations
    )

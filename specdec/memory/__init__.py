"""Computes the memory of a run before it begins (docs/memory.md).

Nothing here imports mlx; :mod:`specdec.memory.planning` reads models.
"""

from .formulas import (
    logits_bytes,
    quantized_elem_bytes,
    recommend_quantization,
    weight_bytes,
)
from .plan import CacheGeometry, MemoryPlan, ModelGeometry, Moment, largest_fitting
from .rows import RowNeeds

__all__ = [
    "CacheGeometry",
    "MemoryPlan",
    "ModelGeometry",
    "Moment",
    "RowNeeds",
    "largest_fitting",
    "logits_bytes",
    "quantized_elem_bytes",
    "recommend_quantization",
    "weight_bytes",
]

"""Memory known beforehand: formulas, and what a run will hold (docs/memory.md).

Nothing here imports mlx; :mod:`specdec.memory.model_geometry` reads models.
"""

from ..cache.capacity import cache_slots, grown_capacity, ring_slots, round_up
from ..utils.sizes import format_size, parse_size
from .formulas import (
    kv_cache_bytes,
    logits_bytes,
    quantized_elem_bytes,
    recommend_quantization,
    weight_bytes,
)
from .geometry import CacheGeometry, ModelGeometry
from .plan import MemoryPlan, Moment, RowNeeds, largest_fitting
from .sampling_memory import Choosing

__all__ = [
    "CacheGeometry",
    "Choosing",
    "MemoryPlan",
    "ModelGeometry",
    "Moment",
    "RowNeeds",
    "cache_slots",
    "format_size",
    "grown_capacity",
    "kv_cache_bytes",
    "largest_fitting",
    "logits_bytes",
    "parse_size",
    "quantized_elem_bytes",
    "recommend_quantization",
    "ring_slots",
    "round_up",
    "weight_bytes",
]

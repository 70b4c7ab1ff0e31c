"""Which model a draft was made for, known again however its weights are stored."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's shape and of its norms.

    Norms are never packed, and training a model changes them; rounded to bfloat16
    they are the same in a GGUF file, a folder made of it, and a quantized copy.
    """
    found = hashlib.sha256()
    leaves: Any = tree_flatten(model.parameters())
    norms = sorted((name, a) for name, a in leaves if "norm" in name and a.ndim == 1)
    for name, array in norms:
        short = name.removeprefix("language_model.")
        found.update(f"{short} {array.size}".encode())
        rounded = array.astype(mx.bfloat16).astype(mx.float32)
        found.update(np.array(rounded).tobytes())
    return found.hexdigest()

"""The assistant of Muse Glimmer: DFlash whose arrays have other names.

It reads rows of the target's embedding without the norm that the target applies to
them, and slots of a block see each other.
"""

from __future__ import annotations

from .block import BlockConfig, block_values
from .config import Published


def muse_config(published: Published) -> BlockConfig:
    """The configuration of a Muse assistant."""
    values = block_values(published, published.sizes())
    if published.value("is_causal", "causal") is None:
        values["causal"] = (False,) * len(values["windows"])
    return BlockConfig(**values | {"raw_embedding": True})

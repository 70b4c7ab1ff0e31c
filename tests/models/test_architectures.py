"""Every architecture of the installed mlx-lm: exact, or refused for a known reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.cache import BatchRecurrentCache, check_caches, make_batch_caches
from specdec.config import EngineConfig
from specdec.errors import UnsupportedModelError
from specdec.models.runner import cache_options

from ..plain import AT_ONCE, METAL
from .architectures import (
    INDEXED,
    NOT_RUN,
    PROMPTS,
    REFUSED,
    build,
    differences,
    line,
    names,
    other_names,
    plain,
)

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
WRITE = "scripts/models_table.py writes docs/models.md"
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16}


def test_lists_hold_nothing_else() -> None:
    """An architecture that mlx-lm has dropped would stay in the lists, and the page."""
    assert {*NOT_RUN, *REFUSED} <= set(names())
    lines = [text for text in PAGE.splitlines() if text.startswith("| ")]
    assert [text.split(" | ")[0][2:] for text in lines[1:]] == names(), WRITE
    assert other_names() in PAGE.replace("\n", " "), WRITE


@pytest.mark.parametrize("arch", [n for n in names() if n not in NOT_RUN])
def test_every_architecture_is_exact_or_refused(arch: str) -> None:
    """Other tokens than mlx-lm's; or one that is new, and nobody has looked at."""
    model = build(arch)
    if arch in REFUSED:
        with pytest.raises(UnsupportedModelError):
            differences(arch, model)
    else:
        assert differences(arch, model) == []
    assert line(arch, model) in PAGE, WRITE


@pytest.mark.parametrize(
    "arch", ["deepseek_v32", "gemma3n", "gpt_oss", "longcat_flash", "minimax_m3_vl"]
)
def test_masks_of_all_heads(arch: str) -> None:
    """Metal's masks: an indexer's are combined with them, in rows that are long."""
    assert differences(arch, build(arch), backend=METAL) == []


# Latent attention, twice a layer too; keys that layers share; attention sinks. All but
# llama's are unpacked for attention.
PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "longcat_flash": LATENT,
    "mistral4": LATENT,
    "deepseek_v32": {**LATENT, "index_head_dim": 32},
    "gemma4_text": {"global_head_dim": 64},
    "gpt_oss": {},
}


@pytest.mark.parametrize(
    ("arch", "backend"),
    [*((arch, AT_ONCE) for arch in PACKED), ("gpt_oss", METAL), ("deepseek_v3", METAL)],
)
def test_packed_keys_and_values(arch: str, backend: BackendDefaults) -> None:
    """What is stored is rounded and nothing else: mlx-lm's tokens with rounded keys.

    Keys that stay dense, are packed twice, or come from another row or after a trim.
    """
    model = build(arch, head_dim=32, **PACKED[arch])
    options = cache_options(EngineConfig(kv_bits=4, kv_group_size=32), backend)
    for cache in make_batch_caches(model, 1, options):
        members = getattr(cache, "caches", [cache])[: 1 if arch in INDEXED else None]
        assert all(c.packing or isinstance(c, BatchRecurrentCache) for c in members)
    assert differences(arch, model, kv_bits=4, backend=backend) == []
    dense = [plain(model, p) for p in PROMPTS]
    assert dense != [plain(model, p, kv_bits=4) for p in PROMPTS]


@pytest.mark.parametrize("arch", sorted(NOT_RUN))
def test_what_mlx_lm_does_not_run(arch: str) -> None:
    """The page would leave it out, or say something else; so would the error."""
    assert line(arch, None) in PAGE, WRITE
    if "Metal" in NOT_RUN[arch] and not mx.metal.is_available():
        with pytest.raises(UnsupportedModelError, match="runs on Metal only"):
            check_caches(build(arch), "model")

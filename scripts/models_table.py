#!/usr/bin/env python3
"""Write docs/models.md: every architecture of the installed mlx-lm.

Usage: scripts/models_table.py

tests/models/test_architectures.py runs each of them, and fails if the page differs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.models.architectures import (  # noqa: E402
    NOT_RUN,
    build,
    line,
    names,
    other_names,
)

INTRO = """\
# Models

<!-- Written by scripts/models_table.py: change that, not this page. -->

specdec runs the architectures of [mlx-lm](https://github.com/ml-explore/mlx-lm). For
each, a test decodes small random models in float32, in batches, with drafts that are
wrong a third of the time, and compares every token with mlx-lm's plain decoding: "yes"
means that there is no difference. "Text only" means the same of a model that also takes
pictures or sound: mlx-lm loads the part that reads and writes text. [Images](images.md)
need the extra `vision`. What is refused is refused by name before any work;
`mlx_lm.generate` runs it.

- **Caches**: what a layer keeps. Full attention keeps all tokens, a sliding window and
  chunks the newest ones. What a compressed layer pools is kept for all tokens, and
  pooled again in each step. A recurrent layer keeps states of one size. Where draft
  tokens are rejected, each row's states go back to what it kept
  (see [Caches](caches.md#recurrent-layers)).
- **Drafts**: "any other" are another model, the target quantized (`self:`), and
  n-grams. `layers:` needs layers that hand on hidden states and nothing else. "heads"
  are [draft heads](drafters.md), which read hidden states of the model: `specdec
  distill --kind block` makes one. `mtp` is the [MTP head](drafters.md) that models of
  this architecture are published with. "distilled" are drafts of layers, for dense
  models.

The recurrence of a prompt is computed by one kernel a layer on CUDA for
bailing_moe_v3, kimi_k3, kimi_linear, olmo_hybrid, qwen3_5, qwen3_5_moe and
qwen3_next, and in chunks on a CPU for the last three ([Devices](devices.md)). mlx-lm's
code loops over the tokens of bailing_moe_linear, jamba, mamba, recurrent_gemma and
rwkv7, and on a CPU of the first four; such prompts are slow. Times: Qwen3.5, and that
kernel of the first four alone, in [prefill-h100](../benchmarks/results/prefill-h100.md)
and [prefill-h200](../benchmarks/results/prefill-h200.md); the others were not timed.

| architecture | runs | caches | drafts |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    found = [line(n, None if n in NOT_RUN else build(n)) for n in names()]
    return (
        INTRO
        + "\n".join([*found, "", *wrap(other_names(), 88, break_on_hyphens=False)])
        + "\n"
    )


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(page(), "utf-8")

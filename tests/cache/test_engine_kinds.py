"""The engine over every kind of layer, far past the window: plain greedy tokens."""

from __future__ import annotations

from collections.abc import Callable

import mlx.nn as nn
import pytest

from specdec.backend import BackendDefaults
from specdec.config import SamplingParams
from tests.plain import AT_ONCE, BEHIND, greedy, run_rows

from .small_models import MODELS, WINDOW

TinyModel = Callable[..., nn.Module]

PROMPTS = [[(5 * i + 3 * j + i * j) % 97 for j in range(n)]
           for i, n in enumerate([3, 30, 2, 17, 8, 9, 22, 5])]  # fmt: skip
NEW_TOKENS = 4 * WINDOW


@pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["at-once", "behind"])
@pytest.mark.parametrize("name", ["sliding", "gemma3", "gpt-oss", "mistral", "list"])
def test_greedy_equals_plain_decoding(
    name: str, backend: BackendDefaults, tiny_model: TinyModel
) -> None:
    arch, arguments = MODELS[name]
    target = tiny_model(arch, **arguments)
    # The target's own weights, a little off: some guesses are right.
    draft = tiny_model(arch, seed=1, **arguments)
    draft.update(target.parameters())
    layer = draft.layers[-1]
    layer.update({"mlp": tiny_model(arch, seed=1, **arguments).layers[-1]["mlp"]}
                 if "mlp" in layer else {})  # fmt: skip
    wanted = [greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=NEW_TOKENS)] * len(PROMPTS)
    for rows, k in ((1, 4), (3, 7), (8, 1), (8, 4)):
        got = run_rows(
            target,
            draft,
            PROMPTS[:rows],
            params[:rows],
            batch_size=rows,
            num_draft_tokens=k,
            backend=backend,
            prefill_step_size=6,
        )
        assert [row.tokens for row in got] == wanted[:rows]
        assert sum(row.accepted for row in got) > 0

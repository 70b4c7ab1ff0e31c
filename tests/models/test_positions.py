"""How many positions a model has: by its configuration, and by its table of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.models import LoadedModel, context_length
from specdec.models.row_positions import with_row_positions
from specdec.tools.decoding import token_level
from tests.plain import greedy

from .architectures import VOCABULARY, build

TABLE = 24


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64, "n_positions": 32}, 32),
        ({"max_position_embeddings": 64.0, "n_ctx": 32}, 64),
        ({"max_position_embeddings": 10**400, "n_ctx": 32}, 32),
        ({"max_position_embeddings": float("inf"), "n_ctx": 32}, 32),
        ({"thinker_config": {"text_config": {"n_ctx": 47}}, "n_positions": 9}, 47),
        ({"text_config": [], "llm_config": {}, "max_sequence_length": 49}, 49),
        ({"n_positions": 32, "n_ctx": 48}, 32),
        ({"n_ctx": 48}, 48),
        ({"max_seq_len": 40}, 40),
        ({"seq_length": 41}, 41),
        ({"n_embd": 8, "block_size": 42}, 42),
        ({"text_config": {"n_positions": 43}, "max_position_embeddings": 9}, 43),
        ({"llm_config": {"max_position_embeddings": 44}}, 44),
        ({"model_max_length": 45}, None),
        ({"max_position_embeddings": None, "n_ctx": True, "n_positions": -1}, None),
        ({"text_config": None, "rope_scaling": 3, "n_ctx": 46}, 46),
        (
            {
                "max_position_embeddings": 50,
                "rope_scaling": {
                    "factor": 4.0,
                    "original_max_position_embeddings": 20,
                },
            },
            80,
        ),
        *(
            (
                {
                    "n_ctx": 50,
                    "rope_scaling": {
                        "factor": factor,
                        "original_max_position_embeddings": 20,
                    },
                },
                50,
            )
            for factor in (float("inf"), float("nan"), -4, "4", True, None)
        ),
    ],
)
def test_names(config: dict[str, Any], length: int | None) -> None:
    """A name that nobody knows lets rows grow past what the model was made for."""
    assert context_length(config) == length


def decoder(arch: str, draft: Any = None, **config: Any) -> SpecDecoder:
    model = build(arch, n_positions=TABLE, n_ctx=TABLE)
    tokenizer = token_level(model).tokenizer
    named = {"model_type": arch, "n_positions": TABLE}
    target = LoadedModel(model, tokenizer, named, "target")
    return SpecDecoder(target, draft=draft, config=EngineConfig(**config))


@pytest.mark.parametrize("arch", ["gpt2", "gpt_bigcode"])
def test_nobody_reads_past_a_table(arch: str) -> None:
    """It is memory of others: other text in each run, or what is no number.

    Rows end at the table's end, and padding reads its last entry.
    """
    prompts = [
        [(5 * i + j) % VOCABULARY for j in range(n)] for i, n in ((0, 20), (1, 3))
    ]
    made = decoder(arch, num_draft_tokens=0, prefill_step_size=64)
    results = made.generate(prompts, SamplingParams(max_tokens=40))
    for prompt, result in zip(prompts, results, strict=True):
        room = TABLE - len(prompt)
        assert (
            result.token_ids
            == greedy(made.target.model, prompt, 40)[: len(result.token_ids)]
        )
        assert room <= len(result.token_ids) <= room + 1
        assert result.finish_reason == "length"
    twin: Any = with_row_positions(made.target.model)
    table = (twin.transformer if arch == "gpt_bigcode" else twin.model).wpe
    beyond = table(mx.array([[0, TABLE - 1, TABLE, 10**6]]))[0]
    assert mx.array_equal(beyond[1], beyond[2])
    assert mx.array_equal(beyond[1], beyond[3])
    assert not mx.array_equal(beyond[0], beyond[1])


def test_a_draft_is_not_asked_past_its_table(tiny_model: Any) -> None:
    """Its proposals there are noise, and each costs a forward."""
    target: Any = tiny_model("llama", vocab_size=VOCABULARY)
    prompt = [1, 2, 3]
    wanted = greedy(target, prompt, 60)
    draft = decoder("gpt2").target
    made = SpecDecoder(
        LoadedModel(target, draft.tokenizer, {}, "target"),
        draft=draft,
        config=EngineConfig(num_draft_tokens=2),
    )
    assert made.generate([prompt], SamplingParams(max_tokens=60))[0].token_ids == wanted
    assert 0 < made.stats.drafted <= 2 * TABLE


def test_only_the_architecture_in_use_is_imported() -> None:
    """An architecture that another mlx-lm renames would stop all other models, too."""
    program = (
        "import sys, specdec.decoder, specdec.models.loading\n"
        "print([name for name, module in sys.modules.items()\n"
        "    if name.startswith('mlx_lm.models.') and hasattr(module, 'ModelArgs')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"

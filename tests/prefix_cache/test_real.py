"""Real weights: SmolLM2 in float32, with prefixes from disk."""

from __future__ import annotations

from pathlib import Path

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.models import LoadedModel
from tests.plain import greedy

SYSTEM = "You are a careful assistant. " + " ".join(
    f"Rule {i}: answer question number {i} in one short sentence." for i in range(2)
)
QUESTIONS = ["Name a river in France.", "What is the capital of Norway?"]
PARAMS = SamplingParams(max_tokens=4)


def test_other_questions_after_the_same_system_prompt(
    smollm2: LoadedModel, tmp_path: Path
) -> None:
    prompts = [
        smollm2.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ],
            add_generation_prompt=True,
        )
        for question in QUESTIONS
    ]
    for prompt, found in zip(prompts, (False, True), strict=True):
        config = EngineConfig(prefix_cache=tmp_path, prefill_step_size=128)
        decoder = SpecDecoder(smollm2, config=config)
        (result,) = decoder.generate([prompt], PARAMS)
        assert (result.prefix_tokens > 40) is found
        assert decoder.prefix_store is not None
        decoder.prefix_store.close()
    expected = greedy(smollm2.model, prompts[1], PARAMS.max_tokens)
    assert result.token_ids == expected[: len(result.token_ids)]

"""SmolLM2-135M-Instruct from its GGUF file: it says sensible things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from specdec.models import (
    LoadedModel,
    convert,
    load,
    load_draft,
    map_vocabulary,
)
from specdec.models.precision import widen_packed

pytestmark = pytest.mark.real

CODE = """def binary_search(arr, target):
    left, right = 0, len(arr) - 1
    while left <= right:
        mid = (left + right) // 2
        if arr[mid] == target:
            return mid
        elif arr[mid] < target:
            left = mid + 1
        else:
            right = mid - 1
    return -1
"""


def test_plain_code_is_likely(smollm2: LoadedModel) -> None:
    """A wrong weight or split costs whole nats."""
    tokens = mx.array([smollm2.tokenizer.encode(CODE)[:33]])
    logits = smollm2.model(tokens)[:, :-1]
    nats: Any = nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")
    assert nats.item() < 0.8


def test_tokenizer(smollm2: LoadedModel) -> None:
    tokenizer: Any = smollm2.tokenizer
    assert tokenizer.eos_token_ids == {0, 2}
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("In 2024, it's"))
    assert pieces == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s"]
    for text in (CODE, "naïve 日本語 🤗👩‍👩‍👧", " a  b\n\n\tc "):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        detokenizer = tokenizer.detokenizer
        streamed = ""
        for token in tokens:
            detokenizer.add_token(token)
            streamed += detokenizer.last_segment
        detokenizer.finalize()
        assert streamed + detokenizer.last_segment == text


def test_folder_and_file_are_one_model(smollm2_path: Path, tmp_path: Path) -> None:
    file = load(str(smollm2_path))
    assert file.model.model.embed_tokens.bits == 8
    assert file.model.layers[0].mlp.up_proj.bits == 4
    out = convert(smollm2_path, tmp_path / "out")
    folder = load(str(out))
    tokens = mx.array([file.tokenizer.encode(CODE)[:6]])
    logits = file.model(tokens)
    assert mx.array_equal(folder.model(tokens), logits)
    model, tokenizer = mlx_lm.load(str(out))[:2]
    widen_packed(model)  # in float16 the CPU takes a minute
    assert mx.array_equal(model(tokens), logits)
    assert map_vocabulary(file, folder) is None
    assert tokenizer.encode(CODE) == file.tokenizer.encode(CODE)


def test_self_draft_agrees_mostly(smollm2: LoadedModel) -> None:
    """Next-token agreement with the target over code; measured 1.0 at 8 bits."""
    tokens = mx.array([smollm2.tokenizer.encode(CODE)[:10]])
    target = smollm2.model(tokens).argmax(-1)
    draft = load_draft("self:8bit", smollm2)
    agreement: Any = mx.mean(draft.model(tokens).argmax(-1) == target)
    assert agreement.item() > 0.9

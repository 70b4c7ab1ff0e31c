"""Decoding with products that were joined when the models were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.backend import BackendDefaults
from specdec.cuda import fused_linear
from specdec.models import loading
from specdec.models import model_outline as outlines

from ..models.folders import write_folder
from ..plain import plainly

# As on a GPU, as far as a CPU can: compiled forwards, padding, rounds in flight.
JOINING = BackendDefaults(
    "cuda",
    read_bucket=64,
    static_shapes=True,
    compile_after=2,
    pad_single_token=True,
    kernels=True,
)
PROMPTS = [[40, 41, 42], [50], [60, 61, 62, 63, 64, 65, 66], [70, 71]]
PARAMS = SamplingParams(max_tokens=24)


@pytest.mark.parametrize(
    ("arch", "draft", "batch_size"),
    [
        ("llama", "self:8bit", 3),
        ("qwen2", None, 1),  # it adds a bias to q, k and v
        ("qwen2", None, 3),
        ("qwen2", "self:8bit", 1),
        ("qwen2", "layers:0", 3),
    ],
)
def test_the_tokens_of_plain_decoding(
    arch: str,
    draft: str | None,
    batch_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts that are taken by the wrong layer, or without their bias."""
    model = write_folder(tmp_path / "target", arch)
    for module in (backend, loading, outlines):
        monkeypatch.setattr(module, "defaults", lambda: JOINING)
    decoder = SpecDecoder.from_pretrained(
        str(tmp_path / "target"),
        draft or "none",
        config=EngineConfig(batch_size=batch_size, num_draft_tokens=3),
    )
    kinds = [type(m) for _, m in decoder.target.model.named_modules()]
    assert kinds.count(fused_linear.JoinedLinear) == 5 * 2
    eos = frozenset(decoder.tokenizer.eos_token_ids)
    results = decoder.generate(PROMPTS, PARAMS)
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.token_ids == plainly(model, prompt, PARAMS, eos).tokens
    assert (decoder.stats.drafted > 0) == (draft is not None)

"""What comes out: a folder for mlx-lm and for specdec, and its card."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from click.testing import CliRunner, Result

from specdec.cli import main
from specdec.models import load, load_draft
from specdec.models.draft_folder import fingerprint
from specdec.models.model_outline import outline, outline_draft
from specdec.models.precision import quantized_copy
from specdec.tools.distill.job import Distillation
from specdec.tools.distill.options import DistillOptions
from tests.models.folders import write_folder

from .harness import longer, options, quietly, write_target

TOKENS = mx.array([[5, 6, 7, 8, 9, 10, 11]])
ARCHES = ["llama", "granitemoehybrid", "gemma3", "qwen3_5"]
# mlx-lm's Gemma 3 has six layers or more; of a hybrid, layers of attention are taken.
COUNTS = {"gemma3": 6, "granitemoehybrid": 4, "qwen3_5": 4}


def brief(target: Path, out: Path, **changes: Any) -> DistillOptions:
    """A run of two steps or three."""
    return longer(options(target, out, answer_tokens=8, **changes), 300)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("arch", "bits"), [*((arch, None) for arch in ARCHES), ("llama", 4), ("gemma3", 4)]
)
def test_a_folder_that_mlx_lm_loads(
    tmp_path: Path, arch: str, bits: int | None
) -> None:
    """Logits are those that training ended with; specdec decodes with it, exactly."""
    count = COUNTS.get(arch, 3)
    target = write_target(tmp_path / "target", arch, num_hidden_layers=count)
    job = Distillation(brief(target, tmp_path / "out", bits=bits, widen=2), quietly)
    card = job.run()
    loaded: Any = mlx_lm.load(str(tmp_path / "out"))
    model, tokenizer = loaded
    assert tokenizer.get_vocab() == job.target.tokenizer.get_vocab()
    assert len(model.layers) == 2
    if bits is None:
        wanted = job.student.model(TOKENS)
        np.testing.assert_array_equal(model(TOKENS), wanted)
    else:
        draft = load_draft(str(tmp_path / "out"), job.target, dtype="float32")
        named = dict(_flat(draft.model))
        for name, array in _flat(job.student.model):
            if array.ndim == 2 and ".layers." in name:
                size = 64 if array.shape[-1] % 64 == 0 else 32
                packed = mx.quantize(array, group_size=size, bits=bits)
                stored = mx.dequantize(*packed, group_size=size, bits=bits)
                stored_array = named[job.student.prefix + name]
                assert bool(mx.array_equal(stored_array, stored)), name
    assert card["bits"] == bits
    run = ["run", "--target", str(target), "-p", "What is 2?", "-m", "12"]
    run += ["--ignore-chat-template", "--dtype", "float32"]
    plain = invoke(*run)
    drafted = invoke(*run, "--draft", str(tmp_path / "out"), "--num-draft-tokens", "3")
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert "warning" not in drafted.stderr


@pytest.mark.parametrize(("tied", "bits"), [(True, 4), (False, None)])
def test_layers_alone(tmp_path: Path, tied: bool, bits: int | None) -> None:
    """Nothing of the target's is stored, and the loaded draft is the same model."""
    target = write_target(tmp_path / "target", tie_word_embeddings=tied)
    wanted = brief(target, tmp_path / "whole", bits=bits)
    Distillation(wanted, quietly).run()
    alone = replace(wanted, out=tmp_path / "alone", layers_only=True)
    Distillation(alone, quietly).run()
    stored: Any = mx.load(str(tmp_path / "alone" / "model.safetensors"))
    assert not any("embed" in name or "lm_head" in name for name in stored)
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "distill.json",
        "model.safetensors",
        "work",
    }
    model = load(str(target), dtype="float32")
    before = dict(_flat(model.model))
    draft = load_draft(str(tmp_path / "alone"), model, dtype="float32")
    whole = load_draft(str(tmp_path / "whole"), model, dtype="float32")
    if bits is None:  # a whole folder's own embedding is packed
        np.testing.assert_array_equal(draft.model(TOKENS), whole.model(TOKENS))
    assert draft.tokenizer is model.tokenizer
    kind = "float32"
    sketch = outline_draft(
        str(tmp_path / "alone"), outline(str(target), dtype=kind), dtype=kind
    )
    assert _bytes(sketch.model) == _bytes(draft.model)
    shared = {id(array) for _, array in _flat(model.model)}
    arrays = [array for _, array in _flat(draft.model) if id(array) not in shared]
    lent = [a for name, a in before.items() if "embed" in name or "lm_head" in name]
    owned = sum(array.nbytes for array in arrays)
    assert owned == _bytes(draft.model) - sum(array.nbytes for array in lent)
    # Another type for the draft does not reach the target.
    load_draft(str(tmp_path / "alone"), model, dtype="bfloat16")
    for name, array in _flat(model.model):
        assert array.dtype == before[name].dtype
    result = invoke(
        *("run", "--target", str(target), "-p", "What is 2?", "-m", "12"),
        *("--draft", str(tmp_path / "alone"), "--num-draft-tokens", "3"),
        "--ignore-chat-template",
    )
    assert result.exit_code == 0, result.output


def test_another_target_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = write_target(tmp_path / "target")
    Distillation(brief(target, tmp_path / "out"), quietly).run()
    write_folder(tmp_path / "other", seed=7, num_hidden_layers=4)
    with caplog.at_level(logging.WARNING, "specdec"):
        load_draft(str(tmp_path / "out"), load(str(target)))
        assert not caplog.records
        load_draft(str(tmp_path / "out"), load(str(tmp_path / "other")))
    (record,) = caplog.records
    assert "was made for target, which is another model than" in record.getMessage()
    card = tmp_path / "out" / "distill.json"
    card.write_text("{")
    result = invoke(
        "run", "-p", "x", "--target", str(target), "--draft", str(card.parent)
    )
    assert result.exit_code == 1
    assert "make the draft again" in result.stderr
    card.write_text(json.dumps({"format": "of another tool"}))
    load_draft(str(tmp_path / "out"), load(str(target)))


def test_a_fingerprint_is_of_the_model_not_of_its_storage(tmp_path: Path) -> None:
    write_folder(tmp_path / "a")
    target = load(str(tmp_path / "a"), dtype="float32")
    known = fingerprint(target.model)
    assert fingerprint(quantized_copy(target.model, 4)[0]) == known
    assert fingerprint(load(str(tmp_path / "a"), dtype="bfloat16").model) == known
    write_folder(tmp_path / "b", seed=1)
    assert fingerprint(load(str(tmp_path / "b")).model) != known


def _bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in _flat(model))


def _flat(model: Any) -> Any:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())

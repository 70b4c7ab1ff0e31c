"""Training that begins with a draft that was made before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from specdec.errors import ConfigError, ModelError
from specdec.models import load_draft
from specdec.tools.distill.beginning import as_begun
from specdec.tools.distill.job import Distillation
from specdec.tools.distill.options import DistillOptions

from .harness import longer, options, quietly, run, write_target

FORMS: dict[str, dict[str, Any]] = {
    "layers": {"widen": 2},
    "packed layers": {"bits": 4, "layers": "1,3", "layers_only": True},
    "one layer": {"layers": "1"},
    "block": {"kind": "block", "block_size": 5, "form": "dflash"},
    "packed block": {"kind": "block", "bits": 4, "widen": 2},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beginning") / "target"
    return write_target(folder, hidden_size=64, num_attention_heads=2)


@pytest.fixture(scope="module", params=FORMS)
def made(
    request: pytest.FixtureRequest,
    target: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[DistillOptions, Path]:
    first = tmp_path_factory.mktemp("made") / "first"
    wanted = options(target, first, **FORMS[request.param])
    run(longer(wanted, 300))
    return wanted, first


@pytest.fixture(scope="module")
def layers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = tmp_path_factory.mktemp("layers") / "first"
    run(longer(options(target, first), 300))
    return first


def begun(target: Path, tmp_path: Path, first: Path, **changes: Any) -> DistillOptions:
    return options(target, tmp_path / "second", begin_with=str(first), **changes)


def test_it_begins_with_the_weights_of_the_draft(
    made: tuple[DistillOptions, Path], target: Path, tmp_path: Path
) -> None:
    earlier, first = made
    job = Distillation(begun(target, tmp_path, first), quietly)

    draft = dequantize_model(load_draft(str(first), job.target).model)
    reference = job.student
    learnt: Any = tree_flatten(replace(reference, model=draft).parameters)
    parameters: Any = dict(tree_flatten(reference.parameters))
    assert parameters.keys() == dict(learnt).keys()
    for name, array in learnt:
        assert mx.allclose(parameters[name], array, atol=1e-6), name
    for name in ("kind", "widen", "block_size", "form"):
        if earlier.kind == "block" or name in ("kind", "widen"):
            assert getattr(job.options, name) == getattr(earlier, name)


def test_the_card_says_what_it_began_with(
    layers: Path, target: Path, tmp_path: Path
) -> None:
    card = run(longer(begun(target, tmp_path, layers), 300))
    assert card["began_with"]["tokens"] >= 300
    assert "| began with | first" in (tmp_path / "second/README.md").read_text("utf-8")

    third = options(target, tmp_path / "third", begin_with=str(tmp_path / "second"))
    card = run(longer(third, 300))
    assert card["began_with"]["began_with"]["name"] == "first"
    assert (tmp_path / "third/README.md").read_text("utf-8").count("| began with") == 2


def test_it_resumes(layers: Path, target: Path, tmp_path: Path) -> None:
    wanted = longer(begun(target, tmp_path, layers), 300)
    run(wanted)
    lines: list[str] = []
    Distillation(replace(longer(wanted, 600), resume=True), lines.append).run()
    assert any(line.startswith("going on after step") for line in lines)
    assert (tmp_path / "second/model.safetensors").exists()


def test_it_does_not_resume_with_another_draft(
    layers: Path, target: Path, tmp_path: Path
) -> None:
    wanted = longer(begun(target, tmp_path, layers), 300)
    run(wanted)
    other = shutil.copytree(layers, tmp_path / "other")
    arrays: Any = mx.load(str(other / "model.safetensors"))
    mx.save_safetensors(
        str(other / "model.safetensors"), {k: 2 * v for k, v in arrays.items()}
    )
    again = replace(longer(wanted, 600), resume=True, begin_with=str(other))
    with pytest.raises(ModelError, match="was made with began_with"):
        Distillation(again, quietly).run()


def test_what_training_cannot_begin_with(
    layers: Path, target: Path, tmp_path: Path
) -> None:
    other = write_target(tmp_path / "other", hidden_size=48, num_attention_heads=2)
    with pytest.raises(ModelError, match="does not fit the target"):
        Distillation(begun(other, tmp_path, layers), quietly)
    with pytest.raises(ConfigError, match="no draft that specdec distill made"):
        as_begun(begun(target, tmp_path, target))
    with pytest.raises(ConfigError, match="which training begins with"):
        as_begun(replace(begun(target, tmp_path, layers), out=layers))

"""No request waits for a kernel that MLX compiles: rehearsals launch all of them.

MLX's CUDA backend compiles what gathers and scatters when it is first launched, for
each type (``module_name`` in its ``backend/cuda/indexing.cpp``): three to six seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.config import EngineConfig
from specdec.cuda.mlx_kernels import LAUNCHES
from specdec.engine.engine import Engine
from specdec.models.loaded import LoadedModel
from specdec.models.precision import cast
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    ChainDrafter,
    Drafter,
    DraftModel,
    NgramDrafter,
    commit,
    ngram_search,
)
from specdec.spec_decode.head_drafter import HeadDrafter
from tests.models.draft_heads.published import LAYERS
from tests.plain import BEHIND, ask, finish
from tests.scripted import Script
from tests.spec_decode.test_heads import CONFIGS, drafter_of, read_by

COMPILES = replace(BEHIND, new_shape_seconds=0.04)
CONFIG = EngineConfig(batch_size=3, num_draft_tokens=3, prefill_step_size=16)
K = CONFIG.max_draft_tokens


class Kernels:
    """The kernels that MLX would compile for the operations called from now on."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.launched: set[str] = set()
        self._paused = False
        for name, kind in (
            ("take_along_axis", "gather_axis"),
            ("put_along_axis", "scatter_axis"),
            ("take", "gather"),
            ("slice", "offset"),
            ("slice_update", "offset"),
        ):
            self._watch(patch, mx, name, kind)
        self._watch(patch, mx.array, "__getitem__", "gather")
        self._watch(patch, mx.array, "__setitem__", "scatter")

    def _watch(
        self, patch: pytest.MonkeyPatch, owner: Any, name: str, kind: str
    ) -> None:
        usual = getattr(owner, name)

        def watched(array: mx.array, *arguments: Any, **options: Any) -> Any:
            start = 1 if name == "slice_update" else 0
            if not self._paused and (types := self._types(arguments[start])):
                if kind == "offset":
                    types.append(str(len(arguments[start])))
                else:
                    types.insert(0, str(array.dtype))
                self.launched.add(" ".join([kind, *types]))
            return usual(array, *arguments, **options)

        patch.setattr(owner, name, watched)

    def _types(self, index: Any) -> list[str]:
        """The types of the arrays in an index; none if MLX slices."""
        each = index if isinstance(index, tuple) else (index,)
        arrays = (i for i in each if isinstance(i, mx.array | np.ndarray | list))
        return [str(mx.array(i).dtype) for i in arrays]

    def ours(self, stands_for: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel of ours, which launches none of MLX's."""

        def launched(*arguments: Any, **options: Any) -> Any:
            self._paused = True
            try:
                return stands_for(*arguments, **options)
            finally:
                self._paused = False

        return launched


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> LoadedModel:
    model = tiny_model("qwen3", num_hidden_layers=LAYERS)
    cast(model, mx.bfloat16)
    return LoadedModel(model, None, {}, "the target")  # type: ignore[arg-type]


def drafter_named(
    name: str, target: LoadedModel, draft: Any, folder: Path
) -> Drafter | None:
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter()
    if name == "model":
        runner = ModelRunner(draft, "draft", CONFIG, COMPILES)
        size = runner.vocab_size
        return DraftModel(
            runner, vocab_size=size, max_draft_tokens=K, context_length=None
        )
    if name.startswith("ngram, "):
        second = drafter_named(name[7:], target, draft, folder)
        assert second is not None
        return ChainDrafter(NgramDrafter(), second)
    drafter, _ = drafter_of(folder, CONFIGS[name], target, COMPILES)
    cast(drafter.head, mx.bfloat16)
    return drafter


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *((name, False) for name in ("ngram", "model")),
        *((name, True) for name in ("none", "ngram", "ngram, model", "ngram, dflash")),
        *((name, True) for name in ("dflash2", "dspark rnn", "eagle3", "peagle")),
    ],
)
def test_no_request_launches_what_nothing_did_before(
    target: LoadedModel,
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    ours: bool,
) -> None:
    """In first rounds, joins, and looks into answers, with any k.

    A kernel that only a second wave of requests needs made one step take 5 s.
    """
    draft = tiny_model("qwen3", seed=3)
    cast(draft, mx.bfloat16)
    drafter = drafter_named(name, target, draft, tmp_path)
    kernels = Kernels(monkeypatch)
    first = getattr(drafter, "first", drafter)
    if ours:
        committed = kernels.ours(commit.commit)
        monkeypatch.setattr("specdec.spec_decode.verifier.committer", lambda: committed)
        if isinstance(first, NgramDrafter):
            names = ("search", "keep")
            first.lookup = SimpleNamespace(  # type: ignore[assignment]
                **{n: kernels.ours(getattr(ngram_search, n)) for n in names}
            )
    runner = ModelRunner(target.model, "target", CONFIG, COMPILES)
    head = getattr(drafter, "second", drafter)
    if isinstance(head, HeadDrafter):
        runner = read_by(head, target, CONFIG, COMPILES)
    length = Script(lambda number: (K, 1, K, 0, 2)[number % 5] if drafter else 0)
    length.max_draft_tokens = K if drafter else 0
    engine = Engine(runner, drafter, CONFIG, COMPILES, frozenset(), length=length)
    for launch in LAUNCHES.values():
        launch(mx.bfloat16)
    engine.warm_up()
    rehearsed = kernels.launched.copy()
    kernels.launched.clear()
    drawn = SamplingParams(max_tokens=17, temperature=1.0, top_p=0.9, seed=1)
    for wave in range(2):
        for i in range(5):
            prompt = [3, 5, 7, *range(5, 7 + 5 * i), 3, 5, 7]
            ask(engine, prompt, drawn if i == 2 else 7 + 3 * i, 5 * wave + i)
        finish(engine)
    assert sorted(kernels.launched - rehearsed) == []

"""What a greedy round computes outside the target's forward, operation by operation.

Where launches bound a round, as on CUDA, each of them takes as long as a kernel of
ours that does a dozen such things at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.backend import BackendDefaults
from specdec.cuda import commit_kernel, gated_delta, ngram_kernel
from specdec.engine.batch import DecodeBatch
from specdec.engine.round import BatchRound
from specdec.models.runner import ModelRows, ModelRunner
from specdec.spec_decode import NamedDrafter, commit, ngram_search
from specdec.tools.decoding import token_level
from tests.models.architectures import build
from tests.scripted import Script

# As on a GPU, as far as a CPU can.
LIKE_CUDA = BackendDefaults(
    "cuda",
    read_bucket=64,
    static_shapes=True,
    pad_single_token=True,
    kernels=True,
)
# They give an array another shape, and compute nothing.
VIEWS = {"Slice", "Broadcast", "ExpandDims", "Squeeze", "Reshape", "View", "Flatten"}


class Launches:
    """Counts operations by name, round by round.

    Args:
        num_rows: only rounds of so many rows are looked at: none has left.

    Attributes:
        rounds: k of every round, and what it computed.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, num_rows: int):
        self.rounds: list[tuple[int, Counter[str]]] = []
        self._num_rows = num_rows
        self._found: Counter[str] = Counter()
        self._folder = folder
        self._eval: Callable[..., None] = mx.async_eval
        patch.setattr(mx, "async_eval", self._handed_over)
        patch.setattr(ModelRows, "forward", self._uncounted(ModelRows.forward))
        for module, name, stands_for in (
            (commit_kernel, "commit", commit.commit),
            (ngram_kernel, "search", ngram_search.search),
            (ngram_kernel, "keep", ngram_search.keep),
        ):
            patch.setattr(module, name, self._kernel(name, stands_for))
        dispatch = DecodeBatch.dispatch

        def noted(batch: DecodeBatch, plan: BatchRound) -> None:
            self._found.clear()
            dispatch(batch, plan)
            if len(batch.slots) == self._num_rows and not plan.first:
                self.rounds.append((plan.num_draft_tokens, Counter(self._found)))

        patch.setattr(DecodeBatch, "dispatch", noted)

    def _count(self, *arrays: Any) -> None:
        """Note what is still to be computed for ``arrays``, and compute it."""
        file = self._folder / "graph.dot"
        there = [a for a in arrays if isinstance(a, mx.array)]
        if there:
            mx.export_to_dot(str(file), *there)
            self._found.update(re.findall(r'label ="(\w+)"', file.read_text("utf-8")))
            mx.eval(there)

    def _handed_over(self, *trees: Any) -> None:
        self._count(*leaves(trees))
        self._eval(*trees)

    def _kernel(self, name: str, stands_for: Callable[..., Any]) -> Any:
        """What a kernel is given is computed before it; it is one launch."""

        def launched(*arguments: Any, **options: Any) -> Any:
            self._count(*leaves(arguments))
            found = stands_for(*arguments, **options)
            mx.eval(leaves(found))
            self._found[name] += 1
            return found

        return launched

    def _uncounted(self, forward: Callable[..., mx.array]) -> Any:
        def ran(rows: ModelRows, tokens: mx.array) -> mx.array:
            self._count(tokens, rows.offset)
            logits = forward(rows, tokens)
            mx.eval(logits, [c.state for c in rows._caches], rows.offset)
            self._found["forward"] += 1
            return logits

        return ran

    def of(self, k: int) -> Counter[str]:
        """The most of each operation that a round of k computed, views left out."""
        most: Counter[str] = Counter()
        for its, found in self.rounds[2:]:
            most |= found if its == k else Counter()
        assert most
        return Counter({n: c for n, c in most.items() if n not in VIEWS})


def leaves(tree: Any) -> list[mx.array]:
    """The arrays in lists, tuples and dataclasses."""
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return leaves(list(vars(tree).values())) if hasattr(tree, "__dict__") else []


CHOOSING = {"forward": 1, "ArgReduce": 1, "Max": 1, "commit": 1}
# A cache's offset, less what it takes back.
TRIM = {"Subtract": 1}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("draft", "k", "allowed"),
    [
        (None, 0, CHOOSING),
        # Rows that are not drafted for cost nothing; while a draft rests, the drafter
        # gets to know what they keep.
        ("ngram", 0, CHOOSING),
        ("resting", 0, {**CHOOSING, "keep": 1}),
        ("ngram", 1, {**CHOOSING, **TRIM, "search": 1, "keep": 1}),
        ("ngram", 4, {**CHOOSING, **TRIM, "search": 1, "keep": 1}),
        # Each draft forward chooses a token; then all of them are put together, and
        # two caches trimmed.
        ("model", 4, {**CHOOSING, "forward": 5, "ArgReduce": 5,
                      "Concatenate": 1, "Subtract": 2}),
    ],
)  # fmt: skip
def test_a_round_launches_no_more(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    draft: str | None,
    k: int,
    allowed: dict[str, int],
    batch_size: int,
) -> None:
    monkeypatch.setattr(backend, "defaults", lambda: LIKE_CUDA)
    monkeypatch.setattr(
        "specdec.spec_decode.verifier.committer",
        lambda: commit_kernel.commit,
    )
    target = token_level(tiny_model("llama", seed=0))
    rests = draft == "resting"
    drafter: Any = "ngram" if rests else draft
    if draft == "model":
        drafter = NamedDrafter("itself", target)
    config = EngineConfig(batch_size=batch_size, num_draft_tokens=k or "auto")
    decoder = SpecDecoder(target, drafter=drafter, config=config)
    if rests:
        decoder._length = Script(lambda number: 0)  # type: ignore[assignment]
    launches = Launches(monkeypatch, tmp_path, batch_size)
    for name in ("search", "keep"):
        kernel = getattr(ngram_kernel, name)
        monkeypatch.setattr(ngram_search, name, kernel)
    asked = 0 if draft == "ngram" and not k else None
    params = SamplingParams(max_tokens=20, num_draft_tokens=asked)
    decoder.generate([[1, 2, 1, 2, 1], [5, 6], [3, 3, 3]][:batch_size], params)
    assert launches.of(k) == allowed


def scanned_at_once(
    form: Any,
    weights: Any,
    inputs: Any,
    past: Any,
    state: mx.array,
    kept: Any = None,
    lengths: Any = None,
) -> gated_delta.Results:
    """In the place of a kernel, one operation that takes all its inputs."""
    rows, tokens = inputs.x.shape[:2]
    taped = [past] if kept is None else [*past, kept.view(mx.float32)]
    given = [a.flatten() for a in (*inputs, *taped, state)]
    all_of_them = mx.concatenate(given)

    def some(*shape: int) -> mx.array:
        return mx.broadcast_to(all_of_them[:1], shape)

    log = gated_delta.Log(
        some(rows, tokens + form.kernel_size - 1, form.channels),
        some(rows, tokens, form.value_heads, 2),
    )
    y = some(rows, tokens, form.value_heads * form.value_size)
    return gated_delta.Results(y, some(*state.shape), some(*state.shape), log)


def test_a_verification_of_gated_delta_layers_launches_what_a_step_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rollback is in the scan; beside it counts are computed, once for all layers."""
    model = build("qwen3_5")
    layers = [gated_delta.form_of(layer) for _, layer in model.named_modules()]
    monkeypatch.setattr(gated_delta, "scan", scanned_at_once)
    monkeypatch.setattr(gated_delta.proven, "verdicts", dict.fromkeys(layers, True))
    config, backend = EngineConfig(), replace(LIKE_CUDA, pad_single_token=False)
    found = []
    for tokens in (1, 5):
        runner = ModelRunner(model, "target", config, backend)
        rows = runner.rows([[3] * 9] * 2, max_round=5, max_length=64)
        for _ in rows.prefill():
            pass
        for _ in range(3):
            mx.eval(rows.offset, [cache.given(tokens) for cache in rows._caches])
            logits = rows.forward(mx.ones((2, tokens), mx.int32))
            if tokens > 1:
                rows.trim_per_sequence(mx.array([0, tokens - 1]), tokens)
        kept = [array for cache in rows._caches for array in cache.given(tokens)[1]]
        file = tmp_path / "graph.dot"
        mx.export_to_dot(str(file), logits, rows.offset, *kept)
        names = Counter(re.findall(r'label ="(\w+)"', file.read_text("utf-8")))
        found.append(Counter({n: c for n, c in names.items() if n not in VIEWS}))
    # What is taken back of offsets, and what is left of the round.
    assert found[1] - found[0] == {"Subtract": 2, "Maximum": 2}

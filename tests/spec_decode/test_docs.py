"""docs/drafters.md: its example runs as pasted, and a drafter written from it alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    DescribedFactory,
    DraftContext,
    Drafter,
    DraftRows,
    Proposals,
    Round,
)
from specdec.spec_decode.commit import Accepted
from tests.plain import BACKENDS, VOCAB, run_rows, sampled
from tests.spec_decode.repetitive import make_prompts

DOCS = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL
)


def run_blocks(*blocks: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), scope)
    return scope


class PhraseDrafter(Drafter):
    """Knows some phrases: after two of their tokens it proposes the next.

    Written from docs/drafters.md alone.
    """

    def __init__(self, phrases: Sequence[Sequence[int]]):
        windows = [p[i : i + 3] for p in phrases for i in range(len(p) - 2)]
        self.known = mx.array(windows, mx.int32)  # (N, 3)
        mx.eval(self.known)

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        return PhraseRows(self.known, len(prompts))


class PhraseRows(DraftRows):
    def __init__(self, known: mx.array, num_rows: int):
        self.known = known
        self.committed = mx.zeros((num_rows,), mx.int32)

    def propose(self, round_: Round) -> Proposals:
        tail = round_.tail
        tokens, lengths = [], mx.zeros((len(tail),), mx.int32)
        matching = mx.ones((len(tail),), mx.bool_)
        for _ in range(round_.num_draft_tokens):
            fits = (self.known[:, :2] == tail[:, None]).all(axis=-1)  # (B, N)
            matching = matching & fits.any(axis=1)
            following = self.known[mx.argmax(fits, axis=1), 2]
            lengths = lengths + matching
            tokens.append(following)
            tail = mx.stack([tail[:, 1], following], axis=1)
        return Proposals(mx.stack(tokens, axis=1), lengths=lengths)

    def commit(self, round_: Round, accepted: Accepted) -> None:
        self.committed = self.committed + accepted.kept
        mx.async_eval(self.committed)

    def filter(self, rows: Sequence[int]) -> None:
        self.committed = self.committed[mx.array(list(rows))]

    def extend(self, other: PhraseRows) -> None:
        self.committed = mx.concatenate([self.committed, other.committed])


def check(target: Any, drafter: Drafter, backend: BackendDefaults) -> None:
    prompts = make_prompts()
    params = [
        SamplingParams(max_tokens=20 + i % 3, temperature=0.4 * (i % 2), seed=i)
        for i in range(8)
    ]
    rows = run_rows(
        target, None, prompts, params, batch_size=3, num_draft_tokens=4,
        backend=backend, drafter=drafter,
    )  # fmt: skip
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == sampled(target, prompt, p)
    assert 0 < sum(r.accepted for r in rows) < sum(r.drafted for r in rows)


@BACKENDS
def test_the_example(backend: BackendDefaults, tiny_model: Callable[..., Any]) -> None:
    context: Any = SimpleNamespace(vocab_size=VOCAB)
    check(tiny_model("llama"), run_blocks(BLOCKS[0])["BigramDrafter"](context), backend)


@BACKENDS
def test_a_drafter_from_the_page_alone(
    backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    target = tiny_model("llama")
    said = [
        sampled(target, p, SamplingParams(max_tokens=20)) for p in make_prompts()[::2]
    ]
    wrong = [[a, b, (b + 1) % VOCAB] for a in range(20) for b in range(20)]
    check(target, PhraseDrafter([*said, *wrong]), backend)


def test_the_example_with_a_decoder(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = run_blocks(*BLOCKS)
    assert scope["decoder"].draft_name == "BigramDrafter"
    assert scope["result"].accepted > 0
    assert capsys.readouterr().out


def test_the_page_names_the_whole_protocol() -> None:
    """A drafter is asked, shown or reports nothing that the page leaves out."""
    page = DOCS.read_text("utf-8")
    internal = ("drawn_from", "inputs", "within", "after")  # of specdec itself
    for part in (
        DraftContext,
        DescribedFactory,
        Drafter,
        DraftRows,
        Round,
        Proposals,
        Accepted,
    ):
        assert part.__name__ in page
        names = {*vars(part), *getattr(part, "__dataclass_fields__", ())}
        for name in names:
            if not name.startswith("_") and name not in internal:
                assert f"`{name}" in page or f".{name}" in page, f"{part}.{name}"

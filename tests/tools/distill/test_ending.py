"""A run that is asked to end does, wherever it is, and keeps what was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specdec.tools.distill import job
from specdec.tools.distill.checkpoint import NAME
from specdec.tools.distill.evaluate import HeldOut
from specdec.tools.distill.job import Distillation
from specdec.tools.distill.train import Trainer
from specdec.tools.distill.wave import Author

from .harness import longer, make_author, options, quietly, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("distill") / "target")


@pytest.mark.parametrize(
    ("owner", "name", "finished", "kept"),
    [
        (Author, "user_turns", 0, False),
        (Author, "answers", 0, False),
        (Trainer, "step", 1, True),
        (HeldOut, "measure", 0, True),
        (job, "measure_rounds", 0, True),
    ],
)
def test_nothing_else_is_begun(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    finished: int,
    kept: bool,
) -> None:
    """Of a step what was begun is finished; what takes longer is not."""
    real, seen = getattr(owner, name), {"begun": 0, "finished": 0}

    def asking(*arguments: Any, **named: Any) -> Any:
        seen["begun"] += 1
        value = real(*arguments, **named)
        seen["finished"] += 1
        return value

    def check() -> None:
        if seen["begun"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, asking)
    holdout = tmp_path / "held-out.txt"
    holdout.write_text("Name a river.\n", "utf-8")
    wanted = options(target, tmp_path / "out", holdout=(str(holdout),))
    if name == "user_turns":
        wanted = options(target, tmp_path / "out", prompts=(), data_tokens=1000)
    with pytest.raises(KeyboardInterrupt):
        Distillation(longer(wanted, 600), quietly, check).run()
    assert seen == {"begun": 1, "finished": finished}
    assert (wanted.work / NAME).exists() is kept


def test_the_target_is_asked_while_it_writes(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between chunks of a long prompt, and every step: a wave can take minutes."""
    monkeypatch.setattr("specdec.tools.distill.wave._PREFILL_STEP_SIZE", 4)

    def checks(prompt: list[int], max_tokens: int) -> int:
        seen: list[None] = []
        author = make_author(tiny_model("llama"), lambda: seen.append(None))
        author._write([prompt], Random(0), max_tokens=max_tokens, temperature=0.0)
        return len(seen)

    assert checks([5], 80) >= checks([5], 1) + 70
    assert checks([5] * 17, 1) >= checks([5] * 5, 1) + 3

"""A run that is asked to end does, wherever it is, and keeps what was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.models.runner import ModelRunner
from specdec.tools.distill import job
from specdec.tools.distill.checkpoint import NAME
from specdec.tools.distill.evaluate import HeldOut
from specdec.tools.distill.job import Job
from specdec.tools.distill.train import Trainer
from specdec.tools.distill.wave import Author
from specdec.tools.distill.writing import write

from .harness import (
    longer,
    options,
    quietly,
    write_target,
)


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
        found = real(*arguments, **named)
        seen["finished"] += 1
        return found

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
        Job(longer(wanted, 600), quietly, check).run()
    assert seen == {"begun": 1, "finished": finished}
    assert (wanted.work / NAME).exists() is kept


def test_saving_is_not_what_ends(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check in there would raise, again, and the checkpoint be lost."""
    within: list[bool] = []
    save = Job._save

    def saving(self: Job, *arguments: Any) -> None:
        within.append(True)
        save(self, *arguments)
        within.pop()

    def check() -> None:
        assert not within

    monkeypatch.setattr(Job, "_save", saving)
    monkeypatch.setattr(job, "_CHECKPOINT_SECONDS", 0)
    Job(longer(options(target, tmp_path / "out"), 600), quietly, check).run()
    assert not within


def test_the_target_is_asked_while_it_writes(tiny_model: Callable[..., Any]) -> None:
    """Between chunks of a long prompt, and every few steps: a wave can take minutes."""
    cpu = BackendDefaults("cpu", read_bucket=1, static_shapes=False, lookahead=1)
    config = EngineConfig(prefill_step_size=4)
    runner = ModelRunner(tiny_model("llama"), "t", config, cpu)

    def checks(prompt: Sequence[int], max_tokens: int) -> int:
        seen: list[None] = []
        write(
            runner,
            [prompt],
            max_tokens=max_tokens,
            ends=(),
            check=lambda: seen.append(None),
        )
        return len(seen)

    assert checks([5], 80) == checks([5], 1) + 2
    assert checks([5] * 17, 1) >= checks([5] * 5, 1) + 3

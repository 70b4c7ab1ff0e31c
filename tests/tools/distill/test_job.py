"""Whole runs on a small random target: they learn, stop, and go on exactly."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.errors import ConfigError, ModelError
from specdec.tools.distill import checkpoint, evaluate, job
from specdec.tools.distill import export as export_module
from specdec.tools.distill.checkpoint import NAME
from specdec.tools.distill.job import Distillation
from specdec.tools.distill.options import Budget, DistillOptions
from specdec.tools.distill.train import Trainer, clipped

from .harness import longer, options, quietly, run, same, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("distill") / "target")


@pytest.fixture(scope="module")
def whole(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """The card and the folder of a run in one piece."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return run(options(target, out)), out


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[DistillOptions, int], None]:
    """Do a run that is interrupted after so many steps: ``stopped(wanted, 4)``."""

    def after(wanted: DistillOptions, steps: int) -> None:
        step = Trainer.step

        def counted(self: Trainer) -> None:
            if self.progress.step == steps:
                raise KeyboardInterrupt
            step(self)

        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "step", counted)
            with pytest.raises(KeyboardInterrupt):
                run(wanted)

    return after


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more to a file fails, by the kernel's own hand."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_another_model_s_folder_is_refused(target: Path, tmp_path: Path) -> None:
    """Its weights would be replaced: the target's own, or any other's."""
    with pytest.raises(ConfigError, match="the target's own folder"):
        options(target, target / ".." / target.name)
    write_target(tmp_path / "other")
    with pytest.raises(ConfigError, match="did not make: name another folder"):
        options(target, tmp_path / "other")


def test_what_a_kill_left_half_written_is_removed(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    wanted = options(target, out, budget=Budget(tokens=600))
    left = [folder / f".{'a' * 32}.specdec-tmp" for folder in (out, wanted.work)]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    run(wanted)
    assert not any(path.exists() for path in left)
    options(target, out)  # of ours, and can be made again


def weights(folder: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return dict(loaded)


def test_learning_lowers_the_divergence_and_raises_agreement(
    target: Path, tmp_path: Path
) -> None:
    wanted = options(target, tmp_path / "out", hard=0.0)
    wanted = longer(wanted, 4000)
    history = run(wanted)["training"]["history"]
    first, last = history[0], history[-1]
    assert last["kl"] < 0.8 * first["kl"]
    assert last["agreement"] > first["agreement"] + 0.2


def test_the_target_stays_as_it_is(target: Path, tmp_path: Path) -> None:
    """Embedding and head are its own arrays; layers were its own in the beginning."""
    job = Distillation(longer(options(target, tmp_path / "out"), 300), quietly)
    before = dict(weights(target))
    parameters = job.student.parameters
    job.run()
    assert same(dict(_flat(job.target.model)), before)
    learnt = weights(tmp_path / "out")
    name = "model.embed_tokens.weight"
    assert same(learnt[name], before[name])
    assert not same(parameters, job.student.parameters)


def _flat(model: Any) -> Any:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def test_a_resumed_run_equals_an_uninterrupted_one(
    target: Path, whole: tuple[dict[str, Any], Path], tmp_path: Path, stopped: Any
) -> None:
    """Weights, optimizer and data order, to the bit; two epochs and more."""
    card, job = whole
    parts = options(target, tmp_path / "parts", resume=True)
    for steps in (3, 7):
        stopped(parts, steps)
    resumed = run(parts)
    assert resumed["training"]["steps"] == card["training"]["steps"] > 8
    assert resumed["agreement"] == card["agreement"]
    assert same(weights(job), weights(tmp_path / "parts"))


def test_a_smaller_budget_stores_what_was_learnt_so_far(
    target: Path, tmp_path: Path, stopped: Any
) -> None:
    """Whoever has no more time need not lose what a run has learnt."""
    wanted = options(target, tmp_path / "out", resume=True)
    stopped(wanted, 4)
    card = run(replace(wanted, budget=Budget(minutes=1e-6)))
    assert card["training"]["steps"] == 4
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_killed_run_goes_on_exactly(
    target: Path, whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Killed while it learns; the end is that of a run in one piece."""
    (in_one, job), out = whole, tmp_path / "out"
    program = [sys.executable, "-m", "tests.tools.distill.killed"]
    done = subprocess.run([*program, str(target), str(out), "2"], check=False)
    assert done.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert (out / "work" / NAME).exists()
    card = run(options(target, out, resume=True))
    assert card["training"]["steps"] == in_one["training"]["steps"]
    assert same(weights(out), weights(job))


def test_clipping_does_not_depend_on_the_order_of_names() -> None:
    """It differs between processes, and sums of floats between orders."""
    keys = mx.random.split(mx.random.key(0), 40)
    tree = {f"{i}": mx.random.normal((7, i + 3), key=k) for i, k in enumerate(keys)}
    turned = dict(reversed(tree.items()))
    assert same(clipped(tree, 0.7), clipped(turned, 0.7))
    norm = sum(float(g.square().sum()) for g in clipped(tree, 0.7).values()) ** 0.5
    assert norm == pytest.approx(0.7, rel=1e-4)
    assert same(clipped(tree, 1e6), tree)


def test_what_was_made_otherwise_is_not_gone_on_with(
    target: Path, tmp_path: Path, stopped: Any
) -> None:
    wanted = options(target, tmp_path / "out", resume=True)
    stopped(wanted, 2)
    message = r"was made with layers \[0, 3\], not \[0, 2\]"
    with pytest.raises(ModelError, match=message):
        run(replace(wanted, layers="0,2"))
    (tmp_path / "out" / "work" / NAME).write_bytes(b"12345678{}")
    with pytest.raises(
        ModelError, match=r"is damaged .it cannot be read.: leave --resume out"
    ):
        run(wanted)


def test_a_full_disk_while_learning(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that cannot be written is reported; the draft is still made."""
    save = checkpoint.save

    def limited(*arguments: Any, **named: Any) -> None:
        with files_of_at_most(100_000):
            save(*arguments, **named)

    monkeypatch.setattr(checkpoint, "save", limited)
    lines: list[str] = []
    Distillation(longer(options(target, tmp_path / "out"), 300), lines.append).run()
    assert any(line.startswith("warning: no checkpoint: cannot") for line in lines)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "out" / "work").glob(f"*{NAME}*"))


def test_a_full_disk_when_it_is_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line; the checkpoint is there, and so is an earlier draft."""
    out = tmp_path / "out"
    run(longer(options(target, out), 300))
    before = weights(out)
    wanted = longer(options(target, out), 600)
    export = export_module.export

    def limited(*arguments: Any, **named: Any) -> None:
        with files_of_at_most(100_000):
            export(*arguments, **named)

    monkeypatch.setattr(job, "export", limited)
    with pytest.raises(ModelError, match=r"cannot write .*out "):
        run(wanted)
    assert same(weights(out), before)
    monkeypatch.undo()
    card = run(replace(wanted, resume=True))
    assert card["training"]["tokens"] >= 600
    assert not same(weights(out), before)


def test_the_card_says_what_was_done(target: Path, tmp_path: Path) -> None:
    holdout = tmp_path / "questions-held-out.txt"
    holdout.write_text("Name a river.\nWhat is 0 times 3?\n", "utf-8")
    wanted = options(target, tmp_path / "out", holdout=(str(holdout),), rounds=2)
    card = run(longer(wanted, 300))
    assert json.loads((tmp_path / "out" / "distill.json").read_text()) == card
    assert card["target"]["name"] == "target"
    assert card["layers"] == [0, 3]
    assert card["agreement"]["questions-held-out"]["positions"] > 2
    assert [r["temperature"] for r in card["rounds"]] == [0.0, 0.7]
    assert {r["num_draft_tokens"] for r in card["rounds"]} == {4}
    # One of the held-out prompts is among those to learn from: it is left out.
    assert card["data"]["documents"] == 2 * 11
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| questions-held-out (2) | 0 | 4 |" in text
    last = card["training"]["history"][-1]
    shares = [last["held_out"][name]["agreement"] for name in ("questions-held-out",)]
    row = [f"{last['tokens'] / 1e6:.1f}", *(f"{share:.3f}" for share in shares)]
    assert f"| {' | '.join(row)} |" in text


def test_rounds_that_were_measured_are_not_measured_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has ten minutes at a time would never get to the end."""
    measure, asked = evaluate.measure_rounds, []

    def limited(*arguments: Any, **named: Any) -> Any:
        asked.append((named["num_draft_tokens"], named["temperature"]))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **named)

    monkeypatch.setattr(job, "measure_rounds", limited)
    holdout = tmp_path / "held-out.txt"
    holdout.write_text("Name a river.\n", "utf-8")
    wanted = options(
        target,
        tmp_path / "out",
        holdout=(str(holdout),),
        num_draft_tokens=(2, 1),
        resume=True,
    )
    wanted = longer(wanted, 300)
    with pytest.raises(KeyboardInterrupt):
        run(wanted)
    card = run(wanted)
    assert asked == [(2, 0.0), (2, 0.7), (1, 0.0), (1, 0.0)]
    settings = [(r["num_draft_tokens"], r["temperature"]) for r in card["rounds"]]
    assert settings == [(2, 0.0), (2, 0.7), (1, 0.0)]
    assert json.loads((tmp_path / "out" / "distill.json").read_text()) == card
    # Another training has rounds of its own.
    run(longer(wanted, 900))
    assert len(asked) == 7

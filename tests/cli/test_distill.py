"""``specdec distill``: what is refused, what is reported, and a whole run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specdec.backend import defaults
from specdec.cli import main
from specdec.tools.distill import checkpoint, plan
from specdec.tools.distill.train import Trainer
from tests.tools.distill.harness import QUESTIONS, write_target

from .signals import drop

PATIENCE = 300  # seconds until a process that does not end is a failure


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_target(tmp_path_factory.mktemp("distill") / "target")
    folder.with_name("questions.txt").write_text(QUESTIONS, "utf-8")
    return folder


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["distill", *arguments])


def small(target: Path, out: Path) -> list[str]:
    questions = str(target.with_name("questions.txt"))
    return [
        *("--target", str(target), "--out", str(out), "--layers", "2"),
        *("--prompts", questions, "--data-tokens", "0", "--tokens", "600"),
        *("--batch", "12", "--block-tokens", "256"),
    ]


def test_a_run_and_what_it_says(target: Path, tmp_path: Path) -> None:
    holdout = tmp_path / "held-out.txt"
    holdout.write_text("Name a river.\n", "utf-8")
    arguments = [*small(target, tmp_path / "out"), "--holdout", str(holdout)]
    result = invoke(*arguments, "--rounds", "1")
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert "answering 12 prompts (prompts)" in lines
    (last,) = [line for line in lines if line.startswith("training: step ")][-1:]
    assert "tokens/s, loss " in last
    assert "held out: held-out 0." in last
    assert f"wrote {tmp_path / 'out'}" in lines
    card = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert {r["temperature"] for r in card["rounds"]} == {0.0, 0.7}
    assert "/" not in card["target"]["name"]
    assert str(tmp_path) not in card["command"]
    # The same again: the answers are there already.
    again = invoke(*small(target, tmp_path / "out"), "--quiet")
    assert again.exit_code == 0, again.output
    assert not again.stderr
    waves = tmp_path / "out" / "work" / "data"
    assert len(list(waves.glob("prompts-*"))) == 1


def test_dry_run(target: Path) -> None:
    """It writes nothing, so that it needs no folder to write to."""
    before = set(target.parent.iterdir())
    result = invoke("--target", str(target), "--layers", "2", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    names = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert names[:6] == ["target", "draft", "writing", "training", "memory", "time"]
    # One quantity a line.
    begin = lines.index(next(x for x in lines if x.startswith("memory:")))
    sizes = [line[10:].partition(": ") for line in lines[begin : begin + 4]]
    assert [what for what, _, _ in sizes] == [
        "target", "draft and optimizer", "logits", "target states",
    ]  # fmt: skip
    assert all("B" in size and len(size) < 40 for _, _, size in sizes)
    about = "questions, problems, code"
    assert f"up to 10 minutes, about {about}\n" in result.stdout
    assert "tokens a step, 5 minutes\n" in result.stdout
    block = invoke(
        *("--target", str(target), "--layers", "2", "--dry-run", "--kind", "block"),
        *("--topic", "code"),
    )
    assert "up to 10 minutes, about code\n" in block.stdout
    assert "\ndraft:    dspark, a block of 8, layers 0, 3, " in block.stdout
    assert set(target.parent.iterdir()) == before
    assert invoke("--target", str(target), "--layers", "2").exit_code == 2


@pytest.mark.parametrize(
    ("budget", "rate", "message", "little"),
    [
        ("--tokens 600", 10.0, "600 tokens of training are less than one step,", True),
        ("--minutes 1 --kind block", 10.0, "less than one step, of 2048\n", True),
        ("--tokens 6000 --kind block", 10.0, "are too little to be of use", True),
        ("--minutes 5", 10.0, "from 20 M, here 23 days, and nothing more", True),
        ("--minutes 5", 1e4, "3 M tokens of training are little\n", True),
        ("--minutes 5", 375e3, "112 M tokens in 5 minutes, and writing\n", False),
        ("--tokens 66000000", 375e3, "product: 3 minutes, and writing\n", False),
        ("--tokens 66000000", 1e3, "product: 18 hours, and writing\n", False),
    ],
)  # fmt: skip
def test_a_budget_too_small_to_be_of_use(
    target: Path, monkeypatch: pytest.MonkeyPatch,
    budget: str, rate: float, message: str, little: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan, "_tokens_per_second", lambda *_: rate)
    options = ("--layers", "2", "--dry-run", *budget.split())
    text = invoke("--target", str(target), *options).stdout
    assert message in text
    ways = "raise --minutes or --tokens"
    if defaults().name == "cpu":
        ways = f"way out: train on a GPU, or {ways}"
    assert (ways in text) is ("note:" in text) is little


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "7"], "--bits is 7: it must be one of 2, 3, 4, 5, 6, 8"),
        (["--layers", "9"], "--layers is 9: the target has 4"),
        (["--layers", "some"], "write a number of layers"),
        (["--data", " "], "--data is empty"),
        (["--kind", "block", "--block-size", "300"], "it must be 2 to 128"),
        (["--widen", "0"], "--widen is 0: it must be a whole number, 1 or more"),
        (["--data-tokens", "-1"], "--data-tokens is -1: it must be a whole number, 0"),
        (["--block-tokens", "5"], "--block-tokens is 5: it must be a whole number, 1"),
        (["--learning-rate", "0"], "--learning-rate is 0.0: it must be a number above"),
    ],
)
def test_wrong_usage(
    target: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    common = ("--target", str(target), "--out", str(tmp_path / "out"))
    result = invoke(*common, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_cannot_be(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = ("--target", str(target), "--out", str(out), "--layers", "2")
    for file in ("--text", "--prompts", "--holdout"):
        for run in (common, ("--dry-run", "--target", str(target))):
            missing = invoke(*run, file, "nowhere")
            assert missing.exit_code == 2
            assert "error: nowhere: no such file: check the path\n" in missing.stderr
    result = invoke(*common, "--data-tokens", "0")
    assert result.exit_code == 1
    assert "nothing to learn from" in result.stderr
    out.write_text("a file")
    result = invoke(*common)
    assert result.exit_code == 2
    assert "is a file: name a folder" in result.stderr


def test_other_architectures_are_refused_by_name(
    tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    """Before weights are loaded: these would be too few."""
    model = tiny_model("phi3", num_key_value_heads=4)
    config = vars(model.args)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "config.json").write_text(json.dumps(config))
    result = invoke("--target", str(tmp_path / "t"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert (
        "distilling a draft of layers of phi3 models is not supported" in result.stderr
    )


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_gone_on_with(
    target: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "specdec", "distill", *small(target, out)]
    command[command.index("--tokens") + 1] = "4000000"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        # Asking once is enough; what does not end is not waited for.
        end = threading.Timer(PATIENCE, child.kill)
        end.start()
        assert child.stderr is not None
        seen = []
        for line in child.stderr:
            seen.append(line)
            if line.startswith("training: step "):
                child.send_signal(number)
                break
        rest = child.stderr.read()
        end.cancel()
    assert child.returncode == 130, "".join(seen) + rest
    assert f"what was done is kept in {out / 'work'}" in rest
    is_there = (out / "work" / "checkpoint.safetensors").exists()
    # A step that takes long is not waited for where Ctrl-C asks for an end.
    assert is_there or number == signal.SIGINT
    assert not (out / "config.json").exists()
    resumed = invoke(*small(target, out), "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert ("going on after step " in resumed.stderr) is is_there
    assert (out / "config.json").exists()


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something happen after a step: ``after_step(2, drop, number)``."""
    step = Trainer.step

    def happens(number: int, do: Callable[..., Any], *arguments: Any) -> None:
        def stepping(self: Trainer) -> None:
            step(self)
            if self.progress.step == number:
                do(*arguments)

        monkeypatch.setattr(Trainer, "step", stepping)

    return happens


@pytest.mark.usefixtures("heeded")
def test_a_request_that_python_drops(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after_step: Callable[..., None],
) -> None:
    """Training would go on to its end, however far that is."""
    arguments = [*small(target, tmp_path / "out"), "--tokens", "1000"]
    after_step(2, drop, signal.SIGTERM)
    result = invoke(*arguments)
    assert result.exit_code == 130, result.output
    assert "specdec: interrupted: what was done is kept in " in result.stderr
    monkeypatch.undo()
    resumed = invoke(*arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "going on after step 2\n" in resumed.stderr


@pytest.mark.usefixtures("heeded")
def test_a_second_request_does_not_interrupt_saving(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after_step: Callable[..., None],
) -> None:
    """``timeout`` asks twice at once: the checkpoint would be lost."""
    arguments = [*small(target, tmp_path / "out"), "--tokens", "1000"]
    save = checkpoint.save

    def asked_again(*arguments: Any, **named: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        save(*arguments, **named)
        signal.raise_signal(signal.SIGTERM)

    after_step(2, signal.raise_signal, signal.SIGINT)
    monkeypatch.setattr(checkpoint, "save", asked_again)
    result = invoke(*arguments)
    assert result.exit_code == 130, result.output
    monkeypatch.undo()
    resumed = invoke(*arguments, "--resume")
    assert "going on after step 2\n" in resumed.stderr

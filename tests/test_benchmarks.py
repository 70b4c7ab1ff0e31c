"""The benchmark scripts run from end to end, and their results stay small."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks.kernels import NO_KERNEL
from benchmarks.kernels import main as kernels
from benchmarks.profile_round import main as profile_round


def run(name: str, out: Path, *options: str) -> dict[str, Any]:
    name, _, part = name.partition(" ")
    command = importlib.import_module(f"benchmarks.{name}").main
    arguments = [*([part] if part else []), *options, "--out", str(out)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert out.with_suffix(".md").read_text("utf-8").startswith("# ")
    raw: dict[str, Any] = json.loads(out.with_suffix(".json").read_text("utf-8"))
    return raw


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BENCHMARKS = RESULTS.parent


def test_scripts_stay_few() -> None:
    """What a recipe can measure, or one of these, needs no script of its own."""
    files = [f for f in BENCHMARKS.glob("*.py") if f.stem not in ("__init__", "common")]
    assert len(files) <= 3
    text = "".join(f.read_text("utf-8") for f in BENCHMARKS.glob("*.py"))
    assert text.count("\n") <= 1080


def test_raw_results_stay_small() -> None:
    """They travel with every checkout: 2 MB, and no pictures of what can be drawn."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    reports = {path.parent for path in files if path.name == "raw.jsonl"}
    assert not [
        path for path in files if path.suffix == ".png" and path.parent in reports
    ]


def test_packed(tmp_path: Path) -> None:
    raw = run(
        "kernels packed",
        tmp_path / "packed",
        *("--scale", "64", "--group-size", "32", "--dtype", "float32"),
        *("--repeat", "1", "--rows", "1", "--rows", "2"),
    )
    assert [r["rows"] for r in raw["microseconds"]] == 3 * [1, 2]
    assert all(r["error"] < 0.01 for r in raw["microseconds"])


def test_steps(tmp_path: Path) -> None:
    """With experts, too; and what MLX would compile kernels for is left out."""
    raw = run("kernels steps", tmp_path / "steps", "--shape", "tiny-moe",
              "--repeat", "1",
              "--group-size", "32")  # fmt: skip
    cells = {(r["rows"], r["tokens"]): r for r in raw["milliseconds"]}
    assert len(cells) == 7
    assert {at for at, r in cells.items() if "mlx_lm" in r} == {(1, 1), (8, 1), (32, 1)}


def test_profile_round(tmp_path: Path) -> None:
    few = ("--batch", "2", "--rounds", "2", "--mlx-lm")
    raw = run("profile_round", tmp_path / "round", *few)
    assert raw["mlx_lm"].keys() == {"B=2"}
    for phases in raw["rounds"].values():
        total = phases.pop("round")
        assert sum(phases.values()) == pytest.approx(total)


def test_ngram(tmp_path: Path) -> None:
    raw = run(
        "kernels ngram",
        tmp_path / "ngram",
        *("--batch", "1", "--batch", "2", "--history", "256"),
        *("--rounds", "2", "--repeat", "1"),
    )
    assert len(raw["passes_ms"]) == 2
    for (times,) in raw["passes_ms"].values():
        assert {part: len(ms) for part, ms in times.items()} == {
            "search": 2,
            "write": 2,
        }


SHAPES = (
    "shapes are 70b, 32b, 8b, 1b, 10m, tiny, qwen3-30b-a3b, qwen3.5-4b, "
    "qwen3.5-35b-a3b, tiny-moe, tiny-hybrid, tiny-hybrid-moe"
)


@pytest.mark.parametrize(
    ("command", "arguments", "code", "message"),
    [
        (
            profile_round,
            "--target random:foo",
            2,
            f"random:foo: no shape 'foo'; {SHAPES}",
        ),
        (profile_round, "--target random:", 2, f"no shape ''; {SHAPES}"),
        (profile_round, "--target random:tiny:x", 2, "'x' is no number of layers"),
        (profile_round, "--target random:tiny:", 2, SHAPES),
        (profile_round, "--target random:tiny:1000", 2, "999 at most"),
        (profile_round, f"--target random:tiny:{'9' * 5000}", 2, "999 at most"),
        (profile_round, "--draft random:tiny:0", 2, SHAPES),
        (profile_round, "--target ./nowhere", 2, "nowhere"),
        (profile_round, "--draft random:foo", 2, f"no shape 'foo'; {SHAPES}"),
        (kernels, "ngram --history 9", 2, "--history 9 is too short for 20 rounds"),
    ],
)
def test_errors_are_one_line(
    command: click.Command, arguments: str, code: int, message: str
) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == code
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("name", ["attention", "skinny"])
def test_a_kernel_that_cannot_run_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, or MLX's own products timed as the kernel's."""
    for module in ("decode_attention", "skinny_matmul"):
        monkeypatch.setattr(
            f"benchmarks.kernels.{module}.proven", lambda *_: False, raising=True
        )
    result = CliRunner().invoke(kernels, [name])
    assert result.exit_code == 2
    assert result.stderr == f"error: {NO_KERNEL}\n"

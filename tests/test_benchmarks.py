"""The benchmark scripts run from end to end, and what they count adds up."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks import common, draft_length, quiet_cores, simulated
from benchmarks.cache import main as cache
from benchmarks.decode import main as decode
from benchmarks.profile_round import main as profile_round
from benchmarks.report import main as report
from benchmarks.report import rebuilt
from specdec import EngineConfig, backend
from specdec.errors import ConfigError
from specdec.models.runner import ModelRunner
from specdec.spec_decode import (
    ChainDrafter,
    DraftContext,
    DraftModel,
    NgramDrafter,
)
from specdec.tools.bench.models import token_level
from specdec.tools.bench.waves import full_rate, quiet_rate

from .models.folders import write_folder


def run(name: str, out: Path, *options: str) -> dict[str, Any]:
    command = importlib.import_module(f"benchmarks.{name}").main
    arguments = [*options, "--out", str(out)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert out.with_suffix(".md").read_text("utf-8").startswith("# ")
    raw: dict[str, Any] = json.loads(out.with_suffix(".json").read_text("utf-8"))
    return raw


def test_decode(tmp_path: Path) -> None:
    """Every system decodes the same tokens in float32, and as many are counted."""
    raw = run(
        "decode",
        tmp_path / "decode",
        *("--target", "random:tiny", "--draft", "random:tiny:1"),
        *("--num-prompts", "4", "--batch", "4", "--num-draft-tokens", "2"),
        *("--prompt-tokens", "12", "--max-tokens", "8", "--repeat", "1"),
        *("--dtype", "float32"),
    )
    assert len(raw["passes"]) == 5
    for passes in raw["passes"].values():
        assert len(passes) == 2
        for record in passes:
            assert record["differences"] == []
            assert sum(wave["generated_tokens"] for wave in record["waves"]) == 32
    for name in ("mlx-lm plain B=1", "mlx-lm batch_generate B=4"):
        waves = raw["passes"][name][0]["waves"]
        assert sum(wave["decode_tokens"] for wave in waves) == 4 * 7
    # The engine may run a first round before it hands out the first tokens.
    (wave,) = raw["passes"]["specdec B=4"][0]["waves"]
    assert wave["decode_tokens"] in (4 * 6, 4 * 7)
    # A peer's first round brings its first token: none beside it counts.
    for wave in raw["passes"]["mlx-lm speculative B=1 k=2"][0]["waves"]:
        assert 8 - 3 <= wave["decode_tokens"] <= 8 - 1


def test_draft_length(tmp_path: Path) -> None:
    """Every draft runs with every k and with auto, beside plain decoding."""
    raw = run(
        "draft_length",
        tmp_path / "lengths",
        *("--target", "random:tiny", "--draft", "random:tiny:1", "--draft", "ngram"),
        *("--draft", "wrong:random:tiny:1", "--num-prompts", "2", "--batch", "2"),
        *("--num-draft-tokens", "2", "--max-tokens", "6", "--repeat", "1"),
        *("--dtype", "float32"),
    )
    assert len(raw["passes"]) == 1 + 3 * 2
    for passes in raw["passes"].values():
        waves = [wave for record in passes for wave in record["waves"]]
        assert [wave["generated_tokens"] for wave in waves] == [2 * 6, 2 * 6]
    wrong = raw["passes"]["wrong:random:tiny:1 B=2 k=2"][0]["waves"]
    assert wrong[0]["drafted"] > 0
    assert wrong[0]["accepted"] == 0


def test_every_draft_that_a_command_names(tiny_model: Callable[..., Any]) -> None:
    """Each is what its name says, not the nearest thing to it."""
    target = token_level(tiny_model())

    def made(name: str) -> Any:
        factory = draft_length.factory(name, target, None)
        context = DraftContext(
            target,
            vocab_size=100,
            max_draft_tokens=4,
            runner=lambda model: ModelRunner(
                model.model, "draft", EngineConfig(), backend.defaults()
            ),
        )
        return factory(context)

    assert type(made("ngram")) is NgramDrafter
    assert isinstance(made("ngram+layers:0"), ChainDrafter)
    assert type(made("layers:0")) is DraftModel
    assert type(made("wrong:layers:0")) is draft_length.WrongDraft
    for name in ("wrong:ngram", "wrong:ngram+layers:0", "wrong:"):
        with pytest.raises(ConfigError):
            made(name)


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_rounds_are_kept_without_their_rows() -> None:
    """Rates of the kept form are those of the measured one, which it leaves alone."""
    rounds = [(0, [(0, 0)] * 2), (2, [(2, 1), (2, 2)]), (4, [(4, 0), (3, 3)])]
    wave = {"rows": 2, "step_ms": [9.0, 5.0, 7.0], "step_rows": [2] * 3}
    measured: dict[str, Any] = {"waves": [{**wave, "rounds": rounds}]}
    kept = common.without_rows(measured)
    assert kept["waves"][0]["rounds"] == [[0, [[0, 0]]], [2, [[4, 3]]], [4, [[7, 3]]]]
    assert measured["waves"][0]["rounds"] is rounds
    assert full_rate(kept) == full_rate(measured) > 0
    assert quiet_rate([kept]) == quiet_rate([measured]) > 0


def test_raw_results_stay_small() -> None:
    """They travel with every checkout: 6 MB, and no pictures of what can be drawn."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    reports = {path.parent for path in files if path.name == "raw.jsonl"}
    assert not [
        path for path in files if path.suffix == ".png" and path.parent in reports
    ]


@pytest.mark.parametrize(
    "raw",
    [
        *RESULTS.glob("draft-length-*.json"),
        *RESULTS.glob("simulated-*.json"),
    ],
    ids=lambda path: path.stem,
)
def test_a_committed_report_is_that_of_its_raw_result(raw: Path) -> None:
    """``python -m benchmarks.report`` was not forgotten, and nobody edited it."""
    assert rebuilt(raw) == raw.with_suffix(".md").read_text("utf-8")


def test_a_report_is_made_anew(tmp_path: Path) -> None:
    raw = tmp_path / "a.b.json"
    raw.write_bytes((RESULTS / "simulated-8b-h200.json").read_bytes())
    invoke = CliRunner().invoke
    assert invoke(report, [str(raw)]).exit_code == 0
    expected = (RESULTS / "simulated-8b-h200.md").read_text("utf-8")
    assert (tmp_path / "a.b.md").read_text("utf-8") == expected
    for text in ("{}", "no JSON", '{"title": "Something else"}'):
        raw.write_text(text, "utf-8")
        result = invoke(report, [str(raw)])
        assert (result.exit_code, result.output.count("\n")) == (2, 1)


def test_draft_length_of_a_batch_that_others_wait_for(tmp_path: Path) -> None:
    """A wave is over when its first row is, and the others' tokens still count."""
    raw = run(
        "draft_length",
        tmp_path / "lengths",
        *("--target", "random:tiny", "--draft", "random:tiny:1", "--others-wait"),
        *("--num-prompts", "4", "--batch", "4", "--num-draft-tokens", "2"),
        *("--max-tokens", "40", "--repeat", "1", "--dtype", "float32"),
    )
    for record in (r for passes in raw["passes"].values() for r in passes):
        (wave,) = record["waves"]
        tokens = [request[-1] for request in wave["requests"]]
        assert len(tokens) == 4
        assert max(tokens) == 40
        assert set(wave["step_rows"]) == {4}
        assert record["decode_tokens_per_second"] > 0
    (wave,) = raw["passes"]["random:tiny:1 B=4 k=2"][1]["waves"]
    assert min(request[-1] for request in wave["requests"]) < 40
    assert wave["drafted"] > 0


def test_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted share is what was asked for; auto has a limit to be held to.

    Forwards are timed behind all passes: before them, kernels were compiled meanwhile.
    """
    order = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(simulated, name)

        def call(*arguments: Any, **options: Any) -> Any:
            order.append(name)
            return real(*arguments, **options)

        return call

    for name in ("measure", "measure_forwards"):
        monkeypatch.setattr(simulated, name, noted(name))
    out = tmp_path / "simulated"
    raw = run(
        "simulated", out, "--target", "random:tiny", "--draft", "random:tiny:1",
        "--dtype", "float32", "--acceptance", "1", "--batch", "2",
        "--num-draft-tokens", "2", "--max-tokens", "13", "--prompt-tokens", "5",
        "--repeat", "1",
    )  # fmt: skip
    fixed = raw["passes"]["B=2 k=2"][1]["waves"][0]
    assert fixed["drafted"] == fixed["accepted"] > 0
    assert set(raw["costs"]["2"]["verify"]) >= {"1", "3"}
    text = out.with_suffix(".md").read_text("utf-8")
    assert "**Simulated**" in text
    assert "| 2 | auto |" in text
    assert order == ["measure"] * 6 + ["measure_forwards"]
    # Costs that come to more than whole rounds took are no limit.
    raw["costs"]["2"]["draft_step"] = 1.0
    rows = simulated.body(raw).splitlines()[-2:]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert [row[6:8] for row in cells] == [["-", "-"], ["-", "-"]]


def test_what_is_allowed_is_not_exceeded() -> None:
    """Nor is auto held to the best of some k where another's is not known."""
    costs = {"verify": {"3": 0.010, "5": 0.011}, "draft_step": 0.001}

    def found(quiet: dict[Any, float]) -> list[float]:
        limits = simulated.limits_of(costs, 0.01, 0.8, quiet)
        return [round(limits[k], 2) for k in quiet]

    assert found({2: 1.9, 4: 2.2, "auto": 2.1}) == [2.03, 2.24, 2.24]
    assert found({2: 1.9, 4: 2.3, "auto": 2.1}) == [2.03, 0, 0]
    assert found({2: 1.9, 6: 2.2, "auto": 2.1}) == [2.03, 0, 0]


def test_packed(tmp_path: Path) -> None:
    raw = run("packed", tmp_path / "packed", "--scale", "16", "--repeat", "1",
              "--dtype", "float32", "--group-size", "32")  # fmt: skip
    assert len(raw["microseconds"]) == 24


def test_compiled(tmp_path: Path) -> None:
    raw = run("compiled", tmp_path / "compiled", "--shape", "tiny", "--dtype",
              "float32", "--batch", "2", "--context", "9", "--steps", "2")  # fmt: skip
    (record,) = raw["milliseconds"]
    assert record["S=2 compiled"] > 0


def test_verification(tmp_path: Path) -> None:
    """Every rule drafts; a draft with noise of its own is accepted less often."""
    write_folder(tmp_path / "m", max_position_embeddings=4096)
    prompts = tmp_path / "q.jsonl"
    prompts.write_text('{"prompt": "Name a river."}\n{"prompt": "A lake?"}\n', "utf-8")
    model = str(tmp_path / "m")
    raw = run(
        "verification",
        tmp_path / "rules",
        *("--target", model, "--draft", model, "--prompts", str(prompts)),
        *("--num-prompts", "2", "--max-tokens", "16", "--temp", "1"),
        *("--dtype", "float32"),
    )
    found = {each["rule"]: each for each in raw["results"]}
    assert len(found) == 4
    assert all(each["drafted"] > 0 for each in found.values())
    # The draft is the target itself.
    rates = {rule: each["acceptance_rate"] for rule, each in found.items()}
    assert rates["coupled"] == rates["rejection"] == rates["block"] == 1
    assert min(rates.values()) < 1


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_verify_forward(tmp_path: Path, draft_tokens: int) -> None:
    raw = run(
        "verify_forward",
        tmp_path / "verify",
        *("--shape", "tiny", "--batch", "2", "--draft-tokens", str(draft_tokens)),
        *("--context", "16", "--steps", "3"),
    )
    assert {len(f["blocking_ms"]) for f in raw["forwards"].values()} == {3}
    assert set(raw["ratios"]) == {"exact verify", "bucket 256 verify", "mlx-lm verify"}


def test_profile_round(tmp_path: Path) -> None:
    raw = run("profile_round", tmp_path / "round", "--batch", "2", "--rounds", "2")
    for phases in raw["rounds"].values():
        total = phases.pop("round")
        assert sum(phases.values()) == pytest.approx(total)


def test_memory(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", max_position_embeddings=4096)
    raw = run("memory", tmp_path / "memory", "--target", str(tmp_path / "m"), "--quick")
    (found,) = raw["runs"]
    assert found["target"] == "m"
    assert found["weights"] < found["measured"] <= found["told"]
    assert found["told"] == max(found["moments"].values())
    assert 2 <= found["generated_tokens"] <= 8


def test_prefix(tmp_path: Path) -> None:
    """In float32 the tokens are the same wherever the prefix comes from."""
    raw = run(
        "prefix",
        tmp_path / "first",
        *("first-tokens", "--dtype", "float32", "--num-prompts", "2"),
        *("--shared", "300", "--own", "9", "--folder", str(tmp_path)),
    )
    rounds = list(raw["rounds"].values())
    assert [r["prefix_tokens"][0] for r in rounds] == [0, 0, 308, 300, 308]
    plain, first, second, _, disk = (r["tokens"] for r in rounds)
    assert plain == first == second == disk
    raw = run(
        "prefix",
        tmp_path / "storage",
        *("storage", "--tokens", "600", "--geometry", "2:2:64"),
    )
    dense, packed = raw["stored"]["16 bits"], raw["stored"]["4 bits"]
    assert dense["memory_bytes"] == 600 * 2 * 2 * 2 * 64 * 2
    assert packed["memory_bytes"] * 16 == dense["memory_bytes"] * 4.5


def test_joined(tmp_path: Path) -> None:
    """Three ways to serve the same prompts: the same tokens, in float32."""
    raw = run(
        "joined",
        tmp_path / "joined",
        *("--target", "random:tiny", "--num-prompts", "6", "--batch", "2"),
        *("--prompt-tokens", "12", "--max-tokens", "9", "--repeat", "1"),
        *("--gap-chunks", "4", "--gap-prompt-tokens", "20"),
    )
    assert len(raw["passes"]) == 3
    for passes in raw["passes"].values():
        assert [record["differ"] for record in passes] == [0, 0]
    (gaps,) = raw["gaps"].values()
    assert gaps["passes"][0]["longest_gap_ms"] >= gaps["passes"][0]["median_gap_ms"]


def test_overhead(tmp_path: Path) -> None:
    raw = run(
        "overhead",
        tmp_path / "overhead",
        *("--batch", "2", "--rounds", "2", "--repeat", "1"),
    )
    assert len(raw["rounds"]) == 2 * 5
    assert raw["target_ms"] == {"2": 0.4}


def test_ngram(tmp_path: Path) -> None:
    raw = run(
        "ngram",
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


def test_passes_end_in_time_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at least: the first is not in the median."""
    now = [0.0]

    def system() -> float:
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    systems = {"a": system, "b": system, "c": system}
    for minutes, passes in ((0.0, 2), (1.0, 2), (1.1, 3), (1.6, 4), (None, 5)):
        now[0] = 0.0
        numbers = [n for n, _, _ in common.in_time(systems, 5, minutes)]
        assert numbers == [n for n in range(passes) for _ in systems]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="processors cannot be chosen here"
)
def test_quiet_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of the allowed processors, the quickest, and all are allowed again."""
    allowed = os.sched_getaffinity(0)
    most = max(allowed)

    def spin() -> float:
        (here,) = os.sched_getaffinity(0)
        return float(most - here)

    monkeypatch.setattr(quiet_cores, "spin", spin)
    for count in (1, len(allowed), len(allowed) + 1):
        assert quiet_cores.quickest(count) == sorted(allowed)[-count:]
        assert os.sched_getaffinity(0) == allowed
    assert quiet_cores.quickest(4, range(most, most + 9)) == [most]
    assert quiet_cores.quickest(4, range(most + 1, most + 9)) == []


SHAPES = "shapes are 8b, 1b, 10m, tiny"


@pytest.mark.parametrize(
    ("command", "arguments", "code", "message"),
    [
        (decode, "--target random:foo", 2, f"random:foo: no shape 'foo'; {SHAPES}"),
        (decode, "--target random:", 2, f"no shape ''; {SHAPES}"),
        (decode, "--target random:tiny:x", 2, "'x' is no number of layers"),
        (decode, "--target random:tiny:", 2, SHAPES),
        (decode, "--target random:tiny --draft random:tiny:0", 2, SHAPES),
        (decode, "--target random:tiny --prompts x", 2, "--prompts needs a tokenizer"),
        (decode, "--target random:tiny --eos", 2, "--eos needs a tokenizer"),
        (decode, "--target ./nowhere", 2, "nowhere"),
        (profile_round, "--draft random:foo", 2, f"no shape 'foo'; {SHAPES}"),
        (cache, "--heads 9:3", 2, "--heads 9:3: write QUERY:KV:DIM, such as 9:3:64"),
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

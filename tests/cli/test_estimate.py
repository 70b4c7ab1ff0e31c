"""``specdec estimate`` from the outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from click.testing import CliRunner, Result

from specdec.cli import main
from specdec.config import MAX_AUTO_DRAFT_TOKENS, EngineConfig

from ..models.draft_heads import published
from ..models.folders import write_folder
from ..models.gguf_files import byte_level, random_model, write_model

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def estimate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["estimate", *arguments])


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def as_json(*arguments: str) -> Any:
    result = estimate(*arguments, "--json")
    record = json.loads(result.stdout)
    # A script can ask before it runs.
    assert result.exit_code == (1 if record["fits"] is False else 0), result.output
    return record


def test_an_8b_from_its_config_alone(config: str) -> None:
    """The reference points, through the command line."""
    limit = ("--memory-limit", "24GB")
    one = ("--batch", "1")
    short = as_json("--target", config, "--context", "8192", *limit, *one)
    assert short["num_parameters"] == 8_030_261_248
    assert short["moments"]["decoding"]["target weights"] == 16_060_522_496
    assert short["moments"]["decoding"]["target KV cache"] == 1 << 30
    assert short["fits"]
    assert short["suggested_weight_bits"] == "as they are"
    long = as_json("--target", config, "--context", "131072", *limit, *one)
    assert long["moments"]["decoding"]["target KV cache"] == 16 << 30
    assert not long["fits"]
    assert long["largest_context"] < 131072


def test_options_reach_the_plan(config: str) -> None:
    """An option that is read and dropped."""
    base = ("--target", config, "--context", "8192", "--memory-limit", "64GB")
    totals = [
        as_json(*base, *more)["total"]
        for more in (
            (),
            ("--batch", "2"),
            ("--kv-bits", "8"),
            ("--max-kv-size", "1024"),
            ("--prefill-step-size", "64"),
            ("--dtype", "float32"),
            ("--draft", config),
        )
    ]
    assert len(set(totals)) == len(totals)
    device = as_json("--target", config, "--context", "8192")
    assert device["memory_limit"] > 1 << 28


def test_no_more_than_the_models_own_context(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": 8192}))
    base = ("--target", str(path), "--memory-limit", "64GB", "--batch", "1")
    record = as_json(*base, "--context", "8192")
    assert record["largest_context"] == record["context_length"] == 8192
    assert "largest context at this batch: 8192 tokens\n" in estimate(*base).stdout
    # Judged as if rows could be longer, which a run refuses.
    for more in ((), ("--json",)):
        result = estimate(*base, "--context", "8193", *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == (
            "specdec: error: --context 8193 is longer than the context of config.json, "
            "8192 tokens: give 8192 or fewer, or another --target (see: specdec "
            "estimate --help)\n"
        )
    # Where less fits, that is reported.
    tight = as_json(*base, "--context", "99", "--memory-limit", "17GB")
    assert 0 < tight["largest_context"] < 8192


def test_sizes_that_are_assumed(tmp_path: Path) -> None:
    """Other rows than a run takes; or more tokens than the target serves."""
    limit = ("--memory-limit", "64GB")
    record = {}
    for context in (None, 1024, 8192, 1 << 20):
        path = tmp_path / f"{context}.json"
        path.write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": context}))
        result = estimate("--target", str(path), *limit)
        assert result.exit_code == 0, result.output
        record[context] = n = as_json("--target", str(path), *limit)["context"]
        assert f": {EngineConfig().batch_size} rows of {n} tokens\n" in result.stdout
        assert result.stderr == (
            "specdec: note: assumed: --device cpu, as here; --batch "
            f"{EngineConfig().batch_size}, as in specdec run; --context {n}, prompt "
            "and output together\n"
        )
        sizes = ("--context", str(n), "--batch", "8", "--device", "cpu")
        output = estimate("--target", str(path), *sizes, *limit)
        assert (output.stdout, output.stderr) == (result.stdout, "")
    assert record == {None: 4096, 1024: 1024, 8192: 4096, 1 << 20: 4096}


def test_no_more_draft_tokens_than_a_block_has(tmp_path: Path) -> None:
    """Rounds counted as wider than any that a block head drafts for."""
    head = published.dspark_config()
    block = head["block_size"]
    assert block < MAX_AUTO_DRAFT_TOKENS
    sizes = "hidden_size", "vocab_size", "head_dim", "num_attention_heads"
    target = {**LLAMA_8B, "num_hidden_layers": published.LAYERS}
    target |= {name: head[name] for name in sizes}
    target["num_key_value_heads"] = head["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(target))
    published.write_head(tmp_path / "head", head)
    base = ("--target", str(tmp_path / "config.json"), "--context", "99")

    def asked(draft: str, *more: str) -> Any:
        return as_json(*base, "--draft", draft, *more)

    own = str(tmp_path / "head")
    assert asked(own)["num_draft_tokens"] == block
    assert asked(own, "--num-draft-tokens", "2")["num_draft_tokens"] == 2
    # N-grams before a head are not bound to its block.
    assert asked(f"ngram+{own}")["num_draft_tokens"] == MAX_AUTO_DRAFT_TOKENS
    wide = estimate(*base, "--draft", own, "--batch", "1", "--num-draft-tokens", "8")
    assert f", {block} draft tokens\n" in wide.stdout
    assert wide.stderr == (
        "specdec: note: assumed: --device cpu, as here\n"
        f"specdec: note: the draft proposes up to {block} tokens in a round, not 8\n"
    )


def test_a_draft_of_another_vocabulary(tmp_path: Path) -> None:
    """Reported as a pair that fits, which no run takes; or without what they share."""
    target = tmp_path / "target"
    write_folder(target)
    (tmp_path / "same").symlink_to(target)
    one = write_model(tmp_path / "one.gguf", "llama", random_model("llama"))
    fewer, foreign = byte_level(), byte_level()
    fewer.tokens[fewer.tokens.index("ab")] = "ba"
    foreign.tokens = [f"{token} " for token in foreign.tokens]
    fewer.merges = foreign.merges = []
    part, other = (
        write_model(
            tmp_path / name, "llama", random_model("llama"), vocabulary=vocabulary
        )
        for name, vocabulary in (("part.gguf", fewer), ("other.gguf", foreign))
    )
    common = ("--context", "99", "--memory-limit", "8GB")
    for draft in ("self:4bit", "layers:0", str(tmp_path / "same")):
        assert as_json("--target", str(target), "--draft", draft, *common)["fits"]
    for a, b in ((one, other), (target, other)):
        run = CliRunner().invoke(
            main, ["run", "-p", "Hi", "--target", str(a), "--draft", str(b)]
        )
        record = estimate("--target", str(a), "--draft", str(b), *common)
        assert run.exit_code == record.exit_code == 1
        assert record.stderr == run.stderr.splitlines(keepends=True)[-1]
        assert "cannot draft for" in record.stderr
        assert record.stdout == ""
    run = CliRunner().invoke(
        main, ["run", "-p", "Hi", "--target", str(one), "--draft", str(part),
               "--max-tokens", "4", "--num-draft-tokens", "2"],
    )  # fmt: skip
    record = estimate("--target", str(one), "--draft", str(part), *common)
    for result in (run, record):
        assert result.exit_code == 0, result.output
        assert ", which has 99.6% of the target's tokens" in result.stderr
    # A configuration alone has no vocabulary to compare.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((target / "config.json").read_bytes())
    assert as_json("--target", str(alone), "--draft", str(other), *common)["fits"]


def test_a_draft_without_a_tokenizer(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_folder(tmp_path / name)
    for file in (tmp_path / "b").glob("tokenizer*"):
        file.unlink()
    pair = ("--target", str(tmp_path / "a"), "--draft", str(tmp_path / "b"))
    result = estimate(*pair, "--context", "99")
    assert result.exit_code == 1
    assert f"{tmp_path / 'b'}: no tokenizer can be made" in result.stderr


def test_a_gguf_file_that_needs_the_gguf_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported as one that fits, which no run can read here."""
    kind = gguf.GGMLQuantizationType.IQ4_NL
    path = write_model(
        tmp_path / "m.gguf", "llama", random_model("llama"), kinds=lambda name: kind
    )
    arguments = ("--target", str(path), "--context", "99", "--memory-limit", "8GB")
    assert as_json(*arguments)["fits"]
    for name in ("gguf", "gguf.quants"):
        monkeypatch.setitem(sys.modules, name, None)
    for extra in ((), ("--dtype", "float32")):
        record = estimate(*arguments, *extra)
        run = CliRunner().invoke(main, ["run", "-p", "Hi", *arguments[:2], *extra])
        assert run.exit_code == record.exit_code == 1
        assert record.stderr == run.stderr.splitlines(keepends=True)[-1]
        assert "IQ4_NL weights, which need the gguf package" in record.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # A smaller chunk is enough, and no token is another one.
        (
            ("--batch", "8", "--memory-limit", "26GB"),
            [(8, 128, None, False, "--batch 8 --prefill-step-size 128")],
        ),
        # Packed keys are needed, or fewer rows.
        (
            ("--batch", "8", "--memory-limit", "24GB"),
            [
                (8, 256, 8, True, "--batch 8 --prefill-step-size 256"),
                (5, 512, None, False, "--batch 5"),
            ],
        ),
        # Not even the weights fit.
        (("--batch", "8", "--memory-limit", "14GB"), []),
        (("--batch", "2", "--memory-limit", "64GB"), []),
    ],
)
def test_what_to_change_so_that_a_run_fits(
    config: str, arguments: tuple[str, ...], expected: list[tuple[Any, ...]]
) -> None:
    """Catches "none fits" where a smaller chunk or packed keys would do.

    Each command, asked for again, fits.
    """
    asked = ("--target", config, "--context", "8192", *arguments)
    changes = as_json(*asked)["changes"]
    names = ("batch", "prefill_step_size", "kv_bits", "changes_tokens")
    assert [tuple(c[n] for n in names) for c in changes] == [e[:4] for e in expected]
    for change, (*_, words) in zip(changes, expected, strict=True):
        command = change["command"]
        assert command.startswith(f"specdec run --target {config} ")
        assert words in command
        again = command.split()[2:]
        assert as_json(*again, "--context", "8192")["fits"]
        text = "to fit (changes tokens): " if change["changes_tokens"] else "to fit: "
        assert text + command in estimate(*asked).stdout


def test_another_machine(config: str) -> None:
    """Catches an estimate for this machine's device and memory."""
    asked = ("--target", config, "--context", "8192", "--batch", "8")
    refused = estimate(*asked, "--device", "metal")
    assert refused.exit_code == 2
    assert "give the other one's --memory" in refused.stderr
    small, large = (
        as_json(*asked, "--device", "metal", "--memory", size)
        for size in ("36GiB", "64GiB")
    )
    there = estimate(*asked, "--device", "metal", "--memory", "24GB").stderr
    assert "assumed: the GPU may hold 16.0 GB of 24.0 GB\n" in there
    # What the system leaves to the GPU.
    assert small["memory_limit"] == 24 * 2**30
    assert large["memory_limit"] == 48 * 2**30
    assert large["fits"]
    card = as_json(*asked, "--device", "cuda", "--memory", "48GB")
    assert card["memory_limit"] == 48 * 10**9
    packed = ("--kv-bits", "4", "--draft", "self:4bit", "--memory", "80GB")
    cpu, cuda = (
        as_json(*asked, *packed, "--device", name)["total"] for name in ("cpu", "cuda")
    )
    assert cpu != cuda

"""Every mistake typed once, as a newcomer would: one line that names the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from specdec.errors import (
    CacheError,
    CompilerMissingError,
    ConfigError,
    ModelNotFoundError,
    PromptError,
    SpecdecError,
    UnsupportedModelError,
    VocabularyMismatchError,
)

from .conftest import FakeDecoder

Specdec = Callable[..., Result]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.txt").write_text("\n  \n")
    Path("latin1.txt").write_bytes("fine\ncafé\n".encode("latin-1"))
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "no end}\n')
    Path("keys.jsonl").write_text('{"text": "Hi"}\n')
    Path("turns.jsonl").write_text('{"turns": [3]}\n')
    Path("few.jsonl").write_text('{"prompt": "Hi", "max_tokens": -3}\n')
    Path("words.jsonl").write_text('{"of max_tokens or": "a top_p of it"}\n')
    Path("mixed.txt").write_text('Hi\n{"prompt": "Hi"}\n')
    Path("good.txt").write_text("Hi\n")


MISTAKES = [
    ("rnu", 2, "No such command 'rnu'. Did you mean 'run'? (see: specdec --help)"),
    (
        "run hello",
        2,
        "unexpected extra argument (hello): write a prompt after --prompt, in quotes "
        "(see: specdec run --help)",
    ),
    ("run good.txt", 2, "(good.txt): name one file after --prompts; cat joins sev"),
    ("convert a b c", 2, "unexpected extra argument (c) (see: specdec convert --help)"),
    ("verify --json", 2, "requires an argument. (see: specdec verify --help)"),
    ("run -p Hi --max-token 5", 2, "No such option '--max-token'. Did you mean '--m"),
    ("run -p Hi --json o", 2, "No such option '--json'. (see: specdec run --help)"),
    ("run -p Hi --max-tokens 0", 2, "error: --max-tokens is 0: it must be"),
    ("run -p Hi --max-tokens many", 2, "'many' is not a whole number (see"),
    ("run -p Hi -m -3", 2, "--max-tokens is -3: it must be a whole number, 1 or more"),
    (
        "run --prompts few.jsonl",
        2,
        "max_tokens is -3: it must be a whole number, 1 or more",
    ),
    ("run -p Hi --max-tokens", 2, "'--max-tokens' requires an argument"),
    ("run -p Hi --batch 0", 2, ": 0 is not a whole number from 1 to 16384 (s"),
    ("run -p Hi --num-draft-tokens -1", 2, "'-1' is not auto, nor a whole number f"),
    ("run -p Hi --num-draft-tokens x", 2, "nor a whole number from 0 to 1073741824 ("),
    ("run -p Hi --num-draft-tokens 9999999999", 2, "'9999999999' is not auto, nor"),
    ("estimate --draft a/D --num-draft-tokens 0", 2, "nor a whole number from 1 to"),
    (
        "advise --num-draft-tokens 9 --prompts x",
        2,
        "9 is not a whole number from 1 to 8",
    ),
    ("advise --draft D", 2, "Missing option '--prompts'"),
    ("advise --draft self:5bit --prompts x", 2, "self:5bit"),
    ("run -p Hi --prefill-step-size 0", 2, "--prefill-step-size is 0: it must"),
    ("run -p Hi --temp -1", 2, "--temp is -1.0: it must be a number from 0 to"),
    ("run -p Hi --temp nan", 2, "error: --temp is nan: it must be a number from 0"),
    ("run -p Hi --temp 1e7", 2, "error: --temp is 10000000.0: it must be a number"),
    (
        "run -p Hi --temp 1 --top-p 0",
        2,
        "error: --top-p is 0.0: it must be a number above 0",
    ),
    (
        "run -p Hi --temp 1 --top-p 1.5",
        2,
        "error: --top-p is 1.5: it must be a number above",
    ),
    (
        "run -p Hi --temp 1 --min-p 2",
        2,
        "error: --min-p is 2.0: it must be a number from 0",
    ),
    ("run -p Hi --temp 1 --top-k -1", 2, "error: --top-k is -1: it must be a whole"),
    ("run -p Hi --min-tokens 500", 2, "--min-tokens is 500: it must be at most --max-"),
    ("run -p Hi --min-tokens 9 -m 8", 2, "it must be at most --max-tokens (8)"),
    ("run -p Hi --stop=", 2, "error: --stop is '': it must be one text or several"),
    ("run -p Hi --repetition-penalty 0", 2, "error: --repetition-penalty is 0.0: it"),
    ("run -p Hi --output o --top-logprobs 1001", 2, "error: --top-logprobs is 1001"),
    ("run -p Hi --top-p 0.9", 2, "--top-p needs a temperature above 0: at 0 noth"),
    ("run -p Hi --temp hot", 2, "'hot' is not a number (see"),
    ("run -p Hi --top-p much", 2, "'--top-p': 'much' is not a number (see: specdec "),
    ("distill --out o --minutes 0", 2, "'--minutes': 0.0 is not a number above 0 (s"),
    ("run -p Hi --seed x", 2, "'--seed': 'x' is not a whole number (see:"),
    (
        "run -p Hi --memory-limit lots",
        2,
        "'--memory-limit': 'lots' is not a size: write it as 8GB",
    ),
    ("run -p Hi --memory-limit 8", 2, "'8' would be 8 bytes: write the unit, as in"),
    ("run -p Hi --dtype fp16", 2, "'fp16' is not one of 'float32', 'bfloat16'"),
    ("run -p Hi --ignore-chat-template --system-prompt S", 2, "leave out --ignore"),
    ("run --prompt=", 2, "--prompt is empty: give it a text"),
    ("demo --prompt=", 2, "--prompt is empty: give it a text"),
    ("run --prompts=", 2, "--prompts is empty: name a file"),
    ("run -p Hi --target=", 2, "--target is empty: name a model"),
    ("run -p Hi --model=", 2, "--target is empty: name a model"),
    ("run -p Hi --draft=", 2, "--draft is empty: name a model"),
    ("run -p Hi --output=", 2, "--output is empty: name a file"),
    ("run -p -", 2, "standard input: it is empty: give it a prompt"),
    ("run -p - -p -", 2, "standard input can be read once: give one '-'"),
    ("run -p - --prompts -", 2, "standard input can be read once"),
    ("run -p Hi --draft self:5bit", 2, "draft 'self:5bit' is not known: use self:2"),
    ("run -p Hi --draft ngram:x", 2, "draft 'ngram:x' is not known: use ngram o"),
    ("run -p Hi --draft layers:x", 2, "draft 'layers:x' names no layers: write layer"),
    ("run -p Hi --draft ngram+", 2, "draft 'ngram+' names no model after the +: wri"),
    ("run -p Hi --draft ngram+ngram", 2, "'ngram+ngram' names n-grams after the +, "),
    ("run -p Hi --draft self:top_k", 2, "draft 'self:top_k' is not known: use self"),
    ("run -p Hi --draft self", 2, "draft 'self' is not known: use self:2bit, self:"),
    ("run -p Hi --num-draft-tokens 3", 2, "--num-draft-tokens needs --draft: name"),
    ("run -p Hi --draft a/D --num-draft-tokens 0", 2, "write --draft none instead"),
    ("run -p Hi --kv-group-size 64", 2, "--kv-group-size needs --kv-bits: add --kv-b"),
    ("run -p Hi --quantized-kv-start 0", 2, "--quantized-kv-start needs --kv-bits"),
    ("run -p Hi --kv-bits 5", 2, "--kv-bits is 5: it must be 4 or 8"),
    ("run -p Hi --max-kv-size 4", 2, "--max-kv-size is 4: it must be a "),
    ("run --prompts missing.txt", 2, "missing.txt: no such file: check the path"),
    ("run --prompts folder", 2, "folder: is a folder: name a file in it"),
    ("advise --draft a/D --prompts missing.txt", 2, "missing.txt: no such file: c"),
    ("advise --prompts=", 2, "--prompts is empty: name a file"),
    ("verify --prompts missing.txt", 2, "missing.txt: no such file: check the pa"),
    ("verify --prompts=", 2, "--prompts is empty: name a file"),
    ("verify --prompts good.txt --json=", 2, "--json is empty: name a file"),
    ("distill --out o --text=", 2, "--text is empty: name a file"),
    ("convert missing.gguf out", 2, "cannot open missing.gguf: No such file or di"),
    ("convert folder out", 2, "cannot open folder: Is a directory; check the path"),
    ("bench missing.toml", 2, "missing.toml: no such file: check the path"),
    (
        "bench acceptance-quick --set batch=[1, 8]",
        2,
        "unexpected extra argument (8]): put the value of --set in quotes, as in --set "
        "'batch=[1, 8]' (see: specdec bench --help)",
    ),
    ("bench --set batch=[1, 2, 8] acceptance-quick", 2, ": put the value of --set in"),
    ("bench a.toml b.toml", 2, "unexpected extra argument (b.toml) (see: specdec b"),
    ("bench --compare folder folder", 2, "folder holds no results: there is no raw"),
    ("report missing", 2, "there is no folder missing: check the path"),
    ("report folder", 2, "folder holds no results: there is no raw.jsonl in it"),
    ("bench --compare folder missing", 2, "folder holds no results: there is no raw"),
    ("cache list missing", 2, "there is no folder missing"),
    ("run --prompts empty.txt", 2, "empty.txt: no prompts in it"),
    ("run --prompts latin1.txt", 2, "latin1.txt:2: not UTF-8 text (byte 0xe9)"),
    ("run --prompts bad.jsonl", 2, "bad.jsonl:2: not JSON"),
    ("run --prompts keys.jsonl", 2, "keys.jsonl:1: expected one object per line"),
    ("run --prompts turns.jsonl", 2, 'turns.jsonl:1: "turns": expected a list of'),
    ("run --prompts mixed.txt", 2, "mixed.txt:2: a JSON line in a file that began a"),
    ("advise --draft a/D --prompts keys.jsonl", 2, "keys.jsonl:1: expected one obje"),
    ("verify --prompts keys.jsonl", 2, "keys.jsonl:1: expected one object per line"),
    ("run", 2, "standard input: no prompts in it"),
    # Words of a file are not taken for names of options.
    ("run --prompts words.jsonl", 2, "not {'of max_tokens or': 'a top_p of it'}"),
    ("run -p Hi --draft no-such", 2, "no model at no-such: give a folder, a .gguf"),
    ("run -p Hi --draft no-such.gguf", 2, "no-such.gguf: there is no such file: check"),
    ("run -p Hi --draft ./nope", 2, "at ./nope: there is no such folder: check the"),
    ("run -p Hi --draft ngram+/no/pe", 2, "at /no/pe: there is no such folder: chec"),
    ("run -p Hi --draft nope/", 2, "at nope/: there is no such folder: check the p"),
    ("run -p Hi --target ~/nope", 2, "at ~/nope: there is no such folder: check the"),
    ("run -p Hi --draft Non", 2, "hub id (owner/name); did you mean none?"),
    ("run -p Hi --draft ngrm", 2, "no model at ngrm: give a folder, a .gguf file or"),
    ("run -p Hi --draft ngrm", 2, "; did you mean ngram?"),
    ("run -p Hi --draft layer:0-3", 2, "; did you mean layers:0-3?"),
    ("run -p Hi --draft ngram+none", 2, "names no model after the +"),
    ("run -p Hi --draft smollm2-head", 2, "did you mean smollm2-135m-head?"),
    ("run -p Hi --draft smollm2-135m-instruct", 2, "mean smollm2-135m-head?"),
    ("bench acceptance-quik", 2, "did you mean acceptance-quick?"),
    ("run -p Hi --target SmolLM2", 2, "no model at SmolLM2: give a folder, a .gguf"),
    ("run -p Hi --target SmolLM2-135M", 2, "; did you mean SmolLM2-135M-Instruct?"),
    ("run -p Hi --target self:4bit", 2, "self:4bit is a draft, made from a target"),
    ("run -p Hi --target ngram", 2, "ngram is a draft, made from a target"),
    ("advise --draft no-such --prompts good.txt", 2, "no model at no-such: give"),
    ("advise --draft none --prompts good.txt", 2, "no draft to advise on: name one"),
    ("verify --draft ./no-such --prompts good.txt", 2, "no model at ./no-such: ther"),
    ("verify --target ./no-such --prompts good.txt", 2, "no model at ./no-such: the"),
    ("verify --draft= --prompts good.txt", 2, "--draft is empty: name a model, or"),
    ("distill --target no-such --out o", 2, "no model at no-such: give a folder, a"),
    ("estimate --target no-such --context 9", 2, "no model at no-such: give a folder"),
    ("run -p Hi --output folder", 2, "--output folder cannot be written: Is a dir"),
    ("run -p Hi --output no/out.jsonl", 2, "there is no folder no: create it first"),
    (
        "run --prompts good.txt --output good.txt",
        2,
        "--output is the file of --prompts",
    ),
    ("convert", 2, "Missing argument 'FILE.gguf'. (see: specdec convert --help)"),
    ("convert model.gguf", 2, "Missing argument 'OUT_DIR'"),
    ("convert model.gguf out --bits 5", 2, "'5' is not one of '4', '8', '16'"),
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "code", "message"), MISTAKES)
def test_mistakes(
    specdec: Specdec, decoder: FakeDecoder, line: str, code: int, message: str
) -> None:
    result = specdec(*line.split())
    assert result.exit_code == code
    assert result.stdout == ""
    (only,) = result.stderr.splitlines()
    assert only.startswith("specdec: error: ")
    assert message in only
    assert decoder.calls == {}, "found before a model is loaded"
    assert Path("good.txt").read_text() == "Hi\n"


def test_no_prompts_on_a_terminal(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CliRunner replaces sys.stdin itself: its class is what can be patched.
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)
    result = specdec("run")
    assert result.exit_code == 2
    assert "no prompts: give --prompt TEXT, --prompts FILE" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bits is 5: it must be 4"), 2),
        (PromptError("prompt 0: it is empty"), 1),
        (ModelNotFoundError("no model at x: name a folder"), 1),
        (UnsupportedModelError("the model's ArraysCache is not supported"), 1),
        (VocabularyMismatchError("token 5 differs"), 1),
        (CacheError("trimming 5 of 3 tokens"), 1),
        (CompilerMissingError("MLX cannot compile its kernels"), 1),
    ],
)
def test_errors_on_purpose_are_printed_as_they_are(
    specdec: Specdec, decoder: FakeDecoder, error: SpecdecError, code: int
) -> None:
    decoder.raises = error
    result = specdec("run", "-p", "Hi")
    assert result.exit_code == code
    assert result.stderr == f"specdec: error: {error}\n"


def test_unexpected_errors_are_one_line_with_a_way_to_see_more(
    specdec: Specdec, decoder: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.raises = RuntimeError("first line\nsecond line")
    result = specdec("run", "-p", "Hi")
    assert result.exit_code == 1
    assert result.stderr == (
        "specdec: error: unexpected RuntimeError: first line second line "
        "(set SPECDEC_DEBUG=1 to see where it comes from)\n"
    )
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    assert "Traceback" in specdec("run", "-p", "Hi").stderr


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"),
        RuntimeError("[metal::malloc] Attempting to allocate 8 bytes which is greater"),
        RuntimeError("cublasCreate failed: CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("[malloc] Unable to allocate 8 bytes."),
        MemoryError(),
    ],
)
def test_a_device_that_is_full(
    specdec: Specdec, decoder: FakeDecoder, error: Exception
) -> None:
    """Whatever MLX calls it, the line names the way out."""
    decoder.raises = error
    result = specdec("run", "-p", "Hi")
    assert result.exit_code == 1
    assert result.stderr.startswith("specdec: error: the memory is full: end")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'mlx'", name="mlx"),
        ModuleNotFoundError("No module named 'mlx.core'", name="mlx.core"),
        ImportError("libmlx.so: cannot open shared object file: No such file"),
    ],
)
def test_mlx_without_a_backend(
    specdec: Specdec, decoder: FakeDecoder, error: ImportError
) -> None:
    decoder.raises = error
    result = specdec("run", "-p", "Hi")
    assert result.exit_code == 1
    assert "pip install '.[cpu]' in a checkout, with cuda12 or" in result.stderr


def test_no_arguments_show_the_help(specdec: Specdec) -> None:
    result = specdec()
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_version(specdec: Specdec) -> None:
    result = specdec("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("mlx-specdec ")
    assert ", mlx-lm 0." in result.stdout
    assert specdec("-V").stdout == result.stdout


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("value", ["x" * 5000, "x y " * 1250], ids=["word", "words"])
@pytest.mark.parametrize(
    "line",
    ["run VALUE", "run -p Hi --max-tokens VALUE", "run -p Hi --VALUE", "VALUE",
     "run -p Hi --chat-template-config VALUE", "run --prompts VALUE", "cache VALUE",
     "run -p Hi --dtype VALUE", "estimate --context VALUE", "run -p Hi --draft VALUE",
     "run -p Hi --memory-limit VALUE", "run -p Hi --json-schema VALUE", "bench VALUE",
     "run -p Hi --output VALUE/x", "bench --set VALUE", "serve --host VALUE"],
)  # fmt: skip
def test_an_argument_is_not_echoed_whole(
    specdec: Specdec, line: str, value: str
) -> None:
    """A screen full of what was typed, with the way out below it."""
    words = [word.replace("VALUE", value) for word in line.split()]
    result = specdec(*words)
    assert result.exit_code
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 700

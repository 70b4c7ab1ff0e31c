"""Every mistake typed once, as a newcomer would: one line that names the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

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

from .conftest import Specdec


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("bad.toml").write_text("a = \n")
    Path("damaged").mkdir()
    Path("damaged", "raw.jsonl").write_text("half a line\n")
    Path("empty.txt").write_text("\n  \n")
    Path("latin1.txt").write_bytes("fine\ncafé\n".encode("latin-1"))
    Path("bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "no end}\n')
    Path("keys.jsonl").write_text('{"text": "Hi"}\n')
    Path("turns.jsonl").write_text('{"turns": [3]}\n')
    Path("few.jsonl").write_text('{"prompt": "Hi", "max_tokens": -3}\n')
    Path("words.jsonl").write_text('{"of max_tokens or": "a top_p of it"}\n')
    Path("mixed.txt").write_text('Hi\n{"prompt": "Hi"}\n')
    Path("good.txt").write_text("Hi\n")


#: Commands, and a part of what each is refused with.
MISTAKES = """\
rnu | No such command 'rnu'. Did you mean 'run'? (see: specdec --help)
run hello | unexpected extra argument (hello): write a prompt after --prompt, in quotes
run good.txt | (good.txt): name one file after --prompts; cat joins sev
serve some/model | extra argument (some/model): name a model after --target (see
convert a b c | unexpected extra argument (c) (see: specdec convert --help)
verify --json | requires an argument. (see: specdec verify --help)
run -p Hi --max-token 5 | No such option '--max-token'. Did you mean '--m
run -p Hi --json o | No such option '--json'. (see: specdec run --help)
run -p Hi --max-tokens 0 | error: --max-tokens is 0: it must be
run -p Hi --max-tokens many | 'many' is not a whole number (see
run --prompts few.jsonl | max_tokens is -3: it must be a whole number, 1 or more
run -p Hi --max-tokens | '--max-tokens' requires an argument
run -p Hi --batch 0 | : 0 is not a whole number from 1 to 16384 (s
run -p Hi --num-draft-tokens x | nor a whole number from 0 to 1073741824 (
estimate --draft a/D --num-draft-tokens 0 | nor a whole number from 1 to
advise --num-draft-tokens 9 --prompts x | 9 is not a whole number from 1 to 8
advise --draft D | Missing option '--prompts'
advise --draft self:5bit --prompts x | self:5bit
run -p Hi --prefill-step-size 0 | --prefill-step-size is 0: it must
run -p Hi --temp nan | error: --temp is nan: it must be a number from 0
run -p Hi --temp 1 --top-p 0 | error: --top-p is 0.0: it must be a number above 0
run -p Hi --temp 1 --top-k -1 | error: --top-k is -1: it must be a whole
run -p Hi --min-tokens 9 -m 8 | it must be at most --max-tokens (8)
run -p Hi --stop= | error: --stop is '': it must be one text or several
run -p Hi --repetition-penalty 0 | error: --repetition-penalty is 0.0: it
run -p Hi --output o --top-logprobs 1001 | error: --top-logprobs is 1001
run -p Hi --top-p 0.9 | --top-p needs a temperature above 0: at 0 noth
run -p Hi --temp hot | 'hot' is not a number (see
distill --out o --minutes 0 | '--minutes': 0.0 is not a number above 0 (s
run -p Hi --memory-limit lots | '--memory-limit': 'lots' is not a size: write it as 8GB
run -p Hi --memory-limit 8 | '8' would be 8 bytes: write the unit, as in
run -p Hi --dtype fp16 | 'fp16' is not one of 'float32', 'bfloat16'
run -p Hi --ignore-chat-template --system-prompt S | leave out --ignore
run --prompt= | --prompt is empty: give it a text
run -p Hi --model= | --target is empty: name a model
run -p Hi --draft= | --draft is empty: name a model
run -p Hi --output= | --output is empty: name a file
run -p - | standard input: it is empty: give it a prompt
run -p - -p - | standard input can be read once: give one '-'
run -p Hi --draft self:5bit | draft 'self:5bit' is not known: use self:2
run -p Hi --draft ngram:x | draft 'ngram:x' is not known: use ngram o
run -p Hi --draft layers:x | draft 'layers:x' names no layers: write layer
run -p Hi --draft ngram+ | draft 'ngram+' names no model after the +: wri
run -p Hi --draft ngram+ngram | 'ngram+ngram' names n-grams after the +,
run -p Hi --draft self | draft 'self' is not known: use self:2bit, self:
run -p Hi --num-draft-tokens 3 | --num-draft-tokens needs --draft: name
run -p Hi --draft a/D --num-draft-tokens 0 | write --draft none instead
run -p Hi --kv-group-size 64 | --kv-group-size needs --kv-bits: add --kv-b
run -p Hi --kv-bits 5 | --kv-bits is 5: it must be 4 or 8
run -p Hi --max-kv-size 4 | --max-kv-size is 4: it must be a
run --prompts missing.txt | missing.txt: no such file: check the path
run --prompts folder | folder: is a folder: name a file in it
advise --draft a/D --prompts missing.txt | missing.txt: no such file: c
convert missing.gguf out | cannot open missing.gguf: No such file or di
convert folder out | cannot open folder: Is a directory; check the path
bench | name a recipe: a .toml file, or one of acceptance-gsm8k
bench prefix --set batch=0 | recipe prefix: sweep.batch is 0
bench prefix --compare a b | --compare takes two folders
bench acceptance-gsm8k | prompts.source is missing: give it
bench missing.toml | missing.toml: no such file: check the path
bench acceptance-quick --set batch=[1, 8] | unexpected extra argument (8]): put the valu
bench --compare folder folder | folder holds no results: there is no raw
report missing | there is no folder missing: check the path
cache list missing | there is no folder missing
run --prompts empty.txt | empty.txt: no prompts in it
run --prompts latin1.txt | latin1.txt:2: not UTF-8 text (byte 0xe9)
run --prompts bad.jsonl | bad.jsonl:2: not JSON
run --prompts keys.jsonl | keys.jsonl:1: expected one object per line
run --prompts turns.jsonl | turns.jsonl:1: "turns": expected a list of
run --prompts mixed.txt | mixed.txt:2: a JSON line in a file that began a
run | standard input: no prompts in it
run --prompts words.jsonl | not {'of max_tokens or': 'a top_p of it'}
run -p Hi --draft no-such | no model at no-such: give a folder, a .gguf
run -p Hi --draft no-such.gguf | no-such.gguf: there is no such file: check
run -p Hi --draft ./nope | at ./nope: there is no such folder: check the
run -p Hi --draft ngram+/no/pe | at /no/pe: there is no such folder: chec
run -p Hi --target ~/nope | at ~/nope: there is no such folder: check the
run -p Hi --draft Non | hub id (owner/name); did you mean none?
run -p Hi --draft ngrm | ; did you mean ngram?
run -p Hi --draft layer:0-3 | ; did you mean layers:0-3?
run -p Hi --draft smollm2-head | did you mean smollm2-135m-head?
run -p Hi --draft smollm2-135m-instruct | mean smollm2-135m-head?
bench acceptance-quik | did you mean acceptance-quick?
run -p Hi --target SmolLM2-135M | ; did you mean SmolLM2-135M-Instruct?
run -p Hi --target self:4bit | self:4bit is a draft, made from a target
advise --draft none --prompts good.txt | no draft to advise on: name one
estimate --target no-such --context 9 | no model at no-such: give a folder
run -p Hi --output folder | cannot be written: Is a directory: name another file
run -p Hi --json-schema {bad | {bad: there is no such file: write it into a file
run -p Hi --json-schema no.json | no.json: there is no such file: check the path
run -p Hi --json-schema folder | folder: Is a directory: name a file of
run -p Hi --json-schema bad.toml | : give one JSON object
run --prompts /proc/self/mem | cannot be read: Input/output error: name a file
run --prompts /dev/null | it is not a plain file: name a file of text
run -p Hi --image /proc/self/mem | Input/output error: name an image
run -p Hi --image folder | Is a directory: name an image
serve --models bad.toml --replicas 2 | : leave --replicas and --tensor-parallel out
run -p Hi --draft layers:9-3 | 9-3 ends before it begins: write 3-9
bench bad.toml | bad.toml cannot be read: not TOML
bench bad.toml | : name a recipe in TOML
bench /proc/self/mem | Input/output error: name a recipe in TOML
report damaged | this version (not JSON
report damaged | : run the recipe again, into another folder
serve --models no.toml | no such file: name a TOML file with a table [models.NAME]
serve --models bad.toml | : name a TOML file with a table [models.NAME]
serve --models folder | Is a directory: name a TOML file
serve --models /proc/self/mem | Input/output error: name a TOML file
run -p Hi --output no/out.jsonl | there is no folder no: create it first
run --prompts good.txt --output good.txt | --output is the file of --prompts
convert | Missing argument 'FILE.gguf'. (see: specdec convert --help)
convert model.gguf | Missing argument 'OUT_DIR'
convert model.gguf out --bits 5 | '5' is not one of '4', '8', '16'
run -p Hi --adapter-path= | --adapter-path is empty: name a folder
run -p Hi --draft-adapter-path=x | --draft-adapter-path needs --draft
run -p Hi --chat-template-config=x | --chat-template-config: not JSON
run -p Hi --chat-template-config=[] | --chat-template-config: it is [], not an obj
run -p Hi --chat-template=none.jinja | none.jinja: no such file: check the path
run -p Hi --ignore-chat-template --prefill-response=x | --prefill-response needs
run -p Hi --ignore-chat-template --chat-template=x | --chat-template has no effect
run -p Hi --xtc-probability 0.5 | --xtc-probability needs a temperature above 0
run -p Hi --temp 1 --xtc-threshold 0.3 | --xtc-threshold needs --xtc-probability
run -p Hi --temp 1 --verification block | --verification needs a draft (--draft)
run -p Hi --draft a/d --verification coupled | --verification needs --temp above 0
run -p Hi --top-logprobs 2 | --top-logprobs needs --output
run -p Hi --prompt-logprobs 0 | --prompt-logprobs needs --output
run -p Hi --output-format openai | --output-format needs --output: name a file
run -p Hi --logit-bias 5 | '5' is not of the form ID=BIAS, as in 1234=-5
run -p Hi --logit-bias x=1 | 'x=1' is not of the form ID=BIAS
run -p Hi --draft ngram+slef:4bit | did you mean self:4bit?
run -p Hi --draft none --num-draft-tokens 3 | no effect with --draft none: leave one
run -p a --resume | --resume needs --output
run --prompts good.txt --output o --ray-workers 2 | without --ray
run -p Hi --prefix-cache= | --prefix-cache is empty: name a folder
run -p Hi --prefix-cache good.txt | must be the path of a folder
run -p Hi --prefix-cache-size 1GB | --prefix-cache-size needs --prefix-cache
run -p Hi --prefix-cache-memory much | 'much' is not a size
cache list good.txt | is a file: give the folder that --prefix-cache
cache verify missing | there is no folder
cache clear missing | there is no folder
verify --prompts good.txt --draft self:5bit | draft 'self:5bit' is not known
verify --prompts good.txt --seed 2 | --seed needs --temp
verify --prompts good.txt --draft a/D --temp 1 --draws 99 | --draws needs --verif
verify --prompts good.txt --kv-group-size 32 | --kv-group-size needs --kv-bits
verify --prompts good.txt --json no/all.json | there is no folder no
verify --prompts good.txt --json good.txt | --json is the file of --prompts
verify --prompts good.txt --temp 1e9 | --temp is 1000000000.0
verify --prompts good.txt --draft no-such | no model at no-such: give a folder
estimate --target a/x --context 1 | '--context': 1 is not between 2
estimate --target a/x --context 8q | '8q' is not a number of tokens: write it as
estimate --target= --context 9 | --target is empty: name a model
estimate --target a/x --context 9 --draft self | 'self' is not
estimate --target a/x --context 9 --memory-limit apples | 'apples' is not a size
estimate --target a/x --context 9 --num-draft-tokens 2 | needs --draft
estimate --target a/x --context 9 --kv-group-size 32 | needs --kv-bits
estimate --target a/x --context 9 --batch 50000000 | is not a whole number from 1 to
distill --out o --minutes 1 --tokens 5 | exclude each other
distill --out o --rounds 3 | --rounds needs --holdout
distill --out o --block-size 4 | --block-size needs --kind block
distill --out o --kind x | 'x' is not one of 'layers', 'block'
serve --port 70000 | 70000
serve --target no/such --max-tokens 9 --max-output-tokens 5 | --max-tokens is 9
serve --chat-template-config [] | --chat-template-config
serve --target no/such --host 999.1.1.1 | : name an address of this machine, such as
serve --max-body much | much
serve --api-key= | an API key is empty: name a key
"""


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("mistake", MISTAKES.splitlines())
def test_mistakes(specdec: Specdec, mistake: str) -> None:
    line, _, message = mistake.partition(" | ")
    assert message in specdec.refuses(*line.split())
    assert Path("good.txt").read_text() == "Hi\n"
    assert not Path("o").exists()


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
    specdec: Specdec, error: SpecdecError, code: int
) -> None:
    specdec.decoder.raises = error
    result = specdec("run", "-p", "Hi")
    assert result.exit_code == code
    assert result.stderr == f"specdec: error: {error}\n"


def test_unexpected_errors_are_one_line_with_a_way_to_see_more(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    specdec.decoder.raises = RuntimeError("first line\nsecond line")
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
def test_a_device_that_is_full(specdec: Specdec, error: Exception) -> None:
    """Whatever MLX calls it, the line names the way out."""
    specdec.decoder.raises = error
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
def test_mlx_without_a_backend(specdec: Specdec, error: ImportError) -> None:
    specdec.decoder.raises = error
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

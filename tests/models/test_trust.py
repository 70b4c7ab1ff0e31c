"""Python code in a model's folder runs where the user trusts it, and nowhere else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec import SpecDecoder
from specdec.cli import main
from specdec.errors import UnsupportedModelError
from specdec.models import load, load_draft
from specdec.models.draft_folder import CARD, FORMAT
from specdec.models.model_outline import check_tokenizers, outline, outline_draft

from .folders import write_folder

Evil = Callable[[Path], None]


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def mark(folder: Path) -> str:
    """Python code that leaves a trace."""
    return f"open({str(folder / 'ran')!r}, 'w').close()\n"


def in_the_tokenizer(folder: Path) -> None:
    code = "from transformers import PreTrainedTokenizerFast as Fast\n"
    code += "class Evil(Fast): pass\n"
    (folder / "evil.py").write_text(mark(folder) + code)
    change(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "evil.Evil"]},
        tokenizer_class="Evil",
    )


def in_the_model(folder: Path) -> None:
    code = "from mlx_lm.models.llama import Model, ModelArgs\n"
    (folder / "evil.py").write_text(mark(folder) + code)
    change(folder / "config.json", model_file="evil.py")


RECIPE = """
target = "./M"
[prompts]
source = "file:P"
[sweep]
batch = [1]
[run]
max_tokens = 2
repeat = 1
"""

EVILS = pytest.mark.parametrize("evil", [in_the_tokenizer, in_the_model])


@pytest.fixture(autouse=True)
def _nobody_at_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who asks on standard input is answered yes; modules are cached in the test."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n1\n" * 9))
    module = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(module, str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@EVILS
def test_python_refuses(evil: Evil, tmp_path: Path) -> None:
    """A call that passes no answer on: transformers asks, and takes a yes."""
    write_folder(tmp_path / "target")
    write_folder(tmp_path / "m")
    evil(tmp_path / "m")
    target, name = load(tmp_path / "target"), str(tmp_path / "m")
    calls: list[Callable[[], object]] = [
        lambda: load(name),
        lambda: load_draft(name, target),
        lambda: SpecDecoder.from_pretrained(name),
        lambda: SpecDecoder.from_pretrained(str(tmp_path / "target"), name),
        lambda: SpecDecoder(target, drafter=name),
        lambda: check_tokenizers(outline(tmp_path / "target"), outline(name)),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError) as caught:
            call()
        assert "add --trust-remote-code (trust_remote_code=True)" in str(caught.value)
    assert not (tmp_path / "m" / "ran").exists()


@EVILS
def test_python_allows(evil: Evil, tmp_path: Path) -> None:
    """The option reaches the target, the draft, and what is looked at before."""
    write_folder(tmp_path / "m")
    evil(tmp_path / "m")
    name = str(tmp_path / "m")
    decoder = SpecDecoder.from_pretrained(name, name, trust_remote_code=True)
    assert (tmp_path / "m" / "ran").exists()
    assert decoder.generate([[1, 2]])[0].token_ids
    found = outline(name, trust_remote_code=True)
    check_tokenizers(
        found,
        outline_draft(name, found, trust_remote_code=True),
        trust_remote_code=True,
    )


def test_a_draft_of_layers_alone(tmp_path: Path) -> None:
    """Such a folder is opened in another way."""
    write_folder(tmp_path / "target")
    write_folder(tmp_path / "m")
    in_the_model(tmp_path / "m")
    card = {"format": FORMAT, "embedding": "target"}
    (tmp_path / "m" / CARD).write_text(json.dumps(card))
    target, name = load(tmp_path / "target"), str(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        load_draft(name, target)
    with pytest.raises(UnsupportedModelError, match="--trust-remote-code"):
        outline_draft(name, outline(tmp_path / "target"))
    assert not (tmp_path / "m" / "ran").exists()
    load_draft(name, target, trust_remote_code=True)
    assert (tmp_path / "m" / "ran").exists()


@pytest.mark.parametrize(
    ("evil", "command"),
    [
        (in_the_model, "run --target M --prompt a --max-tokens 2"),
        (in_the_tokenizer, "run --target M --prompt a --max-tokens 2"),
        (in_the_tokenizer, "run --target T --draft M --prompt a --max-tokens 2"),
        (in_the_model, "verify -q --target M --prompts P --max-tokens 2"),
        (in_the_tokenizer, "advise -q --target T --draft M --prompts P --max-tokens 2"),
        (in_the_model, "estimate --target T --draft M --context 8"),
        (
            in_the_tokenizer,
            "distill --target M --out OUT --layers 1 --tokens 256 --data-tokens 64",
        ),
        (in_the_model, "bench R --out OUT"),
    ],
)
def test_commands(
    command: str, evil: Evil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that loads a model refuses in one line, and has the option."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "T")
    write_folder(tmp_path / "M")
    evil(tmp_path / "M")
    Path("P").write_text("a b c\n")
    Path("R.toml").write_text(RECIPE)
    words = [w + ".toml" if w == "R" else w for w in command.split()]
    words = [f"./{w}" if w in ("T", "M") else w for w in words]
    result = CliRunner().invoke(main, words, input="y\n1\n")
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert "add --trust-remote-code" in result.stderr
    assert not Path("M", "ran").exists()
    result = CliRunner().invoke(main, [*words, "--trust-remote-code"])
    assert "trust-remote-code" not in result.stderr
    assert Path("M", "ran").exists()

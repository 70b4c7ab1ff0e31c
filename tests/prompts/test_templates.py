"""Chat templates are rendered as transformers does, in bounded time and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec.errors import PromptError
from specdec.models import LoadedModel
from specdec.models.tokenizer import ExactTokenizerWrapper
from specdec.prompts import encode, templates
from specdec.prompts.templates import render_chat
from specdec.utils import child

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a\u2028b {{ 1 }} \U0001f600", "name": None},
]


def wrapped(template: str | dict[str, str]) -> Any:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, "a"))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    return ExactTokenizerWrapper(fast)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}\n{% endfor %}",
        "{% if add_generation_prompt %}{{ enable_thinking }}{% endif %}{{ tools }}",
        "{{ messages[0].content }}{{ strftime_now('%Y') }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.first %}{% continue %}{% endif %}!{% endfor %}",
    ],
)
def test_what_transformers_renders(template: str) -> None:
    """A variable or an extension that the other process does not have."""
    tokenizer = wrapped(template)
    expected = tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert render_chat(tokenizer, MESSAGES) == expected


def test_templates_by_name() -> None:
    """A tokenizer may have several: the one named default is meant."""
    tokenizer = wrapped({"default": "one", "tool_use": "two"})
    assert render_chat(tokenizer, MESSAGES) == "one"


@pytest.mark.real
def test_a_real_template(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    expected = tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert render_chat(tokenizer, MESSAGES) == expected


def test_what_renders_in_python_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in a template's place takes arguments of its own."""
    tokenizer = wrapped("template")
    tokenizer.apply_chat_template = lambda *_, **__: "function"
    assert render_chat(tokenizer, MESSAGES) == "function"

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "method"

    own = Own(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    own.chat_template = "template"
    assert render_chat(ExactTokenizerWrapper(own), MESSAGES) == "method"


BOMBS = {
    "one long text": "{{ 'a' * 10**10 }}",
    "a text that doubles": (
        "{% set n = namespace(s='a') %}"
        "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "a wide field": "{{ '%10000000000d' % 1 }}",
    "a long list": "{{ ([0] * 10**10) | length }}",
}


@pytest.fixture(scope="module")
def _unhurried() -> Iterator[None]:
    """A busy machine takes its time until the memory is full."""
    templates._CHILD.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "SECONDS", 100)
        yield
    templates._CHILD.close()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_unhurried")
@pytest.mark.parametrize("template", BOMBS.values(), ids=list(BOMBS))
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS bounds no address space")
def test_memory_is_bounded(template: str) -> None:
    """``{{ 'a' * 10**10 }}`` took 10 GB, of the process that decodes."""
    with pytest.raises(PromptError, match="it takes too much memory") as caught:
        encode(wrapped(template), "a")
    assert "\n" not in str(caught.value)
    # The next template is rendered.
    assert render_chat(wrapped("text"), MESSAGES) == "text"


LOOPS = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "one long operation": "{{ (7 ** 99999999) % 10 }}",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("template", LOOPS.values(), ids=list(LOOPS))
def test_time_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, within one operation too, and the next template is rendered."""
    templates._CHILD.close()
    monkeypatch.setattr(templates, "SECONDS", 1)
    with pytest.raises(PromptError, match="it takes longer than 1 second"):
        encode(wrapped(template), "a")
    assert render_chat(wrapped("text"), MESSAGES) == "text"
    templates._CHILD.close()  # the next one has its time again


def test_a_template_that_refuses() -> None:
    """Its own words arrive."""
    tokenizer = wrapped("{{ raise_exception('no system turn') }}")
    with pytest.raises(PromptError, match="refuses these messages: no system turn"):
        encode(tokenizer, "a")
    with pytest.raises(PromptError, match="refuses these messages"):
        encode(wrapped("{% for %}"), "a")


def test_a_child_that_was_ended() -> None:
    """By the system, for want of memory, between two prompts: neither fails."""
    assert render_chat(wrapped("text"), MESSAGES) == "text"
    process = templates._CHILD._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert render_chat(wrapped("text"), MESSAGES) == "text"


def test_a_child_that_ends_while_it_is_asked() -> None:
    """The prompt of that moment failed, with advice to use another model."""
    tokenizer = wrapped("text")
    assert render_chat(tokenizer, MESSAGES) == "text"
    process = templates._CHILD._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    late = threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL))
    late.start()
    assert render_chat(tokenizer, MESSAGES) == "text"
    late.join()


def test_a_child_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without end for a process that hangs, and for long lines."""
    long = b"a" * 300_000 + b"\n"
    for program, line, answer in (
        ("cat", long, long),
        ("sleep 9", b"a\n", None),
        ("sleep 9", long, None),
        ("true", long, b""),
    ):
        pipe = subprocess.PIPE
        with subprocess.Popen(program.split(), stdin=pipe, stdout=pipe, bufsize=0) as p:
            found = child.exchange(p, line, 20 if answer is not None else 0.2)
            assert found == answer
            p.kill()
    # It is replaced.
    answers = iter([None])
    exchange = child.exchange
    monkeypatch.setattr(
        child, "exchange", lambda *a: next(answers, True) and exchange(*a)
    )
    assert render_chat(wrapped("text"), MESSAGES) == "text"


def test_the_folder_in_which_a_child_was_started_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports ask for the current folder: the child ended, and the next prompt with it.

    A new child would answer for it: this one has to.
    """
    templates._CHILD.close()
    folder = tmp_path / "soon gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    templates.start()
    first = templates._CHILD._process
    folder.rmdir()
    monkeypatch.chdir(tmp_path)
    assert render_chat(wrapped("text"), MESSAGES) == "text"
    assert templates._CHILD._process is first


def test_nothing_of_the_current_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child is started in the folder that the user is in, a model's perhaps."""
    for name in ("transformers", "json", "specdec"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    templates._CHILD.close()
    monkeypatch.chdir(tmp_path)
    assert render_chat(wrapped("text"), MESSAGES) == "text"
    assert not (tmp_path / "ran").exists()


def test_the_child_ends_with_its_parent() -> None:
    """A process that is left over, or a warning at the exit."""
    program = (
        "from tests.prompts.test_templates import MESSAGES, wrapped\n"
        "from specdec.prompts import templates\n"
        "templates.render_chat(wrapped('text'), MESSAGES)\n"
        "print(templates._CHILD._process.pid)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert "Warning" not in done.stderr

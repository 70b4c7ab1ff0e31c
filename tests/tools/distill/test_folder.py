"""A draft's folder and its checkpoints: old or new, whole, or refused in one line."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.errors import ModelError
from specdec.models import load, load_draft
from specdec.models.draft_folder import FORMAT, read_card
from specdec.tools.distill import checkpoint
from specdec.tools.distill.checkpoint import BEFORE, NAME, Progress
from specdec.tools.distill.corpus import FORMAT as CORPUS_FORMAT
from specdec.tools.distill.corpus import Corpus, Document
from specdec.tools.distill.job import Distillation
from specdec.tools.distill.storage import (
    read_arrays,
    write_arrays,
    write_file,
    write_model,
)
from specdec.utils.files import is_temporary

from .harness import longer, options, quietly, same, write_target

#: Calls of the operating system by which files change.
CALLS = ("open", "fsync", "replace", "unlink")
OLD, NEW = (
    {
        "distill.json": json.dumps({"format": FORMAT, "n": n}).encode(),
        "model.safetensors": bytes([n]) * 5000,
        "README.md": bytes([n]),
        "sub/tokenizer.json": bytes([n]) * 10,
        "config.json": bytes([n]) * 20,
    }
    for n in (1, 2)
)


def killed_at(call: int, work: Callable[[], None]) -> bool:
    """Do ``work`` in a child that dies in place of its n-th call; whether it did."""
    child = os.fork()
    if child == 0:
        left = call

        def counted(function: Any) -> Any:
            def inner(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*arguments, **named)

            return inner

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not is_temporary(path.name)
    }


def test_a_kill_at_any_call_leaves_one_draft_or_none(tmp_path: Path) -> None:
    """Weights of one draft beside the configuration of another would be loaded."""
    seen = []
    for call in range(100):
        folder = tmp_path / str(call)
        write_model(folder, OLD)

        def replace(folder: Path = folder) -> None:
            write_model(folder, NEW)

        if not killed_at(call, replace):
            break
        names = contents(folder)
        seen.append({repr(OLD): "old", repr(NEW): "new"}.get(repr(_as(names)), "none"))
        if seen[-1] == "none":
            assert "config.json" not in names
            with pytest.raises(ModelError, match=r"half written.*again, with --resume"):
                read_card(folder)
        write_model(folder, NEW)
        assert contents(folder) == NEW
    assert contents(folder) == NEW
    # First the old one, then none, then the new one.
    assert sorted(seen, key=["old", "none", "new"].index) == seen
    assert set(seen) == {"old", "none", "new"}
    assert min(seen.count("old"), seen.count("none")) > len(NEW)


def _as(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: files[name] for name in OLD if name in files}


def test_a_half_written_draft_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    for layers_only in (True, False):
        out = tmp_path / f"out-{layers_only}"
        wanted = options(target, out, layers_only=layers_only)
        Distillation(longer(wanted, 300), quietly).run()
        loaded = load(str(target))
        load_draft(str(out), loaded)
        (out / "config.json").unlink()
        with pytest.raises(ModelError, match="half written") as caught:
            load_draft(str(out), loaded)
        assert "\n" not in str(caught.value)


# -- checkpoints -------------------------------------------------------------

TREES: tuple[Any, Any] = (
    {"layers": [{"w": mx.ones((2, 3))}], "norm": mx.zeros(4)},
    {"states": [{"step": mx.array(3, mx.uint64)}]},
)
IDENTITY = {"target": "t", "layers": [0, 3]}


def save(folder: Path, step: int) -> None:
    parameters, optimizer = TREES
    checkpoint.save(
        folder,
        parameters=parameters | {"norm": mx.full(4, float(step))},
        optimizer=optimizer,
        progress=Progress(step, 10 * step, 0.5, []),
        identity=IDENTITY,
    )


def read(folder: Path, **changes: Any) -> tuple[int, list[str]]:
    """The step gone on from, and what was said."""
    said: list[str] = []
    standard: dict[str, Any] = {"like": TREES, "say": said.append}
    state = checkpoint.load(folder, IDENTITY, **(standard | changes))
    assert state is not None
    parameters, optimizer, progress = state
    assert same(parameters, TREES[0] | {"norm": mx.full(4, float(progress.step))})
    assert same(optimizer, TREES[1])
    return progress.step, said


def damages() -> dict[str, Callable[[Path], None]]:
    def header(path: Path, old: bytes, new: bytes) -> None:
        data = path.read_bytes()
        assert data.count(old) == 1
        assert len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    def without(path: Path, key: str) -> None:
        arrays, meta = read_arrays(path)
        meta.pop(key)
        meta["digest"] = checkpoint._digest(
            arrays, {k: v for k, v in meta.items() if k != "digest"}
        )
        write_arrays(path, arrays, meta)

    def bit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    return {
        "nothing": lambda p: p.write_bytes(b"") and None,
        "cut short": lambda p: p.write_bytes(p.read_bytes()[:-5]) and None,
        "header alone": lambda p: p.write_bytes(p.read_bytes()[:90]) and None,
        "a bit": bit,
        "another format": lambda p: header(
            p, b"distill checkpoint", b"another checkpoint"
        ),
        "progress": lambda p: header(p, b'\\"tokens\\"', b'\\"tokons\\"'),
        "no identity": lambda p: without(p, "identity"),
        "no progress": lambda p: without(p, "progress"),
    }


@pytest.mark.parametrize("damage", damages().values(), ids=damages())
def test_a_damaged_checkpoint(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The one before is taken; where there is none, one line says what to do."""
    save(tmp_path, 1)
    damage(tmp_path / NAME)
    with pytest.raises(ModelError, match=r"is damaged \(it .*leave --resume out") as e:
        read(tmp_path)
    assert "\n" not in str(e.value)
    save(tmp_path, 2)  # what is there is kept as the one before, damaged or not
    assert read(tmp_path) == (2, [])
    save(tmp_path, 3)
    damage(tmp_path / NAME)
    step, (line,) = read(tmp_path)
    assert step == 2
    assert "is damaged (it " in line
    assert line.endswith("going on from the one before it")
    damage(tmp_path / BEFORE)
    with pytest.raises(ModelError, match="leave --resume out"):
        read(tmp_path)


def test_a_checkpoint_of_other_shapes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    other = ({"layers": [{"w": mx.ones((3, 2))}], "norm": mx.zeros(4)}, TREES[1])
    with pytest.raises(ModelError, match="of another version"):
        read(tmp_path, like=other)
    fewer: tuple[Any, Any] = (TREES[0], {"states": []})
    with pytest.raises(ModelError, match="of another version"):
        read(tmp_path, like=fewer)


def test_a_kill_at_any_call_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Between two names there is none but the one before: it is taken, silently."""
    assert not checkpoint.exists(tmp_path)
    save(tmp_path, 1)
    save(tmp_path, 2)
    old, data = (tmp_path / NAME).read_bytes(), (tmp_path / BEFORE).read_bytes()
    seen = []
    for call in range(40):
        folder = tmp_path / str(call)
        write_file(folder / NAME, old)

        def replace(folder: Path = folder) -> None:
            write_file(folder / NAME, data, before=folder / BEFORE)

        if not killed_at(call, replace):
            break
        step, said = read(folder)
        assert not said
        seen.append((step, (folder / NAME).exists()))
    assert (2, False) in seen
    assert {step for step, _ in seen} == {1, 2}
    assert contents(folder) == {NAME: data, BEFORE: old}


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": "a text"},
        {"target": {"name": ["a list"]}},
        {"target": [1]},
        {"embedding": {}},
        {"else": "digits"},
        {"else": "deep"},
    ],
)
def test_a_card_of_other_kinds(wrong: dict[str, Any], tmp_path: Path) -> None:
    """A text in place of a table ends in an AttributeError when the draft is used."""
    text = json.dumps({"format": FORMAT, **wrong})
    text = text.replace('"deep"', "[" * 5000 + "]" * 5000)
    text = text.replace('"digits"', "9" * 5000)
    (tmp_path / "distill.json").write_text(text)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot be read .*: make the draft again"):
        read_card(tmp_path)


def test_data_of_another_shape(tmp_path: Path) -> None:
    """A file that was made by hand ends in an error of numpy's."""
    corpus = Corpus(tmp_path, "a")
    metadata = {"format": CORPUS_FORMAT, "target": "a"}
    tokens = mx.array([1, 2], mx.int32)
    odd: list[tuple[Any, str]] = [([[2, 1]], "1"), ([2], "1"), ([[2, 1, 0]], "x")]
    for documents, seconds in odd:
        arrays = {"tokens": tokens, "documents": mx.array(documents, mx.int32)}
        path = corpus._path("odd")
        write_arrays(path, arrays, metadata | {"seconds": seconds})
        with pytest.raises(ModelError, match="is not of specdec distill: remove it"):
            list(corpus.read("odd"))


def test_waves_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    documents = [Document((1, 2, 3), 1, 0), Document((4, 5), 1, 1)]
    corpus = Corpus(tmp_path, "a")
    corpus.add(corpus.next_wave, documents, 2.5)
    (tmp_path / f".{'a' * 32}.specdec-tmp").write_bytes(b"half")
    again = Corpus(tmp_path, "a")
    assert again.waves == ["wave-00000"]
    assert (again.num_tokens, again.seconds) == (5, 2.5)
    assert list(again.documents(again.waves)) == documents
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ModelError, match="is about code problems questions: name"):
        Corpus(tmp_path, "a", ["code"])
    about_code = Corpus(tmp_path / "other", "a", ["code"])
    about_code.add(about_code.next_wave, documents)
    assert Corpus(tmp_path / "other", "a", ["code"]).waves == again.waves
    with pytest.raises(ModelError, match="is about code: name the same --topic"):
        Corpus(tmp_path / "other", "a")

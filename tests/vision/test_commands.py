"""Images on the command line: ``run --image``, messages in files, and ``/image``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import PIL.Image
import pytest
from click.testing import CliRunner, Result

from specdec.cli import main
from tests.models.folders import write_folder

from .folders import random_image, write_vision_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    write_vision_folder(path / "model", "mistral3")
    PIL.Image.fromarray(random_image(60, 40).pixels).save(path / "a.png")
    return path


def command(folder: Path, *arguments: str, typed: str | None = None) -> Result:
    target = ("--target", str(folder / "model"), "--dtype", "float32")
    words = [arguments[0], *target, *arguments[1:]]
    return CliRunner().invoke(main, words, input=typed)


def test_one_image_in_an_option_and_in_a_file(folder: Path) -> None:
    """The image is lost on one of the ways, or stands behind the text."""
    image = str(folder / "a.png")
    words = ("run", "--prompt", "what", "-m", "8")
    shown = command(folder, *words, "--image", image)
    assert shown.exit_code == 0, shown.stderr
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what"}]
    file = folder / "p.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    of_file = command(folder, "run", "--prompts", str(file), "-m", "8")
    assert of_file.stdout == shown.stdout
    assert command(folder, *words).stdout != shown.stdout
    both = command(folder, "run", "--prompts", str(file), "--image", image)
    assert "put images into the messages" in both.stderr


def test_an_image_that_is_not_there(folder: Path) -> None:
    """A traceback, or a prompt that is decoded without its image."""
    shown = command(folder, "run", "--prompt", "what", "--image", str(folder / "b"))
    assert shown.exit_code == 2
    assert f"--image {folder / 'b'}: no such file: check the path" in shown.stderr
    (folder / "text.png").write_text("no image")
    damaged = str(folder / "text.png")
    shown = command(folder, "run", "--prompt", "what", "--image", damaged)
    assert shown.exit_code == 2
    assert f"--image {damaged}: " in shown.stderr


def test_a_chat_about_an_image(folder: Path) -> None:
    """The image goes with every message after it, or with none."""
    lines = [
        f"/image {folder / 'a.png'}",
        "what",
        f"/save {folder / 'chat.json'}",
        "/image nothing",
    ]
    words = ("chat", "-m", "8", "--load-vision")
    shown = command(folder, *words, typed="\n".join(lines) + "\n")
    assert "60 x 40, with the next message" in shown.stderr
    assert "nothing: no such file" in shown.stderr
    messages = json.loads((folder / "chat.json").read_text())["messages"]
    assert [part["type"] for part in messages[0]["content"]] == ["image", "text"]


@pytest.mark.parametrize("by", ["--image", "--prompts"])
def test_text_only_counts_more_than_missing_packages(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Packages are asked for that do not help."""
    for name in ("PIL", "PIL.Image", "PIL.ImageOps", "mlx_vlm"):
        monkeypatch.setitem(sys.modules, name, None)
    write_folder(tmp_path / "model")
    image = str(folder / "a.png")
    words = ["--prompt", "what", "--image", image]
    if by == "--prompts":
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "what"}]
        file = tmp_path / "p.jsonl"
        file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
        words = ["--prompts", str(file)]
    shown = command(tmp_path, "run", *words)
    assert shown.exit_code == 1
    assert "reads text only: leave images out" in shown.stderr
    assert "packages" not in shown.stderr
    shown = command(folder, "run", *words)
    assert shown.exit_code == 1
    assert "images need more packages: " in shown.stderr


def test_a_target_that_reads_text_only(tmp_path: Path) -> None:
    """The option is dropped without a word, or the line names no option."""
    write_folder(tmp_path)
    words = ["chat", "--target", str(tmp_path), "--load-vision"]
    shown = CliRunner().invoke(main, words, input="")
    assert shown.exit_code != 0
    assert "reads text only: leave --load-vision out" in shown.stderr


def test_a_message_that_is_refused_loses_no_image(folder: Path) -> None:
    """The next message goes without the image, and nobody is told."""
    lines = [
        f"/image {folder / 'a.png'}",
        "what " * 100_000,
        "what",
        f"/save {folder / 'chat.json'}",
    ]
    shown = command(folder, "chat", "-m", "8", typed="\n".join(lines) + "\n")
    assert "cannot be continued" in shown.stderr
    messages = json.loads((folder / "chat.json").read_text())["messages"]
    assert [part["type"] for part in messages[0]["content"]] == ["image", "text"]


def test_the_tower_is_in_the_plan(folder: Path) -> None:
    """A run with images passes its memory limit by the tower's weights."""
    shown = command(folder, "run", "--prompt", "what", "-m", "4")
    assert shown.exit_code == 0, shown.stderr
    shown = command(
        folder, "run", "--prompt", "what", "-m", "4", "--memory-limit", "60MB"
    )
    assert shown.exit_code != 0
    assert "memory" in shown.stderr


def test_estimate_counts_towers(folder: Path) -> None:
    """Only a run that has loaded the model knows of its tower."""
    target = ("--target", str(folder / "model"), "--json", "--context", "100")
    sizes = [
        json.loads(CliRunner().invoke(main, ["estimate", *target, *more]).stdout)
        for more in ([], ["--image-tokens", "50"])
    ]
    small, large = (size["moments"]["prefill"]["images"] for size in sizes)
    assert 0 < small < large

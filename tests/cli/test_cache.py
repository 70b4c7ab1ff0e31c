"""``specdec cache``, and the options of ``specdec run`` for it."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from specdec.config import EngineConfig
from specdec.prefix_cache.disk import DiskTier
from tests.prefix_cache.entries import SIZE, served, write_chain

from .conftest import FakeDecoder

Specdec = Callable[..., Result]
TOKENS = list(range(3 * SIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    disk = DiskTier(tmp_path / "cache", 1 << 30)
    write_chain(disk, TOKENS, model="a-model")
    disk.close()
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def damage(folder: Path) -> str:
    """Flip a bit of the first entry; its name."""
    name = served(DiskTier(folder, 1 << 30), TOKENS)[0].name
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    return name


def test_list(specdec: Specdec, folder: Path) -> None:
    result = specdec("cache", "list", str(folder))
    assert result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first.startswith("55555555  a-model: 3 entries, ")
    assert ", longest prefix 12 tokens, last used 2" in first
    assert last.startswith("3 entries, ")


def test_list_says_what_is_of_no_use(specdec: Specdec, folder: Path) -> None:
    (folder / f"block-{'0' * 32}-{'0' * 32}.safetensors").write_text("")
    result = specdec("cache", "list", str(folder))
    assert result.exit_code == 0
    assert "note: 1 entry of no use: specdec cache verify" in result.stderr


def test_verify(specdec: Specdec, folder: Path) -> None:
    result = specdec("cache", "verify", str(folder))
    assert result.exit_code == 0
    assert result.stdout.startswith("3 entries, ")
    assert result.stdout.endswith(": verified\n")


def test_verify_removes_damage_and_what_stands_on_it(
    specdec: Specdec, folder: Path
) -> None:
    name = damage(folder)
    result = specdec("cache", "verify", str(folder))
    assert result.exit_code == 1
    assert f"removed {name}: its contents do not match its name" in result.stdout
    assert result.stdout.count("what it stands on is not there") == 2
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_clear(specdec: Specdec, folder: Path) -> None:
    damage(folder)
    (folder / f".{'a' * 32}.specdec-tmp").write_text("half")
    result = specdec("cache", "clear", str(folder))
    assert result.exit_code == 0
    assert result.stdout == "removed 3 entries\n"
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.fixture
def not_writable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Entries whose names begin so cannot be removed."""

    def refuse(start: str) -> None:
        unlink = Path.unlink

        def refusing(path: Path, missing_ok: bool = False) -> None:
            if path.name.startswith(start):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", refusing)

    return refuse


def test_clear_says_what_is_still_there(
    specdec: Specdec, folder: Path, not_writable: Callable[[str], None]
) -> None:
    first, *_ = served(DiskTier(folder, 1 << 30), TOKENS)
    not_writable(first.name)
    result = specdec("cache", "clear", str(folder))
    assert result.exit_code == 1
    assert result.stdout == "removed 2 entries\n"
    assert f"{first.name} could not be removed from {folder}: Perm" in result.stderr
    assert (folder / first.name).exists()


@pytest.mark.parametrize("command", ["verify", "clear"])
def test_nothing_can_be_removed(
    command: str, specdec: Specdec, folder: Path, not_writable: Callable[[str], None]
) -> None:
    name = damage(folder)
    not_writable("block-")
    result = specdec("cache", command, str(folder))
    assert result.exit_code == 1
    if command == "clear":
        assert result.stdout == "removed 0 entries\n"
    else:
        assert f"damaged {name}: its contents do not match" in result.stdout
        assert "removed" not in result.stdout
    assert " and 2 more could not be removed from " in result.stderr
    assert result.stderr.endswith(": Permission denied\n")
    assert result.stderr.count("\n") == 1
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("command", ["list", "verify", "clear"])
def test_no_such_folder(command: str, specdec: Specdec, tmp_path: Path) -> None:
    result = specdec("cache", command, str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "there is no folder" in result.stderr
    file = tmp_path / "entry"
    file.write_text("")
    result = specdec("cache", command, str(file))
    assert result.exit_code == 2
    assert f"{file} is a file: give the folder that --prefix-cache" in result.stderr


def test_it_answers_without_mlx(folder: Path) -> None:
    code = (
        "import sys; from specdec.cli import main;"
        f"main(['cache', 'list', {str(folder)!r}], standalone_mode=False);"
        "print({'mlx', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")


def test_options_reach_the_decoder(
    specdec: Specdec, decoder: FakeDecoder, tmp_path: Path
) -> None:
    options = f"--prefix-cache {tmp_path} --prefix-cache-size 2GB"
    result = specdec("run", "-p", "Hi", *options.split(), "--prefix-cache-memory=3MiB")
    assert result.exit_code == 0
    assert decoder.calls["config"] == EngineConfig(
        prefix_cache=str(tmp_path),
        prefix_cache_size=2 * 10**9,
        prefix_cache_memory=3 * 2**20,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefix-cache", ""], "--prefix-cache is empty: name a folder"),
        (["--prefix-cache", __file__], "must be the path of a folder"),
        (["--prefix-cache-size", "1GB"], "--prefix-cache-size needs --prefix-cache"),
        (["--prefix-cache-memory", "much"], "'much' is not a size"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], message: str, specdec: Specdec
) -> None:
    result = specdec("run", "-p", "Hi", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_summary_says_what_was_reused(
    specdec: Specdec, decoder: FakeDecoder
) -> None:
    decoder.stats.prefix_tokens = 8
    result = specdec("run", "-p", "Hi")
    assert "2 prompts, 10 tokens (8 from the prefix cache), 20.0" in result.stderr


@pytest.fixture
def no_handlers() -> Iterator[None]:
    logger = logging.getLogger("specdec")
    before, logger.handlers = logger.handlers, []
    yield
    logger.handlers = before


@pytest.mark.usefixtures("no_handlers")
def test_warnings_are_lines_like_the_errors(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch, decoder: FakeDecoder
) -> None:
    def warn(*_: object, **__: object) -> FakeDecoder:
        logging.getLogger("specdec.prefix_cache").warning(
            "prefix cache %s: full", "DIR"
        )
        return decoder

    monkeypatch.setattr(decoder, "from_pretrained", warn)
    result = specdec("run", "-p", "Hi")
    assert "specdec: warning: prefix cache DIR: full\n" in result.stderr

"""The disk tier: index, budget, damage, and folders that cannot be used."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from specdec.prefix_cache.audit import audit
from specdec.prefix_cache.disk import DiskTier, Job
from specdec.prefix_cache.files import DamagedError, read_header, read_verified
from specdec.utils import files

from .entries import (
    SIGNATURE,
    SIZE,
    names,
    payload_of,
    served,
    write_chain,
)

TOKENS = list(range(100, 100 + 5 * SIZE))
MANY = 1 << 30


def filled(folder: Path, tokens: list[int] = TOKENS, **options: Any) -> DiskTier:
    disk = DiskTier(folder, MANY)
    write_chain(disk, tokens, **options)
    disk.flush()
    return disk


def spans(disk: DiskTier, tokens: list[int] = TOKENS) -> list[tuple[int, int]]:
    return [(file.start, file.end) for file in served(disk, tokens)]


WHOLE = [(start, start + SIZE) for start in range(0, len(TOKENS), SIZE)]


def test_what_is_written_is_found_again(tmp_path: Path) -> None:
    disk = filled(tmp_path)
    for tier in (disk, DiskTier(tmp_path, MANY)):
        assert spans(tier) == WHOLE
        assert spans(tier, TOKENS[:6]) == WHOLE  # and what goes on after
        for file in served(tier, TOKENS):
            data = tier.read(file)
            assert data is not None
            assert data.endswith(payload_of(file.place))
            assert tier.path(file) == (SIGNATURE, *TOKENS[: file.end])
    assert len(names(tmp_path)) == 5


def test_prompts_share_files(tmp_path: Path) -> None:
    disk = filled(tmp_path)
    branch = [*TOKENS[: 3 * SIZE], 1, 2, 3]
    write_chain(disk, branch)
    disk.flush()
    assert len(names(tmp_path)) == 6
    assert spans(disk, branch)[:3] == WHOLE[:3]


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    """Each finds what the other writes, and misses what the other removes."""
    one, two = DiskTier(tmp_path, MANY), DiskTier(tmp_path, MANY)
    write_chain(one, TOKENS)
    one.flush()
    two.refresh()
    assert spans(two) == WHOLE
    write_chain(two, TOKENS)  # nothing to do
    two.flush()
    assert len(names(tmp_path)) == 5
    file = served(two, TOKENS)[-1]
    (tmp_path / file.name).unlink()
    two.refresh()
    assert spans(two) == WHOLE[:-1]


def test_the_same_entry_written_twice_is_kept_once(tmp_path: Path) -> None:
    """By two processes at once, with contents that need not be equal."""
    one, two = DiskTier(tmp_path, MANY), DiskTier(tmp_path, MANY)
    write_chain(one, TOKENS[:SIZE])
    write_chain(two, TOKENS[:SIZE], nbytes=80)
    one.flush()
    two.flush()
    one.refresh()
    assert len(names(tmp_path)) == 1
    assert len(served(DiskTier(tmp_path, MANY), TOKENS)) == 1


def test_the_least_recently_used_makes_place(tmp_path: Path) -> None:
    """Also where another run has used it; no entry loses what it stands on."""
    size = filled(tmp_path / "a", TOKENS[:SIZE]).nbytes
    folder = tmp_path / "b"
    disk = DiskTier(folder, MANY)
    chains = [[1000 * i + j for j in range(2 * SIZE)] for i in range(3)]
    for age, chain in enumerate(chains):
        places = write_chain(disk, chain)
        disk.flush()
        for file in served(disk, chain):
            assert file.place in places
            os.utime(folder / file.name, (age, age))
    os.utime(folder / served(disk, chains[0])[1].name)  # the first was used last
    small = DiskTier(folder, 4 * size + size // 2)
    assert [len(served(small, chain)) for chain in chains] == [2, 0, 2]
    write_chain(small, [7] * SIZE)
    small.flush()
    # Of the third the end goes, not what it stands on.
    assert [len(served(small, chain)) for chain in chains] == [2, 0, 1]
    assert sum(p.stat().st_size for p in folder.iterdir()) <= small.budget


def test_a_prefix_larger_than_the_budget_keeps_its_head(tmp_path: Path) -> None:
    size = filled(tmp_path / "a", TOKENS[:SIZE]).nbytes
    disk = DiskTier(tmp_path / "b", 3 * size + size // 2)
    long = list(range(40 * SIZE))
    for _ in range(2):
        write_chain(disk, long)
        disk.flush()
        assert spans(disk, long) == WHOLE[:3]
        assert len(names(tmp_path / "b")) == 3
    assert spans(DiskTier(tmp_path / "b", MANY), long) == WHOLE[:3]


@pytest.mark.parametrize("where", ["length", "header", "tokens", "contents", "end"])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_damage_is_found_removed_and_never_used(
    where: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any byte, any length; what stands on the damaged entry is not used either."""
    disk = filled(tmp_path)
    file = served(disk, TOKENS)[2]
    path = tmp_path / file.name
    data = bytearray(path.read_bytes())
    at = {
        "length": 0,
        "header": 9,
        "tokens": data.index(b"10"),
        "contents": len(data) - 30,
        "end": len(data) - 1,
    }[where]
    data[at] ^= 1
    damaged = data if how == "flipped" else data[:at]
    for known in (True, False):
        path.write_bytes(damaged)
        tier = disk if known else DiskTier(tmp_path, MANY)
        found = [f for f in served(tier, TOKENS) if f.place == file.place]
        assert all(tier.read(f) is None for f in found)
        assert file.place not in {f.place for f in served(tier, TOKENS)}
        assert not path.exists()
    assert caplog.text.count(f"{file.name} was removed") >= 2
    # The next one stores it again, and what stands on it.
    again = DiskTier(tmp_path, MANY)
    again.refresh()
    write_chain(again, TOKENS)
    again.flush()
    assert spans(again) == WHOLE


def test_every_byte_counts(tmp_path: Path) -> None:
    filled(tmp_path, TOKENS[:SIZE])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert read_verified(path) == whole
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            read_verified(path)


def test_foreign_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that bear the name of an entry go, others are none of our business."""
    disk = filled(tmp_path)
    data = (tmp_path / served(disk, TOKENS)[0].name).read_bytes()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "folder").mkdir()
    changed = {
        "version": data.replace(b'"version": "1"', b'"version": "2"'),
        "format": data.replace(b"specdec prefix", b"another prefix"),
        "json": b"\x05\0\0\0\0\0\0\0{}   ",
        "nothing": b"",
        "much": b"\xff" * 100,
    }
    for i, contents in enumerate(changed.values()):
        assert contents != data
        (tmp_path / f"block-{i:032}-{i:032}.safetensors").write_bytes(contents)
    again = DiskTier(tmp_path, MANY)
    assert spans(again) == WHOLE
    assert caplog.text.count("was removed") == len(changed)
    left = {"notes.txt", "model.safetensors", "folder"}
    assert set(names(tmp_path)) == left | {f.name for f in again.files}


def test_without_what_it_stands_on(tmp_path: Path) -> None:
    """An entry without its parent is not used, and goes once that is certain."""
    disk = filled(tmp_path)
    (tmp_path / served(disk, TOKENS)[1].name).unlink()
    again = DiskTier(tmp_path, MANY)
    assert spans(again) == WHOLE[:1]
    assert len(names(tmp_path)) == 4
    again.refresh()
    assert len(names(tmp_path)) == 1


def test_leftovers_go_but_not_what_is_being_written(tmp_path: Path) -> None:
    left = tmp_path / f".{'a' * 32}.specdec-tmp"
    left.write_bytes(b"half")
    with files._locked_temporary(tmp_path) as file:
        DiskTier(tmp_path, MANY)
        assert names(tmp_path) == [Path(file.name).name]
    DiskTier(tmp_path, MANY)
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_folder_that_cannot_be_written(
    call: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning; what was there is served, nothing half is left."""
    disk = filled(tmp_path, TOKENS[: 2 * SIZE])

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    if call == "open":
        monkeypatch.setattr(files, "_locked_temporary", fail)
    else:
        monkeypatch.setattr(os, call, fail)
    write_chain(disk, TOKENS)
    disk.flush()
    monkeypatch.undo()
    write_chain(disk, TOKENS)
    disk.close()
    assert caplog.text.count("cannot be written") == 1
    assert os.strerror(code) in caplog.text
    assert spans(disk) == WHOLE[:2]
    assert len(names(tmp_path)) == 2


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    disk = DiskTier(tmp_path / "file" / "cache", MANY)
    assert spans(disk) == []
    write_chain(disk, TOKENS)
    disk.close()
    assert not disk.takes("block", "0" * 32, None)
    (line,) = caplog.messages
    assert "cannot be made (Not a directory): nothing is stored there" in line


def test_a_file_removed_before_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = filled(tmp_path)
    file = served(disk, TOKENS)[1]
    (tmp_path / file.name).unlink()
    assert disk.read(file) is None
    assert f"{file.name} cannot be read" in caplog.text
    assert file not in served(disk, TOKENS)


def test_a_header_is_believed_only_where_its_hash_agrees(tmp_path: Path) -> None:
    """Other tokens under the name of a place are damage."""
    disk = filled(tmp_path, TOKENS[:SIZE])
    path = tmp_path / served(disk, TOKENS)[0].name
    data = path.read_bytes()
    path.write_bytes(data.replace(b"100 101", b"100 102"))
    with pytest.raises(DamagedError, match="place"):
        read_header(path)


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """Entries show tokens: those that older versions have left open are closed, too."""
    umask = os.umask(0o022)
    try:
        filled(tmp_path / "cache").close()
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
        assert modes(tmp_path / "cache") == {0o600}
        for path in (*(tmp_path / "cache").iterdir(), tmp_path / "cache"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        DiskTier(tmp_path / "cache", MANY)
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
        assert modes(tmp_path / "cache") == {0o600}
        # A folder of something else as well is not ours to close.
        (tmp_path / "cache" / "notes.txt").write_text("")
        (tmp_path / "cache").chmod(0o755)
        DiskTier(tmp_path / "cache", MANY)
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "cache" / "notes.txt").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(umask)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_budget_holds_when_the_tier_goes_first(tmp_path: Path) -> None:
    """Catches a thread that writes what is queued and removes nothing for it."""
    size = filled(tmp_path / "a", TOKENS[:SIZE]).nbytes
    disk = DiskTier(tmp_path / "b", 3 * size + size // 2)
    for i in range(14):  # fewer than the queue takes
        write_chain(disk, [50 + i] * SIZE)
    del disk
    gc.collect()
    assert 0 < size_of(tmp_path / "b") <= 3 * size + size // 2


def test_the_budget_holds_with_several_processes(tmp_path: Path) -> None:
    """Three write chains of their own; one may remove what another builds upon."""
    size = filled(tmp_path / "a", TOKENS[:SIZE]).nbytes
    folder, budget = tmp_path / "b", 6 * size
    for race in range(4):
        children = []
        for i in range(3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    disk = DiskTier(folder, budget)
                    for n in range(12):
                        start = 1000 * race + 100 * i + n % 3
                        write_chain(disk, range(start, start + (n + 1) * SIZE))
                    del disk
                    gc.collect()
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        assert 0 < size_of(folder) <= budget, race


def test_what_stands_on_nothing_counts(tmp_path: Path) -> None:
    """Entries that wait for their parent take room, and go with the next write."""
    disk = filled(tmp_path)
    first = served(disk, TOKENS)[0]
    budget = disk.nbytes - first.nbytes
    write_chain(disk, [6] * SIZE)
    disk.close()
    (tmp_path / first.name).unlink()
    small = DiskTier(tmp_path, budget)
    assert len(names(tmp_path)) == 4  # perhaps their parent is on its way
    assert size_of(tmp_path) <= budget
    write_chain(small, [7] * SIZE)
    small.flush()
    assert [file.start for file in small.files] == [0]
    assert len(names(tmp_path)) == 1


def test_an_entry_larger_than_the_budget_drives_no_other_out(tmp_path: Path) -> None:
    disk = filled(tmp_path)
    budget = disk.nbytes
    write_chain(disk, [7] * SIZE, nbytes=2 * budget)
    disk.close()
    again = DiskTier(tmp_path, budget)
    assert spans(again) == WHOLE
    assert len(names(tmp_path)) == 5


def test_after_a_failure_nothing_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither asked for, nor queued, nor remembered: memory stays as it was."""
    disk = filled(tmp_path, TOKENS[:SIZE])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    write_chain(disk, TOKENS)
    disk.flush()
    monkeypatch.undo()  # there is room again
    for n in range(100):
        place = f"{n:032}"
        assert not disk.takes("block", place, None)
        disk.write(Job("block", place, None, b"x" * 100))
        assert not disk.has("block", place)
    disk.flush()
    assert not disk._queued
    assert caplog.text.count("cannot be written") == 1
    assert spans(disk) == WHOLE[:1]


def test_what_cannot_be_removed_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a damaged entry that is read and warned of at every look-up."""
    disk = filled(tmp_path)
    path = tmp_path / served(disk, TOKENS)[-1].name
    path.write_bytes(path.read_bytes()[:-1])

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", fail)
    again = DiskTier(tmp_path, MANY)
    for _ in range(3):
        again.refresh()
        assert spans(again) == WHOLE[:-1]
    assert caplog.text.count(f"{path.name} is not used") == 1


def test_the_thread_ends_with_its_tier(tmp_path: Path) -> None:
    """What was queued is written; nothing keeps an abandoned tier alive."""
    disk = filled(tmp_path, TOKENS[:SIZE])
    write_chain(disk, TOKENS)
    del disk
    gc.collect()
    assert len(names(tmp_path)) == 5
    assert not any(t.name.startswith("specdec") for t in threading.enumerate())


@pytest.mark.timeout(60)
def test_entries_that_are_no_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening a FIFO waits for a writer; so would every run with that folder."""
    filled(tmp_path)
    os.mkfifo(tmp_path / f"block-{0:032}-{0:032}.safetensors")
    os.mkfifo(tmp_path / f".{0:032}.specdec-tmp")
    assert spans(DiskTier(tmp_path, MANY)) == WHOLE
    assert "it is not a plain file" in caplog.text
    damaged = audit(tmp_path, contents=True).damaged
    assert list(damaged.values()) == ["it cannot be read (it is not a plain file)"]

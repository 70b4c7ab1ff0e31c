"""What a process sets before MLX is imported: open files, and the devices it sees."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import EngineConfig
from specdec.server.config import ServerConfig
from specdec.utils import process

ROOT = Path(__file__).parents[2]

# Stands for MLX on a host with four GPUs. It keeps what CUDA would see.
FAKE_MLX = """\
import os

class DeviceType:
    gpu = 1

visible = os.environ.get("CUDA_VISIBLE_DEVICES")
with open(os.environ["SEEN"], "a") as file:
    print(visible, file=file)

def device_count(kind):
    return 4 if visible is None else len([x for x in visible.split(",") if x])
"""
API = ["-c", "from specdec import SpecDecoder"]
MEET = ["-c", "from specdec import Ranks; import mlx.core"]
LIMITS = "; import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [(500, 1000, "1000 1000"), (300, 5000, "2048 5000"), (4500, 5000, "4500 5000")],
)
def test_open_files_are_not_limited(soft: int, hard: int, after: str) -> None:
    """mlx-lm's import fails below 4096 open files, and lowers the limit elsewhere."""
    program = [sys.executable, "-c", f"{API[1]}, EngineConfig{LIMITS}"]
    done = limited(soft, hard, program)
    assert done.stdout.split("\n")[0] == after, done.stderr


def test_commands_run_with_few_open_files(tmp_path: Path) -> None:
    """In a container, every command would end in an unexpected ValueError."""
    target = str(tmp_path / "none")
    program = [sys.executable, "-m", "specdec", "estimate", "--target", target]
    done = limited(500, 1000, program)
    assert "unexpected" not in done.stderr
    assert "none" in done.stderr


def limited(
    soft: int, hard: int, program: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run a program that may open so many files, and may not raise its hard limit."""
    unprivileged = [
        "setpriv",
        "--bounding-set=-sys_resource",
        "--inh-caps=-sys_resource",
    ]
    as_root = unprivileged if os.geteuid() == 0 else []
    return subprocess.run(
        [
            *("bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "bash"),
            *as_root,
            *program,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("program", "visible", "seen"),
    [
        *((API, visible, seen) for visible, seen in
          ((None, "0"), ("1", "1"), ("", ""), ("GPU-8a,GPU-9b", "GPU-8a"))),
        *((program, "2,3", "2") for program in
          (API, MEET, ["-m", "specdec", "estimate", "--target", "."],
           ["-c", "import specdec.ray, mlx.core"])),
    ],
)  # fmt: skip
def test_a_process_sees_one_device(
    program: list[str], visible: str | None, seen: str, tmp_path: Path
) -> None:
    """With two visible GPUs, an array that a list is made into fails in a thread."""
    assert run_with_gpus(program, visible, tmp_path)[1] == [seen]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("GPU-8a", ["GPU-8a"]),
        ("", []),
    ],
)
def test_ranks_and_replicas_share_the_user_s_devices(
    visible: str | None, names: list[str], tmp_path: Path
) -> None:
    """Hiding devices from this process would hide them from those that it starts."""
    program = (
        "from specdec.utils.process import cuda_devices, prepare_process\n"
        "prepare_process()\n"
        "print(cuda_devices())"
    )
    output, _ = run_with_gpus(["-c", program], visible, tmp_path)
    assert output.strip() == str(names)


def test_a_program_that_has_mlx_keeps_its_devices(tmp_path: Path) -> None:
    """Changing the variable then has no effect on MLX, and one on other libraries."""
    program = (
        "import os, mlx.core\n"
        "from specdec.utils.process import prepare_process\n"
        "prepare_process()\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    assert run_with_gpus(["-c", program], "1,2", tmp_path) == ("1,2\n", ["1,2"])


KERNELS = (
    "import os\n"
    "from specdec.utils.process import prepare_process\n"
    "prepare_process()\n"
    "import mlx.core\n"
    "print(os.environ['MLX_PTX_CACHE_DIR'])"
)


def test_compiled_kernels_are_kept_in_a_folder_of_the_user_s(tmp_path: Path) -> None:
    """MLX's own is one that another user may have made, with code of theirs."""
    output, _ = run_with_gpus(["-c", KERNELS], None, tmp_path)
    folder = Path(output.strip())
    assert folder.parent == tmp_path / "cache" / "specdec"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_user_s_folder_of_kernels_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/some/where")
    assert run_with_gpus(["-c", KERNELS], None, tmp_path)[0] == "/some/where\n"


def test_a_folder_of_the_starting_process_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica on another kind of GPU would load code for the first one."""
    other = tmp_path / "cache" / "specdec" / "cuda-of-another-gpu"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(other))
    output, _ = run_with_gpus(["-c", KERNELS], None, tmp_path)
    folder = Path(output.strip())
    assert folder.parent == other.parent
    assert folder.is_dir()
    assert folder != other


def test_processes_at_the_same_time_share_no_kernel_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX writes in place: replicas or ranks that start together read half a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = process._unshared_folder("cuda")
    (first / "whole.ptx").write_bytes(b"code")
    (first / "whole.txt").write_bytes(b"names")
    for name in ("whole.ptx", "whole.txt"):
        os.utime(first / name, (1, 1))
    (first / "begun.ptx").write_bytes(b"co")
    (first / "new.ptx").write_bytes(b"co")
    (first / "new.txt").write_bytes(b"na")
    second = process._unshared_folder("cuda")
    assert second != first
    assert sorted(each.name for each in second.iterdir()) == [
        "lock", "whole.ptx", "whole.txt"]  # fmt: skip
    assert (second / "whole.ptx").read_bytes() == b"code"
    program = (
        "from specdec.utils import process\nprint(process._unshared_folder('cuda'))"
    )

    def taken() -> Path:
        command = [sys.executable, "-c", program]
        return Path(subprocess.check_output(command, text=True).strip())

    third = taken()
    assert third not in (first, second)
    before = sorted(third.iterdir())
    (third / "begun.ptx").write_bytes(b"co")
    (third / "begun.txt.1.2.part").write_bytes(b"na")
    (third / "tmp1234").mkdir()
    (third / "tmp1234" / "begun.ptx").write_bytes(b"co")
    assert taken() == third  # its process has ended
    assert sorted(third.iterdir()) == before


def test_a_copy_of_kernels_that_ends_early_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk half a list of names stays, and every later process reads it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = process._unshared_folder("cuda")
    for name in ("whole.ptx", "whole.txt"):
        (first / name).write_bytes(b"names and code")
        os.utime(first / name, (1, 1))

    def half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:3])
        if source.suffix == ".txt":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half)
        with pytest.raises(OSError, match="No space"):
            process._unshared_folder("cuda")
    (second,) = (each for each in first.parent.iterdir() if each != first)
    assert not (second / "whole.txt").exists()


def test_files_of_the_driver_may_be_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In such a container, importing specdec would end with an error."""
    glob = Path.glob

    def hidden(path: Path, pattern: str) -> Iterator[Path]:
        if path.is_relative_to("/proc"):
            raise PermissionError(13, "Permission denied", str(path))
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", hidden)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(process._kernel_folder()).parent == tmp_path / "specdec"


def test_no_kernel_is_read_that_others_could_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and MLX neither reads nor writes anywhere."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    output, _ = run_with_gpus(["-c", KERNELS], None, tmp_path)
    assert not Path(output.strip()).exists()
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        Path(output.strip()).mkdir(parents=True, exist_ok=True)
    (line,) = capfd.readouterr().err.splitlines()
    assert "compiled kernels are not kept" in line
    assert str(tmp_path / "cache") in line


def test_a_replica_is_prepared_before_mlx() -> None:
    """Models of ``specdec serve --models`` would multiply with the reference BLAS."""
    program = (
        "import sys\n"
        "from specdec.cli import replica\n"
        "replica.prepare_process = lambda: sys.exit('mlx.core' in sys.modules)\n"
        "replica.main()"
    )
    config = {"config": EngineConfig()}
    greeting = pickle.dumps(("", config, ServerConfig(), True, 1, False))
    subprocess.run([sys.executable, "-c", program], input=greeting, check=True)


@pytest.mark.parametrize(
    ("system", "before", "after"),
    [("darwin", None, "0"), ("darwin", "1", "1"), ("linux", None, None)],
)
def test_metal_multiplies_float32_as_float32(
    system: str, before: str | None, after: str | None
) -> None:
    """MLX reads the variable once; an M5 would round float32 factors to TF32."""
    program = (
        "import os, sys\n"
        f"sys.platform = {system!r}\n"
        "from specdec.utils import process\n"
        "process.load_blas = lambda: None\n"
        "process.prepare_process()\n"
        "print(os.environ.get('MLX_ENABLE_TF32'), 'mlx.core' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MLX_ENABLE_TF32"}
    environment |= {"PYTHONPATH": str(ROOT)}
    if before is not None:
        environment["MLX_ENABLE_TF32"] = before
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, check=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(after), "False"]


def run_with_gpus(
    program: list[str], visible: str | None, folder: Path
) -> tuple[str, list[str]]:
    """Run a program with four fake GPUs; its output, and what MLX saw, per import."""
    package = folder / "mlx"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text(FAKE_MLX)
    seen = folder / "seen"
    own = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    own |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "SEEN": str(seen)}
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    if visible is not None:
        own["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, *program],
        env=own,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        check=False,
    )
    sys.stderr.write(done.stderr.decode())
    return done.stdout.decode(), seen.read_text().splitlines()

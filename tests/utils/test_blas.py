"""OpenBLAS takes the place of the reference BLAS, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.utils import blas

pytestmark = pytest.mark.skipif(
    blas.load_blas()[0] != "OpenBLAS", reason="MLX has no OpenBLAS here"
)

#: Products of all kinds that MLX passes to BLAS, beside numpy's; prints their digest.
PRODUCTS = """
import hashlib, sys
import numpy as np
{first}
import mlx.core as mx
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for dtype, rtol in ((np.float32, 1e-4), (np.complex64, 1e-4)):
    for a, b, turned in (
        ((1, 300), (300, 70), False), ((5, 300), (70, 300), True),
        ((3, 5, 64), (64, 33), False), ((2, 4, 9, 16), (2, 4, 11, 16), True),
    ):
        x, y = (rng.standard_normal((2, *shape)) for shape in (a, b))
        x, y = (z[0].astype(dtype) + (1j * z[1] if dtype == np.complex64 else 0)
                for z in (x, y))
        x, y = x.astype(dtype), y.astype(dtype)
        found = mx.array(x) @ (mx.array(y).swapaxes(-1, -2) if turned else mx.array(y))
        expected = x @ (y.swapaxes(-1, -2) if turned else y)
        np.testing.assert_allclose(np.array(found), expected, rtol=rtol, atol=1e-4)
        digest.update(np.array(found).tobytes())
print(*fast, digest.hexdigest(), sep='|')
"""
LOAD = "from specdec.utils.blas import load_blas; fast = *load_blas(),"


def products(first: str = LOAD, **environment: str | None) -> list[str]:
    """What a new process says: its BLAS, the way out, and the products' digest.

    Args:
        environment: variables; ``None`` takes one away.
    """
    own = {
        **os.environ,
        "LD_PRELOAD": None,
        "PYTHONPATH": os.pathsep.join(sys.path),
        # The last bits depend on how many threads add up, which the load decides.
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS.format(first=first)],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in (own | environment).items() if v is not None},
    )
    assert not done.stderr, done.stderr
    return done.stdout.strip().split("|")


@pytest.fixture(scope="module")
def reference() -> str:
    """The digest of the reference BLAS, whose sums have another order."""
    _, digest = products("fast = ('',)")
    return digest


def test_mlx_calls_it(tmp_path: Path, reference: str) -> None:
    """A shim that nothing calls, or that mixes arguments up."""
    blas, remedy, digest = products(XDG_CACHE_HOME=str(tmp_path))
    assert (blas, remedy) == ("OpenBLAS", "")
    assert digest != reference
    (shim,) = (tmp_path / "specdec").iterdir()
    assert shim.stat().st_mode & 0o077 == 0
    compiled = shim.stat().st_mtime_ns
    assert products(XDG_CACHE_HOME=str(tmp_path)) == [blas, "", digest]
    assert shim.stat().st_mtime_ns == compiled


@pytest.mark.parametrize(
    "first",
    [
        "from specdec import SpecDecoder",
        "from specdec.ray import SpecDecodeStage",
        "import specdec.ray.job",  # as Ray's workers do, to unpickle
        "import benchmarks.kernels",
    ],
)
def test_it_is_loaded_first(first: str, reference: str) -> None:
    """A way in that imports mlx before, and multiplies with the reference BLAS."""
    blas, remedy, digest = products(f"{first}; {LOAD}")
    assert (blas, remedy) == ("OpenBLAS", "")
    assert digest != reference


@pytest.mark.parametrize("spoilt", ["damaged", "others"])
def test_a_file_that_cannot_be_trusted_is_replaced(
    tmp_path: Path, reference: str, spoilt: str
) -> None:
    """It is damaged, or others could have written what would run here."""
    expected = products(XDG_CACHE_HOME=str(tmp_path))
    (shim,) = (tmp_path / "specdec").iterdir()
    good = shim.read_bytes()
    if spoilt == "damaged":
        shim.write_bytes(b"x")
    else:
        shim.chmod(0o777)
    assert products(XDG_CACHE_HOME=str(tmp_path)) == expected
    assert shim.read_bytes() == good
    assert shim.stat().st_mode & 0o077 == 0


def test_too_late(tmp_path: Path, reference: str) -> None:
    """MLX has bound its functions; a library would be loaded for nothing."""
    first = f"import mlx.core; {LOAD}"
    blas, remedy, digest = products(first, XDG_CACHE_HOME=str(tmp_path))
    assert (blas, digest) == ("reference BLAS", reference)
    assert "before mlx" in remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compiler", [None, "#!/bin/sh\nexit 1\n"])
def test_without_a_compiler(
    tmp_path: Path, reference: str, compiler: str | None
) -> None:
    """MLX runs as it is, and nothing is left."""
    if compiler is not None:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    home = tmp_path / "home"
    blas, remedy, digest = products(XDG_CACHE_HOME=str(home), PATH=str(tmp_path))
    assert (blas, digest) == ("reference BLAS", reference)
    assert "install g++" in remedy
    assert not list(home.glob("specdec/*"))


def test_without_the_package(tmp_path: Path, reference: str) -> None:
    first = f"sys.modules['scipy_openblas32'] = None; {LOAD}"
    blas, remedy, digest = products(first, XDG_CACHE_HOME=str(tmp_path))
    assert (blas, digest) == ("reference BLAS", reference)
    assert "[cpu]" in remedy


def test_nothing_can_be_kept(tmp_path: Path, reference: str) -> None:
    """A folder that is none; a user without a home, who had got a traceback."""
    (tmp_path / "file").touch()
    for home in (str(tmp_path / "file"), None):
        no_home = "import pathlib; pathlib.Path.home = lambda: 1 / 0"
        no_home = no_home.replace("1 / 0", "(_ for _ in ()).throw(RuntimeError())")
        first = f"{no_home}; {LOAD}" if home is None else LOAD
        blas, _, digest = products(first, XDG_CACHE_HOME=home)
        assert blas == "OpenBLAS"
        assert digest != reference


def test_what_was_preloaded_stays(tmp_path: Path) -> None:
    """The user's choice: another BLAS, or another build."""
    _, _, digest = products(XDG_CACHE_HOME=str(tmp_path / "a"))
    (shim,) = (tmp_path / "a" / "specdec").iterdir()
    found = products(XDG_CACHE_HOME=str(tmp_path / "b"), LD_PRELOAD=str(shim))
    assert found == ["preloaded BLAS", "", digest]
    assert not (tmp_path / "b").exists()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that this machine has 16 cores; the rest is given."""
    files: dict[str, str] = {}

    def read_text(path: Path, encoding: str) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    def pretend(usable: int = 16, load: str | None = None, quota: str = "") -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
        if load is not None:
            files["/proc/loadavg"] = load
        if quota:
            files["/sys/fs/cgroup/cpu.max"] = quota

    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(Path, "read_text", read_text)
    return pretend


@pytest.mark.parametrize(
    ("usable", "quota", "cores"),
    [
        (16, "", 16),
        (4, "", 4),
        (16, "max 100000\n", 16),
        (16, "250000 100000\n", 2),
        (16, "50000 100000\n", 1),
        (4, "800000 100000\n", 4),
    ],
)
def test_cores_of_a_container(
    machine: Callable[..., None], usable: int, quota: str, cores: int
) -> None:
    """A container with a quota of 2 of 64 cores, where 64 threads took turns."""
    machine(usable, quota=quota)
    assert blas.usable_cores() == blas.free_cores() == cores


@pytest.mark.parametrize(
    ("usable", "load", "free"),
    [
        (16, "0.00 0.00 0.00 1/99 7\n", 16),
        (16, "3.97 9.00 9.00 12/99 7\n", 13),
        (16, "12.0 9.00 9.00 1/99 7\n", 16),  # it has ended
        (16, "0.40 9.00 9.00 9/99 7\n", 16),  # it is about to end
        (16, "12.0 9.00 9.00 5/99 7\n", 12),
        (16, "99.0 9.00 9.00 99/99 7\n", 1),
        (4, "12.9 9.00 9.00 13/99 7\n", 4),  # on the cores of others
        (16, "12.0", 16),  # not what Linux writes
    ],
)
def test_threads_keep_off_busy_cores(
    machine: Callable[..., None], usable: int, load: str, free: int
) -> None:
    """With a thread on a busy core, tokens came at a tenth of the speed."""
    machine(usable, load)
    assert blas.free_cores() == free


THREADS = """
from specdec.utils.blas import free_cores, load_blas
{}
load_blas()
import ctypes
print(ctypes.CDLL(None).scipy_openblas_get_num_threads())
"""


@pytest.mark.parametrize(
    ("environment", "free", "threads"),
    [
        ({}, 1, "1"),
        ({}, 3, "3"),
        ({"OPENBLAS_NUM_THREADS": "2"}, 1, "2"),
        ({"OMP_NUM_THREADS": "2"}, 1, "2"),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}, 1, "2"),
    ],
)
def test_openblas_gets_the_free_cores(
    environment: dict[str, str], free: int, threads: str
) -> None:
    """A number that the user has set, and that is not kept."""
    if int(threads) > (os.cpu_count() or 1):
        pytest.skip("OpenBLAS starts no more threads than there are cores")
    unset = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    fake = f"import specdec.utils.blas as it; it.free_cores = lambda: {free}"
    done = subprocess.run(
        [sys.executable, "-c", THREADS.format(fake)],
        capture_output=True,
        text=True,
        check=True,
        env=unset | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )
    assert done.stdout.strip() == threads


def test_processes_share_the_cores(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas with all cores each are slower than one."""
    machine(8)
    assert blas.own_threads(2) == {"OPENBLAS_NUM_THREADS": "4"}
    assert blas.own_threads(100) == {"OPENBLAS_NUM_THREADS": "1"}
    machine(8, "10.0 9.00 9.00 11/99 7\n")
    assert blas.own_threads(2) == {"OPENBLAS_NUM_THREADS": "3"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert blas.own_threads(2) == {}

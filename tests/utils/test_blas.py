"""OpenBLAS takes the place of the reference BLAS, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
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
    own = {**os.environ, "LD_PRELOAD": None, "PYTHONPATH": os.pathsep.join(sys.path)}
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
    first = "from specdec import SpecDecoder; fast = ('', '')"
    assert products(first, XDG_CACHE_HOME=str(tmp_path)) == ["", "", digest]


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


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with all cores each are slower than one."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert blas.own_threads(2) == {"OPENBLAS_NUM_THREADS": "4"}
    assert blas.own_threads(100) == {"OPENBLAS_NUM_THREADS": "1"}
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert blas.own_threads(2) == {"OPENBLAS_NUM_THREADS": "3"}

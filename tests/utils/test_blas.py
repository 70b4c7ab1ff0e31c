"""OpenBLAS takes the place of the reference BLAS, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.utils import blas

pytestmark = pytest.mark.skipif(
    not blas._brings_reference(), reason="MLX does not bring the reference BLAS"
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
print(fast, digest.hexdigest())
"""
LOAD = "from specdec.utils.blas import load_blas; fast = load_blas()"


def products(first: str = LOAD, **environment: str) -> list[str]:
    """What a new process says: whether products are fast, and the products' digest."""
    own = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    own |= {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS.format(first=first)],
        capture_output=True,
        text=True,
        check=False,
        env=own,
    )
    assert not done.stderr, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def reference() -> str:
    """The digest of the reference BLAS, whose sums have another order."""
    fast, digest = products("fast = False")
    assert fast == "False"
    return digest


def test_mlx_calls_it(tmp_path: Path, reference: str) -> None:
    """A shim that nothing calls, or that mixes arguments up."""
    fast, digest = products(XDG_CACHE_HOME=str(tmp_path))
    assert fast == "True"
    assert digest != reference
    (shim,) = (tmp_path / "specdec").iterdir()
    compiled = shim.stat().st_mtime_ns
    assert products(XDG_CACHE_HOME=str(tmp_path)) == [fast, digest]
    assert shim.stat().st_mtime_ns == compiled
    first = "from specdec import SpecDecoder; fast = True"
    assert products(first, XDG_CACHE_HOME=str(tmp_path)) == [fast, digest]


def test_too_late(tmp_path: Path, reference: str) -> None:
    """MLX has bound its functions; a library would be loaded for nothing."""
    first = f"import mlx.core; {LOAD}"
    assert products(first, XDG_CACHE_HOME=str(tmp_path)) == ["False", reference]
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
    found = products(XDG_CACHE_HOME=str(home), PATH=str(tmp_path))
    assert found == ["False", reference]
    assert not list(home.glob("specdec/*"))


def test_without_the_package(tmp_path: Path, reference: str) -> None:
    first = f"sys.modules['scipy_openblas32'] = None; {LOAD}"
    assert products(first, XDG_CACHE_HOME=str(tmp_path)) == ["False", reference]


def test_a_folder_that_cannot_be_written(tmp_path: Path, reference: str) -> None:
    (tmp_path / "file").touch()
    found = products(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert found == ["False", reference]


def test_what_was_preloaded_stays(tmp_path: Path) -> None:
    """The user's choice: another BLAS, or another build."""
    products(XDG_CACHE_HOME=str(tmp_path / "a"))
    (shim,) = (tmp_path / "a" / "specdec").iterdir()
    fast, _ = products(XDG_CACHE_HOME=str(tmp_path / "b"), LD_PRELOAD=str(shim))
    assert fast == "True"
    assert not (tmp_path / "b").exists()

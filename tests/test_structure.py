"""The shape of the package: what may import what, and what it shows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import specdec
from specdec import errors

PACKAGE = Path(specdec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Arrows point down: a module, or a package, imports from lower lines only.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"distill"},
    {"bench", "certificate", "tuning"},
    {"decoder"},
    {"serving"},
    {"assembly", "session"},
    {"engine"},
    {"batch", "calibration"},
    {"drafting", "inflight", "limits", "pacing"},
    {"rounds"},
    {"drafters", "settling", "stepwise"},
    {"models", "verification"},
    {"prefix"},
    {
        "cache",
        "observer",
        "preflight",
        "results",
        "sampling",
        "scheduler",
        "stats",
    },
    {"sequence"},
    {"lengths", "params", "text"},
    {"backend", "config", "draft_spec", "kernels", "memory", "prompts"},
    {"checks", "data_files", "files", "names", "templates"},
    {"errors"},
    {"printable"},
)
LEVEL = {name: -line for line, names in enumerate(LAYERS) for name in names}

WITHOUT_MLX = {
    "checks",
    "config",
    "data_files",
    "draft_spec",
    "errors",
    "files",
    "lengths",
    "memory",
    "names",
    "pacing",
    "params",
    "preflight",
    "printable",
    "prompts",
    "results",
    "scheduler",
    "sequence",
    "stats",
    "text",
}

MAX_LINES = 400


def name_of(file: Path) -> str:
    """``cache/batch.py`` belongs to ``cache``, ``engine.py`` to ``engine``."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[str]:
    """Absolute names of the modules, and of what is taken from them."""
    inside = ["specdec", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def ids(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_arrows_point_down(file: Path) -> None:
    name = name_of(file)
    if name == "__init__":  # the public surface
        return
    assert name in LEVEL, f"{name} is new: give it a line in LAYERS"
    for target in imported(file):
        if not target.startswith("specdec."):
            continue
        other = target.split(".")[1]
        assert other in LEVEL, f"{ids(file)} takes {other} from specdec itself"
        assert other == name or LEVEL[other] < LEVEL[name], (
            f"{ids(file)} imports {target}: {name} is not above {other}"
        )


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_what_needs_no_mlx_does_not_import_it(file: Path) -> None:
    if name_of(file) in WITHOUT_MLX:
        roots = {name.partition(".")[0] for name in imported(file)}
        assert not roots & {"mlx", "mlx_lm", "transformers", "numpy"}


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_modules_fit_in_the_head(file: Path) -> None:
    assert len(file.read_text("utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_mlx_lm_is_used_as_it_is(file: Path) -> None:
    """None of its private names, and nothing of it is replaced."""
    tree = ast.parse(file.read_text("utf-8"))
    theirs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "mlx_lm":
                    theirs.add(alias.asname or "mlx_lm")
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").partition(".")[0] == "mlx_lm"
        ):
            theirs.update(alias.asname or alias.name for alias in node.names)
    for name in imported(file):
        parts = name.split(".")
        assert parts[0] != "mlx_lm" or not any(p.startswith("_") for p in parts), name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            assert root_of(node) not in theirs, f"line {node.lineno} patches mlx-lm"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
        ):
            assert root_of(node.args[0]) not in theirs, f"line {node.lineno}"


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_the_public_surface_is_all() -> None:
    """Every name is there, and nothing of specdec's own stands beside them."""
    assert sorted(set(specdec.__all__)) == sorted(specdec.__all__)
    for name in specdec.__all__:
        getattr(specdec, name)
    shown = {
        name
        for name, value in vars(specdec).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "").startswith("specdec")
    }
    assert shown <= set(specdec.__all__)


def test_every_error_is_public_and_a_specdec_error() -> None:
    tree = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert tree.keys() <= set(specdec.__all__)
    assert all(issubclass(value, errors.SpecdecError) for value in tree.values())
    assert all(name in (errors.__doc__ or "") for name in tree)


def test_importing_specdec_is_cheap() -> None:
    """The decoder, and mlx and transformers with it, come when asked for."""
    code = "import sys, specdec; print({'mlx', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"

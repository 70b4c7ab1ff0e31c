"""The shape of the package: what may import what, and what it shows."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import specdec
from specdec import errors

PACKAGE = Path(specdec.__file__).parent

# A package, or a module at the root, imports from lower lines only.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("ray", "server", "tools"),
    ("decoder",),
    ("engine",),
    ("spec_decode", "memory"),
    ("models",),
    ("prefix_cache",),
    ("cache", "sampling"),
    ("outputs",),
    ("request", "metal"),
    ("config", "cuda", "prompts", "sampling_params"),
    ("parallel",),
    ("backend", "grammar", "model_names"),
    ("errors", "utils"),
)
LEVEL = {name: -line for line, names in enumerate(LAYERS) for name in names}

# What is asked before a model is loaded, or thinks while one runs, waits for neither.
WITHOUT_MLX = (
    "config",
    "engine/admission",
    "engine/scheduler",
    "errors",
    "grammar",
    "model_names",
    "outputs",
    "prompts/encode",
    "prompts/files",
    "request",
    "sampling_params",
    "spec_decode/draft_length.py",
    "spec_decode/round_times.py",
    "utils",
)

MOST_ATTRIBUTES = 15
# Classes that have more: the list shrinks.
LARGE = {"cli/progress.Progress", "engine/engine.Engine"}


@cache
def trees() -> dict[Path, ast.Module]:
    """All modules of the package, by their paths in it."""
    return {
        file.relative_to(PACKAGE): ast.parse(file.read_text("utf-8"))
        for file in sorted(PACKAGE.rglob("*.py"))
    }


def names_imported(path: Path) -> Iterator[str]:
    """Absolute names of the modules, and of what is taken from them."""
    inside = ["specdec", *path.parts[:-1]]
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_arrows_point_down() -> None:
    """A circle, or a package that reaches above itself, is how a house decays."""
    wrong = []
    for path in trees():
        name = path.parts[0].removesuffix(".py")
        if name == "__init__":  # the public surface
            continue
        assert name in LEVEL, f"{name} is new: give it a line in LAYERS"
        for target in names_imported(path):
            other = target.split(".")[1] if target.startswith("specdec.") else name
            assert other in LEVEL, f"{path} takes {other} from specdec itself"
            if other != name and LEVEL[other] >= LEVEL[name]:
                # Messages of errors are made printable, and utils raises errors.
                if (name, other) in (("errors", "utils"), ("utils", "errors")):
                    continue
                wrong.append(f"{path} imports {target}")
    assert not wrong


def test_libraries_are_used_as_they_are() -> None:
    """mlx-lm is not patched, its private names are not used, mlx is a choice."""
    wrong = []
    for path, tree in trees().items():
        imports = list(names_imported(path))
        if path.as_posix().startswith(WITHOUT_MLX):
            roots = {name.partition(".")[0] for name in imports}
            if imported := roots & {"mlx", "mlx_lm", "transformers", "numpy"}:
                wrong.append(f"{path} imports {imported}")
        wrong += [
            f"{path} imports {name}"
            for name in imports
            if name.startswith("mlx_lm.") and "._" in name
        ]
        theirs = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if (isinstance(node, ast.Import) and "mlx_lm" in node.names[0].name)
            or (isinstance(node, ast.ImportFrom) and "mlx_lm" in (node.module or ""))
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                target: ast.expr = node
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("setattr", "delattr")
            ):
                target = node.args[0]
            else:
                continue
            while isinstance(target, ast.Attribute):
                target = target.value
            if isinstance(target, ast.Name) and target.id in theirs:
                wrong.append(f"{path}:{node.lineno} patches mlx-lm")
    assert not wrong


def test_classes_can_be_kept_in_mind() -> None:
    """What a class holds, by what its methods assign; records are not counted."""
    large = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and isinstance(each.value, ast.Name)
                    and each.value.id == "self"
                }
                if len(names) > MOST_ATTRIBUTES:
                    large[f"{path.with_suffix('').as_posix()}.{node.name}"] = len(names)
    assert large.keys() == LARGE, large


def test_the_public_surface() -> None:
    """Every public name is there, every error is one, and importing loads no mlx."""
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
    raised = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert raised.keys() <= set(specdec.__all__)
    assert all(issubclass(value, errors.SpecdecError) for value in raised.values())
    assert all(name in (errors.__doc__ or "") for name in raised)
    code = "import sys, specdec; print({'mlx', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"

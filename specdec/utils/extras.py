"""How to install what is missing, in the way in which specdec was installed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

#: The compiler that MLX calls on Linux.
INSTALL_GXX = "Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++"
DISTRIBUTION = "mlx-specdec"


def install(extra: str) -> str:
    """How to install the packages of an extra, as the end of a message."""
    if in_checkout():
        return f"{installer()} '.[{extra}]' in a checkout"
    return f"{installer()} '{DISTRIBUTION}[{extra}]'"


def install_backend() -> str:
    """How to install MLX's backend, as the end of a message."""
    return f"{install('cpu')}, with cuda12 or cuda13 for an NVIDIA GPU"


def installer() -> str:
    """The command that adds packages to this environment."""
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():  # made by ``uv tool install``
        return f"uv pip install --python {sys.prefix}"
    try:
        by = metadata.distribution(DISTRIBUTION).read_text("INSTALLER") or ""
    except metadata.PackageNotFoundError:
        by = ""
    return "uv pip install" if by.strip() == "uv" else "pip install"


def in_checkout() -> bool:
    """Whether this package is a working tree, not an installed copy."""
    return (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()


def is_backend(error: ImportError) -> bool:
    """Whether an import failed for want of MLX, or of its backend."""
    return (error.name or "").partition(".")[0] == "mlx" or "libmlx" in str(error)

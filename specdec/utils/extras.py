"""How to install what is missing, in the way in which specdec was installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .data_files import parse_json

#: The compiler that MLX calls on Linux.
INSTALL_GXX = "Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++"
DISTRIBUTION = "mlx-specdec"


def install(extra: str) -> str:
    """How to install the packages of an extra, as the end of a message."""
    if in_checkout():
        return f"{installer()} '.[{extra}]' in a checkout"
    if source := _source():
        return f"{installer()} '{source}[{extra}]'"
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


def _source() -> str | None:
    """The checkout or the wheel that specdec was installed from, if it is there."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlsplit(str(parse_json(text or "")["url"]))
        path = Path(unquote(url.path))
        there = path.is_file() or (path / "pyproject.toml").is_file()
    except (metadata.PackageNotFoundError, LookupError, OSError, TypeError, ValueError):
        return None  # also where the file is damaged
    return str(path) if url.scheme == "file" and there else None


@contextmanager
def naming_backend() -> Iterator[None]:
    """Within the context, an import without MLX says how to install it.

    Raises:
        ImportError: it fails.
    """
    try:
        yield
    except ImportError as error:
        if not is_backend(error):
            raise
        raise ImportError(
            f"MLX has no backend here: {install_backend()} ({error})", name=error.name
        ) from None


def is_backend(error: ImportError) -> bool:
    """Whether an import failed for want of MLX, or of its backend."""
    return (error.name or "").partition(".")[0] == "mlx" or "libmlx" in str(error)

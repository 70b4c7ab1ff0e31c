"""How to install what messages report as missing."""

from __future__ import annotations

#: The compiler that MLX calls on Linux.
INSTALL_GXX = "Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++"


def install(extra: str) -> str:
    """How to install the packages of an extra, as the end of a message."""
    return f"pip install '.[{extra}]' in a checkout"

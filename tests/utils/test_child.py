"""Processes that run a module of the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

from specdec.utils.child import module_process


def test_a_folder_has_nothing_to_run(tmp_path: Path) -> None:
    """A model's folder with a module in it, from which a server or its ranks start."""
    for name in ("click", "specdec", "json"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    program, environment = module_process("specdec", ["--version"])
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stderr

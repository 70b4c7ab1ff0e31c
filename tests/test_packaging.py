"""What is installed: bounds of dependencies, and the versions that are locked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specdec.backend import TESTED

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
]
LOCK = (ROOT / "requirements.lock").read_text("utf-8").splitlines()
PINS = [Requirement(line) for line in LOCK if not line.startswith("#")]

#: Numbered by date, so that no number announces what breaks.
BY_DATE = {"furo", "packaging"}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_dependency_is_bounded_and_locked(requirement: Requirement) -> None:
    """A major release arrived unasked; or the lock was not made anew."""
    operators = {one.operator for one in requirement.specifier}
    assert operators & {"<", "<=", "==", "~="} or requirement.name in BY_DATE
    name = canonicalize_name(requirement.name)
    pins = [pin for pin in PINS if canonicalize_name(pin.name) == name]
    assert pins, f"{name} is not in requirements.lock"
    for pin in pins:
        (pinned,) = pin.specifier
        assert pinned.version in requirement.specifier, str(pin)


def test_the_tested_versions_are_the_locked_ones() -> None:
    """An error that recommends versions which nobody tested."""
    locked = {pin.name: str(pin.specifier) for pin in PINS}
    assert {f"=={v}" for v in TESTED.values()} == {locked[name] for name in TESTED}


def test_the_lock_is_names_and_versions() -> None:
    """It works with any index: no address, no option, no path stands in it."""
    for line in LOCK:
        assert re.match(r"#|[\w.-]+==[\w.!+-]+( ; |$)", line), line
    assert "://" not in "".join(LOCK)
    assert "--constraint" in (ROOT / "scripts" / "lib.sh").read_text("utf-8")


def test_the_page_names_what_the_demo_installs() -> None:
    """An extra that a user gets without having read of it."""
    script = (ROOT / "scripts" / "lib.sh").read_text("utf-8")
    match = re.search(r'extras="\$\{backend:\+\$backend,\}([\w,]+)', script)
    assert match is not None
    backends = re.findall(r"echo (cpu|cuda\d+)", script)
    assert len(backends) == 3
    page = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    beginning = page.partition("## Install")[0]
    for extra in (*match[1].split(","), *backends):
        assert f"`{extra}`" in beginning, extra


def test_messages_name_extras_that_there_are() -> None:
    """A package by itself comes in a version that may not fit; an extra is bounded."""
    # A package that is installed without its dependencies, and one that has prompts.
    alone = {"model_names.py", "prompts.py", "extras.py"}
    for path in sorted((ROOT / "specdec").rglob("*.py")):
        text = path.read_text("utf-8")
        for extra in re.findall(r"\binstall\(['\"](\w+)", text):
            assert extra in PROJECT["optional-dependencies"], path
        if path.name not in alone:
            hints = re.findall(r"pip install .*", text)
            assert all("'.[" in hint for hint in hints), path


def test_workflows_name_actions_by_their_commit() -> None:
    """A tag of an action was moved to other code, which then runs with our rights."""
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert workflows
    for path in workflows:
        text = path.read_text("utf-8")
        assert "\npermissions:\n" in text, path
        for action in re.findall(r"uses: *(.*)", text):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), action


def test_workflows_run_scripts_that_exist() -> None:
    """A check that only a workflow knows cannot be run before a change is pushed."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text("utf-8")
        for script in re.findall(r"run: *((?:scripts|\.ci)/\w+)", text):
            assert (ROOT / script).is_file(), f"{path}: {script}"

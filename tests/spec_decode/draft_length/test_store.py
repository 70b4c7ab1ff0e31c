"""Costs on disk: what was saved comes back, what is broken is done without."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from specdec.spec_decode.draft_length import (
    Acceptance,
    CostStore,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)

VERSION, MOST_ENTRIES = 9, 64

FORWARDS = Forwards(
    8, {1: 0.1, 2: 0.15}, 0.02, 0.03, context=2048, longer={1: 0.2, 2: 0.3}
)


def costs() -> RoundCosts:
    return RoundCosts(ForwardCosts([FORWARDS]), {(8, 2): 0.25})


def test_saved_costs_come_back(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "new" / "costs.json")
    store.save("a", costs(), Acceptance([0.5, 0.25]))
    found, acceptance = CostStore(store.path).load("a", new_shape=0.5)
    assert acceptance.chances == [0.5, 0.25]
    # It is where another process begins, and weighs little.
    acceptance.observe(RoundTiming(8, 1, [(1, 1)] * 8))
    assert acceptance.survival(1)[0] > 0.7
    assert found.forwards.measured == [FORWARDS]
    assert {key: each.excess for key, each in found.timed.items()} == {(8, 2): 0.25}
    assert found.new_shape == 0.5
    assert [p.name for p in store.path.parent.iterdir()] == ["costs.json"]
    assert CostStore(store.path).load("b")[0].forwards.measured == []


def test_a_file_keeps_the_newest_pairs(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs.json")
    for i in range(MOST_ENTRIES + 3):
        store.save(str(i), costs(), Acceptance())
    assert store.load("2")[0].forwards.measured == []
    assert store.load("3")[0].forwards.measured == [FORWARDS]


ENTRY = {
    "forwards": [
        {
            "rows": 8,
            "verify": [[1, 0.1]],
            "draft_step": 0.1,
            "draft_once": 0,
            "busy": False,
            "context": 2048,
            "longer": [[1, 0.1]],
        }
    ],
    "excess": [[8, 2, 0.1]],
    "acceptance": [0.5],
}


def kept(entry: dict[str, Any]) -> str:
    """A file with one entry."""
    return json.dumps({"version": VERSION, "costs": {"a": entry}})


def test_an_entry_is_read(tmp_path: Path) -> None:
    """Files below are refused for other reasons than their faults."""
    (tmp_path / "costs.json").write_text(kept(ENTRY), "utf-8")
    assert CostStore(tmp_path / "costs.json").load("a")[0].forwards.measured


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"costs"',
        json.dumps({"version": VERSION}),
        json.dumps({"version": VERSION, "costs": []}),
        json.dumps({"version": VERSION, "costs": {"a": None}}),
        json.dumps({"version": VERSION - 1, "costs": {"a": ENTRY}}),
        kept({**ENTRY, "forwards": [{}]}),
        kept({**ENTRY, "excess": [[1]]}),
        kept({**ENTRY, "excess": [[8, 2, 1e9]]}),
        kept({**ENTRY, "acceptance": [1.5]}),
        kept(ENTRY).replace("0.1]", "-1]"),
        kept(ENTRY).replace("0.1]", "NaN]"),
        kept(ENTRY).replace("[[1,", "[[2,", 1),
        kept(ENTRY).replace('"longer": [[1,', '"longer": [[2,'),
        kept(ENTRY).replace("2048", "-1"),
    ],
)
def test_a_broken_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, "utf-8")
    store = CostStore(path)
    assert store.load("a")[0].forwards.measured == []
    store.save("a", costs(), Acceptance([0.5, 0.25]))
    assert store.load("a")[0].forwards.measured == [FORWARDS]


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = CostStore(tmp_path / "file" / "costs.json")
    store.save("a", costs(), Acceptance([0.5, 0.25]))
    assert store.load("a")[0].forwards.measured == []


def test_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CostStore().path == tmp_path / "specdec" / "costs.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CostStore().path == tmp_path / ".cache" / "specdec" / "costs.json"


def test_what_is_saved_beside_rounds_is_on_the_disk_when_the_process_ends(
    tmp_path: Path,
) -> None:
    """Threads that replace the file at once lose no entry of each other."""
    program = f"""if True:
        from tests.spec_decode.draft_length.test_store import *
        for i in range(20):
            CostStore(Path({str(tmp_path / "costs.json")!r})).save(
                str(i), costs(), Acceptance(), False
            )
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    store = CostStore(tmp_path / "costs.json")
    assert all(store.load(str(i))[0].forwards.measured for i in range(20))


def test_costs_are_saved_where_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = CostStore(tmp_path / "costs.json")
    store.save("a", costs(), Acceptance(), False)
    assert store.load("a")[0].forwards.measured

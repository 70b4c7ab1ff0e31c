"""``--draft auto``: what it takes, what it passes over, and what it asks."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import huggingface_hub
import mlx.core as mx
import mlx_lm.utils
import pytest
from click.testing import CliRunner

from specdec import ConfigError, EngineConfig, SpecDecoder
from specdec.cli import main
from specdec.engine import auto_draft
from specdec.engine.auto_draft import choose
from specdec.model_names import is_hub_id
from specdec.models import load, pairs
from specdec.models.pairs import (
    KnownTarget,
    PublishedDraft,
    described,
    known_target,
    plain_name,
    registry,
)
from tests.models.draft_heads import published
from tests.models.draft_heads.mtp_checkpoints import less_one, write_target
from tests.models.folders import write_folder
from tests.models.gguf_files import VOCAB, write_model
from tests.models.test_adapters import write_adapter

SHAPE: dict[str, str | int] = {
    "model_type": "llama",
    "width": 64,
    "layers": 6,
    "vocabulary": VOCAB,
}
DRAFTS = (
    PublishedDraft("maker/big", "DFlash", gb=1.0, licence="mit"),
    PublishedDraft("maker/small", "EAGLE-3"),
)
CONFIG = EngineConfig(batch_size=2)


class Hub:
    """What is downloaded, and what can be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.here = set[str]()
        self.asked = list[str]()

    def snapshot(self, name: str, local_files_only: bool = False, **_: Any) -> str:
        if name not in self.here:
            if local_files_only or not (self.folder / name).exists():
                raise OSError("it is not here")
            self.asked.append(name)
            self.here.add(name)
        return str(self.folder / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Two drafts on a hub for a target in a folder; neither is downloaded."""
    target = write_folder(tmp_path / "target", num_hidden_layers=6)
    width = target.args.hidden_size
    made = Hub(tmp_path / "hub")
    sizes = {"hidden_size": width, "vocab_size": VOCAB}
    published.write_head(made.folder / "maker/big", published.dflash_config(**sizes))
    published.write_head(made.folder / "maker/small", published.eagle_config(**sizes))
    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", made.snapshot)
    entry = KnownTarget("maker/Target", SHAPE, DRAFTS)
    monkeypatch.setattr(pairs, "registry", lambda: (entry,))

    class Api:
        def model_info(self, name: str, **_: Any) -> Any:
            file = SimpleNamespace(rfilename="model.safetensors", size=3 * 10**9)
            card = {"license": "apache-2.0"}
            return SimpleNamespace(siblings=[file], card_data=card, sha="abc")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return made


def test_the_best_that_is_here(hub: Hub, tmp_path: Path) -> None:
    """What was downloaded comes before what is better; nothing is downloaded."""
    target = str(tmp_path / "target")
    first = choose(target, CONFIG)
    assert (first.spec.name, first.missing) == ("ngram", DRAFTS[0])
    assert "maker/big (DFlash, 1.0 GB, licence mit) is published, but" in first.why
    hub.here.add("maker/small")
    second = choose(target, CONFIG)
    assert (second.spec.name, second.missing) == ("maker/small", None)
    assert second.why == "published for maker/Target"
    hub.here.add("maker/big")
    assert choose(target, CONFIG).spec.name == "maker/big"
    assert hub.asked == []


def no_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def half_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        arrays: Any = mx.load(str(file))
        mx.save_safetensors(str(file), {n: a for n, a in arrays.items() if n != name})

    return change


def other(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        published.write_head(folder, config | changes)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_config, "download it again"),
        (half_the_weights, "download it again"),
        (without("fc.weight"), "fc.weight is missing"),
        (other(hidden_size=48), "of width 48, and .* has 64"),
        (other(vocab_size=VOCAB + 1), f"of {VOCAB + 1} logits, and .* has {VOCAB}"),
        (other(num_target_layers=9), "of 9 layers, and .* has 6"),
    ],
)
def test_what_does_not_load_is_passed_over(
    change: Callable[[Path], None], why: str, hub: Hub, tmp_path: Path
) -> None:
    """A damaged draft, or one of another target, keeps nobody from decoding."""
    hub.here |= {"maker/big", "maker/small"}
    change(hub.folder / "maker/big")
    found = choose(str(tmp_path / "target"), CONFIG)
    assert found.spec.name == "maker/small"
    assert re.search(rf"maker/big cannot be taken \(.*{why}", found.why), found.why
    assert "\n" not in str(found)


def test_a_damaged_head_of_the_target_is_named(hub: Hub, tmp_path: Path) -> None:
    """A target without one has nothing to say; one whose head is broken has."""
    path = tmp_path / "with-head"
    _, _, head = write_target(path, "qwen3_5", with_head=False)
    head.pop("mtp.fc.weight")
    mx.save_safetensors(str(path / "mtp.safetensors"), less_one(head))
    found = choose(str(path), CONFIG)
    assert found.spec.name == "ngram"
    assert "mtp cannot be taken (the MTP head of" in found.why
    assert "mtp" not in choose(str(tmp_path / "target"), CONFIG).why


@pytest.mark.parametrize("form", ["folder", "gguf", "adapter"])
def test_targets_of_any_form(form: str, hub: Hub, tmp_path: Path) -> None:
    """Each has its published draft, which decodes."""
    target, loading = tmp_path / "target", dict[str, Any]()
    if form == "gguf":
        model = write_folder(tmp_path / "other", num_hidden_layers=6)
        target = write_model(tmp_path / "Target-Q4_K_M.gguf", "llama", model)
    if form == "adapter":
        loading["adapter_path"] = write_adapter(tmp_path / "adapter", target)
    hub.here.add("maker/small")
    assert choose(str(target), CONFIG, **loading).why == "published for maker/Target"
    found = []
    for draft in ("none", "auto"):
        decoder = SpecDecoder.from_pretrained(target, draft, config=CONFIG, **loading)
        (result,) = decoder.generate([[5, 9, 11]], max_tokens=6)
        found.append(result.token_ids)
    assert found[0] == found[1]
    assert decoder.draft_name == "maker/small"


def test_what_does_not_fit_is_passed_over(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the rows that were asked for, downloaded or not."""
    target = str(tmp_path / "target")
    hub.here.add("maker/small")
    usual = auto_draft.room_beside
    monkeypatch.setattr(
        auto_draft, "room_beside", lambda t, d, c: -1.0 if d else usual(t, d, c)
    )
    found = choose(target, CONFIG)
    assert found.spec.name == "ngram"
    assert "maker/small does not fit beside the rows" in found.why
    monkeypatch.undo()


def test_room_is_what_the_rows_leave(tmp_path: Path) -> None:
    """A limit that one row fits in leaves none for a draft beside a thousand."""
    write_folder(tmp_path / "target")
    from specdec.models.model_outline import outline

    target = outline(tmp_path / "target")
    few, many = (
        auto_draft.room_beside(
            target, None, EngineConfig(batch_size=n, memory_limit=10**9)
        )
        for n in (1, 1000)
    )
    assert 0 < few < 10**9
    assert many < few


def test_a_head_in_the_targets_folder_comes_first(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any published draft."""
    path = tmp_path / "with-head"
    _, _, head = write_target(path, "qwen3_5", with_head=False)
    mx.save_safetensors(str(path / "mtp.safetensors"), less_one(head))
    found = choose(str(path), CONFIG)
    assert (found.spec.name, found.why) == ("mtp", "the target's own head")
    (path / "mtp.safetensors").unlink()
    assert choose(str(path), CONFIG).spec.name == "ngram"


def test_the_text_is_the_targets(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is said what was chosen; without a name, what is known is named."""
    hub.here.add("maker/big")
    target, found = str(tmp_path / "target"), []
    with caplog.at_level(logging.INFO, "specdec"):
        for draft in ("none", "auto", None):
            decoder = SpecDecoder.from_pretrained(target, draft, config=CONFIG)
            found.append(decoder.generate([[5, 9, 11]], max_tokens=6)[0].token_ids)
            assert decoder.draft_name == ("maker/big" if draft == "auto" else None)
    assert found[1:] == found[:1] * 2
    notes = [r.getMessage() for r in caplog.records if "maker/big" in r.getMessage()]
    assert notes == [
        "draft auto: maker/big: published for maker/Target",
        "maker/big (DFlash) is published for this target: --draft auto",
    ]
    with pytest.raises(ConfigError, match=r"use SpecDecoder\.from_pretrained"):
        SpecDecoder(load(target), drafter="auto")
    with pytest.raises(ConfigError, match=r"names no model after the \+"):
        SpecDecoder(load(target), drafter="ngram+auto")


@pytest.mark.parametrize("here", [True, False])
def test_without_a_network(
    here: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is here is taken; else the run goes on with n-grams, even with --yes."""

    class Away:
        def model_info(self, name: str, **_: Any) -> Any:
            raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Away)
    (hub.folder / "maker/big").rename(hub.folder / "away")
    if here:
        hub.here.add("maker/small")
    said = ask(tmp_path / "target", "--yes")
    assert said.exit_code == 0, said.output
    if here:
        assert "draft auto: maker/small: published for maker/Target" in said.output
    else:
        assert "maker/big cannot be downloaded" in said.output
        assert "draft auto: ngram: maker/big (DFlash, 1.0 GB, licence" in said.output


def ask(target: Path, *more: str, answer: str = "") -> Any:
    arguments = ["run", "--target", str(target), "--draft", "auto", "--prompt", "12"]
    return CliRunner().invoke(main, [*arguments, "-m", "2", *more], input=answer)


def test_it_asks_before_it_downloads(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal nothing is downloaded, unless --yes says so."""
    target = tmp_path / "target"
    said = ask(target)
    assert said.exit_code == 0, said.output
    assert "maker/big (DFlash, 3.0 GB, licence apache-2.0) is published" in said.output
    assert "--yes downloads it" in said.output
    assert "draft auto: ngram" in said.output
    assert hub.asked == []
    said = ask(target, "--yes")
    assert said.exit_code == 0, said.output
    assert hub.asked == ["maker/big"]
    assert "draft auto: maker/big" in said.output


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked(
    answer: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With name, size and licence."""
    from specdec.cli import auto_draft as asking

    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(asking, "sys", SimpleNamespace(stdin=terminal, stderr=terminal))
    asked = list[str]()

    def confirm(text: str, **_: Any) -> bool:
        asked.append(text)
        return answer == "y"

    monkeypatch.setattr(click, "confirm", confirm)
    said = ask(tmp_path / "target")
    assert said.exit_code == 0, said.output
    assert asked == ["Download maker/big (DFlash, 3.0 GB, licence apache-2.0)?"]
    assert hub.asked == (["maker/big"] if answer == "y" else [])


@pytest.mark.parametrize(
    "command",
    [
        ["advise", "--prompts", "prompts.txt", "-m", "4"],
        ["estimate", "--draft", "auto", "--context", "64"],
        ["verify", "--draft", "auto", "--prompts", "prompts.txt", "-m", "4"],
    ],
)
def test_other_commands_take_the_same(
    command: list[str], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``advise`` without being told to."""
    hub.here.add("maker/small")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("12\n", "utf-8")
    said = CliRunner().invoke(main, [*command, "--target", str(tmp_path / "target")])
    assert said.exit_code == 0, said.output
    assert "draft auto: maker/small: published for maker/Target" in said.output


def test_the_default_target_takes_its_own() -> None:
    """The head that comes with specdec."""
    assert choose("SmolLM2-135M-Instruct", CONFIG).spec.implied


# -- the registry --------------------------------------------------------------------


def test_the_registry_can_be_read() -> None:
    """At least 25 targets, each with a shape, none twice; kinds by our words."""
    every = registry()
    assert len(every) >= 25
    assert len({plain_name(entry.id) for entry in every}) == len(every)
    kinds = "DFlash|DFlash 2|DSpark|EAGLE-3|P-EAGLE|MTP|assistant"
    for entry in every:
        assert entry.shape, entry.id
        assert entry.drafts, entry.id
        names = [draft.id for draft in entry.drafts]
        assert len(set(names)) == len(names), entry.id
        for key, value in entry.shape.items():
            assert value if key == "model_type" else int(value) > 1, (entry.id, key)
        for draft in entry.drafts:
            assert is_hub_id(draft.id), draft
            assert re.fullmatch(kinds, draft.kind), draft
            assert draft.gb is None or 0 < draft.gb < 100, draft
            assert draft.k is None or 1 <= draft.k <= 16, draft
            assert re.fullmatch(r"[a-z0-9.-]*", draft.licence), draft
            assert draft.thinking in ("", "off"), draft
            assert re.fullmatch(r"[0-9a-f]{40}", draft.revision or "0" * 40), draft
            assert "\n" not in draft.published
            assert "://" not in draft.published
            assert re.search(
                r"\(.*, (\d+\.\d GB|size not known), licence (not known|\S+)\)$",
                described(draft),
            ), draft


@pytest.mark.parametrize(
    ("name", "config", "found"),
    [
        ("Qwen/Qwen3-4B", {}, "Qwen/Qwen3-4B"),
        ("mlx-community/Qwen3-4B-4bit", {}, "Qwen/Qwen3-4B"),
        ("/models/qwen3-4b-MLX-8bit/", {}, "Qwen/Qwen3-4B"),
        ("me/my-fine-tune", {}, "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-4B", {"hidden_size": 2048}, None),
        ("Qwen/Qwen3-4B", {"model_type": "llama"}, None),
        ("me/my-fine-tune", {"vocab_size": 7}, None),
        (
            "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit-DWQ",
            {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48},
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        ),
        (
            "me/tuned-of-one-of-three",
            {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48},
            None,
        ),
        ("Qwen/Qwen3.6-27B", {"model_type": "qwen3_5"}, "Qwen/Qwen3.6-27B"),
        ("me/tuned", {"model_type": "qwen3_5"}, None),
    ],
)
def test_targets_are_known_by_name_and_shape(
    name: str, config: dict[str, Any], found: str | None
) -> None:
    """Never by a name alone; by a shape alone only if one target has it."""
    shape = {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36}
    entry = known_target(name, {**shape, "vocab_size": 151936, **config})
    assert (entry and entry.id) == found


def test_odd_configurations_have_no_entry() -> None:
    """Values of any kind are compared, not trusted."""
    values: list[Any] = [None, [], {}, "a", 1e9, True]
    for value in values:
        config = {"model_type": value, "hidden_size": value, "text_config": value}
        assert known_target("x", json.loads(json.dumps(config))) is None

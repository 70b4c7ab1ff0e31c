"""What names of models mean: the same for every command, and from Python."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from specdec import model_names
from specdec.config import EngineConfig
from specdec.decoder import SpecDecoder
from specdec.draft_names import DraftSpec, ModelDraft, draft_for, named_draft
from specdec.engine.build import load_drafter
from specdec.errors import ConfigError, ModelNameError, ModelNotFoundError
from specdec.models import LoadedModel, load, load_draft
from specdec.models.draft_folder import fingerprint
from specdec.models.model_outline import outline, outline_draft
from specdec.tools.bench.recipe import Recipe

from .models.folders import write_folder

TARGET, DRAFT = model_names.DEFAULT_TARGET, model_names.DEFAULT_DRAFT


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A small model in place of the default target, and a draft with its card."""
    (tmp_path / "installed").mkdir()
    target, draft = tmp_path / "installed/t", tmp_path / "installed/d"
    write_folder(target)
    write_folder(draft)
    monkeypatch.setattr("specdec.model_names.default_target", lambda: str(target))
    for module in ("model_names", "draft_names"):
        monkeypatch.setattr(f"specdec.{module}.default_draft", lambda: str(draft))
    write_card(draft, fingerprint(load(target).model))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return load(TARGET)


def write_card(folder: Path, hashed: str) -> None:
    card: dict[str, Any] = {"format": "specdec draft", "embedding": "own"}
    card["target"] = {"name": TARGET, "fingerprint": hashed}
    (folder / "distill.json").write_text(json.dumps(card))


def test_the_default_target_has_a_name(pair: LoadedModel) -> None:
    """What a run prints can be typed, in any case."""
    assert model_names.target_name(None) == pair.name == TARGET
    for name in (TARGET, TARGET.lower()):
        assert load(name).name == outline(name).name == name
    assert SpecDecoder.from_pretrained(draft="none").target_name == TARGET


def test_the_draft_of_the_default_target(pair: LoadedModel) -> None:
    """None is the default, "none" is none, whatever asks."""
    for target in (None, TARGET, TARGET.lower()):
        spec = draft_for(target, None)
        assert spec is not None
        assert (spec.name, spec.implied) == (DRAFT, True)
        assert draft_for(target, "none") is None
        assert SpecDecoder.from_pretrained(target).draft_name == DRAFT
        assert SpecDecoder.from_pretrained(target, "none").draft_name is None
        assert SpecDecoder.from_pretrained(target, "ngram").draft_name == "ngram"
    assert draft_for("owner/name", None) is None
    assert draft_for(model_names.locate_target(TARGET), None) is None
    config = EngineConfig(num_draft_tokens=0)
    assert SpecDecoder.from_pretrained(config=config).draft_name is None
    assert SpecDecoder(pair, drafter="none").draft_name is None


def test_the_draft_has_a_name(pair: LoadedModel) -> None:
    for name in (DRAFT, DRAFT.upper()):
        spec = named_draft(name)
        assert spec is not None
        assert spec.model is not None
        assert not spec.implied
        assert spec.model.source == model_names.default_draft()
        assert load_draft(name, pair).name == name
        assert SpecDecoder(pair, drafter=name).draft_name == name
        assert outline_draft(name, outline(TARGET)).name == name
    chain = named_draft(f"ngram+{DRAFT}")
    assert chain is not None
    assert chain.model == ModelDraft(DRAFT, folder=model_names.default_draft())


def test_what_lies_here_comes_first(pair: LoadedModel) -> None:
    """A folder of that name is what is meant, and has no draft by default."""
    for name in (TARGET, DRAFT):
        write_folder(Path(name))
    assert model_names.locate_target(TARGET) == TARGET
    assert draft_for(TARGET, None) is None
    spec = named_draft(DRAFT)
    assert spec is not None
    assert spec.model == ModelDraft(DRAFT)
    implied = draft_for(None, None)
    assert implied is not None
    assert implied.model == ModelDraft(DRAFT, folder=model_names.default_draft())


def test_it_drafts_for_the_model_it_was_made_for_alone(
    pair: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version of the target: nobody asked for the draft, so there is none."""
    folder = model_names.default_draft()
    assert folder is not None
    write_card(Path(folder), "another")
    with caplog.at_level(logging.WARNING, "specdec"):
        assert SpecDecoder.from_pretrained().draft_name is None
    (record,) = caplog.records
    assert f"nothing is drafted: {DRAFT} was made for another" in record.getMessage()
    # Asked for, it is taken, with a warning.
    assert SpecDecoder.from_pretrained(None, DRAFT).draft_name == DRAFT
    Path(folder, "distill.json").unlink()
    assert load_drafter(draft_for(None, None), pair) is None


def test_no_draft_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model_names", "draft_names"):
        monkeypatch.setattr(f"specdec.{module}.default_draft", lambda: None)
    assert draft_for(None, None) is None
    with pytest.raises(ModelNameError, match=f"no model at {DRAFT}"):
        named_draft(DRAFT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SmolLM2-135M", f"did you mean {TARGET}"),
        ("no-such", r"no model at no-such: .*\(owner/name\)$"),
        ("no/such.gguf", "no model at no/such.gguf"),
        ("ngram", "ngram is a draft"),
        ("self:4bit", "self:4bit is a draft"),
    ],
)
def test_what_can_be_no_target(name: str, message: str) -> None:
    """It is wrong usage, and no model is found: whoever catches either is told."""
    for find in (model_names.target_name, load, outline, SpecDecoder.from_pretrained):
        with pytest.raises(ModelNameError, match=message) as caught:
            find(name)
        assert isinstance(caught.value, ConfigError)
        assert isinstance(caught.value, ModelNotFoundError)


def test_recipes_mean_the_same(tmp_path: Path, pair: LoadedModel) -> None:
    """A draft that is not named is that of the default target, "none" is none."""
    file = tmp_path / "r.toml"
    file.write_text('[prompts]\nsource = "file:x"\n')

    def drafts(*settings: str) -> tuple[str, ...]:
        return Recipe.read(file, settings).draft

    assert drafts() == drafts(f"target={TARGET}") == (DRAFT,)
    assert drafts("draft=none") == drafts("draft=[]") == drafts("target=a/T") == ()
    assert drafts("draft=['none', 'ngram']") == ("ngram",)
    assert DraftSpec.parse(drafts()[0]).model is not None


def test_the_shipped_draft_was_made_for_the_default_target(
    smollm2: LoadedModel,
) -> None:
    """As a card says that nobody would notice: it would quietly not be the default."""
    spec = draft_for(None, None)
    assert spec is not None
    drafter = load_drafter(spec, smollm2)
    assert drafter is not None
    assert drafter.name == DRAFT

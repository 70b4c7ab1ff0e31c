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
from specdec.engine.build import load_drafter
from specdec.errors import ConfigError, ModelNameError, ModelNotFoundError
from specdec.model_names import (
    SELF_DRAFTS,
    DraftSpec,
    ModelDraft,
    draft_for,
    named_draft,
)
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
    monkeypatch.setattr("specdec.model_names.default_draft", lambda: str(draft))
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
    by_file = draft_for(model_names.locate_target(TARGET), None)
    assert by_file is not None
    assert by_file.name == DRAFT
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
    monkeypatch.setattr("specdec.model_names.default_draft", lambda: None)
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
    """It is wrong usage, and no model is found: whoever catches either gets it."""
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


@pytest.mark.parametrize("name", ["a/b", "folder/self", "m.gguf", "./ngram", "a+b/c"])
def test_models(name: str) -> None:
    spec = DraftSpec.parse(name)
    assert spec == DraftSpec(name, False, ModelDraft(name))


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_the_target_quantized(name: str) -> None:
    model = DraftSpec.parse(name).model
    assert model == ModelDraft(name, bits=int(name[5]))


def test_lookups_and_what_comes_after_them() -> None:
    assert DraftSpec.parse("ngram") == DraftSpec("ngram", True, None)
    chain = DraftSpec.parse("ngram+owner/a+b")
    assert chain.ngram
    assert chain.model == ModelDraft("owner/a+b")
    layers = DraftSpec.parse("ngram+layers:4,0-1").model
    assert layers == ModelDraft("layers:4,0-1", layers=(0, 1, 4))
    assert DraftSpec.parse("ngram+mtp").model == ModelDraft("mtp", mtp=True)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        *((n, "use self:2bit, self:3bit") for n in ("self", "self:5bit", "self:4bit ")),
        *((n, "use ngram or ngram") for n in ("ngram:", "ngram:shared", "ngram:2+a")),
        *((n, "write ngram.MODEL") for n in ("ngram+", "ngram+none", "ngram+ngram",
          "ngram+ngram+a")),
        ("ngram+self:1bit", "use self:2bit"),
        *((n, "write layers:0-7,22-29") for n in ("layers", "layers:", "layers:1,",
          "layers:a", "layers:-1", "layers:1-2-3", "layers:1 2", "layers:\u0661")),
        ("layers:5-2", "5-2 ends before it begins"),
        ("layers:0-3,2", "names layer 2 twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_apart(name: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out) as error:
        DraftSpec.parse(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("self:4bit+ngram", "did you mean ngram.self:4bit"),
        ("layers:0-3+ngram", "did you mean ngram.layers:0-3"),
        ("slef:4bit", "did you mean self:4bit"),
        ("4bit", "did you mean self:4bit"),
        ("self:5bit", r"did you mean self:4bit\?$"),
        ("ngram+self:16bit", r"did you mean self:8bit\?$"),
        ("ngrm", "did you mean ngram"),
        ("ngrm+slef:8bit", "did you mean ngram.self:8bit"),
        ("owner/name+ngram", "did you mean ngram.owner/name"),
        ("layer:0-3", "did you mean layers:0-3"),
        ("Non", "did you mean none"),
        ("NGRAM", "did you mean ngram"),
        ("smollm2-135m", "did you mean smollm2-135m-head"),
        ("ngram+no-such-model", r"no model at no-such-model: .*\(owner/name\)$"),
        ("no-1.5b", r"\(owner/name\), or one of auto, ngram, self:4bit, mtp, none$"),
        (
            "./no/such",
            r"at ./no/such: there is no such folder: check the path$",
        ),
    ],
)
def test_what_is_not_there_is_reported_before_loading(name: str, hint: str) -> None:
    with pytest.raises((ConfigError, ModelNotFoundError), match=hint):
        DraftSpec.parse(name).check_model()


@pytest.mark.parametrize(
    "name", ["ngram", "self:4bit", "layers:0-3", "mtp", "owner/a.b-c"]
)
def test_what_may_be_there_is_left_to_the_loader(name: str) -> None:
    DraftSpec.parse(name).check_model()


def test_a_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slef:4bit").mkdir()
    DraftSpec.parse("slef:4bit").check_model()

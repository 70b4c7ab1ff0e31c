"""Names of drafts, taken apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec import ConfigError, ModelNotFoundError
from specdec.draft_names import SELF_DRAFTS, DraftSpec, ModelDraft


@pytest.mark.parametrize("name", ["a/b", "folder/self", "m.gguf", "./ngram", "a+b/c"])
def test_models(name: str) -> None:
    spec = DraftSpec.parse(name)
    assert spec == DraftSpec(name, False, ModelDraft(name))


@pytest.mark.parametrize("name", SELF_DRAFTS)
def test_the_target_quantized(name: str) -> None:
    model = DraftSpec.parse(name).model
    assert model == ModelDraft(name, bits=int(name[5]))


def test_lookups_and_what_comes_behind_them() -> None:
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
        ("ngrm", "did you mean ngram"),
        ("ngrm+slef:8bit", "did you mean ngram.self:8bit"),
        ("owner/name+ngram", "did you mean ngram.owner/name"),
        ("layer:0-3", "did you mean layers:0-3"),
        ("Non", "did you mean none"),
        ("NGRAM", "did you mean ngram"),
        ("smollm2-135m", "did you mean smollm2-135m-instruct"),
        ("ngram+no-such-model", r"no model at no-such-model: .*\(owner/name\)$"),
        ("./no/such", r"no model at ./no/such: .*\(owner/name\)$"),
    ],
)
def test_what_is_not_there_is_told_before_loading(name: str, hint: str) -> None:
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

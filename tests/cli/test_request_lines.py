"""Settings in the lines of a file, and results in OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.request_lines import openai_line, requests_of
from specdec.errors import PromptFileError
from specdec.grammar import Grammar
from specdec.outputs import GenerationResult
from specdec.prompts import PromptRecord
from specdec.request import TokenLogprobs
from specdec.sampling_params import SamplingParams

from .conftest import Specdec


def record(**fields: Any) -> PromptRecord:
    return PromptRecord("a", "f.jsonl:3", None, fields)


def test_settings_of_each_line() -> None:
    """One is dropped, or reaches the lines beside its own."""
    base = SamplingParams(max_tokens=9, temperature=0.5, seed=40, top_p=0.9)
    lines = [
        record(max_tokens=5, stop="\n", category="x", top_p=None),
        record(),
        record(max_completion_tokens=6, temp=1, seed=3, top_k=4, min_p=0.1),
        record(temperature=0, logprobs=True, top_logprobs=2, n=1, model="m"),
        record(logit_bias={"5": -2}, logprobs=3, presence_penalty=0.5),
        record(num_draft_tokens=2, verification="block", min_tokens=3),
    ]
    assert requests_of(lines, base) == [
        SamplingParams(max_tokens=5, temperature=0.5, seed=40, top_p=0.9, stop=("\n",)),
        SamplingParams(max_tokens=9, temperature=0.5, seed=41, top_p=0.9),
        SamplingParams(
            max_tokens=6, temperature=1, seed=3, top_p=0.9, top_k=4, min_p=0.1
        ),
        # Filters of the others would be refused at temperature 0.
        SamplingParams(max_tokens=9, seed=40, logprobs=True, top_logprobs=2),
        SamplingParams(
            max_tokens=9,
            temperature=0.5,
            seed=44,
            top_p=0.9,
            logit_bias={5: -2},
            logprobs=True,
            top_logprobs=3,
            presence_penalty=0.5,
        ),
        SamplingParams(
            max_tokens=9,
            temperature=0.5,
            seed=45,
            top_p=0.9,
            num_draft_tokens=2,
            verification="block",
            min_tokens=3,
        ),
    ]
    # Nothing of their own: the shared ones, whose seeds the decoder spreads.
    assert requests_of([record(answer="x"), record()], base) is base
    # One random seed for the lines that draw, and none for the others.
    requests = requests_of([record(), record(temp=1), record(temp=1)], SamplingParams())
    assert isinstance(requests, list)
    greedy, first, second = requests
    assert greedy.seed is None
    assert first.seed is not None
    assert second.seed == first.seed + 1
    # A seed of a line's own is nobody else's.
    records = [record(temp=1, seed=7), record(temp=1)]
    requests = requests_of(records, SamplingParams(seed=40))
    assert [params.seed for params in requests] == [7, 41]  # type: ignore[union-attr]


def test_a_grammar_of_each_line() -> None:
    """OpenAI's form, and the names of the options."""
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    requests = requests_of(
        [
            record(json_schema=schema),
            record(regex="[a-z]+"),
            record(response_format=form),
            record(response_format={"type": "json_object"}),
            record(response_format={"type": "text"}, seed=1),
        ],
        SamplingParams(),
    )
    assert [params.grammar for params in requests] == [  # type: ignore[union-attr]
        Grammar.json_schema(schema),
        Grammar.regex("[a-z]+"),
        Grammar.json_schema(schema),
        Grammar.json_object(),
        None,
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": 5}, "f.jsonl:3: regex: "),
        ({"regex": "[a-z"}, "f.jsonl:3: regex: the regular expression cannot be used"),
        ({"temp": 1, "temperature": 0.5}, "f.jsonl:3: temp is temperature, which is"),
        ({"regex": "a", "json_schema": {}}, "f.jsonl:3: regex is one grammar too many"),
        ({"response_format": {"type": "x"}}, "f.jsonl:3: response_format: its type is"),
        ({"response_format": 5}, "f.jsonl:3: response_format: it is incomplete"),
        ({"max_tokens": 0}, "f.jsonl:3: max_tokens is 0"),
        ({"max_tokens": "5"}, "f.jsonl:3: max_tokens is '5'"),
        ({"temperature": -1}, "f.jsonl:3: temperature is -1"),
        ({"temperature": 0, "top_p": 0.5}, "f.jsonl:3: top_p needs a temperature"),
        ({"stop": 5}, "f.jsonl:3: stop is 5"),
        ({"logit_bias": {"x": 1}}, "f.jsonl:3: logit_bias is {'x': 1}"),
        ({"n": 2}, "f.jsonl:3: n is 2: one output is generated for a line"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    """The line is named, before a model is loaded."""
    with pytest.raises(PromptFileError) as caught:
        requests_of([record(), record(**fields)], SamplingParams())
    assert str(caught.value).startswith(message)


def test_a_file_with_settings(specdec: Specdec, tmp_path: Path) -> None:
    """Keys without effect are named once; results come in OpenAI's form."""
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"custom_id": "x", "body": {"messages": [{"role": "user", "content": "a"}]}},
        {"prompt": "failing", "max_tokens": 7, "category": 1, "answer": 2},
        {"prompt": "b", "category": 1, "max_token": 3},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    asked = ("--prompts", str(path), "--output", str(output), "--max-tokens", "4")
    result = specdec("run", *asked, "--output-format", "openai")
    assert result.exit_code == 1  # one line failed
    requests = "answer, category, max_token (did you mean max_tokens?)"
    assert result.stderr.count(f"keys without effect: {requests}\n") == 1
    asked_for: Any = specdec.calls["params"]
    assert [p.max_tokens for p in asked_for] == [4, 7, 4]
    lines = {line["custom_id"]: line for line in map(json.loads, output.open("rb"))}
    assert lines.keys() == {"x", "request-1", "request-2"}
    body = lines["x"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "the-target"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Bonjour n°0"}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7
    }  # fmt: skip
    assert lines["request-1"]["response"] is None
    assert lines["request-1"]["error"]["message"] == "the logits\nare NaN"
    for options, message in (
        (("--output-format", "openai"), "--output-format needs --output: name a file"),
    ):
        refused = specdec("run", "-p", "Hi", *options)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_log_probabilities_in_openais_form() -> None:
    """Texts and bytes of each token, and of those beside it."""
    entry = TokenLogprobs(-0.5, [(3, -0.5), (4, -1.5)], "é", ["é", "b"])
    result = GenerationResult(
        index=0, prompt="p", text="é", token_ids=[3], finish_reason="length",
        prompt_tokens=1, rounds=0, drafted=0, accepted=0, logprobs=[entry],
        prompt_logprobs=[None, entry], prompt_token_ids=[2, 3],
    )  # fmt: skip
    line: Any = openai_line(result, PromptRecord("p"), "m")
    (choice,) = line["response"]["body"]["choices"]
    assert choice["prompt_logprobs"] == result.to_dict()["prompt_logprobs"]
    (token,) = choice["logprobs"]["content"]
    assert token == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }

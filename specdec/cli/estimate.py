"""``specdec estimate``: the memory that a run would need. Loads no weights."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..config import DEFAULT_BATCH_SIZE, EngineConfig
from ..errors import UnsupportedModelError
from ..model_names import short, target_name
from ..sampling_params import SamplingParams
from ..utils.data_files import json_text
from ..utils.sizes import format_size
from . import options
from .output import FAILURE, note, share_text, show

if TYPE_CHECKING:
    from ..memory.estimate import Change
    from ..model_names import DraftSpec
    from ..models.model_outline import ModelOutline

# Options that a run does not have.
ABOUT_ESTIMATES = {"context", "temp", "device", "memory", "as_json"}
# Room for a prompt of some pages and the default number of new tokens.
DEFAULT_CONTEXT = 4096


def metal_share(memory: int) -> float:
    """The share of a Mac's memory that its GPU may hold (docs/apple-silicon.md)."""
    return 2 / 3 if memory <= 36 * 2**30 else 3 / 4


def command_of_run(change: Change) -> str:
    """``specdec run`` with the options that were typed here, and the changes."""
    ctx = click.get_current_context()
    changed = {
        "batch_size": change.batch,
        "prefill_step_size": change.prefill_step_size,
        "kv_bits": change.kv_bits,
    }
    words = ["specdec", "run"]
    for option in ctx.command.params:
        name, flag = str(option.name), option.opts[0]
        value = changed.get(name, ctx.params.get(name))
        was_given = options.is_given(name) and name not in ABOUT_ESTIMATES
        differs = name in changed and value != option.default
        if value is None or not (was_given or differs):
            continue
        if isinstance(value, bool):
            words.append(flag if value else option.secondary_opts[0])
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += [flag, str(each)]
    return shlex.join(words)


@click.command(
    cls=options.Command, short_help="Report how much memory a run needs, and what fits."
)
@options.models(
    options.target(
        "MLX model folder, .gguf file, config.json, or a hub id that is downloaded."
    ),
    dtype_help="Type in which the run loads the weights. [default: as they are stored]",
)
@options.engine(
    options.batch(default=DEFAULT_BATCH_SIZE, help="Rows that decode together."),
    options.num_draft_tokens(
        "Tokens that the draft proposes in a round; auto counts the most it may "
        "choose.",
        low=1,
    ),
    options.prefill_step_size(help="Prompt tokens per row in one forward."),
    options.max_kv_size(
        help="Full-attention layers keep this many tokens of a row. [default: all]"
    ),
    options.kv_bits(),
    options.kv_group_size(),
)
@options.context(
    "Tokens of a row, prompt and output together, such as 8192 or 8k. [default: "
    f"{DEFAULT_CONTEXT}, or the target's context if that is shorter]"
)
@options.temp(help="Above 0, include the memory that sampling and its filters need.")
@options.memory_limit(
    help="Memory to fit into, such as 8GB or 6.5GiB. [default: all that the device has]"
)
@options.positive(
    "--image-tokens",
    low=0,
    default=0,
    help="Tokens of the largest image of a prompt, for targets that take images.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "metal", "cpu"]),
    help="Where the run would be. [default: this machine's device]",
)
@options.size(
    "--memory",
    help="Memory of the machine or GPU where the run would be, such as 24GB. On Metal "
    "the system leaves a part of it to the run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def estimate(
    *,
    models: options.Models,
    config: EngineConfig,
    context: int | None,
    temp: float,
    memory_limit: int | None,
    image_tokens: int,
    device: str | None,
    memory: int | None,
    as_json: bool,
) -> None:
    """Report how much memory a run needs at most, and what fits.

    This reads headers and configurations, and loads no weights. The exit code is 0 if
    the run fits, and 1 if it does not.

    \b
      specdec estimate --target MODEL --context 8k --batch 8
      specdec estimate --target config.json --context 128k --memory-limit 24GB
      specdec estimate --target MODEL --device metal --memory 64GB
    """  # noqa: D301 - click's mark for lines to keep
    from .. import backend

    here = backend.defaults()
    there = here if device is None else backend.defaults(device)
    limit = memory_limit
    if limit is None and memory is not None:
        share = metal_share(memory) if there.name == "metal" else 1
        limit = int(memory * share)
    if limit is None and there is not here:
        raise click.UsageError(
            f"this machine's device is {here.name}: give the other one's --memory"
        )
    from ..memory import MemoryPlan
    from ..memory.estimate import Estimate
    from ..memory.planning import plan_memory
    from ..models import context_length
    from ..spec_decode.factory import ngram_of

    target, draft, spec, share_of_draft = _outlines(models, config)
    longest = context_length(target.config)
    rows = _context(context, longest, target.name)
    ngram = None if spec is None else ngram_of(spec)

    def plan_with(bits: int | None, step: int) -> MemoryPlan:
        return plan_memory(
            target,
            draft,
            replace(config, kv_bits=bits, prefill_step_size=step),
            there,
            drafts=spec is not None,
            lookup_bytes=0 if ngram is None else ngram.nbytes(config.batch_size),
        )

    def plan_if_supported(bits: int | None, step: int) -> MemoryPlan | None:
        try:
            return plan_with(bits, step)
        except UnsupportedModelError:
            return None

    # A temperature comes with the usual filters.
    filters: dict[str, Any] = {"top_p": 0.9, "min_p": 0.05, "top_k": 40}
    result = Estimate(
        plan=plan_with(config.kv_bits, config.prefill_step_size),
        kv_bits=config.kv_bits,
        context=rows,
        batch=config.batch_size,
        limit=backend.memory_size() if limit is None else limit,
        plan_with=plan_if_supported,
        command=command_of_run,
        params=SamplingParams(temperature=temp, **(filters if temp > 0 else {})),
        context_length=longest,
        image_tokens=image_tokens,
    )
    show(json_text(result.as_dict(), indent=2) if as_json else result.table())
    assumed = {
        f"--device {here.name}, as here": device is None,
        f"--batch {config.batch_size}, as in specdec run": not options.is_given(
            "batch_size"
        ),
        f"--context {rows}, prompt and output together": context is None,
    }
    if memory is not None and limit is not None and limit < memory:
        shares = f"{format_size(limit)} of {format_size(memory)}"
        assumed[f"the GPU may hold {shares}"] = True
    if any(assumed.values()):
        note(f"assumed: {'; '.join(text for text, holds in assumed.items() if holds)}")
    k, asked = result.plan.num_draft_tokens, config.num_draft_tokens
    if spec is not None and asked not in ("auto", k):
        note(f"the draft proposes up to {k} tokens in a round, not {asked}")
    if share_of_draft is not None:
        note(f"the draft has another vocabulary{share_text(share_of_draft)}")
    if result.fits is False:
        sys.exit(FAILURE)


def _outlines(
    models: options.Models, config: EngineConfig
) -> tuple[ModelOutline, ModelOutline | None, DraftSpec | None, float | None]:
    """The target, the draft model and its name, and the share of a vocabulary.

    Models have no weights. The share is that of the target's tokens, if the draft has
    another vocabulary.
    """
    from ..models.model_outline import check_tokenizers, outline, outline_draft

    spec, loading = models.spec, models.loading
    of_target = {k: v for k, v in loading.items() if k != "draft_adapter_path"}
    if spec is not None and spec.automatic:
        from ..engine.auto_draft import choose

        choice = choose(target_name(models.target), config, **of_target)
        note(str(choice))
        spec = choice.spec
    target = outline(target_name(models.target), **of_target)
    if spec is not None and "draft_adapter_path" in loading:
        spec = spec.with_adapter(loading["draft_adapter_path"])
    if spec is None or spec.model is None:
        return target, None, spec, None
    trusted = {"trust_remote_code": loading["trust_remote_code"]}
    draft = outline_draft(spec.model, target, dtype=loading["dtype"], **trusted)
    vocabulary = check_tokenizers(target, draft, **trusted)
    return target, draft, spec, None if vocabulary is None else vocabulary.share


def _context(asked: int | None, longest: int | None, target: str) -> int:
    """Tokens of a row, which the context of the named target holds.

    A run refuses longer prompts and ends rows there: such rows never exist.
    """
    if asked is None:
        return min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest is not None and asked > longest:
        raise click.UsageError(
            f"--context {asked} is longer than the context of {short(target)}, "
            f"{longest} tokens: give {longest} or fewer, or another --target"
        )
    return asked

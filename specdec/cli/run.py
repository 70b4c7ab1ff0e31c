"""``specdec run``: decode prompts; text to standard output, the rest beside it."""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ..config import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_PREFIX_CACHE_MEMORY,
    EngineConfig,
    NumDraftTokens,
)
from ..errors import PromptFileError, RankError
from ..model_names import target_name
from ..parallel import launched_rank
from ..prompts import Encoding, PromptRecord, read_records, read_text, templates
from ..sampling_params import SamplingParams, per_prompt
from ..utils.printable import one_line
from ..utils.warm_up import warm_up
from . import options, ranks
from .interrupts import last_words
from .output import (
    FAILURE,
    INTERRUPTED,
    check_extra,
    name_of,
    open_output,
    places_named,
    share_text,
    show,
    show_error,
    show_warnings,
    silence_third_parties,
)
from .progress import Progress, Share
from .request_lines import ignored_keys, openai_line, requests_of
from .resume import common_of, keep_finished, settings_of
from .sink import Sink, line_of_result

if TYPE_CHECKING:
    from ..outputs import GenerationResult, RunStats, StreamEvent
    from ..parallel import Leader

# Seconds after which a pipe that brings nothing is named.
_PATIENCE = 2.0


@click.command(
    cls=options.Command, short_help="Decode prompts with a target model and a draft."
)
@options.models(
    draft="Draft model, named like the target. self:4bit (2, 3, 8): the target itself, "
    "quantized. layers:0-7,22-29: those layers of it, counted from 0. mtp: its own MTP "
    "head. A DFlash, DSpark or EAGLE-3 head is named like a model. ngram: no model; "
    "what followed the newest tokens before. ngram+MODEL: MODEL where no n-gram "
    "matches. none: no draft.",
)
@options.engine(
    options.batch(default=DEFAULT_BATCH_SIZE, help="Prompts that decode together."),
    options.num_draft_tokens(
        "Tokens that the draft proposes in a round. auto: as many as are worth it, or "
        "none, from measured costs and acceptance.",
        low=0,
    ),
    options.prefill_step_size(
        help="Prompt tokens per row in one forward; a smaller number takes less memory."
    ),
    options.max_kv_size(),
    options.kv_bits(
        help="Keep keys and values of target and draft quantized. [default: as they "
        "are]"
    ),
    options.kv_group_size(),
    click.option(
        "--quantized-kv-start",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="Quantize once the longest row holds N tokens, with --kv-bits.",
    ),
    *options.prefix_cache,
    options.memory_limit(
        help="Most memory to use, such as 8GB or 6.5GiB. Rows wait for it; a prompt "
        "that cannot fit is refused. [default: all that the device has]"
    ),
)
@options.sampling
@options.encoding
@click.option(
    "--chat-template",
    metavar="FILE",
    help="Chat template in Jinja, in place of the model's own.",
)
@click.option(
    "--prompt",
    "-p",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="A prompt; repeat it for more. Text piped to standard input is appended to "
    "each. '-' reads a prompt from standard input.",
)
@options.prompts(
    help="File of prompts, one a line: text, or JSON with prompt, question, messages "
    "or turns (each after the answer to the one before), and with settings such as "
    "max_tokens; OpenAI's batch files too. [default: standard input, unless --prompt "
    "is given]",
    required=False,
)
@ranks.tensor_parallel()
@options.file(
    "--output",
    "output_file",
    metavar="FILE.jsonl",
    help="Write one JSON object per prompt, as each finishes. An existing file is "
    "replaced.",
)
@click.option(
    "--output-format",
    type=click.Choice(["specdec", "openai"]),
    default="specdec",
    show_default=True,
    help="Form of the lines of --output; openai: as OpenAI's batch files have them.",
)
@click.option(
    "--resume",
    "resumed",
    is_flag=True,
    help="Go on where an earlier run with the same prompts and settings ended: those "
    "with a result in --output are skipped, those that failed run again.",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Decode on a Ray cluster: auto, which it is without ADDRESS, HOST:PORT, or "
    "local, which starts one here. [default: in this process]",
)
@options.positive(
    "--ray-workers",
    help="Processes that decode, with --ray. [default: one for each GPU that Ray has, "
    "or for each machine]",
)
@options.quiet(help="No progress and no summary.")
def run(
    *,
    models: options.Models,
    config: EngineConfig,
    params: SamplingParams,
    encoding: Encoding,
    chat_template: str | None,
    texts: tuple[str, ...],
    file: str | None,
    tensor_parallel: int | None,
    output_file: str | None,
    output_format: str,
    resumed: bool,
    ray: str | None,
    ray_workers: int | None,
    quiet: bool,
) -> None:
    """Decode prompts with a target model and, if one is named, a draft.

    Text goes to standard output, progress and a summary to standard error. The
    draft and the batch change the speed, not the text.

    \b
      specdec run --prompt "What is MLX?"
      specdec run --draft self:4bit --prompts questions.jsonl --output out.jsonl
      cat report.txt | specdec run --prompt "Summarize:"
    """  # noqa: D301 - click's mark for lines to keep
    # What can be wrong is found here, before a model is loaded.
    if config.num_draft_tokens == 0:
        raise click.UsageError(
            "--num-draft-tokens 0 leaves the draft unused: write --draft none instead"
        )
    raw = encoding["ignore_chat_template"]
    if chat_template is not None:
        if raw:
            raise click.UsageError(
                "--chat-template has no effect with --ignore-chat-template: leave one "
                "out"
            )
        models.loading["chat_template"] = read_text(chat_template)
    records = _collect(texts, file, quiet=quiet)
    requests = requests_of(records, params)
    _note_what_does_nothing(models.draft, requests, quiet=quiet)
    if (ignored := ignored_keys(records)) and not quiet:
        keys = one_line(", ".join(ignored), 200)
        where = file or "standard input"
        show(f"specdec: warning: {where}: keys without effect: {keys}", err=True)
    if output_format != "specdec" and output_file is None:
        raise click.UsageError("--output-format needs --output: name a file")
    turns = sum(len(record.turns) for record in records)
    if turns and raw:
        raise click.UsageError(
            "turns need the chat template: leave out --ignore-chat-template"
        )
    if turns and output_format == "openai":
        raise click.UsageError(
            "OpenAI's batch files have no turns: leave out --output-format"
        )
    if turns and config.prefix_cache_memory is None:
        # What a turn says again of the one before is not computed again.
        memory = DEFAULT_PREFIX_CACHE_MEMORY
        config = replace(config, prefix_cache_memory=memory)
    if turns and (ray is not None or resumed):
        raise click.UsageError(
            "turns are decoded in one process and one run: leave out --ray and --resume"
        )
    launched = launched_rank() is not None
    if ray is not None and (launched or tensor_parallel is not None):
        other = "mlx.launch" if launched else "--tensor-parallel"
        raise click.UsageError(f"workers of --ray have whole models: leave out {other}")
    if ray_workers is not None and ray is None:
        raise click.UsageError("--ray-workers has no effect without --ray")
    asked = requests if isinstance(requests, list) else [requests] * len(records)
    common = common_of(models, config, encoding)
    done: set[int] = set()
    if resumed:
        if output_file is None or output_format != "specdec":
            raise click.UsageError("--resume needs --output, in specdec's own form")
        settings = [settings_of(params, common) for params in asked]
        for i, params in enumerate(per_prompt(requests, len(records))):
            own = records[i].fields.get("seed") is not None
            if params.draws and (own or options.is_given("seed")):
                settings[i]["seed"] = params.seed
        done = keep_finished(output_file, records, settings)
        if len(done) == len(records):
            show(f"specdec: all {len(done)} prompts have their results", err=True)
            return
    output = None
    if output_file is not None:
        output = open_output("--output", output_file, file)
        click.get_current_context().call_on_close(output.close)

    silence_third_parties()
    show_warnings(notes=not quiet)
    from ..backend import check_compiler

    draft_note = _draft_note(config.num_draft_tokens) if models.spec else None
    for note in (check_compiler(), draft_note):
        if note and not quiet:
            show(f"specdec: note: {note}", err=True)
    left = [index for index in range(len(records)) if index not in done]
    if done or ray is not None:
        of_all = per_prompt(requests, len(records))
        requests = [of_all[index] for index in left]
    prompts = [records[index].prompt for index in left]
    events: Iterator[StreamEvent]
    leader: Leader | None = None
    loading = models.arguments(config)
    if ray is not None:
        check_extra("--ray", "ray", "ray")
        from ..ray.job import RayJob

        context = click.get_current_context()
        job = context.with_resource(RayJob(ray, ray_workers, loading))
        name, spec = target_name(models.target), models.spec
        draft = None if spec is None else spec.name
        stats, most = job.stats, config.max_draft_tokens
        assert isinstance(requests, list)
        events = job.events(left, prompts, requests, encoding)
    else:
        if not raw:
            templates.start()
        decoder, leader = ranks.load(tensor_parallel, **loading)
        name, draft = decoder.target_name, decoder.draft_name
        most = decoder.max_draft_tokens
        with places_named([records[index] for index in left]):
            events = decoder.stream(
                prompts,
                requests,
                turns=[records[index].turns for index in left],
                keep_going=len(records) > 1,
                **encoding,
            )
        if done:
            events = (e.renumbered(left[e.index], e.turn) for e in events)
        stats = decoder.stats
    total = len(left) + turns
    streaming = total == 1 and sys.stdout.isatty()
    what = "turn" if turns else "prompt"
    progress = Progress(what, total, quiet=quiet or streaming)

    def line_of(result: GenerationResult, record: PromptRecord) -> dict[str, object]:
        if output_format == "openai":
            return openai_line(result, record, model=name)
        line = line_of_result(result, record)
        return {**line, "settings": settings_of(asked[result.index], common)}

    sink = Sink(records, output, progress.aside, line_of, done)

    def conclude(*, interrupted: bool, lost: RankError | None = None) -> None:
        """Close what is open, and report how it ended."""
        sink.close()
        progress.close()
        for index, error in sorted(sink.errors.items()):
            show_error(f"{name_of(index, records)}: {error}")
        if lost is not None:
            show_error(str(lost))
        if interrupted:
            kept = f", their results are in {output_file}" if sink.finished else ""
            coming = total - sink.dropped
            show(
                f"specdec: interrupted: {sink.finished} of {coming} {what}s "
                f"finished{kept if output_file is not None else ''}",
                err=True,
            )
        if not quiet:
            by = "" if leader is None else f", divided between {leader.size} ranks"
            if ray is not None:
                by = f", by {_some(job.workers, 'worker')} of Ray"
            failed = len(sink.errors)
            show(_summary(stats, name, by, draft, most, config, each, failed), err=True)

    interrupted, lost = False, None
    each = requests if isinstance(requests, list) else [requests]
    share = Share(total, max(params.max_tokens for params in each))
    ranks.last_words(leader, partial(conclude, interrupted=True))
    with progress, last_words(lambda: conclude(interrupted=True)):
        try:
            progress.add(0, what="prefill" if ray is None else "workers start")
            for event in events:
                dropped = sink.dropped
                sink.take(event)
                ended = event.result is not None
                share.drop(sink.dropped - dropped)
                share.take(
                    event.index * (turns + 1) + event.turn,
                    len(event.token_ids),
                    done=ended,
                )
                progress.show(
                    progress.done + ended,
                    total - sink.dropped,
                    **_under_way(stats),
                    share=share,
                )
        except KeyboardInterrupt:
            interrupted = True
        except RankError as error:
            interrupted, lost = True, error
        except BaseException:
            sink.close()
            raise
    conclude(interrupted=interrupted, lost=lost)
    if interrupted and lost is None:
        sys.exit(INTERRUPTED)
    if lost is not None or sink.errors:
        sys.exit(FAILURE)


def _note_what_does_nothing(
    draft: str | None,
    requests: SamplingParams | list[SamplingParams],
    *,
    quiet: bool,
) -> None:
    """Name an option without effect, or with another than many expect."""
    each = requests if isinstance(requests, list) else [requests]
    notes = []
    if options.is_given("seed") and not any(params.draws for params in each):
        notes.append("--seed has no effect at --temp 0: nothing is drawn")
    if (found := re.search(r"(?:^|\+)layers:(\d{1,6})$", draft or "")) is not None:
        n = int(found[1])
        notes.append(
            f"layers:{n} is layer {n} alone; the first {n} are layers:0-{n - 1}"
            if n > 1
            else f"layers:{n} is layer {n} alone"
        )
    for note in notes if not quiet else ():
        show(f"specdec: note: {note}", err=True)


def _collect(
    texts: Sequence[str], file: str | None, *, quiet: bool
) -> list[PromptRecord]:
    """The prompts of ``--prompt`` and ``--prompts``; without any, standard input's.

    What is piped to standard input is appended to the prompts of ``--prompt``, where
    neither another prompt nor ``--prompts`` reads it.

    Raises:
        click.UsageError: there are none, or standard input is asked for twice.
        PromptFileError: see :func:`~specdec.prompts.read_records`.
    """
    if not all(text.strip() for text in texts):
        raise click.UsageError("--prompt is empty: give it a text")
    if launched_rank() is not None and ("-" in (file, *texts) or not (file or texts)):
        raise click.UsageError(
            "mlx.launch leaves standard input open: give --prompts FILE, or start "
            "with --tensor-parallel"
        )
    if [*texts, file].count("-") > 1:
        raise click.UsageError("standard input can be read once: give one '-'")
    if file is not None:
        return [*map(_typed, texts), *read_records(file)]
    if "-" in texts:
        return list(map(_typed, texts))
    if texts:
        piped = _piped(quiet=quiet)
        return [PromptRecord(text + piped) for text in texts]
    if sys.stdin.isatty():
        raise click.UsageError(
            "no prompts: give --prompt TEXT, --prompts FILE, or standard input; "
            "specdec chat talks"
        )
    return read_records("-")


def _typed(text: str) -> PromptRecord:
    if text != "-":
        return PromptRecord(text)
    text = read_text("-")
    if not text.strip():
        raise PromptFileError("standard input: it is empty: give it a prompt")
    return PromptRecord(text)


def _piped(*, quiet: bool) -> str:
    """What comes after the prompts: standard input, unless that is a terminal."""
    if sys.stdin.isatty() or launched_rank() is not None:
        return ""
    with suppress(OSError, ValueError):  # a stream without a descriptor
        ready, _, _ = select.select([sys.stdin], [], [], _PATIENCE)
        if not ready and not quiet:
            note = "reading standard input; </dev/null leaves it out"
            show(f"specdec: note: {note}", err=True)
    text = read_text("-")
    return f"\n\n{text}" if text.strip() else ""


def _under_way(stats: RunStats) -> dict[str, str]:
    """What progress says: a rate once there is one."""
    if not stats.decode_seconds:
        return {"what": "prefill", "note": f"{stats.prefilled} prefilled"}
    tokens = _some(stats.generated_tokens, "token")
    return {"note": f"{tokens}, {stats.tokens_per_second:.1f} tokens/s"}


def _draft_note(num_draft_tokens: NumDraftTokens) -> str | None:
    """What a fixed draft length does where verification is not nearly free."""
    from ..backend import defaults

    if num_draft_tokens == "auto" or defaults().name != "cpu":
        return None
    return (
        "on a CPU, verifying costs nearly as much as decoding: with a fixed number of "
        "draft tokens most pairs are slower there; the output is the same"
    )


def _summary(
    stats: RunStats,
    target: str,
    by: str,
    draft: str | None,
    most: int,
    config: EngineConfig,
    requests: Sequence[SamplingParams],
    num_failed: int,
) -> str:
    from ..model_names import short

    k = config.num_draft_tokens
    length = "as many tokens a round as are worth it"
    if k != "auto":
        length = f"{_some(most, 'token')} a round"
    failed = ", until it failed" if stats.draft_error else ""
    shared = share_text(stats.vocabulary_share)
    lines = {
        "target": short(target) + by,
        "draft": f"{short(draft)}{shared}, {length}{failed}" if draft else "none",
    }
    if warm_up.seconds >= 0.05:
        lines["warm-up"] = f"{warm_up.seconds:.1f} s to have kernels compiled"
    if stats.calibration_seconds >= 0.05:
        seconds = stats.calibration_seconds
        lines["calibration"] = f"{seconds:.1f} s to measure what rounds cost, once"
    lines |= {
        "prefill": f"{_some(stats.prefilled, 'prompt')}, "
        f"{_some(stats.prompt_tokens, 'token')}{_reused(stats.prefix_tokens)}"
    }
    if stats.prefill_seconds:
        lines["prefill"] += f", {stats.prefill_tokens_per_second:.1f} tokens/s"
    if stats.rounds:
        of_each = "the first" if stats.prefilled == 1 else "the first of each prompt"
        lines["decode"] = (
            f"{_some(stats.decode_tokens, 'token')} after {of_each}, "
            f"{_some(stats.rounds, 'round')}, {stats.tokens_per_second:.1f} tokens/s"
        )
    elif stats.row_rounds:  # of workers, whose rounds overlap
        lines["decode"] = (
            f"{_some(stats.decode_tokens, 'token')} in {stats.decode_seconds:.1f} s, "
            f"workers' start included, {stats.tokens_per_second:.1f} tokens/s"
        )
    if stats.drafted:
        lines["acceptance"] = (
            f"rate {stats.acceptance_rate:.3f}, "
            f"length {stats.acceptance_length:.2f} tokens a round"
        )
    elif draft and k == "auto" and "decode" in lines and not failed:
        lines["acceptance"] = "nothing was drafted: it is not worth it here"
    if config.kv_bits is not None:
        lines["KV cache"] = f"{config.kv_bits} bits"
    if seeds := [str(params.seed) for params in requests if params.draws]:
        lines["seed"] = ", ".join(seeds[:3]) + ", ..." * (len(seeds) > 3)
    if num_failed:
        lines["failed"] = f"{_some(num_failed, 'prompt')}, see above"
    if stats.peak_memory_bytes:
        lines["peak memory"] = f"{stats.peak_memory_bytes / 1e9:.2f} GB"
    return "\n".join(f"{key + ':':<13}{value}" for key, value in lines.items())


def _reused(n: int) -> str:
    return f" ({n} from the prefix cache)" if n else ""


def _some(n: int, what: str) -> str:
    return f"{n} {what}" + "s" * (n != 1)

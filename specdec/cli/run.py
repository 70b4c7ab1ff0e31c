"""``specdec run``: decodes prompts. Only text goes to standard output."""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from ..config import DEFAULT_BATCH_SIZE, DEFAULT_PREFIX_CACHE_MEMORY, EngineConfig
from ..errors import PromptError, PromptFileError, RankError
from ..parallel import launched_rank
from ..prompts import Encoding, PromptRecord, read_records, read_text, templates
from ..prompts.images import read_file
from ..sampling_params import SamplingParams, per_prompt
from ..utils.ctrl_c import INTERRUPTED
from ..utils.printable import counted, one_line
from ..utils.warm_up import warm_up
from . import options, ranks
from .interrupts import last_words
from .options import given
from .output import (
    FAILURE,
    OutputFile,
    check_extra,
    name_of,
    note,
    places_named,
    share_text,
    show,
    show_error,
    show_interrupted,
    show_warnings,
    undrafted,
)
from .progress import Progress, Share
from .request_lines import ignored_keys, openai_line, requests_of
from .resume import Finished, common_of, finished_in, settings_of
from .sink import Sink, line_of_result

if TYPE_CHECKING:
    from ..decoder import SpecDecoder
    from ..outputs import GenerationResult, RunStats, StreamEvent
    from ..parallel import Leader
    from ..ray.job import RayJob

# Seconds after which a note says that a pipe has brought nothing.
_PATIENCE = 2.0


@click.command(
    cls=options.Command, short_help="Decode prompts with a target model and a draft."
)
@options.models(
    draft_help="Draft model or draft head (DFlash, DSpark, EAGLE, a Gemma 4 "
    "assistant), named like the target. auto: the target's own head, or one that is "
    "published for it. self:4bit (or 2, 3, 8): the target itself, quantized. "
    "layers:0-7,22-29: these layers of the target, counted from 0. mtp: the target's "
    "own MTP head. ngram: no model; repeats what followed the newest tokens before. "
    "ngram+MODEL: MODEL where no n-gram matches. none: no draft."
)
@options.engine(
    options.batch(default=DEFAULT_BATCH_SIZE, help="Prompts that decode together."),
    options.num_draft_tokens(
        "Tokens that the draft proposes in a round. auto chooses the number, which may "
        "be 0, by measured costs and acceptance.",
        low=0,
    ),
    options.draft_corpus(),
    options.prefill_step_size(),
    options.max_kv_size(),
    options.kv_bits(),
    options.kv_group_size(),
    options.field(EngineConfig, "quantized_kv_start"),
    *options.prefix_cache,
    options.memory_limit(
        help="Use at most this much memory, such as 8GB or 6.5GiB. Rows wait for it; a "
        "prompt that cannot fit is refused. [default: all that the device has]"
    ),
)
@options.sampling
@options.encoding
@click.option(
    "--chat-template",
    metavar="FILE",
    help="File with a Jinja chat template, in place of the model's own.",
)
@options.texts(
    help="A prompt; repeat it for more. Text piped to standard input is appended to "
    "each. '-' reads a prompt from standard input."
)
@options.file(
    "--image",
    "images",
    multiple=True,
    help="An image that stands before the text of each prompt; repeat it for more.",
)
@options.prompts(
    help="File of prompts, one per line: text, or a JSON object with prompt, "
    "question, messages or turns (each sent after the answer to the one before) and "
    "with settings such as max_tokens. OpenAI's batch files work too. [default: "
    "standard input, unless --prompt is given]",
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
    help="Format of the lines in --output; openai is that of OpenAI's batch files.",
)
@click.option(
    "--resume",
    "resumed",
    is_flag=True,
    help="Continue an earlier run with the same prompts and settings: prompts with a "
    "result in --output are skipped, those that failed run again.",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Decode on a Ray cluster. ADDRESS is auto, HOST:PORT, or local, which starts "
    "a cluster here; without ADDRESS it is auto. [default: decode in this process]",
)
@options.positive(
    "--ray-workers",
    help="With --ray: processes that decode. [default: one for each GPU that Ray has, "
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
    images: tuple[str, ...],
    file: str | None,
    tensor_parallel: int | None,
    output_file: str | None,
    output_format: str,
    resumed: bool,
    ray: str | None,
    ray_workers: int | None,
    quiet: bool,
) -> None:
    """Decode prompts with a target model, and with a draft if one is named.

    Text goes to standard output, progress and a summary to standard error. The
    draft and the batch change the speed, not the text.

    \b
      specdec run --prompt "What is MLX?"
      specdec run --draft self:4bit --prompts questions.jsonl --output out.jsonl
      cat report.txt | specdec run --prompt "Summarize:"
    """  # noqa: D301 - click's mark for lines to keep
    # Errors are found here as far as possible, before a model is loaded.
    raw = encoding["ignore_chat_template"]
    if chat_template is not None:
        if raw:
            raise click.UsageError(
                "--chat-template has no effect with --ignore-chat-template: leave one "
                "out"
            )
        models.loading["chat_template"] = read_text(chat_template)
    records = _with_images(_collect(texts, file, quiet=quiet), images)
    requests = requests_of(records, params)
    if not quiet:
        _note_what_does_nothing(models.draft, requests)
        if ignored := ignored_keys(records):
            keys = one_line(", ".join(ignored), 200)
            where = file or "standard input"
            show(f"specdec: warning: {where}: keys without effect: {keys}", err=True)
    turns = sum(len(record.turns) for record in records)
    _check_together(turns, raw=raw)
    if turns and config.prefix_cache_memory is None:
        # A turn repeats the turns before it, which need not be computed again.
        config = replace(config, prefix_cache_memory=DEFAULT_PREFIX_CACHE_MEMORY)
    common = common_of(models, config, encoding)
    finished = None
    if resumed:
        asked = _settings_to_resume(records, requests, common)
        finished = finished_in(str(output_file), records, asked)
    done = set() if finished is None else set(finished.lines)
    if finished is not None and done and len(done) == len(records):
        _tidy(finished)
        return
    output = None
    if output_file is not None:
        prepare = None if finished is None else finished.keep
        output = OutputFile("--output", output_file, file, prepare)

    show_warnings(notes=not quiet)
    job = _job(models.arguments(config), tensor_parallel, ray, ray_workers, quiet=quiet)
    left = [index for index in range(len(records)) if index not in done]
    of_all: SamplingParams | list[SamplingParams] = requests
    if done or ray is not None:
        each = per_prompt(requests, len(records))
        requests = [each[index] for index in left]
    events = job.events(left, records, requests, encoding)

    def line_of(result: GenerationResult, record: PromptRecord) -> dict[str, object]:
        if output_format == "openai":
            return openai_line(result, record, model=job.target_name)
        params = of_all[result.index] if isinstance(of_all, list) else of_all
        line = line_of_result(result, record)
        return {**line, "settings": settings_of(params, common)}

    total = len(left) + turns
    unit = "turn" if turns else "prompt"
    streaming = total == 1 and sys.stdout.isatty()
    progress = Progress(unit, total, quiet=quiet or streaming)
    decoding = _Decoding(
        job=job,
        config=config,
        requests=requests if isinstance(requests, list) else [requests],
        records=records,
        sink=Sink(records, output, progress.aside, line_of, done),
        progress=progress,
        file=output_file,
        resumable=output_format == "specdec" and not turns,
        earlier=bool(done),
        quiet=quiet,
    )
    decoding.run(events, turns)


def _tidy(finished: Finished) -> None:
    """Leave the results alone in a file that has those of all prompts."""
    try:
        finished.keep()
    except OSError as error:
        why = f"--output {finished.path}: {error.strerror}"
        raise click.UsageError(why) from error
    have = "the prompt has its result"
    if len(finished.lines) > 1:
        have = f"all {len(finished.lines)} prompts have their results"
    show(f"specdec: {have}", err=True)


def _settings_to_resume(
    records: Sequence[PromptRecord],
    requests: SamplingParams | list[SamplingParams],
    common: dict[str, Any],
) -> list[dict[str, Any]]:
    """What a result has to be made with, to stand for each prompt's."""
    settings = []
    for record, params in zip(records, per_prompt(requests, len(records)), strict=True):
        asked = settings_of(params, common)
        seeded = record.fields.get("seed") is not None or options.is_given("seed")
        if params.draws and seeded:
            asked["seed"] = params.seed
        settings.append(asked)
    return settings


def _job(
    loading: dict[str, Any],
    tensor_parallel: int | None,
    ray: str | None,
    ray_workers: int | None,
    *,
    quiet: bool,
) -> _Here | RayJob:
    """The job, with its models loaded, or with the cluster that will load them."""
    if ray is None:
        if not given("ignore_chat_template"):
            templates.start()
        return _Here(*ranks.load(tensor_parallel, quiet=quiet, **loading))
    check_extra("--ray", "ray", "ray")
    from ..backend import check_compiler
    from ..ray.job import RayJob

    if (missing := check_compiler()) and not quiet:
        note(missing)
    job = RayJob(ray, ray_workers, loading)
    return click.get_current_context().with_resource(job)


@dataclass(kw_only=True)
class _Decoding:
    """A job while it decodes: where results go, what is shown, and how it ends.

    Args:
        requests: the settings of each prompt, or those of all.
        file: the file of ``--output``, if any.
        resumable: ``--resume`` can go on from that file.
        earlier: that file has results of an earlier run.
    """

    job: _Here | RayJob
    config: EngineConfig
    requests: Sequence[SamplingParams]
    records: Sequence[PromptRecord]
    sink: Sink
    progress: Progress
    file: str | None
    resumable: bool
    earlier: bool
    quiet: bool

    def run(self, events: Iterator[StreamEvent], turns: int) -> None:
        """Take all events, report how the run ended, and exit if it failed.

        Args:
            turns: number of user turns after the first ones of the prompts.
        """
        interrupted, lost = False, None
        ranks.report_loss(self.job.leader, partial(self._conclude, interrupted=True))
        with self.progress, last_words(lambda: self._conclude(interrupted=True)):
            try:
                self._take(events, turns)
            except KeyboardInterrupt:
                interrupted = True
            except RankError as error:
                interrupted, lost = True, error
            except BrokenPipeError:
                self._stdout_closed()
                raise
            except BaseException:
                self.sink.close()
                raise
        self._conclude(interrupted=interrupted, lost=lost)
        if interrupted and lost is None:
            sys.exit(INTERRUPTED)
        if lost is not None or self.sink.errors:
            sys.exit(FAILURE)

    def _take(self, events: Iterator[StreamEvent], turns: int) -> None:
        sink, progress, total = self.sink, self.progress, self.progress.total or 0
        share = Share(total, max(params.max_tokens for params in self.requests))
        progress.add(0, **_at_first(self.job))
        for event in events:
            dropped = sink.dropped
            sink.take(event)
            ended = event.result is not None
            share.drop(sink.dropped - dropped)
            number = event.index * (turns + 1) + event.turn
            share.take(number, len(event.token_ids), done=ended)
            left = total - sink.dropped
            done = progress.done + ended
            progress.show(done, left, **_under_way(self.job), share=share)

    def _conclude(self, *, interrupted: bool, lost: RankError | None = None) -> None:
        """Close the outputs, and report how the run ended."""
        try:
            self.sink.close()
        except BrokenPipeError:
            self._stdout_closed()
            raise
        self.progress.close()
        for index, error in sorted(self.sink.errors.items()):
            show_error(f"{name_of(index, self.records)}: {error}")
        if lost is not None:
            show_error(str(lost))
        if interrupted:
            show_interrupted(self._kept())
        if not self.quiet:
            num_failed = len(self.sink.errors)
            text = _summary(self.job, self.config, self.requests, num_failed)
            show(text, err=True)

    def _stdout_closed(self) -> None:
        if self.file is not None:
            self.progress.close()
            show_error(f"standard output was closed: {self._kept()}")

    def _kept(self) -> str:
        """What has finished, where it is, and how to go on."""
        unit, coming = self.progress.unit, self.progress.total or 0
        text = f"{self.sink.finished} of {counted(coming, unit)} finished"
        any_result = self.sink.finished or self.earlier
        if not any_result:
            text = f"no {unit} had finished"
        if self.file is None or not any_result:
            return text
        text = f"{text}; {self.file} has the results"
        more = self.sink.finished < coming
        resume = ", and --resume continues" if self.resumable and more else ""
        return f"{text}{resume}"


def _check_together(turns: int, *, raw: bool) -> None:
    """Refuse options that do not go together.

    Args:
        turns: number of user turns after the first ones of the prompts.
        raw: the chat template is ignored.
    """
    output, resumed, ray = map(given, ("output_file", "resumed", "ray"))
    openai = given("output_format") == "openai"
    launched = launched_rank() is not None
    other = "mlx.launch" if launched else "--tensor-parallel"
    divided = launched or given("tensor_parallel") is not None
    for wrong, why in (
        (
            given("num_draft_tokens") == 0,
            "--num-draft-tokens 0 leaves the draft unused: write --draft none instead",
        ),
        (openai and output is None, "--output-format needs --output: name a file"),
        (
            turns and raw,
            "turns need the chat template: leave out --ignore-chat-template",
        ),
        (
            turns and openai,
            "OpenAI's batch files have no turns: leave out --output-format",
        ),
        (
            turns and (ray is not None or resumed),
            "turns are decoded in one process and one run: leave out --ray and "
            "--resume",
        ),
        (
            ray is not None and divided,
            f"workers of --ray have whole models: leave out {other}",
        ),
        (
            given("ray_workers") is not None and ray is None,
            "--ray-workers has no effect without --ray",
        ),
        (
            resumed and (output is None or openai),
            "--resume needs --output, in specdec's own form",
        ),
    ):
        if wrong:
            raise click.UsageError(why)


def _note_what_does_nothing(
    draft: str | None, requests: SamplingParams | list[SamplingParams]
) -> None:
    """Name options that have no effect, or not the effect that many expect."""
    each = requests if isinstance(requests, list) else [requests]
    notes = []
    if options.is_given("seed") and not any(params.draws for params in each):
        notes.append("--seed has no effect at --temp 0: nothing is drawn")
    if (match := re.search(r"(?:^|\+)layers:(\d{1,6})$", draft or "")) is not None:
        n = int(match[1])
        notes.append(
            f"layers:{n} is layer {n} alone; the first {n} are layers:0-{n - 1}"
            if n > 1
            else f"layers:{n} is layer {n} alone"
        )
    for text in notes:
        note(text)


def _collect(
    texts: Sequence[str], file: str | None, *, quiet: bool
) -> list[PromptRecord]:
    """The prompts of ``--prompt`` and ``--prompts``, or else of standard input.

    Text piped to standard input is appended to the prompts of ``--prompt``, unless
    another prompt or ``--prompts`` reads it.

    Raises:
        click.UsageError: there are no prompts, or standard input is asked for twice.
        PromptFileError: see :func:`~specdec.prompts.read_records`.
    """
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


def _with_images(
    records: list[PromptRecord], files: Sequence[str]
) -> list[PromptRecord]:
    """The prompts, with the images of ``--image`` before each text.

    Raises:
        click.UsageError: an image cannot be read; the message names its file. Or a
            prompt consists of messages, which have images themselves.
    """
    if not files:
        return records
    # Without Pillow, files wait for the target: if it reads text only, Pillow is no
    # way out.
    read = read_file if find_spec("PIL") else str
    try:
        images = [{"type": "image", "image": read(name)} for name in files]
    except PromptError as error:
        raise click.UsageError(f"--image {error}") from error
    if not all(isinstance(record.prompt, str) for record in records):
        raise click.UsageError(
            "--image goes with prompts of one text: put images into the messages"
        )
    return [
        replace(
            record,
            prompt=[
                {
                    "role": "user",
                    "content": [*images, {"type": "text", "text": record.prompt}],
                }
            ],
        )
        for record in records
    ]


def _typed(text: str) -> PromptRecord:
    if text != "-":
        return PromptRecord(text)
    text = read_text("-")
    if not text.strip():
        raise PromptFileError("standard input: it is empty: give it a prompt")
    return PromptRecord(text)


def _piped(*, quiet: bool) -> str:
    """The text to append to prompts: standard input, unless that is a terminal."""
    if sys.stdin.isatty() or launched_rank() is not None:
        return ""
    with suppress(OSError, ValueError):  # a stream without a descriptor
        ready, _, _ = select.select([sys.stdin], [], [], _PATIENCE)
        if not ready and not quiet:
            note("reading standard input; </dev/null leaves it out")
    text = read_text("-")
    return f"\n\n{text}" if text.strip() else ""


class _Here:
    """A job that this process runs, with other ranks if there are any.

    Args:
        leader: rank 0's view of the ranks, if there are others.

    Attributes:
        target_name, draft_name: the models' names, for reports.
        by: a text that names the ranks, if there are others.
        max_draft_tokens: the most tokens that a round proposes.
    """

    def __init__(self, decoder: SpecDecoder, leader: Leader | None):
        self._decoder = decoder
        self.leader = leader
        self.target_name, self.draft_name = decoder.target_name, decoder.draft_name
        self.by = f", divided between {leader.size} ranks" if leader else ""
        self.max_draft_tokens = decoder.max_draft_tokens

    @property
    def stats(self) -> RunStats:
        """Totals so far."""
        return self._decoder.stats

    @property
    def draft_length_reason(self) -> str | None:
        """What ``auto`` chose in most rounds, and why."""
        return self._decoder.draft_length_reason

    def events(
        self,
        indices: Sequence[int],
        records: Sequence[PromptRecord],
        requests: SamplingParams | list[SamplingParams],
        encoding: Encoding,
    ) -> Iterator[StreamEvent]:
        """Decode some of the records; events have their indices."""
        chosen = [records[index] for index in indices]
        with places_named(chosen):
            events = self._decoder.stream(
                [record.prompt for record in chosen],
                requests,
                turns=[record.turns for record in chosen],
                keep_going=len(records) > 1,
                **encoding,
            )
        if len(chosen) == len(records):
            return events
        return (event.renumbered(indices[event.index], event.turn) for event in events)


def _under_way(job: _Here | RayJob) -> dict[str, Any]:
    """What progress shows while rounds run: rates, once they are known."""
    stats = job.stats
    if not stats.decode_tokens:  # prompts' first tokens have no rate
        return _at_first(job)
    tokens = counted(stats.generated_tokens, "token")
    return {"note": f"{tokens}, {stats.tokens_per_second:.1f} tokens/s"}


def _at_first(job: _Here | RayJob) -> dict[str, Any]:
    """What progress shows until rounds run."""
    if not isinstance(job, _Here):
        return {"what": "workers start"}

    def prefilled() -> str:
        # A function, as it is called while nothing else happens (a long prefill).
        return f"{counted(job.stats.prefill_tokens, 'token')} prefilled"

    return {"what": "prefill", "note": prefilled}


def _summary(
    job: _Here | RayJob,
    config: EngineConfig,
    requests: Sequence[SamplingParams],
    num_failed: int,
) -> str:
    """A summary of the run, in lines."""
    from ..model_names import short

    stats, draft = job.stats, job.draft_name
    automatic = config.num_draft_tokens == "auto"
    length = "as many tokens a round as are worth it"
    if not automatic:
        length = f"{counted(job.max_draft_tokens, 'token')} a round"
    failed = ", until it failed" if stats.draft_error else ""
    shared = share_text(stats.vocabulary_share)
    reused = ""
    if stats.prefix_tokens:
        reused = f" ({stats.prefix_tokens} from the prefix cache)"
    lines = {
        "target": short(job.target_name) + job.by,
        "draft": f"{short(draft)}{shared}, {length}{failed}" if draft else "none",
    }
    if warm_up.seconds >= 0.05:
        lines["warm-up"] = f"{warm_up.seconds:.1f} s to have kernels compiled"
    if stats.calibration_seconds >= 0.05:
        seconds = stats.calibration_seconds
        lines["calibration"] = f"{seconds:.1f} s to measure what rounds cost, once"
    lines["prefill"] = (
        f"{counted(stats.prefilled, 'prompt')}, "
        f"{counted(stats.prompt_tokens, 'token')}{reused}"
    )
    if stats.prefill_seconds:
        lines["prefill"] += f", {stats.prefill_tokens_per_second:.1f} tokens/s"
    tokens, rate = counted(stats.decode_tokens, "token"), stats.tokens_per_second
    if stats.rounds:
        of_each = "the first" if stats.prefilled == 1 else "the first of each prompt"
        rounds = counted(stats.rounds, "round")
        lines["decode"] = f"{tokens} after {of_each}, {rounds}, {rate:.1f} tokens/s"
    elif stats.row_rounds:  # rounds of workers overlap
        took = f"{stats.decode_seconds:.1f} s, workers' start included"
        lines["decode"] = f"{tokens} in {took}, {rate:.1f} tokens/s"
    if stats.drafted:
        lines["acceptance"] = (
            f"rate {stats.acceptance_rate:.3f}, "
            f"length {stats.acceptance_length:.2f} tokens a round"
        )
    # What an interrupt cuts off has no counts of its draft.
    elif draft and automatic and stats.row_rounds and not failed:
        lines["acceptance"] = undrafted(draft)
    if isinstance(job, _Here) and job.draft_length_reason:
        lines["auto"] = job.draft_length_reason
    if config.kv_bits is not None:
        lines["KV cache"] = f"{config.kv_bits} bits"
    if seeds := [str(params.seed) for params in requests if params.draws]:
        lines["seed"] = ", ".join(seeds[:3]) + ", ..." * (len(seeds) > 3)
    if num_failed:
        lines["failed"] = f"{counted(num_failed, 'prompt')}, see above"
    if stats.peak_memory_bytes:
        lines["peak memory"] = f"{stats.peak_memory_bytes / 1e9:.2f} GB"
    return "\n".join(f"{key + ':':<13}{value}" for key, value in lines.items())

"""``specdec convert``: a GGUF file as a folder that mlx-lm loads."""

from __future__ import annotations

import click

from ..model_names import is_default_target, locate_target
from .output import note, show, show_warnings


@click.command(short_help="Convert a GGUF file to a folder that mlx-lm loads.")
@click.argument("file", metavar="FILE.gguf")
@click.argument("out_dir", metavar="OUT_DIR")
@click.option(
    "--bits",
    type=click.Choice([4, 8, 16]),
    help="Bits per weight. 16 does not quantize; on a CPU, mlx-lm is fastest with it. "
    "[default: as in the file]",
)
def convert(file: str, out_dir: str, bits: int | None) -> None:
    """Convert FILE.gguf to OUT_DIR, a folder that mlx-lm can load.

    FILE may also be the name of the default target.

    \b
      specdec convert model.gguf model
      specdec convert SmolLM2-135M-Instruct out
    """  # noqa: D301 - click's mark for lines to keep
    show_warnings()
    from ..backend import defaults
    from ..models import convert as convert_model

    source = locate_target(file) if is_default_target(file) else file
    convert_model(source, out_dir, bits=bits)
    show(f"wrote {out_dir}: specdec run --target {out_dir}", err=True)
    if bits != 16 and defaults().name == "cpu":
        note(
            "on a CPU, mlx-lm is many times slower with packed weights (their scales "
            "have 16 bits); --bits 16 is fast there"
        )

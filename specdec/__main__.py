"""``python -m specdec``: the command, for when its script is not on PATH."""

from .cli import main

main(prog_name="specdec")

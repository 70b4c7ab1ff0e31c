"""``python -m specdec``: the command, where its script is not on PATH."""

from .cli import main

main(prog_name="specdec")

"""The command. ``python -m specdec`` is for when its script is not on PATH."""

from __future__ import annotations

from .utils.ctrl_c import end_at_once


def main() -> None:
    """Run the command line. Ctrl-C is listened to before it is imported."""
    end_at_once()
    from .utils.process import prepare_process

    prepare_process()
    from .cli import main as command

    command(prog_name="specdec")


if __name__ == "__main__":
    main()

"""Tables: columns that line up, whatever is in them."""

from __future__ import annotations

from specdec.utils.tables import markdown_table, text_table


def test_columns_line_up() -> None:
    """A cell that is wider than its header, and blanks at the end of a line."""
    rows: list[list[object]] = [["", "a", "bb"], ["total", 1234, "x"]]
    assert text_table(rows) == "       a     bb\ntotal  1234  x"
    assert text_table(rows, align="right") == "          a  bb\ntotal  1234   x"
    assert text_table([]) == ""


def test_markdown() -> None:
    assert (
        markdown_table(["a", "b"], [["x", 1]]) == "| a | b |\n|---|---:|\n| x | 1 |\n"
    )

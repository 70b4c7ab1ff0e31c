"""Grammars that outputs must follow, and a row's state in its grammar."""

from .compiler import AT_ONCE, GrammarCompiler, check_grammar
from .spec import Grammar, GrammarKind
from .state import FAILED, GrammarState
from .thinking import ThinkingBudget, ThinkingMarks

__all__ = [
    "AT_ONCE",
    "FAILED",
    "Grammar",
    "GrammarCompiler",
    "GrammarKind",
    "GrammarState",
    "ThinkingBudget",
    "ThinkingMarks",
    "check_grammar",
]

"""Grammars that outputs must follow, and a row's state in its grammar."""

from .compiler import AT_ONCE, GrammarCompiler, check_grammar
from .spec import Grammar, GrammarKind
from .state import GrammarState

__all__ = [
    "AT_ONCE",
    "Grammar",
    "GrammarCompiler",
    "GrammarKind",
    "GrammarState",
    "check_grammar",
]

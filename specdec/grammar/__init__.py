"""Grammars that outputs must follow, and the state of a row in one."""

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

"""Grammars that output has to follow: what users write, and where a row is in one."""

from .compiler import GrammarCompiler, check_grammar
from .spec import Grammar, GrammarKind
from .state import GrammarState

__all__ = [
    "Grammar",
    "GrammarCompiler",
    "GrammarKind",
    "GrammarState",
    "check_grammar",
]

"""Openings of user turns; the target writes the rest of each turn.

A target that writes user turns without an opening repeats itself. A few words at the
beginning, drawn from lists, spread its texts over the kinds of things that users ask:
instructions and questions, word problems, code. The words here are this project's own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

_QUESTIONS = (
    "", "", "", "Explain", "Explain why", "Explain how", "What is", "What are",
    "What is the difference between", "How do I", "How does", "How can I", "Why do",
    "Why is", "When did", "Who was", "Can you", "Could you", "Please", "Describe",
    "Write", "Write a short story about", "Write a poem about", "Write an email to",
    "Write a letter", "Write a blog post about", "Write a dialogue between",
    "Summarize", "Summarize the following text:", "Rewrite this sentence:",
    "Translate", "Give me", "Give an example of", "Give three reasons", "List",
    "List five", "Name", "Compare", "Suggest", "Imagine", "Imagine you are",
    "I want to", "I need", "I am", "I have been", "My friend", "Help me", "Is it",
    "Do you", "Tell me about", "Make a plan for", "Plan a", "Create", "Design",
    "Classify", "Identify", "Correct the grammar", "Edit the following paragraph",
    "Turn these notes into", "Act as", "Pretend", "Which of these", "Should I",
    "What would happen if", "What do you think about", "In one sentence,",
    "As a teacher,", "A good way to", "Consider", "Provide", "Outline", "Draft",
    "Solve", "Calculate", "Find", "Prove that", "Convert", "Complete the sentence:",
    "Answer the question:", "Read the passage and", "The following is", "Recommend",
)  # fmt: skip

_NAMES = (
    "Maria", "Tom", "Aisha", "Ben", "Chen", "Olga", "Ravi", "Emma", "Lucas", "Nina",
    "Omar", "Sofia", "Peter", "Julia", "Kofi", "Hana", "David", "Leila", "Marco",
    "Grace", "Sam", "Anna", "Victor", "Zoe", "Paul", "Mina", "Jack", "Ines", "Karl",
    "A farmer", "A baker", "A teacher", "A shop", "A train", "A school", "A company",
    "A bus", "A gardener", "A library", "A class", "A family", "A factory",
    "A painter", "A car", "A store", "Two friends", "A box", "A restaurant",
)  # fmt: skip
_DEEDS = (
    "has", "buys", "sells", "makes", "collects", "earns", "reads", "bakes", "drives",
    "saves", "plants", "needs", "gives away", "works", "walks", "spends", "packs",
    "orders", "picks", "pays", "starts with", "wants to buy", "is", "runs", "uses",
    "can carry", "produces", "eats", "found", "had", "bought", "sold", "received",
)  # fmt: skip
_AMOUNTS = (
    "", "", "3", "4", "5", "6", "8", "10", "12", "15", "20", "24", "25", "30", "36",
    "40", "48", "50", "60", "75", "100", "120", "150", "200", "300", "1000", "twice",
    "half", "$5", "$12", "$20", "$40", "$150", "two", "three", "five", "seven",
)  # fmt: skip
_THINGS = (
    "", "", "", "apples", "books", "eggs", "cookies", "pencils", "miles", "hours",
    "tickets", "boxes of", "bags of", "bottles of water", "chairs", "flowers",
    "marbles", "stickers", "shirts", "cakes", "pages", "trees", "toys", "chickens",
    "loaves of bread", "pounds of", "cups of", "students", "gallons of", "dozen",
)  # fmt: skip
_WORKED = (
    "If", "There are", "At a", "On Monday,", "In a", "The price of", "The sum of",
    "How many", "It takes", "Every day,", "A rectangle has", "Half of", "The ratio of",
    "An event", "The cost of", "Each", "A recipe calls for", "The average of",
)  # fmt: skip

_VERBS = (
    "count", "find", "sum", "remove", "reverse", "check", "is", "merge", "filter",
    "sort", "split", "get", "compute", "max", "min", "convert", "rotate", "group",
    "find_all", "replace", "encode", "decode", "parse", "format", "select", "flatten",
    "longest", "shortest", "first", "last", "unique", "common", "multiply", "has",
    "add", "validate", "next", "total", "average", "largest", "smallest", "most",
)  # fmt: skip
_NOUNS = (
    "words", "numbers", "digits", "vowels", "pairs", "list", "string", "matrix",
    "primes", "duplicates", "characters", "intervals", "elements", "substring",
    "brackets", "sentence", "dates", "divisors", "points", "sequence", "palindrome",
    "letters", "values", "factors", "squares", "indices", "sublists", "text", "tree",
    "range", "scores", "names", "dictionary", "grid", "positions", "even_numbers",
)  # fmt: skip
_PARAMETERS = (
    ("text: str", "int"), ("text: str", "str"), ("text: str", "bool"),
    ("s: str", "str"), ("words: List[str]", "str"), ("words: List[str]", "List[str]"),
    ("numbers: List[int]", "int"), ("numbers: List[int]", "List[int]"),
    ("numbers: List[float]", "float"), ("values: List[int], k: int", "List[int]"),
    ("n: int", "int"), ("n: int", "bool"), ("n: int", "List[int]"),
    ("a: int, b: int", "int"), ("a: str, b: str", "bool"), ("items: list", "list"),
    ("text: str, letter: str", "int"), ("matrix: List[List[int]]", "int"),
    ("pairs: List[Tuple[int, int]]", "int"), ("x: float, y: float", "float"),
)  # fmt: skip
_SAYS = (
    "", "Return", "Given", "Check if", "Find the", "Write a function that",
    "Return the", "Return a list of", "For a given", "Count the", "You are given",
    "Input to this function is", "Create a function that", "Remove", "Compute",
    "Filter", "The function takes", "Return True if",
)  # fmt: skip
_ASKS = (
    "Return the", "Find the", "Count the", "Compute the", "Remove all", "Return all",
    "Check the", "Sort the", "Return how many", "Return the largest of the",
)  # fmt: skip
_CODING = (
    "Write a Python function that", "Write a Python function to", "Write a function",
    "Write a Python program that", "Implement", "Complete the following function:",
    "How do I write a loop that", "Fix the bug in this code:", "Write a class",
    "Write a SQL query that", "Write a JavaScript function that", "In Python, how",
    "Write a regular expression", "Explain this code:", "Write a unit test for",
    "Create a Python script that", "Refactor this function:", "Write a bash script",
    "Given a list of", "Given a string", "Given an array of integers",
)  # fmt: skip


@dataclass(frozen=True)
class Opening:
    """The opening of a user turn.

    Args:
        text: the opening; it may be empty.
        until: the turn ends where this text comes again after the opening.
    """

    text: str
    until: str | None = None


def _question(rng: Random) -> Opening:
    return Opening(rng.choice(_QUESTIONS))


def _problem(rng: Random) -> Opening:
    if rng.random() < 0.2:
        return Opening(rng.choice(_WORKED))
    lists = (_NAMES, _DEEDS, _AMOUNTS, _THINGS)
    words = [rng.choice(each) for each in lists[: rng.choice((1, 2, 3, 4, 4))]]
    return Opening(" ".join(filter(None, words)))


def _code(rng: Random) -> Opening:
    if rng.random() < 0.3:
        return Opening(rng.choice(_CODING))
    parameters, result = rng.choice(_PARAMETERS)
    typed = rng.random() < 0.7
    if not typed:
        parameters = ", ".join(p.split(":")[0] for p in parameters.split(", ") if p)
    head = ""
    if typed and ("List" in parameters + result or "Tuple" in parameters):
        names = [n for n in ("List", "Tuple") if n in parameters + result]
        head = f"from typing import {', '.join(names)}\n\n\n"
    name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    arrow = f" -> {result}" if typed else ""
    says = rng.choice(_SAYS)
    if rng.random() < 0.3:  # an example that the target continues
        what = rng.choice(_NOUNS).replace("_", " ")
        says = f"{rng.choice(_ASKS)} {what} of the input.\n    >>> {name}("
    begin = f'{head}def {name}({parameters}){arrow}:\n    """'
    space = rng.choice((" ", "", "\n    "))
    return Opening(f"{begin}{space if says else ''}{says}", until='"""')


# What is drawn from, by topic: word problems come twice as often.
_DRAWN = {"questions": [_question], "problems": [_problem] * 2, "code": [_code]}
#: What an opening can be of.
TOPICS = tuple(_DRAWN)


def draw(rng: Random, topics: Collection[str] = TOPICS) -> Opening:
    """Draw an opening.

    Args:
        topics: some of :data:`TOPICS`.
    """
    kinds = [kind for topic, of in _DRAWN.items() if topic in topics for kind in of]
    return rng.choice(kinds)(rng)

"""Texts to be computed: a given number of plain words in an order that depends on a seed."""

from random import Random

_TEXT = """
the river town market letter window winter garden table paper morning evening road bridge teacher doctor
house door light water stone music story question answer reason number minute hour week year friend
neighbour child summer train station ticket captain island harbour forest mountain valley village kitchen
bread butter apple orange silver yellow green early late small large quiet open closed heavy simple careful
honest familiar distant keep carry bring follow reach build write read count weigh turn wait listen remember
forget explain promise between under behind before after without within against toward until while because
although whether however report order account price weather engine bottle coat glass shoulder corner field
cloud north south
"""
WORDS = tuple(_TEXT.split())

WORD_CHARS = sum(map(len, WORDS)) / len(WORDS) + 1
"""Characters of a word with its space, on average."""


def text(source: Random, num_words: int) -> str:
    """Sentences with this number of words together."""
    words = source.choices(WORDS, k=max(1, num_words))
    sentences: list[str] = []
    start = 0
    while start < len(words):
        stop = start + source.randint(6, 14)
        sentences.append(" ".join(words[start:stop]).capitalize() + ".")
        start = stop
    return " ".join(sentences)

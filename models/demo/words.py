"""Words, names and values for the tasks of the demo model's training text.

What passes through here: a seeded generator goes in, and nouns, names of places and people,
numbers, dates and codes come out, alone or in the slots of a template of ``text/asks.txt``. Half
of the words do not exist: they are put together from sounds. What is taught with words that are
seen once is taught for all words: to find one again, and to copy it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"<(\w+)>")
Value = str | int | float | bool | list[str]


def read_blocks(path: Path) -> dict[str, list[str]]:
    """The lines of a file's blocks, by the names behind their @; comments are left out."""
    blocks: dict[str, list[str]] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("@"):
            name = line[1:]
            blocks[name] = []
        elif line and not line.startswith("#"):
            blocks.setdefault(name, []).append(line)
    return blocks


TEXT_DIR = Path(__file__).resolve().parent / "text"
ASKS = read_blocks(TEXT_DIR / "asks.txt")
WORDS = {
    name: " ".join(lines).split() for name, lines in read_blocks(TEXT_DIR / "words.txt").items()
}


class Words:
    """Draws words and values with a generator of its own."""

    def __init__(self, rng: random.Random) -> None:
        """rng: decides everything that is drawn."""
        self.rng = rng
        self.slots: dict[str, Callable[[], str]] = {
            "noun": self.noun,
            "verb": self.verb,
            "adjective": self.adjective,
            "place": self.place,
            "person": self.person,
            "item": self.item,
            "code": self.code,
            "date": self.date,
            "time": self.time,
            "email": self.email,
            "number": lambda: str(self.number()),
            "decimal": lambda: str(self.decimal()),
            "clause": lambda: self.say("clause"),
            "word": self.noun,
            "told": self.sentence,
            "weekday": lambda: rng.choice(WORDS["days"]),
            "unit": lambda: rng.choice(WORDS["units"]) if rng.random() < 0.6 else self.noun() + "s",
            "measure": lambda: rng.choice(WORDS["measures"]),
            "colour": lambda: (
                rng.choice(WORDS["colours"]) if rng.random() < 0.6 else self.made_up(2)
            ),
            "language": lambda: rng.choice(WORDS["languages"]),
            "currency": lambda: rng.choice(WORDS["currencies"]),
            "room": lambda: rng.choice(WORDS["rooms"]) if rng.random() < 0.5 else self.phrase(),
            "name": lambda: rng.choice([self.person, self.item, self.place])(),
            "digits": lambda: "".join(rng.choice("0123456789") for _ in range(rng.randint(5, 9))),
            "sum": lambda: f"{self.number()} {rng.choice('+-*/')} {self.number()}",
            "file": lambda: self.fill("{|||/|docs/}<noun>{.txt|.md|.csv||_2.log}"),
        }
        self.values: dict[str, Callable[[], Value]] = {
            "number": self.number,
            "age": lambda: rng.randint(1, 99),
            "small": lambda: rng.randint(0, 12),
            "year": lambda: rng.randint(1500, 2039),
            "money": lambda: self.decimal() if rng.random() < 0.4 else self.number(),
            "list": lambda: [self.noun() for _ in range(rng.randint(1, 4))],
            "bool": lambda: rng.random() < 0.5,
        }

    # -- templates -------------------------------------------------------------------------------

    def fill(self, template: str, **given: str) -> str:
        """Resolves the choices and slots of a template; ``given`` comes before what is drawn."""
        while _CHOICE.search(template):
            template = _CHOICE.sub(lambda m: self.rng.choice(m[1].split("|")), template)
        return _SLOT.sub(lambda m: given[m[1]] if m[1] in given else self.slots[m[1]](), template)

    def say(self, block: str, **given: str) -> str:
        """One of the ways of a block of ``text/asks.txt``."""
        return self.fill(self.rng.choice(ASKS[block]), **given)

    def value(self, kind: str) -> Value:
        """A value of a kind, as JSON has it."""
        return self.values[kind]() if kind in self.values else self.slots[kind]()

    # -- words -----------------------------------------------------------------------------------

    def made_up(self, most: int = 3) -> str:
        """A word that does not exist, of one to ``most`` syllables."""
        rng = self.rng
        count = rng.choices(range(1, most + 1), [4, 6, 1][:most])[0]
        sounds = [
            rng.choice(WORDS["onsets"])
            + rng.choice(WORDS["vowels"])
            + (rng.choice(WORDS["codas"]) if rng.random() < 0.45 else "")
            for _ in range(count)
        ]
        if rng.random() < 0.03:  # of another language
            accents = str.maketrans("aeou", rng.choice(["äéöü", "áèóú", "åêøů"]))
            sounds[0] = sounds[0].translate(accents)
        return "".join(sounds) + (rng.choice(WORDS["tails"]) if rng.random() < 0.5 else "")

    def noun(self, odd: float = 0.5) -> str:
        """A noun, one that does not exist with the probability ``odd``."""
        return self.made_up() if self.rng.random() < odd else self.rng.choice(WORDS["nouns"])

    def verb(self, odd: float = 0.3) -> str:
        """A verb, one that does not exist with the probability ``odd``."""
        return self.made_up(2) if self.rng.random() < odd else self.rng.choice(WORDS["verbs"])

    def adjective(self, odd: float = 0.3) -> str:
        """An adjective, one that does not exist with the probability ``odd``."""
        return self.made_up(2) if self.rng.random() < odd else self.rng.choice(WORDS["adjectives"])

    def inflected(self, word: str) -> str:
        """A word with another ending, as a question has it where a tool's name has the stem."""
        if not word.isalpha() or len(word) < 3:
            return word
        stem = word[:-1] if word[-1] in "ey" else word
        doubled = stem + stem[-1] if stem[-1] in "bdgmnpt" and self.rng.random() < 0.5 else stem
        return self.rng.choice([word + "s", doubled + "ed", doubled + "ing", stem + "er", stem])

    def phrase(self) -> str:
        """What something is called: one to three words."""
        words = [self.noun()]
        pick = self.rng.random()
        if pick < 0.35 or pick > 0.95:
            words.insert(0, self.noun())
        if pick > 0.75:
            words.insert(0, self.adjective())
        return " ".join(words)

    # -- values ----------------------------------------------------------------------------------

    def place(self) -> str:
        """A place's name."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.2:
            return rng.choice(WORDS["places"])
        name = self.made_up().title()
        if pick < 0.3:
            return f"{rng.choice(WORDS['joins'])} {name}"
        return f"{name} {rng.choice(WORDS['ends'])}" if pick < 0.4 else name

    def person(self) -> str:
        """A person's name, often with a family name."""
        rng = self.rng
        first = rng.choice(WORDS["given"]) if rng.random() < 0.4 else self.made_up(2).title()
        pick = rng.random()
        if pick < 0.35:
            return f"{first} {self.made_up().title()}"
        return f"{rng.choice(['Mr', 'Mrs', 'Dr', 'Captain'])} {first}" if pick < 0.4 else first

    def item(self) -> str:
        """A thing that somebody wants, plays or reads: words of any sort, sometimes in capitals."""
        rng = self.rng
        words = [self.noun() for _ in range(rng.choice([1, 1, 2, 2, 3]))]
        if rng.random() < 0.3:
            words.insert(0, self.adjective())
        text = " ".join(words)
        return text.title() if rng.random() < 0.35 else text

    def code(self) -> str:
        """A number of an order, a parcel, a room: letters and digits."""
        rng = self.rng
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
        forms = [f"{letters}-{digits}", f"{letters}{digits}", digits, f"{digits}-{digits[::-1]}"]
        return rng.choice(forms)

    def number(self) -> int:
        """A whole number, small ones more often."""
        return self.rng.randint(1, self.rng.choice([12, 99, 999, 9999]))

    def decimal(self) -> float:
        """A number with one or two decimals."""
        return round(self.rng.uniform(0, self.rng.choice([10, 100, 1000])), self.rng.choice([1, 2]))

    def date(self) -> str:
        """A day, in one of the forms that people write."""
        rng = self.rng
        pick, month, day = rng.random(), rng.choice(WORDS["months"]), rng.randint(1, 28)
        if pick < 0.35:
            return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02}-{day:02}"
        if pick < 0.65:
            return rng.choice(WORDS["days"])
        return f"{day} {month}" if pick < 0.8 else f"{month} {day}"

    def time(self) -> str:
        """A time of the day."""
        rng = self.rng
        if rng.random() < 0.6:
            return f"{rng.randint(0, 23):02}:{rng.randrange(0, 60, 5):02}"
        return f"{rng.randint(1, 12)} {rng.choice(['am', 'pm'])}" if rng.random() < 0.7 else "noon"

    def email(self) -> str:
        """An address for mail."""
        end = self.rng.choice(["example.com", "example.org", f"{self.made_up(2)}.example"])
        return f"{self.made_up(2)}{self.rng.choice(['', '.' + self.made_up(1)])}@{end}"

    def sentence(self) -> str:
        """A sentence of words that need not fit each other."""
        text = self.say("sentence")
        return text[0].upper() + text[1:]

"""Words, names and values for the tasks of the demo model's training text.

The input is a seeded generator. The output is nouns, names of places and people, numbers, dates and
codes, alone or in the slots of a template of ``text/asks.txt``. Half of the words are invented from
sounds. Because most words occur only once, what is taught with them applies to all words: to find a
word again and copy it.
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
    """Return the lines of a file's blocks, by the names after their @; comments are left out."""
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
    """Draws words and values with a given random generator."""

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
        """Resolves the choices and slots of a template; ``given`` takes precedence over what is
        drawn.
        """
        while _CHOICE.search(template):
            template = _CHOICE.sub(lambda m: self.rng.choice(m[1].split("|")), template)
        return _SLOT.sub(lambda m: given[m[1]] if m[1] in given else self.slots[m[1]](), template)

    def say(self, block: str, **given: str) -> str:
        """Return one of the phrases of a block of ``text/asks.txt``."""
        return self.fill(self.rng.choice(ASKS[block]), **given)

    def value(self, kind: str) -> Value:
        """Return a JSON value of a kind."""
        return self.values[kind]() if kind in self.values else self.slots[kind]()

    # -- words -----------------------------------------------------------------------------------

    def made_up(self, most: int = 3) -> str:
        """Return a word that does not exist, with one to ``most`` syllables."""
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
        """Return a noun, which is invented with the probability ``odd``."""
        return self.made_up() if self.rng.random() < odd else self.rng.choice(WORDS["nouns"])

    def verb(self, odd: float = 0.3) -> str:
        """Return a verb, which is invented with the probability ``odd``."""
        return self.made_up(2) if self.rng.random() < odd else self.rng.choice(WORDS["verbs"])

    def adjective(self, odd: float = 0.3) -> str:
        """Return an adjective, which is invented with the probability ``odd``."""
        return self.made_up(2) if self.rng.random() < odd else self.rng.choice(WORDS["adjectives"])

    def inflected(self, word: str) -> str:
        """Return a word with another ending, as in a question if a tool's name has the stem."""
        if not word.isalpha() or len(word) < 3:
            return word
        stem = word[:-1] if word[-1] in "ey" else word
        doubled = stem + stem[-1] if stem[-1] in "bdgmnpt" and self.rng.random() < 0.5 else stem
        return self.rng.choice([word + "s", doubled + "ed", doubled + "ing", stem + "er", stem])

    def phrase(self) -> str:
        """Return the name of something: one to three words."""
        words = [self.noun()]
        pick = self.rng.random()
        if pick < 0.35 or pick > 0.95:
            words.insert(0, self.noun())
        if pick > 0.75:
            words.insert(0, self.adjective())
        return " ".join(words)

    # -- values ----------------------------------------------------------------------------------

    def place(self) -> str:
        """Return a place's name."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.2:
            return rng.choice(WORDS["places"])
        name = self.made_up().title()
        if pick < 0.3:
            return f"{rng.choice(WORDS['joins'])} {name}"
        return f"{name} {rng.choice(WORDS['ends'])}" if pick < 0.4 else name

    def person(self) -> str:
        """Return a person's name, often with a family name."""
        rng = self.rng
        first = rng.choice(WORDS["given"]) if rng.random() < 0.4 else self.made_up(2).title()
        pick = rng.random()
        if pick < 0.35:
            return f"{first} {self.made_up().title()}"
        return f"{rng.choice(['Mr', 'Mrs', 'Dr', 'Captain'])} {first}" if pick < 0.4 else first

    def item(self) -> str:
        """Return something that somebody wants, plays or reads: words of any kind, sometimes
        capitalised.
        """
        rng = self.rng
        words = [self.noun() for _ in range(rng.choice([1, 1, 2, 2, 3]))]
        if rng.random() < 0.3:
            words.insert(0, self.adjective())
        text = " ".join(words)
        return text.title() if rng.random() < 0.35 else text

    def code(self) -> str:
        """Return the number of an order, a parcel or a room: letters and digits."""
        rng = self.rng
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
        forms = [f"{letters}-{digits}", f"{letters}{digits}", digits, f"{digits}-{digits[::-1]}"]
        return rng.choice(forms)

    def number(self) -> int:
        """Return a whole number; small ones are more frequent."""
        return self.rng.randint(1, self.rng.choice([12, 99, 999, 9999]))

    def decimal(self) -> float:
        """Return a number with one or two decimals."""
        return round(self.rng.uniform(0, self.rng.choice([10, 100, 1000])), self.rng.choice([1, 2]))

    def date(self) -> str:
        """Return a date in one of the formats that people write."""
        rng = self.rng
        pick, month, day = rng.random(), rng.choice(WORDS["months"]), rng.randint(1, 28)
        if pick < 0.35:
            return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02}-{day:02}"
        if pick < 0.65:
            return rng.choice(WORDS["days"])
        return f"{day} {month}" if pick < 0.8 else f"{month} {day}"

    def time(self) -> str:
        """Return a time of day."""
        rng = self.rng
        if rng.random() < 0.6:
            return f"{rng.randint(0, 23):02}:{rng.randrange(0, 60, 5):02}"
        return f"{rng.randint(1, 12)} {rng.choice(['am', 'pm'])}" if rng.random() < 0.7 else "noon"

    def email(self) -> str:
        """Return an email address."""
        end = self.rng.choice(["example.com", "example.org", f"{self.made_up(2)}.example"])
        return f"{self.made_up(2)}{self.rng.choice(['', '.' + self.made_up(1)])}@{end}"

    def sentence(self) -> str:
        """Return a sentence of unrelated words."""
        text = self.say("sentence")
        return text[0].upper() + text[1:]

r"""Writes the stories, facts and chats that the demo model is trained on.

The input is the hand-written templates of ``text/``; the output is seeded documents. A document is
either plain text (a story, a description, a fact) or a chat (a list of role/content messages).
Nothing is read from anywhere else, so all of the text is original to this project.

Template syntax: ``{a|b|c}`` is a choice and may be nested, ``<slot>`` is filled from the cast of
the document (names, pronouns, things, places), and a literal ``\n`` is a line break.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

TEXT_DIR = Path(__file__).resolve().parent / "text"

CHOICE = re.compile(r"\{([^{}]*)\}")
SLOT = re.compile(r"<([A-Za-z0-9:]+)>")


def _list(text: str, mark: str | None = None) -> list[str]:
    """Splits a text at a mark, by default at spaces, and joins broken lines."""
    return [" ".join(part.split()) for part in text.split(mark)]


GIRLS = _list("""
Mira Anna Lily Rosa Emma Clara Nora Ida Greta Sofia Ella Maya Lena Ruth Zoe Amina Yuki Priya Alice
Martha Nina Vera Lucy Sara Kate Molly Daisy Ada
""")
BOYS = _list("""
Tom Ben Max Leo Oskar Paul Jonas Finn Hugo Emil Sam Noah Peter Omar Ravi Kenji Luca Ivan Anton
Felix Jack Henry Theo Arthur Simon David George Toby
""")
PETS = _list("""
Biscuit Pepper Bruno Ginger Clover Pip Maple Nutmeg Otto Barley Poppy Bramble Mossy Teddy Luna
Pickle Fig Juniper Tuck Waffle Fern Momo
""")
ROBOTS = _list("Bolt Zip Bip Cog Rivet Dot Nix Widget Spark Gizmo")
SURNAMES = _list("Miller Baker Hill Brook Carter Fischer Rossi Tanaka Lang Stone Marsh Weaver")
ANIMALS = _list("""
dog cat rabbit fox mouse bear owl duck hedgehog squirrel frog goat pony donkey lamb puppy kitten
pig hen turtle badger otter beaver lion elephant monkey penguin wolf horse cow sheep tiger bird
crow deer goose dolphin whale bee snail
""")
PLURAL = {
    "mouse": "mice",
    "wolf": "wolves",
    "sheep": "sheep",
    "deer": "deer",
    "fox": "foxes",
    "goose": "geese",
    "fish": "fish",
    "pony": "ponies",
    "puppy": "puppies",
}
THINGS = _list("""
lantern clock whistle drum teapot umbrella mirror compass bell basket chair ladder book hat ring
button bottle box telescope flute violin kite ball boat wagon bicycle blanket candle coat cup flag
hammer key letter map painting pencil piano rope scarf shell shoe spoon table toy train watch
wheel camera guitar lamp puzzle doll robot pillow broom bucket jar coin crown car computer tent
bag machine notebook
""")
COLORS = _list("red blue green yellow white grey brown silver golden purple orange black")
TOWNS = _list("""
Alderbrook Millford Greenhill Stonebridge Riverton Oakham Seabury Larkfield Northwood Willowdale
Fernley Ashby Westport Marlow
""")
SEASONS = ["spring", "summer", "autumn", "winter"]
LANGS = _list("French German Spanish Italian Chinese Japanese Arabic Russian Polish Dutch")
SKILLS = ["swim", "draw", "cook", "play the piano", "sing", "write", "dance", "read faster"]
NATURE = {  # what can be described, and how the descriptions of it begin
    "the river": "The river",
    "the forest": "The forest",
    "the sea": "The sea",
    "the mountain": "The mountain",
    "the garden": "The garden",
    "the village": "The {village",
    "the market": "The market",
    "the house": "The house",
    "the wind": "The wind",
    "the sun": "The sun",
    "the rain": "The rain",
    "the lake": "The lake",
    "the beach": "The beach",
    "the night": "The night|{It was a dark",
    "the morning": "The morning|In the morning",
    "winter": "{Winter",
    "summer": "{Summer",
    "autumn": "{In autumn",
    "spring": "{Spring",
}
UNKNOWN = _list(
    """
quantum computing;blockchain;the stock market;inflation;a black hole;calculus;philosophy;
chemistry;an atom;gravity;evolution;a virus;opera;jazz;chess;tennis;the Roman Empire;democracy;
a parliament;photosynthesis;Kubernetes;Docker;a compiler;JavaScript;Rust;a database;a kernel;
the government;biology;a molecule;physics;an algorithm;cryptography;a passport;yoga;a guitar solo;
sushi;the pyramids;America;Australia;India;China;Africa;Mars;a rocket engine;a submarine;
a helicopter;a vaccine;law;economics;marketing;psychology;astronomy;a satellite
""",
    ";",
)
FACT_ASKS = [
    "What is {}?",
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "Can you explain what {} is?",
    "Do you know what {} is?",
    "Please explain what {} is.",
    "Explain {}.",
    "Explain {} to a child.",
    "Explain {} to me like I'm five.",
    "In simple words, what is {}?",
    "Could you tell me what {} is?",
    "I would like to know what {} is.",
    "I have heard of {}. What is it?",
    "Describe {}.",
    "Define {}.",
    "Tell me about {}.",
    "What do you know about {}?",
]
FACT_ASKS_MANY = [
    "What are {}?",
    "Tell me about {}.",
    "Tell me about {}.",
    "Tell me something about {}.",
    "Explain {}.",
    "What do you know about {}?",
    "Write a few sentences about {}.",
    "Do you know anything about {}?",
    "I want to learn about {}.",
    "Can you tell me about {}?",
]
DESCRIBE_ASKS = [
    "Describe {}.",
    "Write about {}.",
    "Write a paragraph about {}.",
    "Write a text about {}.",
    "Write a few sentences that describe {}.",
    "Can you describe {}?",
    "Give me a description of {}.",
]
REFUSALS = [
    "I am only a small demo model, so I do not know what {} is.",
    "I am sorry, but I do not know {}. I am only a small demo model.",
    "I do not know {}. Perhaps I can tell you a story instead?",
    "I have not learned anything about {}. I am only a small demo model.",
]
GREETINGS = ["Hello! ", "Hi! ", "Hi, ", "Hello, ", "I have a question. ", "Tell me: ", "Please: "]
TRAITS = [
    "small",
    "young",
    "curious",
    "brave",
    "shy",
    "clever",
    "quiet",
    "cheerful",
    "gentle",
    "stubborn",
    "kind",
    "little",
    "dreamy",
    "patient",
]
JOBS = [
    "baker",
    "miller",
    "fisherman",
    "carpenter",
    "gardener",
    "tailor",
    "shepherd",
    "potter",
    "shoemaker",
    "postman",
    "teacher",
    "doctor",
    "sailor",
    "farmer",
    "painter",
    "ferryman",
]
HOMES = [
    "in a small house by the river",
    "at the edge of a deep forest",
    "in the town of <town>",
    "in a village called <town>",
    "on a hill above the sea",
    "near an old mill",
    "in a cottage with a red roof",
    "in a valley between two mountains",
    "not far from <town>",
    "beside a quiet lake",
    "on a small island",
    "at the end of a long road",
]
ANIMAL_HOMES = [
    "under the roots of an old oak",
    "on a farm near <town>",
    "in a warm barn",
    "behind an old mill",
    "at the edge of a deep forest",
    "beside a quiet pond",
    "in a garden full of flowers",
    "in a yard with a tall fence",
    "near the river",
]
OPENINGS = [
    "Once upon a time, there was <hero> who lived <home>.",
    "Once upon a time, <hero> lived <home>.",
    "Once upon a time, there lived <hero>. <Name> lived <home>.",
    "Once upon a time, in a land far away, there was <hero>.",
    "There once was <hero>. <He> lived <home>.",
    "Long ago, <hero> lived <home>.",
    "A long time ago, there was <hero> who lived <home>.",
    "Not so long ago, <hero> lived <home>.",
    "<Hero> lived <home>.",
    "<Name> was <herobare>. <He> lived <home>.",
    "This is the story of <Name>, <herobare> who lived <home>.",
    "One day in <season>, something happened to <hero>.",
    "Many years ago, there was <hero>. Everybody <home0> knew <him>.",
    "In a place where the {winters|summers} were long, there lived <hero>.",
    "Do you know <Name>? <Name> was <herobare>, and <he> lived <home>.",
    "<Hero> lived <home> and was {happy|seldom bored|always busy} there.",
]
ASIDES = [
    "",
    "",
    "",
    "",
    "",
    "",
    "The sun {was shining|went behind a cloud}.",
    "A soft wind moved the {leaves|grass}.",
    "Somewhere a {dog barked|bell rang|bird sang}.",
    "<Name> {took a deep breath|closed <his> eyes for a moment|did not say a word}.",
    '<Name> {remembered the words of <kin>|thought of <kin>}: "{Never give up|Be kind and be '
    'brave|Take your time|Look twice before you speak}."',
    "It {was not easy|took a long time|was hard work}, but <he> {did not give up|kept going|was "
    "patient}.",
    "{Time went by|The hours passed|Everything was quiet}.",
    '"{I can do it|Everything will be all right|I must not give up}," <he> told <himself>.',
    "A few drops of rain fell, and then it {stopped|was dry again}.",
    "<Name> felt {nervous|calm|hopeful|excited}.",
]
ENDINGS = [
    "From that day on, <Name> and <friend> were {the best of friends|good friends}.",
    "And so <Name> learned that {small things can make a big difference|it is good to ask for "
    "help|a kind heart is worth more than gold|nobody has to be alone}.",
    "That night, <Name> {slept deeply|fell asleep with a smile|dreamed of the sea}.",
    "<Name> never forgot that day.",
    "And they lived happily ever after.",
    "When <kin> heard about it, <khe> {laughed|smiled and said nothing|was very proud}.",
    "And if you ever come to <town>, you may still {hear the story|meet them there}.",
    "In the evening, they {drank hot chocolate|sat by the fire|ate soup} and told the story {again "
    "and again|to everyone}.",
    "It was {the best day of the year|a day to remember}.",
    '"{What a day|That was an adventure}!" said <Name>.',
    "And that is the end of the story.",
    "<Name> {smiled all the way home|went home, tired and happy|was happy}.",
    "",
    "After that, {everything was a little brighter|life was good}.",
    "<friend> still {tells that story|laughs about it} today.",
]
KIN_F = ["<his> grandmother", "<his> mother", "<his> aunt", "<his> old neighbour"]
KIN_M = ["<his> grandfather", "<his> father", "<his> uncle", "<his> old teacher"]
CON = [
    "b",
    "br",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "sk",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
    "sh",
    "qu",
    "th",
    "ch",
]
VOW = ["a", "e", "i", "o", "u", "oo", "ea", "ai"]
TAIL = ["n", "x", "rk", "l", "m", "sh", "t", "ng", "ck", "d", "bid", "tor", "ment", "ing", "gle"]
STORY_ASKS = [
    "Write a story about <t>.",
    "Tell me a story about <t>.",
    "Write a short story about <t>",
    "Write a story about <t>",
    "tell me a story about <t>",
    "Can you tell me a story about <t>?",
    "Please write a story about <t>.",
    "I would like to hear a story about <t>.",
    "Story about <t>, please.",
    "Tell me about <t> in a story.",
    "Make up a story about <t>.",
    "Could you write a short story about <t>?",
    "A story about <t>",
    "Write a tale about <t>.",
    "Give me a story about <t>.",
    "Tell a bedtime story about <t>.",
]
PLAIN_ASKS = [
    "Tell me a story.",
    "Write a story.",
    "Tell me a story",
    "Write a short story.",
    "Can you tell me a story?",
    "Please tell me a story.",
    "Another story, please.",
    "Write something nice.",
    "Tell me a bedtime story.",
    "Once upon a time",
]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are the demo model of Headrace.",
    "Be kind and use simple words.",
    "You write short stories.",
    "You are a concise assistant. Answer in plain English.",
    "You are an assistant that answers questions truthfully.",
]

Message = dict[str, str]


@dataclass
class Document:
    """One training document: plain ``text``, or the ``messages`` of a chat."""

    text: str = ""
    messages: list[Message] = field(default_factory=list)


def article(noun: str) -> str:
    """Puts "a" or "an" in front of a noun phrase."""
    return ("an " if noun[0].lower() in "aeio" or noun.startswith("umb") else "a ") + noun


def _blocks(path: Path) -> list[str]:
    """Splits a template file into blocks at blank lines, dropping comments."""
    lines = [ln for ln in path.read_text(encoding="utf-8").split("\n") if not ln.startswith("#")]
    return [b.strip() for b in "\n".join(lines).split("\n\n") if b.strip()]


class Writer:
    """Draws documents from the templates with its own seeded random generator."""

    def __init__(self, seed: int) -> None:
        """Reads the templates; ``seed`` decides everything that is drawn from them."""
        self.rng = random.Random(seed)
        self.stories = [self._story_block(b) for b in _blocks(TEXT_DIR / "stories.txt")]
        self.texts = _blocks(TEXT_DIR / "texts.txt")
        self.chats = [
            (u, a)
            for u, a in (
                re.findall(r"^U: (.*)\nA: (.*)$", b)[0] for b in _blocks(TEXT_DIR / "chats.txt")
            )
        ]
        self.nature = {
            topic: [t for t in self.texts if re.match(start.replace("{", r"\{"), t)]
            for topic, start in NATURE.items()
        }
        self.facts: list[tuple[str, str, list[str]]] = []
        for line in "\n".join(_blocks(TEXT_DIR / "facts.txt")).split("\n"):
            names, _, body = line.partition(" :: ")
            one, _, many = names.partition(" | ")
            self.facts.append((one, many, body.split(" || ")))

    @staticmethod
    def _story_block(block: str) -> tuple[str, list[str], list[str]]:
        head, *beats = block.split("\n")
        kind, _, topics = head[1:].partition(" ")
        return kind, [t.strip() for t in topics.split(";")], beats

    # -- filling templates ---------------------------------------------------------------------

    def fill(self, template: str, cast: dict[str, str]) -> str:
        """Resolves all choices and slots of a template."""
        text = template
        while True:
            done = CHOICE.sub(lambda m: self.rng.choice(m.group(1).split("|")), text)
            done = SLOT.sub(lambda m: self._slot(m.group(1), cast), done)
            if done == text:
                break
            text = done
        text = text.replace("\\n", "\n")
        text = re.sub(r" {2,}", " ", text)
        text = re.sub(r"\b([Aa]) (?=[aeio]|umb)(?!one)", r"\1n ", text)
        # Marks that met when choices were joined, such as ``?."`` or ``?",``.
        return re.sub(r'([?!])([."]*)[.!?,]', lambda m: m[1] + m[2].replace(".", ""), text).strip()

    @staticmethod
    def _quotes(text: str) -> str:
        """Puts the punctuation at the end of every speech inside its quotes; adds it if it is
        missing.
        """
        text = re.sub(r'([A-Za-z])"(?= [a-z])', r'\1,"', text)
        text = re.sub(r'([A-Za-z])"(?= [A-Z"]|\n|$)', r'\1."', text)
        return re.sub(r'([A-Za-z])"\.', r'\1."', text)

    def _slot(self, name: str, cast: dict[str, str]) -> str:
        rng = self.rng
        if name in cast:
            return cast[name]
        if name == "aside":
            return rng.choice(ASIDES)
        if name == "end":
            return rng.choice(ENDINGS) + (" The end." if rng.random() < 0.06 else "")
        if name == "open":
            return rng.choice(OPENINGS)
        if name == "open2":
            return "<Hero> lived nearby."
        if name == "person":
            return rng.choice([t for t in self.texts if t.startswith("<Name> {was|is}")])
        if name == "odd":
            return self.odd_word()
        if name in ("n", "n2"):
            return str(rng.randint(3, 999))
        if name == "animals":
            one = rng.choice(ANIMALS)
            return PLURAL.get(one, one + "s")
        if name == "skill":
            return rng.choice(SKILLS)
        if name == "nature":
            return rng.choice(sorted(NATURE))
        if name == "Title":
            return "The " + rng.choice(COLORS).title() + " " + rng.choice(THINGS).title()
        raise KeyError(f"unknown slot <{name}>")

    def odd_word(self) -> str:
        """Return a word that does not exist, for questions that the model should not answer."""
        rng = self.rng
        word = "".join(rng.choice(CON) + rng.choice(VOW) for _ in range(rng.randint(1, 2)))
        return word + rng.choice(TAIL)

    def cast(
        self, kind: str, animal: str | None = None, thing: str | None = None
    ) -> dict[str, str]:
        """Choose the characters and topic of a document, with matching pronouns."""
        rng = self.rng
        cast: dict[str, str] = {}
        beast = animal is not None or kind == "animal" or (kind == "any" and rng.random() < 0.4)
        female = rng.random() < 0.5
        trait = rng.choice(TRAITS)
        if beast:
            species = animal or rng.choice(ANIMALS)
            name = rng.choice(PETS)
            who = f"{trait} {species}"
            cast["home"] = rng.choice(ANIMAL_HOMES)
        else:
            name = rng.choice(GIRLS if female else BOYS)
            role = rng.random()
            who = f"{trait} {'girl' if female else 'boy'}"
            if role < 0.15 and kind == "any":
                who = f"{trait} {rng.choice(JOBS)}" if not female else f"{trait} old woman"
            cast["home"] = rng.choice(HOMES)
        if rng.random() < 0.02:
            name = self.odd_word().title()
        fem2 = rng.random() < 0.5
        other = rng.choice([n for n in (GIRLS if fem2 else BOYS) if n != name])
        if beast and rng.random() < 0.3:
            other = rng.choice([n for n in PETS if n != name])
        for key, fem in (("", female), ("f", fem2)):
            cast[key + "he"] = "she" if fem else "he"
            cast[key + "He"] = "She" if fem else "He"
            cast[key + "him"] = "her" if fem else "him"
            cast[key + "his"] = "her" if fem else "his"
            cast[key + "His"] = "Her" if fem else "His"
            cast[key + "himself"] = "herself" if fem else "himself"
        kin_f = rng.random() < 0.5
        cast["kin"] = rng.choice(KIN_F if kin_f else KIN_M)
        cast["khe"], cast["khis"] = ("she", "her") if kin_f else ("he", "his")
        called = rng.choice(
            ["named", "called", "by the name of"] if rng.random() < 0.3 else ["named", "called"]
        )
        cast["herobare"] = article(who)
        cast["hero"] = f"{article(who)} {called} {name}"
        cast["Hero"] = cast["hero"][0].upper() + cast["hero"][1:]
        cast["home0"] = "in the {village|town|valley}"
        cast["Name"], cast["friend"], cast["Name2"] = name, other, other
        cast["robot"] = rng.choice(ROBOTS)
        cast["town"] = rng.choice(TOWNS)
        cast["season"], cast["color"] = rng.choice(SEASONS), rng.choice(COLORS)
        cast["surname"], cast["lang"] = rng.choice(SURNAMES), rng.choice(LANGS)
        cast["animal"], cast["animal2"], cast["animal3"] = rng.sample(ANIMALS, 3)
        cast["thing"] = thing or rng.choice(THINGS)
        cast["a:thing"] = article(cast["thing"])
        return cast

    # -- documents -----------------------------------------------------------------------------

    def story(self) -> tuple[str, str]:
        """Write a story and return it with its topic."""
        rng = self.rng
        kind, topics, beats = rng.choice(self.stories)
        if rng.random() < 0.18:
            kind, topics, beats = rng.choice(
                [s for s in self.stories if s[1][0] == "<a:thing>" or s[1][-1] == "<a:thing>"]
            )
        animal = None
        if kind == "animal" or (kind == "any" and rng.random() < 0.45):
            animal = rng.choice(ANIMALS)
            if rng.random() < 0.15:
                animal = rng.choice(["dog", "cat"])
        cast = self.cast(
            "child" if animal is None and kind == "any" and rng.random() < 0.7 else kind, animal
        )
        opened = any("<open>" in b or "<hero>" in b for b in beats)
        about = self.fill(rng.choice(topics), cast)
        if opened and rng.random() < 0.5:
            bare = cast["herobare"]
            if animal is not None:
                bare = article(animal) if rng.random() < 0.8 else bare
            elif rng.random() < 0.5:
                bare = article(bare.split(" ", 2)[2])
            about = bare
            if rng.random() < 0.15:
                about += f" named {cast['Name']}"
            elif rng.random() < 0.12:
                about += " and " + self.fill(topics[-1], cast)
        gap = "\n\n" if rng.random() < 0.35 else " "
        text = gap.join(p for p in (self.fill(b, cast) for b in beats) if p)
        return self._quotes(self._capitals(text)), about

    @staticmethod
    def _capitals(text: str) -> str:
        """Capitalises the beginnings of sentences."""
        return re.sub(
            r'(^|\n|[.!?] )("?)([a-z])',
            lambda m: m.group(1) + m.group(2) + m.group(3).upper(),
            text,
        )

    def plain_text(self) -> str:
        """Write a description, a letter, or a short report."""
        text = self.fill(self.rng.choice(self.texts), self.cast("child"))
        return text[0].upper() + text[1:]

    def fact_text(self) -> str:
        """Write a short paragraph about one thing."""
        _, _, body = self.rng.choice(self.facts)
        return " ".join(body)

    def fact_chat(self) -> tuple[str, str]:
        """Write a question about a thing, and its answer."""
        rng = self.rng
        one, many, body = rng.choice(self.facts[:16] if rng.random() < 0.2 else self.facts)
        ask = rng.choice(FACT_ASKS).format(one)
        if rng.random() < 0.35:
            asks = FACT_ASKS_MANY if many != one else FACT_ASKS_MANY[1:]
            ask = rng.choice(asks).format(many)
        if rng.random() < 0.05:
            ask = one.removeprefix("a ").removeprefix("an ").removeprefix("the ").title() + "?"
        keep = body if rng.random() < 0.6 else body[: rng.randint(1, len(body))]
        return ask, " ".join(keep)

    def unknown_chat(self) -> tuple[str, str]:
        """Write a question about a thing that the model does not know; the answer repeats its
        name.
        """
        rng = self.rng
        topic = rng.choice(UNKNOWN)
        if rng.random() < 0.4:
            topic = rng.choice(["", "a ", "the "]) + self.odd_word()
        if rng.random() < 0.2:
            topic = f"the {rng.choice(['history', 'theory', 'art', 'price', 'end'])} of {topic}"
        ask = rng.choice(FACT_ASKS + FACT_ASKS_MANY[1:]).format(topic)
        return ask, rng.choice(REFUSALS).format(topic)

    def description(self) -> tuple[str, str]:
        """Write a request for a description, and the description."""
        rng = self.rng
        cast = self.cast("child")
        pick = rng.random()
        if pick < 0.2:
            topic, text = f"a {cast['animal']}", self.by_start("The <animal>")
        elif pick < 0.4:
            topic, text = f"a {cast['thing']}", self.by_start("The <thing>")
        else:
            topic = rng.choice(sorted(self.nature))
            text = rng.choice(self.nature[topic])
        ask = rng.choice(DESCRIBE_ASKS).format(topic)
        return self.fill(ask, cast), self._capitals(self.fill(text, cast))

    def by_start(self, start: str) -> str:
        """Return one of the texts that begin in the given way."""
        return self.rng.choice([text for text in self.texts if text.startswith(start)])

    def turn(self) -> tuple[str, str]:
        """Return one question and one answer."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.30:
            text, about = self.story()
            if rng.random() < 0.1:
                return self.vary(rng.choice(PLAIN_ASKS)), text
            return self.vary(rng.choice(STORY_ASKS).replace("<t>", about)), text
        if pick < 0.58:
            ask, answer = self.fact_chat()
        elif pick < 0.64:
            ask, answer = self.unknown_chat()
        elif pick < 0.69:
            ask, answer = self.description()
        else:
            ask, answer = rng.choice(self.chats[:6] if rng.random() < 0.2 else self.chats)
            cast = self.cast("child")
            cast["odd"] = self.odd_word()
            ask, answer = self.fill(ask, cast), self.fill(answer, cast)
            if len(ask) < 16:
                return (ask.lower() if rng.random() < 0.1 else ask), answer
        return self.vary(ask), answer

    def vary(self, ask: str) -> str:
        """Rephrase a question slightly, as people do."""
        rng = self.rng
        if rng.random() < 0.08:
            ask = rng.choice(GREETINGS) + ask
        if rng.random() < 0.12:
            ask = ask[:-1] if ask[-1] in ".?" else ask
        if rng.random() < 0.12:
            ask = ask[0].lower() + ask[1:]
        return ask

    def chat(self) -> Document:
        """Write a chat of one to three turns, sometimes with a system message."""
        rng = self.rng
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            ask, answer = self.turn()
            messages.append({"role": "user", "content": ask})
            messages.append({"role": "assistant", "content": answer})
        return Document(messages=messages)

    def document(self) -> Document:
        """Draws one document of any kind."""
        pick = self.rng.random()
        if pick < 0.50:
            return self.chat()
        if pick < 0.57:  # the same questions and answers, without any chat markers
            return Document(text=self.rng.choice([" ", "\n", "\n\n"]).join(self.turn()))
        if pick < 0.82:
            return Document(text=self.story()[0])
        if pick < 0.95:
            return Document(text=self.plain_text())
        return Document(text=self.fact_text())

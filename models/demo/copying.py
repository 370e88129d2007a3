"""Documents whose answer is contained in the question: copies, edits, lists, extraction.

The input is `Words`; the output is pairs of a question and its answer, or plain texts that repeat
themselves. They teach a model to find a word again and continue from there. Tool calls and forms
need this skill as well, so these documents come first in the training.
"""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase, digits

from words import ASKS, Words


def _asked(words: Words, block: str, text: str, **given: str) -> str:
    """Return a request and its text, which is on the same line, on a separate line, or in
    quotes.
    """
    rng = words.rng
    ask = words.fill(rng.choice(ASKS[block]), t="<t>", old="<old>", new="<new>", slip="<slip>")
    ask = ask[:1].upper() + ask[1:]
    if ask.endswith(" <t>"):
        ask = ask.removesuffix(" <t>") + rng.choice([" ", " ", " ", "\n", "\n\n"]) + "<t>"
        if rng.random() < 0.15 and '"' not in text and '"' not in ask:
            ask = ask.replace("<t>", '"<t>"')
    return words.fill(ask, t=text, **given)


_SIGNS = "!?.,;:-_/()[]+*=%&#@'~<>|$"


def sentence(words: Words) -> str:
    """Return a sentence of unrelated words, or one of a story."""
    return words.sentence() if words.rng.random() < 0.6 else words.slots["told"]()


def scraps(words: Words) -> str:
    """Return meaningless letters, digits and signs, mixed with words."""
    rng = words.rng
    made = []
    for _ in range(rng.randint(3, 14)):
        letters = rng.choice([ascii_lowercase, ascii_uppercase, digits])
        word = "".join(rng.choice(letters) for _ in range(rng.randint(1, 6)))
        if rng.random() < 0.5:
            word = words.noun(0.8)
        sign = rng.choice(_SIGNS) if rng.random() < 0.5 else ""
        made.append(sign + word if rng.random() < 0.4 else word + sign)
    return rng.choice([" ", " ", ""]).join(made)


def some_text(words: Words) -> str:
    """Return a text to work on: sentences, a list of words, a row of codes, or a line of JSON."""
    rng = words.rng
    pick = rng.random()
    if pick < 0.1:
        return scraps(words)
    if pick < 0.55:
        gap = rng.choice([" ", " ", " ", "\n"])
        return gap.join(sentence(words) for _ in range(rng.choice([1, 1, 2, 3, 4])))
    if pick < 0.75:
        return " ".join(words.noun(0.8) for _ in range(rng.randint(3, 24)))
    if pick < 0.85:
        kinds = rng.choices(["noun", "place", "person", "item"], k=rng.randint(3, 12))
        return ", ".join(words.slots[kind]() for kind in kinds)
    if pick < 0.93:
        some = ["code", "number", "time", "date", "email", "decimal"]
        kinds = rng.choices(some, k=rng.randint(2, 9))
        return rng.choice([" ", ", "]).join(words.slots[kind]() for kind in kinds)
    members = [f'"{words.noun()}": {words.number()}' for _ in range(rng.randint(1, 4))]
    return "{" + ", ".join(members) + "}"


def repetition(words: Words) -> str:
    """Return a plain text that repeats itself, so that its continuation is already known."""
    rng = words.rng
    pick = rng.random()
    if pick < 0.6:
        gap = rng.choice(["\n", " ", "\n\n", "\n- "])
        return gap.join([some_text(words)] * rng.choice([2, 2, 3]))
    known = [words.noun(0.8) for _ in range(rng.randint(3, 8))]
    if pick < 0.8:  # pairs: the second of a pair follows the first wherever it stands
        mark = rng.choice([": ", " = ", " is ", " -> ", " "])
        lines = [f"{one}{mark}{words.slots[rng.choice(['noun', 'place'])]()}" for one in known]
        again = rng.sample(lines, len(lines))
        return rng.choice(["\n", ", ", "; "]).join(lines + again)
    return " ".join(known) + "\n" + " ".join(known * 2)


def copy(words: Words) -> tuple[str, str]:
    """Return a request to repeat a text, and the text."""
    text = some_text(words)
    return _asked(words, "copy", text), text


def edit(words: Words) -> tuple[str, str]:
    """Return a request to change a word of a text, and the changed text."""
    rng = words.rng
    text = " ".join(sentence(words) for _ in range(rng.choice([1, 1, 2, 2, 3])))
    plain = [word.strip('.,:"') for word in text.split()]
    once = [w for w in plain if w.isalnum() and len(w) > 1 and text.count(w) == 1]
    long = [w for w in once if w.isalpha() and len(w) > 3]
    if not long:
        return copy(words)
    pick, old = rng.random(), rng.choice(once)
    if pick < 0.25:  # a slip of the pen in the text, the right word in the wish
        old = rng.choice(long)
        at = rng.randrange(1, len(old) - 1)
        swapped = old[:at] + old[at + 1] + old[at] + old[at + 2 :]
        slip = swapped if swapped != old and rng.random() < 0.6 else old[:at] + old[at + 1 :]
        wrong = text.replace(old, slip, 1)
        return _asked(words, "correct", wrong, old=old, slip=slip), text
    new = words.noun()
    if old[0].isupper() or rng.random() < 0.1:
        new = rng.choice([words.person, words.place])()
    elif old[0].isdigit():
        new = str(words.number())
    if pick < 0.8:
        return _asked(words, "replace", text, old=old, new=new), text.replace(old, new, 1)
    if pick < 0.88 and f" {old} " in text:
        return _asked(words, "drop", text, old=old), text.replace(f" {old} ", " ", 1)
    if pick < 0.92:
        some = words.sentence()
        return _asked(words, "append", text, new=some), f"{text} {some}"
    if pick < 0.95:
        some = words.sentence()
        return _asked(words, "prepend", text, new=some), f"{some} {text}"
    added = text.replace(old, f"{old} {new}", 1)
    return _asked(words, "after", text, old=old, new=new), added


def listing(words: Words) -> tuple[str, str]:
    """Return a question about the order of a list, or a list to continue."""
    rng = words.rng
    kind = rng.choice(["noun", "place", "person", "code"])
    items = list(dict.fromkeys(words.slots[kind]() for _ in range(rng.randint(3, 7))))
    row, at = ", ".join(items), rng.randrange(max(1, len(items) - 1))
    start, step = rng.randint(1, 400), rng.choice([1, 1, 2, 5, 10])
    counted = [str(start + i * step) for i in range(8)]
    return rng.choice(
        [
            (words.fill("{What is|Name|Which is} the first of these: ") + row, items[0]),
            (words.fill("{What is|Name|Which is} the last of these: ") + row, items[-1]),
            (f"What comes after {items[at]}: {row}", items[at + 1 if len(items) > 1 else 0]),
            (words.fill("{Write|Put} {one|each} on {a|its own} line: ") + row, "\n".join(items)),
            (words.fill("{Write|Make|Show} as a list: ") + row, "- " + "\n- ".join(items)),
            (f"Continue: {', '.join(counted[:4])}", ", ".join(counted[4:])),
            (f"Continue: {', '.join(items * 2)},", row),
        ]
    )


_REPORTS = [
    (
        "<who> lives in <where>.",
        ["Where does <who> live?|<where>", "Who lives in <where>?|<who>", "Who is it about?|<who>"],
    ),
    (
        "The <what> with <who> is on <when> at <at>.",
        [
            "When is the <what>?|on <when> at <at>",
            "Who is the <what> with?|<who>",
            "At what time is the <what>?|<at>",
            "On which day is the <what>?|<when>",
        ],
    ),
    (
        "<who> bought <n> <what> for <m> euros.",
        [
            "How many <what>?|<n>",
            "Who bought <what>?|<who>",
            "What was bought?|<what>",
            "What did <who> buy?|<what>",
        ],
    ),
    (
        "Order <code> of <who> goes to <where>.",
        [
            "What is the number of the order?|<code>",
            "Where does the order go?|<where>",
            "Whose order is it?|<who>",
        ],
    ),
    (
        "<who> is a <job> and has the address <mail>.",
        ["What is <who>?|a <job>", "What is the address of <who>?|<mail>", "Who is a <job>?|<who>"],
    ),
    (
        "The <what> costs <n> euros in <where>.",
        [
            "How much is the <what>?|<n> euros",
            "What costs <n> euros?|the <what>",
            "Where does it cost so much?|in <where>",
        ],
    ),
    (
        "There are <n> <job>s at the <what>.",
        ["How many <job>s are there?|<n>", "Where are the <job>s?|at the <what>"],
    ),
]


def extraction(words: Words) -> tuple[str, str]:
    """Return a short report and a question about one of its facts."""
    rng = words.rng
    told = []
    for text, questions in rng.sample(_REPORTS, rng.choice([1, 2, 2, 3])):
        given = {
            "who": words.person(),
            "where": words.place(),
            "when": words.date(),
            "what": words.item(),
            "n": str(words.number()),
            "m": str(words.number()),
            "at": words.time(),
            "code": words.code(),
            "mail": words.email(),
            "job": words.noun(),
        }
        told.append((words.fill(text, **given), questions, given))
    _, questions, given = rng.choice(told)
    question, answer = (words.fill(part, **given) for part in rng.choice(questions).split("|"))
    report = " ".join(text for text, _, _ in told)
    form = rng.choice(
        ["{t} {q}", "{t}\n{q}", "Text: {t}\nQuestion: {q}", "{q} {t}", "Read this. {t} {q}"]
    )
    return form.format(t=report, q=question), answer

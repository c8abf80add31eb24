"""Short conversations with seeded details; what is computed in them is true."""

# ruff: noqa: E501  (templates keep the lines of their text)
import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta

NAMES = [
    "Anna",
    "Bilal",
    "Clara",
    "Dmitri",
    "Esra",
    "Finn",
    "Gita",
    "Hugo",
    "Irene",
    "Jamal",
    "Kim",
    "Luca",
    "Maya",
    "Nils",
    "Olga",
    "Pedro",
]
MARKS = (
    ("User: ", "Assistant: "),
    ("Q: ", "A: "),
    ("", ""),
    ("Customer: ", "Agent: "),
    ("- ", "- "),
    ("**You:** ", "**Helper:** "),
)
PLAIN = (("", ""), ("- ", "- "), ("A: ", "B: "))
"""Where nobody asks an assistant."""
SHOPS = ["the bakery", "the bicycle shop", "the pharmacy", "the hardware store", "the florist", "the tailor"]
UNITS = (("miles", "kilometres", 1.609344), ("pounds", "kilograms", 0.45359237), ("inches", "centimetres", 2.54),
         ("US gallons", "litres", 3.785411784), ("feet", "metres", 0.3048), ("ounces", "grams", 28.349523125))  # fmt: skip
CITIES = [
    "Lisbon",
    "Oslo",
    "Nairobi",
    "Lima",
    "Hanoi",
    "Ottawa",
    "Cairo",
    "Athens",
    "Seoul",
    "Quito",
    "Dublin",
    "Warsaw",
    "Tunis",
    "Helsinki",
]
WORDS = [
    "harbour",
    "lantern",
    "meadow",
    "copper",
    "river",
    "window",
    "market",
    "station",
    "garden",
    "winter",
    "letter",
    "bridge",
    "engine",
    "orchard",
]
GERMAN = dict(zip(WORDS, ["Hafen", "Laterne", "Wiese", "Kupfer", "Fluss", "Fenster", "Markt", "Bahnhof", "Garten", "Winter", "Brief", "Brücke", "Motor", "Obstgarten"], strict=True))  # fmt: skip
SPANISH = dict(zip(WORDS, ["puerto", "farol", "prado", "cobre", "río", "ventana", "mercado", "estación", "jardín", "invierno", "carta", "puente", "motor", "huerto"], strict=True))  # fmt: skip
Turns = list[str]


def documents() -> Iterator[tuple[str, list[str]]]:
    """Yield conversations, a name for each kind."""
    makers: tuple[tuple[str, int, Callable[[random.Random], Turns]], ...] = (
        ("delivery", 8, delivery), ("units", 10, units), ("calendar", 8, calendar), ("words", 10, words),
        ("code", 8, code), ("shop", 8, shop), ("quiz", 8, quiz), ("table", 8, table),
    )  # fmt: skip
    for name, count, make in makers:
        yield f"chat, {name}", [_show(random.Random(f"{name} {index}"), make) for index in range(count)]


def _show(rng: random.Random, make: Callable[[random.Random], Turns]) -> str:
    marks = rng.choice(PLAIN if make in (shop, table, quiz) else MARKS)
    between = "\n\n" if not marks[0] else rng.choice(("\n", "\n\n"))
    return between.join(marks[turn % 2] + text for turn, text in enumerate(make(rng)))


def delivery(rng: random.Random) -> Turns:
    order, days = rng.randrange(10_000, 99_999), rng.randint(2, 9)
    sent = date(2024, 1, 8) + timedelta(days=rng.randrange(300))
    due = sent + timedelta(days=days)
    item = rng.choice(("kettle", "pair of boots", "desk lamp", "set of screwdrivers", "winter coat"))
    return [
        f"Hi, I ordered a {item} a while ago and it hasn't come. The order number is {order}.",
        f"Thanks, let me look. Order {order} left the warehouse on {sent:%A, %d %B}. It usually takes {days} days, so it should "
        f"arrive by {due:%A, %d %B}.",
        f"That's later than the website said! Can I still change the address? I'll be at my sister's in {rng.choice(CITIES)}.",
        "I'm sorry about that. Once a parcel is with the carrier we can't change the address ourselves, but the carrier can: there "
        "is a link in the message that told you it was on its way. If you'd rather not bother, they also keep parcels for ten days.",
        "And if I'm not happy with it?",
        f"You can send it back within thirty days of receiving it. If it comes on {due:%d %B}, that means until "
        f"{due + timedelta(days=30):%d %B}. Keep the box, if you can.",
        rng.choice(("Okay, that works. Thanks.", "Fine. I'll wait for it then.", "Good to know. Bye!")),
        "You're welcome. Is there anything else I can do for you today?",
    ]


def units(rng: random.Random) -> Turns:
    one, other, factor = rng.choice(UNITS)
    amount, second = rng.randint(3, 120), rng.randint(2, 40)
    return [
        f"How much is {amount} {one} in {other}?",
        f"{amount} {one} are about {amount * factor:.1f} {other}. One of the former is {factor:.4g} of the latter, and "
        f"{amount} × {factor:.4g} ≈ {amount * factor:.1f}.",
        f"And the other way round, {second} {other}?",
        f"Divide instead: {second} / {factor:.4g} ≈ {second / factor:.2f} {one}.",
        "Is there a rule of thumb that I can do in my head?",
        f"Yes. Ten {one} are {10 * factor:.0f} {other}, near enough. Scale from there, and you will be within a few per cent.",
        f"So twenty would be {20 * factor:.0f}?",
        f"Exactly: about {20 * factor:.1f}, to one decimal.",
    ]


def calendar(rng: random.Random) -> Turns:
    day = date(2023, 1, 1) + timedelta(days=rng.randrange(1000))
    later = rng.randint(10, 200)
    end = day + timedelta(days=later)
    leap = day.year % 4 == 0
    return [
        f"What day of the week was {day:%d %B %Y}?",
        f"It was a {day:%A}, in week {day.isocalendar().week} of the year.",
        f"Which date is {later} days after it?",
        f"{end:%d %B %Y}, a {end:%A}. {later} days are {later // 7} weeks and {later % 7} days, so the day of the week moves on by "
        f"{later % 7}.",
        f"How many days are left in {day.year} after {day:%d %B}?",
        f"{(date(day.year, 12, 31) - day).days}, since {day.year} is {'a leap year' if leap else 'not a leap year'} and has "
        f"{366 if leap else 365} days.",
    ]


def words(rng: random.Random) -> Turns:
    a, b, c = rng.sample(WORDS, 3)
    language, book = rng.choice((("German", GERMAN), ("Spanish", SPANISH)))
    return [
        f"How do you say “{a}” in {language}?",
        f"“{book[a]}”.",
        f"And “{b}” and “{c}”?",
        f"“{book[b]}” and “{book[c]}”.",
        "Please make a list of all three with their number of letters.",
        "\n".join(f"- {word} – {book[word]} ({len(book[word])} letters)" for word in (a, b, c)),
        "Sort the English words by the alphabet.",
        ", ".join(sorted((a, b, c))) + ".",
        f"Now spell “{a}” backwards.",
        f"{a[::-1]}.",
    ]


def code(rng: random.Random) -> Turns:
    values, word = [rng.randrange(1, 60) for _ in range(6)], rng.choice(WORDS)
    name = rng.choice(("values", "scores", "numbers", "sizes"))
    limit = sorted(values)[3]
    return [
        f"In Python, I have `{name} = {values}`. How do I keep only those that are at least {limit}?",
        f"With a list comprehension:\n\n```python\nkept = [value for value in {name} if value >= {limit}]\n```\n\n"
        f"For your list this gives `{[value for value in values if value >= limit]}`.",
        "I get `NameError: name 'value' is not defined`. Why?",
        "Most likely the name before `for` and the one after it differ, say `[value for v in …]`. The name after `for` is the one that "
        "exists in the comprehension. Use the same name in all three places.",
        "Right, that was it! How do I add them all up, and find where the largest is?",
        f"```python\ntotal = sum({name})  # {sum(values)}\nplace = {name}.index(max({name}))  # {values.index(max(values))}\n```\n\n"
        "Places are counted from zero. If the largest occurs twice, `index` finds the first.",
        f"And how would I count the letters of “{word}”?",
        f"`len({word!r})` is {len(word)}. To count each letter by itself, `collections.Counter({word!r})` gives a dictionary: here "
        f"“{max(word, key=word.count)}” occurs {word.count(max(word, key=word.count))} time(s).",
    ]


def shop(rng: random.Random) -> Turns:
    place, price, count = rng.choice(SHOPS), rng.randrange(3, 30), rng.randint(2, 6)
    name = rng.choice(NAMES)
    note = (price * count // 20 + 1) * 20
    return [
        f"Good morning, {name}! You're early. What can I do for you at {place} today?",
        "I need something for my neighbour. She looked after the cat while we were away.",
        f"How nice. These here are {price} euros each. Most people take two.",
        f"Then I'll take {count}, one for each day she came.",
        f"That makes {price * count} euros, please. Shall I wrap them up?",
        f"Yes, please. Here are {note}.",
        f"And {note - price * count} back. Give her my best. Has she found a new flat, by the way?",
        "Not yet. She says that everything is either too small, too dark or too dear. But she isn't in a hurry.",
    ]


def quiz(rng: random.Random) -> Turns:
    a, b = rng.randint(12, 99), rng.randint(3, 19)
    turns = [f"Let's play. What is {a} times {b}?", f"Hmm. {a} times {b} is {a * b + rng.choice((-10, 10))}?",
             f"Close, but no. {a} × {b} = {a // 10 * 10} × {b} + {a % 10} × {b} = {a // 10 * 10 * b} + {a % 10 * b}.",
             f"Ah, so {a * b}!", f"Right. Next: is {a * b} divisible by 3?"]  # fmt: skip
    digits = sum(map(int, str(a * b)))
    turns += [f"The digits sum to {digits}, which is {'' if digits % 3 == 0 else 'not '}divisible by 3. So {'yes' if digits % 3 == 0 else 'no'}.",
              "Well done. Your turn: ask me one.", f"Which is larger, {a} squared or {a - 1} times {a + 1}?",
              f"{a} squared, by one: {a * a} against {a * a - 1}. It is always so, because (n − 1)(n + 1) = n² − 1."]  # fmt: skip
    return turns


def table(rng: random.Random) -> Turns:
    people, hour, name = rng.randint(2, 9), rng.randint(6, 9), rng.choice(NAMES)
    return [
        "Good evening, you are through to the restaurant. How can I help?",
        f"Hello. I'd like a table for {people} on {rng.choice(('Friday', 'Saturday', 'Sunday'))} at {hour}, please.",
        f"One moment. At {hour} we are full, I'm afraid. I could offer you {hour - 1}:30 or {hour + 1}:15.",
        f"{hour + 1}:15 would be fine. Two of us eat no meat; is that a problem?",
        "Not at all. About half of the menu is without meat, and the kitchen can change most of the rest. Which name may I write down?",
        f"{name}. Is there somewhere to leave bicycles?",
        f"In the yard, through the green gate. So that's a table for {people}, at {hour + 1}:15, for {name}. Should you be late, please give us "
        "a ring: we keep tables for twenty minutes.",
        "Will do. Thank you, and until then.",
    ]

"""Worked exercises with seeded numbers. Their results are computed, so they are true."""

# ruff: noqa: E501  (templates keep the lines of their text)
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction


def documents() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each kind of exercise, and exercises of it."""
    makers: tuple[tuple[str, int, Callable[[random.Random], str]], ...] = (
        ("quadratic", 12, quadratic), ("linear system", 12, linear_system), ("derivative", 12, derivative),
        ("integral", 10, integral), ("gcd", 8, gcd), ("fractions", 10, fractions), ("probability", 8, urn),
        ("word problem", 24, word_problem), ("matrix", 10, matrix), ("modular", 8, modular), ("sequence", 8, sequence),
        ("mean", 8, statistics), ("geometry", 10, geometry), ("percent", 8, percent), ("base", 6, base),
        ("long division", 6, division),
    )  # fmt: skip
    for name, count, make in makers:
        yield f"maths, {name}", [make(random.Random(f"{name} {index}")) for index in range(count)]


def _signed(value: int | Fraction, symbol: str = "", first: bool = False) -> str:
    """Write a term of a sum: its sign, its size unless it is 1, its symbol."""
    size = abs(value)
    body = symbol if symbol and size == 1 else f"{size}{symbol}"
    return ("-" if value < 0 else "") + body if first else (" - " if value < 0 else " + ") + body


def _polynomial(coefficients: list[int]) -> str:
    """Write a polynomial, highest power first."""
    out = ""
    for power in range(len(coefficients) - 1, -1, -1):
        if coefficients[power]:
            symbol = {0: "", 1: "x"}.get(power, f"x^{{{power}}}" if power > 9 else f"x^{power}")
            out += _signed(coefficients[power], symbol, first=not out)
    return out or "0"


def quadratic(rng: random.Random) -> str:
    r, s = rng.sample([value for value in range(-9, 10) if value], 2)
    a = rng.choice((1, 1, 2, 3))
    b, c = -a * (r + s), a * r * s
    discriminant = b * b - 4 * a * c
    low, high = sorted((r, s))
    return rf"""\textbf{{Exercise.}} Solve ${_polynomial([c, b, a])} = 0$.

\textbf{{Solution.}} Here $a = {a}$, $b = {b}$ and $c = {c}$. The discriminant is
\[
  \Delta = b^2 - 4ac = {b * b}{_signed(-4 * a * c)} = {discriminant} = {math.isqrt(discriminant)}^2 .
\]
It is positive, so there are two real solutions,
\[
  x = \frac{{-b \pm \sqrt{{\Delta}}}}{{2a}} = \frac{{{-b} \pm {math.isqrt(discriminant)}}}{{{2 * a}}},
\]
that is, $x_1 = {low}$ and $x_2 = {high}$. As a check, their sum is ${low + high} = -b/a$ and their product is
${low * high} = c/a$. Hence ${_polynomial([c, b, a])} = {"" if a == 1 else a}(x{_signed(-low)})(x{_signed(-high)})$."""


def linear_system(rng: random.Random) -> str:
    x, y = rng.randint(-7, 9), rng.randint(-7, 9)
    while True:
        a, b, c, d = (rng.choice((-5, -4, -3, -2, 2, 3, 4, 5, 7)) for _ in range(4))
        if a * d - b * c:
            break
    e, f = a * x + b * y, c * x + d * y
    return f"""Problem: find x and y with
    {_signed(a, "x", True)}{_signed(b, "y")} = {e}    (1)
    {_signed(c, "x", True)}{_signed(d, "y")} = {f}    (2)

Multiply (1) by {d} and (2) by {b}, so that y has the same coefficient {b * d} in both:
    {_signed(a * d, "x", True)}{_signed(b * d, "y")} = {e * d}
    {_signed(b * c, "x", True)}{_signed(b * d, "y")} = {f * b}
Subtract the second from the first: {a * d - b * c}x = {e * d - f * b}, so x = {x}.
Put x = {x} into (1): {_signed(b, "y", True)} = {e}{_signed(-a * x)} = {b * y}, so y = {y}.
Check in (2): {c}·({x}) + {d}·({y}) = {c * x}{_signed(d * y)} = {f}. The solution is (x, y) = ({x}, {y})."""


def derivative(rng: random.Random) -> str:
    p = [rng.randint(-9, 9) for _ in range(3)] + [rng.choice((-3, -2, 2, 3, 4))]
    q = [power * value for power, value in enumerate(p)][1:]
    r = [power * value for power, value in enumerate(q)][1:]
    at = rng.randint(-3, 3)
    value, slope = (sum(c * at**power for power, c in enumerate(poly)) for poly in (p, q))
    return rf"""\begin{{example}}
Let $f(x) = {_polynomial(p)}$. Differentiating term by term with $(x^n)' = n x^{{n-1}}$ gives
\begin{{align*}}
  f'(x)  &= {_polynomial(q)}, \\
  f''(x) &= {_polynomial(r)}.
\end{{align*}}
At $x = {at}$ we have $f({at}) = {value}$ and $f'({at}) = {slope}$, so the tangent there is
$y = {value}{_signed(slope)}\,(x{_signed(-at)})$, and the function is
{"increasing" if slope > 0 else "decreasing" if slope < 0 else "stationary"} at that point.
\end{{example}}"""


def integral(rng: random.Random) -> str:
    p = [rng.randint(-6, 8) for _ in range(3)]
    p[2] = p[2] or 3
    a, b = sorted(rng.sample(range(-3, 5), 2))
    whole = [Fraction(0), *(Fraction(c, power + 1) for power, c in enumerate(p))]
    upper, lower = (sum(c * Fraction(at) ** power for power, c in enumerate(whole)) for at in (b, a))
    terms = "".join(
        _signed(c, {1: "x"}.get(power, f"x^{power}"), False) for power, c in reversed(list(enumerate(whole))) if c
    )
    return rf"""Compute $\displaystyle\int_{{{a}}}^{{{b}}} \left({_polynomial(p)}\right)\,dx$.

An antiderivative is $F(x) = {terms.removeprefix(" + ").replace(" - ", " - ").strip()}$. By the fundamental theorem of calculus
the integral is $F({b}) - F({a})$. We get $F({b}) = {upper}$ and $F({a}) = {lower}$, so the value is
${upper} - ({lower}) = {upper - lower}$."""


def gcd(rng: random.Random) -> str:
    a, b = sorted(rng.sample(range(60, 2000), 2), reverse=True)
    lines, x, y = [], a, b
    while y:
        lines.append(f"  {x} = {x // y} · {y} + {x % y}")
        x, y = y, x % y
    steps = "\n".join(lines)
    return f"""The greatest common divisor of {a} and {b}, by Euclid's algorithm:
{steps}
The last remainder that is not zero is {x}, so gcd({a}, {b}) = {x}. The least common multiple follows:
lcm({a}, {b}) = {a} · {b} / {x} = {a * b // x}. {"The two numbers are coprime." if x == 1 else f"In lowest terms, {a}/{b} = {a // x}/{b // x}."}"""


def fractions(rng: random.Random) -> str:
    a, b, c, d = rng.randint(1, 9), rng.randint(2, 12), rng.randint(1, 9), rng.randint(2, 12)
    common = math.lcm(b, d)
    total, product = Fraction(a, b) + Fraction(c, d), Fraction(a, b) * Fraction(c, d)
    return f"""Q: What is {a}/{b} + {c}/{d}, and what is {a}/{b} × {c}/{d}?
A: The least common denominator of {b} and {d} is {common}. So {a}/{b} = {a * common // b}/{common} and
{c}/{d} = {c * common // d}/{common}, and the sum is {a * common // b + c * common // d}/{common} = {total}, about {float(total):.3f}.
To multiply, multiply tops and bottoms: {a * c}/{b * d} = {product}, about {float(product):.3f}."""


def urn(rng: random.Random) -> str:
    red, blue = rng.randint(3, 9), rng.randint(3, 9)
    n = red + blue
    both, none = Fraction(red * (red - 1), n * (n - 1)), Fraction(blue * (blue - 1), n * (n - 1))
    return rf"""\begin{{problem}}
An urn holds {red} red and {blue} blue balls. Two are drawn without putting the first back. What is the probability that both
are red, and what is the probability that the colours differ?
\end{{problem}}
\begin{{solution}}
The first ball is red with probability ${red}/{n}$. Given that, {red - 1} of the {n - 1} balls left are red. So
$P(\text{{both red}}) = \frac{{{red}}}{{{n}}} \cdot \frac{{{red - 1}}}{{{n - 1}}} = {both}$. In the same way
$P(\text{{both blue}}) = {none}$. The three events exclude each other and one of them happens, so
$P(\text{{different}}) = 1 - {both} - {none} = {1 - both - none} \approx {float(1 - both - none):.4f}$.
\end{{solution}}"""


def word_problem(rng: random.Random) -> str:
    return rng.choice((_train, _shop, _tank, _ages, _work))(rng)


def _train(rng: random.Random) -> str:
    v, w, hours = rng.randrange(50, 90, 5), rng.randrange(60, 120, 5), rng.randint(2, 6)
    gap = (v + w) * hours
    return f"""Question: Two trains start at the same time from stations {gap} km apart and run towards each other, one at {v} km/h and
the other at {w} km/h. When do they meet, and how far has each gone?
Let's think step by step. Each hour the distance between them shrinks by {v} + {w} = {v + w} km. They meet after
{gap} / {v + w} = {hours} hours. By then the first has gone {v} × {hours} = {v * hours} km and the second
{w} × {hours} = {w * hours} km. Together that is {v * hours + w * hours} km, as it should be.
Answer: after {hours} hours, {v * hours} km from the first station."""


def _shop(rng: random.Random) -> str:
    pens, pads, price_pen, price_pad = rng.randint(3, 12), rng.randint(2, 8), rng.randint(2, 4), rng.randint(3, 7)
    total = pens * price_pen + pads * price_pad
    paid = (total // 10 + 1) * 10
    return f"""Question: {rng.choice(("Mara", "Tom", "Yusuf", "Ling"))} buys {pens} pens at {price_pen} euros each and {pads} notebooks at {price_pad} euros each, and pays with {paid} euros. How
much change is due?
The pens cost {pens} × {price_pen} = {pens * price_pen} euros. The notebooks cost {pads} × {price_pad} = {pads * price_pad} euros. Together they cost
{pens * price_pen} + {pads * price_pad} = {total} euros. The change is {paid} - {total} = {paid - total} euros.
Answer: {paid - total} euros."""


def _tank(rng: random.Random) -> str:
    a, b = rng.sample((2, 3, 4, 5, 6, 8, 10, 12), 2)
    both = 1 / (Fraction(1, a) + Fraction(1, b))
    return f"""Question: One pipe fills a tank in {a} hours, another in {b} hours. How long do both take together?
In an hour the first fills 1/{a} of the tank and the second 1/{b}. Together they fill 1/{a} + 1/{b} = {Fraction(1, a) + Fraction(1, b)} of it.
The whole tank takes 1 ÷ {Fraction(1, a) + Fraction(1, b)} = {both} hours, which is about {float(both) * 60:.0f} minutes.
Answer: {both} hours."""


def _ages(rng: random.Random) -> str:
    child, times, years = rng.randint(4, 12), rng.randint(3, 5), rng.randint(3, 10)
    parent = child * times
    return f"""Question: A mother is {times} times as old as her son. In {years} years the two will be {parent + child + 2 * years} years old together. How old are
they now?
Let the son be x years old now. The mother is {times}x. In {years} years they are x + {years} and {times}x + {years}, together
{times + 1}x + {2 * years} = {parent + child + 2 * years}. So {times + 1}x = {parent + child} and x = {child}.
Answer: the son is {child} and the mother is {parent}."""


def _work(rng: random.Random) -> str:
    workers, days, new = rng.randint(3, 9), rng.randint(4, 15), rng.randint(2, 12)
    total = workers * days
    left = Fraction(total, new)
    return f"""Question: {workers} painters need {days} days for a school. How many days do {new} painters need, working at the same pace?
The work is {workers} × {days} = {total} painter-days. Shared among {new} painters it takes {total} / {new} = {left} days
({float(left):.2f} as a decimal). With {"more" if new > workers else "fewer or as many"} painters the time
{"falls" if new > workers else "does not fall"}, as one expects.
Answer: {left} days."""


def matrix(rng: random.Random) -> str:
    a, b = ([[rng.randint(-4, 6) for _ in range(2)] for _ in range(2)] for _ in range(2))
    c = [[sum(a[i][k] * b[k][j] for k in range(2)) for j in range(2)] for i in range(2)]

    def det(m: list[list[int]]) -> int:
        return m[0][0] * m[1][1] - m[0][1] * m[1][0]

    def show(m: list[list[int]]) -> str:
        return r"\begin{pmatrix} " + r" \\ ".join(" & ".join(map(str, row)) for row in m) + r" \end{pmatrix}"

    trace, name = a[0][0] + a[1][1], r"\lambda"
    return rf"""Let
\[ A = {show(a)}, \qquad B = {show(b)}. \]
Then
\[ AB = {show(c)}, \]
where for instance the entry in the first row and first column is
${a[0][0]} \cdot ({b[0][0]}) + ({a[0][1]}) \cdot ({b[1][0]}) = {c[0][0]}$. The determinants are $\det A = {det(a)}$,
$\det B = {det(b)}$ and $\det(AB) = {det(c)}$, in accordance with $\det(AB) = \det A \cdot \det B$. The characteristic polynomial of
$A$ is $\lambda^2{_signed(-trace, name) if trace else ""}{_signed(det(a)) if det(a) else ""}$, since its trace is ${trace}$.
{"$A$ is invertible." if det(a) else "$A$ is singular."}"""


def modular(rng: random.Random) -> str:
    base_, power, modulus = rng.randint(2, 12), rng.randint(20, 200), rng.choice((7, 11, 13, 17, 19, 23, 101))
    lines, square, exponent = [], base_ % modulus, 1
    result = 1
    while exponent <= power:
        lines.append(f"  {base_}^{exponent} ≡ {square} (mod {modulus})")
        if power & exponent:
            result = result * square % modulus
        square, exponent = square * square % modulus, exponent * 2
    parts = " + ".join(str(1 << bit) for bit in range(power.bit_length() - 1, -1, -1) if power >> bit & 1)
    assert result == pow(base_, power, modulus)
    steps = "\n".join(lines)
    return f"""What is the remainder of {base_}^{power} divided by {modulus}? Square again and again:
{steps}
In binary, {power} = {parts}. Multiplying the powers with these exponents gives {base_}^{power} ≡ {result} (mod {modulus})."""


def sequence(rng: random.Random) -> str:
    first, step, n = rng.randint(-10, 20), rng.choice((-4, -3, 2, 3, 5, 6, 7)), rng.randint(15, 60)
    last = first + (n - 1) * step
    return f"""An arithmetic sequence begins {first}, {first + step}, {first + 2 * step}, {first + 3 * step}, … Find term number {n} and the sum of the first {n} terms.
The difference is d = {step}, so a_n = {first} + (n - 1)·({step}), and a_{n} = {first} + {n - 1}·({step}) = {last}. Pairing the first term
with the last, the second with the last but one, and so on, each pair sums to {first + last}. There are {n}/2 such pairs, so
S_{n} = {n}·({first + last})/2 = {n * (first + last) // 2}."""


def statistics(rng: random.Random) -> str:
    values = [rng.randint(1, 40) for _ in range(rng.choice((5, 8, 10)))]
    n, ordered = len(values), sorted(values)
    mean = Fraction(sum(values), n)
    median = ordered[n // 2] if n % 2 else Fraction(ordered[n // 2 - 1] + ordered[n // 2], 2)
    squares = sum((value - mean) ** 2 for value in values)
    return f"""Data: {", ".join(map(str, values))}.
Mean: the sum is {sum(values)}, so the mean is {sum(values)}/{n} = {float(mean):.3f}.
Median: in order the values are {", ".join(map(str, ordered))}; the middle is {float(median):g}.
Variance: the squared deviations from the mean sum to {float(squares):.3f}. Dividing by n - 1 = {n - 1} gives
{float(squares / (n - 1)):.3f}, and the standard deviation is its root, {math.sqrt(squares / (n - 1)):.3f}. The range is {max(values)} - {min(values)} = {max(values) - min(values)}."""


def geometry(rng: random.Random) -> str:
    m, n = sorted(rng.sample(range(1, 8), 2), reverse=True)
    a, b, c = m * m - n * n, 2 * m * n, m * m + n * n
    radius = rng.randint(2, 12)
    return rf"""A right triangle has legs ${a}$ and ${b}$. By the theorem of Pythagoras its hypotenuse is
$\sqrt{{{a}^2 + {b}^2}} = \sqrt{{{a * a} + {b * b}}} = \sqrt{{{c * c}}} = {c}$. Its area is
$\tfrac12 \cdot {a} \cdot {b} = {a * b // 2}$ and its perimeter ${a + b + c}$, so the radius of the inscribed circle, the area over
half the perimeter, is ${Fraction(a * b, a + b + c)}$. For comparison, a circle of radius ${radius}$ has the area
${radius * radius}\pi \approx {math.pi * radius * radius:.2f}$ and the circumference ${2 * radius}\pi \approx {2 * math.pi * radius:.2f}$."""


def percent(rng: random.Random) -> str:
    start, rate, years = rng.randrange(500, 9000, 100), rng.choice((2, 3, 4, 5)), rng.randint(3, 6)
    lines, amount = [], float(start)
    for year in range(1, years + 1):
        lines.append(f"  year {year}: {amount:.2f} × {1 + rate / 100:.2f} = {amount * (1 + rate / 100):.2f}")
        amount *= 1 + rate / 100
    table = "\n".join(lines)
    return f"""{start} euros are saved at {rate} % interest a year, which is left in the account. The balance grows like this:
{table}
After {years} years there are {start} × {1 + rate / 100:.2f}^{years} ≈ {amount:.2f} euros. The interest is {amount - start:.2f} euros; without interest on
interest it would be {start} × {rate}/100 × {years} = {start * rate * years / 100:.2f}. Money doubles when {1 + rate / 100:.2f}^t = 2, which takes
t = ln 2 / ln {1 + rate / 100:.2f} ≈ {math.log(2) / math.log(1 + rate / 100):.1f} years."""


def base(rng: random.Random) -> str:
    number = rng.randint(100, 4000)
    lines, left = [], number
    while left:
        lines.append(f"  {left} = 2 · {left // 2} + {left % 2}")
        left //= 2
    steps = "\n".join(lines)
    return f"""Write {number} in base 2. Divide by 2 and keep the remainders:
{steps}
Read from the last to the first they are {number:b}. In groups of four bits this is hexadecimal {number:X}; in base 8 it is {number:o}."""


def division(rng: random.Random) -> str:
    divisor, number = rng.randint(3, 19), rng.randint(1000, 99_999)
    lines, left = [], 0
    for digit in str(number):
        left = left * 10 + int(digit)
        lines.append(f"  bring down {digit}: {left} ÷ {divisor} = {left // divisor}, remainder {left % divisor}")
        left %= divisor
    steps = "\n".join(lines)
    return f"""{number} divided by {divisor}, digit by digit:
{steps}
So {number} = {divisor} × {number // divisor} + {number % divisor}, or about {number / divisor:.4f}."""

"""Measure `products`: the form that a pool here has for each product of the tiny and the 100 M base, against
the quickest of all forms, measured again.

    python -m benchmarks.rollout.products lorad --models DIR     the table on stderr, figures on stdout

`worst` is the time of the chosen form over the quickest one's, of the shape where it is largest: a wrong
choice in the file shows here. `won` is the rule's time over the chosen form's, the geometric mean over
the shapes.
"""

import sys
from statistics import geometric_mean

from benchmarks.kit.models import SHAPES
from benchmarks.kit.workload import Figures, Turn, play
from lorad.box.paths import cache_directory
from lorad.models.products.choices import Choices, seconds_of
from lorad.models.products.forms import Form, Shape, by_rule

ROWS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 512)


def lorad(turn: Turn) -> Figures:
    figures: Figures = {"worst": [], "won": []}
    for _ in range(turn.repeats):
        measured = [of for name in ("tiny", "100m") for of in table_of(name)]
        figures["worst"].append(max(seconds[form] / min(seconds.values()) for _, form, seconds in measured))
        won = [seconds[by_rule(shape)] / seconds[form] for shape, form, seconds in measured]
        figures["won"].append(geometric_mean(won))
    return figures


def table_of(name: str) -> list[tuple[Shape, Form, dict[Form, float]]]:
    """Print and return each product of a base with its form, and the seconds of all forms."""
    size, base = 4 * SHAPES[name].parameters, SHAPES[name]
    choices = Choices(cache_directory() / "products", size)
    heads = (base.heads + 2 * base.kv_heads) * base.head_dim
    linears = {(heads, base.hidden), (base.hidden, base.heads * base.head_dim)}
    linears |= {(2 * base.inner, base.hidden), (base.hidden, base.inner), (base.vocab, base.hidden)}
    rows = []
    for out, into in sorted(linears):
        for shape in (Shape(number, out, into, is_turned) for is_turned in (False, True) for number in ROWS):
            if shape.is_turned and shape.rows < ROWS[-1]:
                continue  # gradients have many rows
            form, seconds = choices(shape), seconds_of(shape, size)
            rows.append((shape, form, seconds))
            print(line_of(name, shape, form, seconds), file=sys.stderr)
    return rows


def line_of(name: str, shape: Shape, form: Form, seconds: dict[Form, float]) -> str:
    """Return a row of Markdown, microseconds of each form: the chosen one is bold, the rule's in italics."""
    cells = []
    for each, value in seconds.items():
        mark = ("**" if each == form else "") + ("*" if each == by_rule(shape) else "")
        cells.append(f"{mark}{1e6 * value:,.0f}{mark}")
    turned = ", turned" if shape.is_turned else ""
    return f"| {name} | {shape.rows} | {shape.out} x {shape.into}{turned} | {' | '.join(cells)} |"


if __name__ == "__main__":
    play({"lorad": lorad})

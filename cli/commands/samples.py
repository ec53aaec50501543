"""The command `lorad samples`: what the model wrote."""

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson, Run
from lorad.client.choice import HINT, ORDERS, Choice, ordered_by
from lorad.client.client import Client
from lorad.client.histogram import SampleSpread, spread
from lorad.errors import NotFound
from lorad.records.samples import Sample
from lorad.text import question

_SAMPLES = table.columns(
    "sample, step 3, reward, advantage 1, end 2, prompt cut, answer cut, completion cut, error fold"
)
_ALL = 1 << 30  # samples: none is left out
_BAR = 30  # cells of the longest bar


_Set = Annotated[
    str | None, typer.Option("--eval", metavar="SET", help="Of an evaluation: a set of eval.sets, or main.")
]
_Prompt = Annotated[
    int | None, typer.Option("--prompt", "-p", help="Only this prompt; with --eval at each step.", min=1)
]
_Sample = Annotated[
    int | None,
    typer.Option("--sample", "-s", help="Show this one in full, by its number in the table.", min=1),
]
_Where = Annotated[str, typer.Option("--where", "-w", help=f"Only such: {HINT}.")]
_End = Annotated[
    str | None, typer.Option("--end", help="Only those that ended so: done, length, …; truncated.")
]
_Sort = Annotated[
    str,
    typer.Option(
        help=f"The largest first, by one of: {', '.join(ORDERS)}.", autocompletion=candidates.words(*ORDERS)
    ),
]


def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Default: the last step.")] = None,
    eval: _Set = None,
    prompt: _Prompt = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most this many.")] = 24,
    sample: _Sample = None,
    where: _Where = "",
    end: _End = None,
    min_reward: Annotated[float | None, typer.Option(help="Only with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only with at most this reward.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those whose reward failed.")] = False,
    sort: _Sort = "drawn",
    reverse: Annotated[bool, typer.Option("--reverse", help="The smallest first.")] = False,
    histogram: Annotated[
        bool, typer.Option("--histogram", help="How many of the step have which reward and length.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print prompts and completions of a step, with their reward and advantage; with --sample one of them in
    full.

    Of an episode, that is each turn with what the environment answered. With --eval they are completions of
    held-out problems; --prompt shows how one of them changed from step to step.

    --where and the options like it choose among all samples of the step, and --sort orders them; the first of
    these, as many as --limit says, are printed. Several conditions hold at once; `!` before a word of --where
    is for not.

    --histogram counts rewards and lengths (of sampled tokens) of all samples of the step that fit the
    conditions, in ten ranges of the same width, or by value where there are no more than ten.

    A prompt and its answer appear at the first of its samples; of a chat the last turn (--sample: all of it).
    Long text is cut in the middle to fit the terminal.
    """
    most = limit if sample is None else sample
    bounds = {"reward>=": min_reward, "reward<=": max_reward}
    words = [where, "" if end is None else f'end:"{end}"', "failed" if failed else ""]
    words += [f"{name}{value!r}" for name, value in bounds.items() if value is not None]
    choice = Choice(" ".join(word for word in words if word), ordered_by(sort), reverse)
    if histogram:
        whole_step = Client().samples(
            run, step=step, limit=_ALL, eval=eval, problem=prompt, choice=choice, brief=True
        )
        _print_spread(spread(whole_step), as_json=as_json)
        return
    rows = Client().samples(run, step=step, limit=most, eval=eval, problem=prompt, choice=choice)
    if sample is not None:
        if len(rows) < sample:
            hint = f"Its samples are 1 to {len(rows)}."
            raise NotFound(f"{run} has no sample {sample} in that step", hint=hint)
        row = rows[sample - 1]
        if as_json:
            output.print_json(row)
        else:
            table.print_fields(whole(row))
    elif as_json:
        output.print_json(rows)
    else:
        output.print_table(
            _SAMPLES,
            _cells(rows, grouped=table.terminal_width() is not None),
            empty=f"No sample of that step is such: {choice.where}" if choice.where else "No samples yet.",
        )
        if eval is not None and prompt is None and rows:
            numbers = f"{rows[0].problem} to {rows[-1].problem}"
            output.note(f"Problems {numbers}; `--eval {eval} --prompt N` shows one at each step.")


def _print_spread(counted: SampleSpread, *, as_json: bool) -> None:
    """Print a bar for each range of rewards and of lengths; the longest of each figure has the same width."""
    if as_json:
        output.print_json(counted)
        return
    rows = []
    for name, bins in (("reward", counted.rewards), ("tokens", counted.lengths)):
        most = max((part.count for part in bins), default=1)
        for part in bins:
            ends = f"{part.low:.6g}", f"{part.high:.6g}"
            rows.append((name, *ends, str(part.count), "█" * math.ceil(_BAR * part.count / most)))
            name = name if table.terminal_width() is None else ""
    output.print_table(("of", "from", "to", "samples", ""), rows, empty="No samples yet.")
    if counted.unscored:
        output.note(f"{counted.unscored} of {counted.samples} samples have no reward.")


def _cells(rows: Sequence[Sample], *, grouped: bool) -> list[tuple[str, ...]]:
    """Make the rows of samples. grouped: samples that share a prompt and its answer show them once."""
    shown = []
    before = None
    line_break = "⏎" if grouped else "\\n"
    for place, row in enumerate(rows, 1):
        again = grouped and before is not None and row.prompt_id == before.prompt_id
        prompt = question(row.prompt) if grouped else row.prompt
        texts = ["" if again else prompt, "" if again else row.answer, row.completion, row.error]
        end = str(row.end or row.finish)
        figures = (output.number(row.reward, 2), output.number(row.advantage, 2), end)
        shown.append(
            (
                str(place),
                str(row.step),
                *figures,
                *("" if text is None else line_break.join(text.split("\n")) for text in texts),
            )
        )
        before = row
    return shown


def whole(sample: Sample) -> list[tuple[str, str]]:
    figures = {"reward": output.number(sample.reward), "advantage": output.number(sample.advantage)}
    parts = "  ".join(f"{name} {output.number(value)}" for name, value in sample.rewards.items())
    named = {
        "rewards": parts,
        "version": f"@{str(sample.version).rpartition('@')[2]}",
        "end": sample.end or sample.finish,
        "error": sample.error,
    }
    texts = {"prompt": sample.prompt, "answer": sample.answer}
    for number, turn in enumerate(sample.turns, 1):
        texts |= {f"turn {number}": turn.text, f"reward {number}": output.number(turn.reward)}
        is_replaced = number < len(sample.turns) and sample.turns[number].row > turn.row
        texts |= {f"{'new context' if is_replaced else 'observation'} {number}": turn.observation.strip("\n")}
    texts |= {} if sample.turns else {"completion": sample.completion}
    fields = {"step": sample.step, **figures, **named, **texts}
    return [(name, str(value)) for name, value in fields.items() if value not in (None, "")]

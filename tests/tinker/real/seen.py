"""The table of docs/tinker.md that says what holds with which trainer and engine: `make tinker-backends`
writes what it saw into it, and leaves the columns of other pairs as they are.
"""

import os
from collections import defaultdict
from pathlib import Path

_BEGIN, _END = "<!-- table: made by `make tinker-backends` -->\n", "<!-- end of the table -->\n"

ROWS = {
    "cross_entropy_falls": "`forward`, `forward_backward` with cross_entropy, `optim_step`",
    "losses_of_rl": "importance_sampling, ppo, cispo, dro, gspo",
    "targets_need_not_be_the_next_tokens": "targets that are not the next tokens",
    "custom_loss": "`forward_backward_custom`",
    "a_large_batch_comes_in_parts": "1,100 datums, which come in parts",
    "mistakes_are_told_and_the_step_behind_refused": "a wrong pass fails in words, and the step behind it",
    "two_models_side_by_side": "two models side by side, each bit for bit as alone",
    "other_ranks_and_fewer_modules": "other ranks; `train_mlp=False`, `train_attn=False`",
    "a_checkpoint_goes_on_as_the_original": "`save_state`, `create_training_client_from_state`"
    " (with the optimizer: bit for bit)",
    "a_state_is_loaded_into_a_fresh_model": "`load_state`, `load_state_with_optimizer`",
    "samples_are_of_the_model": "`sample` and `compute_logprobs` agree with the trainer within 2e-4; equal"
    " seeds give equal samples",
    "length_and_stop": "`max_tokens`, `stop`",
    "top_k_and_top_p": "`top_k`, `top_p`",
    "prompt_logprobs_of_the_end": "`prompt_logprobs_last_n`",
    "most_likely_tokens_of_the_prompt": "`include_prompt_logprobs`, `topk_prompt_logprobs`",
    "many_requests_at_once": "40 requests at once",
    "a_sampler_is_polled_as_a_whole": "`retrieve_futures`",
    "many_samplers_stay_alive": "13 samplers of a model, all alive",
    "a_named_sampler_stays_as_it_was": "`save_weights_for_sampler`: stays as it was",
    "base_is_another_model": "samples of the base",
    "samplers_attested": "samplers are attested (`lorad adapters`)",
    "paused": "`lorad pause` between the passes of a step, then `lorad resume`",
    "killed": "`kill -9` of the pool amid steps and samples: the numbers of a calm run, within 2e-4",
    "refused": "what lorad does not do (14 things)",
}
"""By what a check is called; checks that no trainer and no engine has a part in are not shown."""


class Seen:
    """What was seen.

    cells: what was seen of each pair of trainer and engine, by row.
    """

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, str]] = defaultdict(dict)

    def checks(self, pair: str, output: str) -> None:
        """Note what client_check.py printed."""
        for line in output.splitlines():
            _, _, name = line.strip().partition(" ")
            if name in ROWS:
                self.add(name, pair, "yes")

    def add(self, name: str, pair: str, cell: str) -> None:
        self.cells[ROWS[name]][pair] = cell

    def write(self) -> None:
        """Put the cells into the page that LORAD_TINKER_PAGE names, if it does."""
        if not (name := os.environ.get("LORAD_TINKER_PAGE")):
            return
        page = Path(name)
        before, _, rest = page.read_text().partition(_BEGIN)
        known, _, after = rest.partition(_END)
        page.write_text(before + _BEGIN + "\n" + self.table(known) + "\n\n" + _END + after)

    def table(self, known: str) -> str:
        """Return the rows of both; `known`: the table as it was."""
        cells = _read(known)
        for row, seen in self.cells.items():
            cells[row] |= seen
        pairs = list(dict.fromkeys(pair for row in cells.values() for pair in row))
        lines = [["", *pairs], ["---"] * (1 + len(pairs))]
        for row in ROWS.values():
            if row in cells:
                lines.append([row, *(cells[row].get(pair, "") for pair in pairs)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _read(table: str) -> dict[str, dict[str, str]]:
    lines = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in table.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for row, *values in lines[1:]:
        cells[row] = dict(zip(lines[0][1:], values, strict=True))
    return cells

"""The filter of the dashboard: which runs some words want."""

import pytest

from lorad.client.client import Client
from lorad.records.runs import Run
from lorad.tui.dashboard.filter import fields, has, words
from tests.kit.frozen.world import frozen
from tests.kit.tui_world import a_run, shaped

__all__ = ["frozen"]

FAILED = {"reason": "attestation_failed", "state": "ended", "detail": 'out of "memory'}


def wanted(run: Run, text: str, alarm: str = "") -> bool:
    return has(fields(run, alarm), words(text))


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ("", True),
        ("   ", True),
        ("sort", True),
        ("SORT", True),
        ("sort memory", True),
        ("sort nothing", False),
        ("!sort", False),
        ("!nothing", True),
        ("!", True),
        ("state:ended", True),
        ("state:attestation_failed", True),
        ('state:"attestation failed"', True),
        ("state:running", False),
        ("!state:running sort", True),
        ("state:", True),
        ("owner:ann", True),
        ("owner:sorter", False),
        ("pool:tiny", True),
        ("base:qwen", True),
        ("base:llama", False),
        ("alarm:kl", True),
        ("alarm:stall", False),
        ('"out of', True),
        ('"out of ', True),
        ('"of out"', False),
        ('"', True),
        ("nofield:x", False),
    ],
)
def test_filter_needs_all_its_words(filter: str, found: bool) -> None:
    assert wanted(shaped(Run, a_run("Sorter", base="Qwen/Qwen3-8B", **FAILED)), filter, "kl rewards") is found


def test_absent_fields_are_found_by_no_word() -> None:
    run = Run("sorter", "queued")
    assert wanted(run, "sort") and not wanted(run, "none")


@pytest.mark.system
def test_base_is_known_before_the_pool(frozen: Client) -> None:
    found = [run.name for run in frozen.list() if wanted(run, "base:qwen3-8b state:queued")]
    assert found == ["waits", "waits-too"]

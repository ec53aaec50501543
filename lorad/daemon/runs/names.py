"""Names for runs that were given none: brisk-otter-3."""

from __future__ import annotations

import random

ADJECTIVES = """
amber bold brisk calm clever crisp deft eager fair fleet gentle keen kind lively lucid mellow nimble plucky
quick quiet rapid serene sharp silver smooth spry steady sunny swift tidy vivid warm wise witty
"""
ANIMALS = """
badger beaver bison cobra condor crane dolphin eagle falcon ferret finch fox gecko heron ibex jackal
koala lark
lemur lynx marten mole moose newt otter owl panda puffin raven seal stork swan tapir tern wolf wren yak
"""


def generate_name(number: int) -> str:
    """Make a name that ends in `number`, so that two with different numbers never meet."""
    return f"{random.choice(ADJECTIVES.split())}-{random.choice(ANIMALS.split())}-{number}"

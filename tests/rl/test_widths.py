"""Which characters of a completion each of its tokens made."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from lorad.rl.completions.widths import Widths
from lorad.rl.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, for ` a` and `ab`, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "Ġa", "ab"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a"), ("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    directory: Path = tmp_path_factory.mktemp("model")
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@given(text=st.text(alphabet=" ab漢👩é\n", max_size=20))
def test_tokens_make_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = [*tokenizer.encode(text), tokenizer.number_of("<|end|>") or 0]
    widths = Widths(tokenizer).of(text, ids)
    assert len(widths) == len(ids) and sum(widths) == len(text) and widths[-1] == 0


@given(text=st.text(alphabet="a漢\N{REPLACEMENT CHARACTER}", max_size=9))
def test_no_token_makes_too_much(tokenizer: Tokenizer, text: str) -> None:
    widths = Widths(tokenizer).of(text, tokenizer.encode(text))
    assert not widths or sum(widths) <= len(text)


def test_each_token_makes_its_own_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab a漢b")
    assert Widths(tokenizer).of("ab a漢b", ids) == [2, 2, 0, 0, 1, 1]


def test_what_was_cut_off_is_nobodys(tokenizer: Tokenizer) -> None:
    assert Widths(tokenizer).of("ab", tokenizer.encode("ab ab")) == [2, 0, 0]


def test_tokens_of_another_text_have_no_widths(tokenizer: Tokenizer) -> None:
    assert Widths(tokenizer).of("ba ba", tokenizer.encode("ab ab")) == []

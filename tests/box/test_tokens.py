"""The file of tokens by which gateway and door know who asks."""

from pathlib import Path

from lorad.box.tokens import Tokens

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = Tokens(path)
    assert tokens.owner(ALICE) is None
    path.write_text(f"alice: {ALICE}\n")
    path.chmod(0o600)
    assert tokens.owner(ALICE) == "alice" and tokens.owner(BOB) is None
    path.write_text(f"bob: {BOB}\n")
    assert tokens.owner(ALICE) is None and tokens.owner(BOB) == "bob"


def test_a_token_may_have_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"alice: {ALICE}\n")
    path.chmod(0o600)
    header = b"\xff\xed\xa0\x80".decode(errors="surrogateescape")  # as aiohttp reads it
    assert Tokens(path).owner(header * 8) is None


def test_a_file_that_others_read_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"alice: {ALICE}\n")
    path.chmod(0o644)
    tokens = Tokens(path)
    assert tokens.owner(ALICE) is None
    path.chmod(0o600)
    assert tokens.owner(ALICE) == "alice"
    assert Tokens(None).owner(ALICE) is None


def test_bytes_that_are_no_text_let_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"alice: {ALICE}\n")
    path.chmod(0o600)
    header = (ALICE.encode() + b"\xff\xed\xa0\x80").decode(errors="surrogateescape")  # as a server reads it
    assert Tokens(path).owner(header) is None

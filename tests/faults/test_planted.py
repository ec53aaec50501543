"""The table of mistakes that quick tests notice fits the code as it is."""

from faults.planted import FAULTS, ROOT, check_table


def test_each_mistake_is_of_one_line() -> None:
    check_table(ROOT, FAULTS)


def test_every_large_room_has_a_mistake() -> None:
    rooms = {fault.room for fault in FAULTS}
    large = {
        f"lorad/{room.name}"
        for room in (ROOT / "lorad").iterdir()
        if room.is_dir() and not room.is_symlink() and len([*room.rglob("*.py")]) > 8
    }
    assert {room for room in large if not any(has.startswith(room) for has in rooms)} == set()

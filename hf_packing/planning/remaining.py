"""Documents that are in no pack yet, while a counting strategy fills one pack after the other."""

from collections.abc import Mapping


class Remaining:
    """How many are left of each length. The lengths in use are the bits of one big integer."""

    def __init__(self, number: Mapping[int, int]) -> None:
        self.number = dict(number)
        bits = bytearray(max(self.number, default=0) // 8 + 1)
        for length in self.number:
            bits[length >> 3] |= 1 << (length & 7)
        self.lengths = int.from_bytes(bits, "little")

    def longest(self, room: int) -> int:
        """The longest length that fits in the room; -1 for none."""
        return (self.lengths & ((2 << room) - 1)).bit_length() - 1

    def shortest(self) -> int:
        return (self.lengths & -self.lengths).bit_length() - 1

    def add(self, length: int) -> None:
        self.number[length] = self.number.get(length, 0) + 1
        self.lengths |= 1 << length

    def take(self, length: int, number: int) -> None:
        self.number[length] -= number
        if not self.number[length]:
            self.lengths ^= 1 << length

    def fill(self, room: int) -> tuple[list[tuple[int, int]], int]:
        """The longest that fits, then the next: (length, copies) for each, and the room left. Nothing is taken yet."""
        copies: list[tuple[int, int]] = []
        limit = room
        while (length := self.longest(limit)) > 0:
            number = min(room // length, self.number[length])
            copies.append((length, number))
            room -= number * length
            limit = min(room, length - 1)
        return copies, room

    def packs_alike(self, copies: list[tuple[int, int]]) -> int:
        """How many packs in a row would be filled with these same copies."""
        return min(self.number[length] // number for length, number in copies)

"""Sizes of tiles and grids, on the host: Triton's own functions of these names take a microsecond or more a call there."""


def cdiv(size: int, block: int) -> int:
    """How many blocks hold `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of 2 that is no smaller than `size`, for `size` >= 1."""
    return 1 << (size - 1).bit_length()

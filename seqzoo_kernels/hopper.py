"""What Triton's kernels must keep to on Hopper."""

from .sizes import next_power_of_2

# With four warps and a tile narrower than this, products read beside their operands: Triton 3.4 to 3.7.1 at least,
# github.com/triton-lang/triton/issues/11366. Two warps use other instructions.
SAFE_WIDTH = 64


def padded(size: int) -> int:
    """The block that holds `size` columns, safe with any number of warps."""
    return max(SAFE_WIDTH, next_power_of_2(size))

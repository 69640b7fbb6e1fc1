"""In which portions keys are handed to attention kernels. Pure."""

from __future__ import annotations

KEY_BLOCK = 512
"""Keys per block of torch's CPU flash kernel (kvSplitSize in its source).

Matrix products change how they sum at multiples of it, too (oneDNN's at 1,024), so no
block of queries reaches across one.
"""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple

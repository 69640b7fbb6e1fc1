"""What a careful application does by hand: keep what was used last, within a budget.

Knows nothing of models: it keeps any value under any key.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by key; those not used for longest go when there are too many tokens."""

    def __init__(self, most: float = math.inf) -> None:
        """
        Args:
            most: Tokens that may be kept; 0 keeps nothing.
        """
        self._most = most
        self._values: OrderedDict[tuple[int, ...], Value] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Tokens kept now."""
        return sum(map(len, self._values))

    def take(self, key: tuple[int, ...]) -> Value | None:
        """The value of these tokens, which is kept no longer: its user changes it."""
        return self._values.pop(key, None)

    def put(self, key: tuple[int, ...], value: Value) -> None:
        """Keep a value as the one used last, if it fits at all."""
        self._values.pop(key, None)
        if len(key) > self._most:
            return
        self._values[key] = value
        while self.tokens > self._most:
            self._values.popitem(last=False)

"""Strides of samples: odd primes of which no length is a multiple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Known: TypeAlias = Callable[[Any], bool]
"""Whether a condition on lengths is true."""


def stride(least: int, lengths: Sequence[int], known: Known = bool) -> int:
    """The first odd prime from `least`, which is one (or 1), of which no length is a multiple. A stride of so many tokens meets
    all places alike: the first position with its massive activations, the padded edge of an image, whose sides are often
    multiples of 7."""
    while least > 1 and any(known(length % least == 0) for length in lengths):
        least = odd_prime(least + 2)
    return least


def odd_prime(least: int) -> int:
    """The smallest odd prime that is not below `least`; 1 for 1. See `stride`."""
    if least == 1:
        return 1
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, int(number**0.5) + 1, 2)):
        number += 2
    return number

"""A copy of what is on the CPU has its values, in order, in memory of its own, and nothing of autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from trackbridge import hostcopy
from trackbridge.hostcopy import HostMemory

whole = torch.arange(12.0).reshape(3, 4)
LEAVES = {
    "in order": whole,
    "turned": whole.t(),
    "repeated": torch.ones(3, 1).expand(3, 4),
    "of autograd": whole.clone().requires_grad_(),
    "conjugate": torch.complex(whole, whole).conj(),
    "negated": torch.complex(whole, whole).conj().imag,
    "a scalar": torch.tensor(2),
    "empty": torch.ones(0, 3),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("kept", [False, True], ids=["memory of its own", "memory that stays"])
def test_of_a_tensor(name: str, kept: bool) -> None:
    leaf = LEAVES[name].detach().clone() if name == "in order" else LEAVES[name]
    leaves: dict[str, hostcopy.Leaf] = {name: leaf}
    memory = HostMemory(hostcopy.sizes(leaves), locked=False) if kept else None
    expected = leaf.detach().resolve_conj().resolve_neg().clone()
    with torch.set_grad_enabled(not kept):
        copy = hostcopy.copy(leaves, memory).leaves[name]
        if name == "in order":
            leaf.zero_()  # what happens to it later does not count
    assert isinstance(copy, Tensor) and copy.dtype == expected.dtype and torch.equal(copy, expected)
    assert copy.is_contiguous() and not copy.requires_grad and not copy.is_conj() and not copy.is_neg()


def test_of_an_array() -> None:
    array = np.arange(3)
    copy = hostcopy.copy({"a": array}).leaves["a"]
    array[:] = 0
    assert isinstance(copy, np.ndarray) and copy.tolist() == [0, 1, 2]

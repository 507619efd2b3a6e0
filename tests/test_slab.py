"""The slab: what is written into its fields arrives by name, and a reset leaves what lasts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbridge.slab import Field, Ring, Slab

Fields = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["device", "host"]), st.booleans()), min_size=1, max_size=12
).map(lambda found: [Field(f"f{n}", size, where, lasting) for n, (size, where, lasting) in enumerate(found)])


@given(Fields)
@settings(max_examples=200, deadline=None)
def test_every_field_arrives_and_only_what_lasts_stays(fields: list[Field]) -> None:
    slab = Slab(fields, torch.device("cpu"))
    ring = Ring(slab, 2)
    values = {field.name: np.arange(1.0, 1.0 + field.size) + 10.0 * n for n, field in enumerate(fields)}
    for field in fields:
        if field.where == "host":
            slab.host_view(field.name)[:] = values[field.name]
        else:
            slab.device_view(field.name).copy_(torch.from_numpy(values[field.name]))
    first = ring.take(0)
    slab.reset()
    second = ring.take(1)
    assert first is not None and second is not None
    found, after = (slab.unpack(slot.read()) for slot in (first, second))
    for field in fields:
        np.testing.assert_array_equal(found[field.name], values[field.name])
        np.testing.assert_array_equal(after[field.name], values[field.name] if field.lasting else np.zeros(field.size))
        np.testing.assert_array_equal(slab.part(first.read(), field.name), values[field.name])


def test_what_was_read_stays_when_its_slot_is_used_again() -> None:
    slab = Slab([Field("a", 3), Field("b", 2, "host")], torch.device("cpu"))
    ring = Ring(slab, 1)
    slab.device_view("a").fill_(1.0)
    slot = ring.take(0)
    assert slot is not None
    numbers = slot.read()
    ring.give(slot)
    slab.reset()
    assert ring.take(1) is slot
    assert slab.unpack(numbers)["a"].tolist() == [1.0] * 3

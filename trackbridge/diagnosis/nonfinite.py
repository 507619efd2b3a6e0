"""Where the first value that is not finite came in, of a step whose batch is not recorded: with the batch, or through a weight.

The first module shows what it was given. Where it is a single layer, how many of its elements broke tells the two apart: a bad
sample breaks all units of its own row, a bad weight breaks one unit in every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from trackbridge.diagnosis import trends
from trackbridge.diagnosis.view import LATER, FloatArray, View, in_steps, is_embedding

_Said: TypeAlias = "tuple[str, str, bool]"  # speaks, why, sure


@dataclass(frozen=True, slots=True)
class Entry:
    """`count` elements of what `site`, the first measured module, put out at the onset were not finite. `speaks` of ``batch``
    or ``weight``, in the words of `why`; "" where the record fits both. `sure`: it fits one of them alone."""

    site: str
    count: int
    speaks: str = ""
    why: str = ""
    sure: bool = True


def entry(view: View) -> Entry | None:
    """None where the batch is recorded, where looked-up values enter (an id is always finite), and where it did not begin at
    the first module and in one step."""
    if view.batches.tensors or view.lead > 1 or not view.sites or not view.parameters:
        return None
    site = view.sites[0]
    if is_embedding(site) or is_embedding(view.parameters[0]):
        return None
    name = f"act/{site}/nonfinite"
    count, earlier = int(np.nan_to_num(view.at(name) or 0.0)), view.before(name)
    if count < 1 or len(earlier) < trends.LEAST or earlier.any():
        return None
    said = _weights_say(view, site, count) or _later_steps_say(view, site, count) or _elements_say(view, site, count)
    return Entry(site, count, *said) if said is not None else Entry(site, count)


def _weights_say(view: View, site: str, count: int) -> _Said | None:
    """What was measured of the weights since the onset: all finite, or those of this module alone broken. Where all are broken,
    an update with broken gradients did it, whatever began it. One element alone may have been a number of its own."""
    found = {p: _since(view, f"layer/{p}/weight_nonfinite") for p in view.parameters}
    first = {p: float(values[0]) for p, values in found.items() if len(values)}
    own = {p: bad for p, bad in first.items() if p.startswith(f"{site}.")}
    if not own:
        return None
    if not any(first.values()) and count > 1:
        return "batch", f"the weights of {site} are finite, as measured since", True
    broken = [p for p, bad in own.items() if bad]
    if broken and not any(bad for p, bad in first.items() if p not in own):
        return (
            "weight",
            f"{broken[0]} holds {first[broken[0]]:.0f} non-finite values, and no weight of another module does",
            True,
        )
    return None


def _later_steps_say(view: View, site: str, count: int) -> _Said | None:
    """A bad weight goes on to break every step. Of one element alone that says nothing, as above."""
    steps, values = view.series(f"act/{site}/nonfinite")
    after = steps[(steps > view.onset) & (steps <= view.onset + LATER) & (values == 0)]
    if count == 1 or not len(after):
        return None
    late = in_steps(int(after[0]) - view.onset)
    return "batch", f"what {site} puts out is finite again {late} later, so its weights are", True


def _elements_say(view: View, site: str, count: int) -> _Said | None:
    """Which elements broke at the onset, of those that there are: all break once an update has broken the weights. Inside a
    block a weight that is huge and finite breaks some samples too, so of a block it is not sure."""
    whole = _whole(view, site)
    if whole is None:
        return None
    units = _units(view, site)
    if site == view.input_module and units and whole % units == 0 and whole > units:
        rows = whole // units
        if count % units:
            return "weight", f"{count} of its {whole} elements broke, in {units} units: no whole samples", True
        if count % rows or (count == whole and units > 1):
            samples = "all samples" if count == whole else f"{count // units} of {rows} samples"
            return "batch", f"{samples} broke in all {units} units of {site}; a weight breaks one unit in all samples", True
    shares = {s: (view.at(f"act/{s}/nonfinite") or 0.0) / size for s in view.sites if (size := _whole(view, s))}
    least, most = min(shares.values()), max(shares.values())
    if len(shares) > 1 and 0 < least == most < 1:
        return (
            "batch",
            f"{most:.1%} of what each module puts out broke: some samples alone, and a weight acts on all",
            site == view.input_module,
        )
    return None


def _whole(view: View, site: str) -> int | None:
    """Elements that a module puts out; None unless all of them were seen to break after the onset."""
    counts = _since(view, f"act/{site}/nonfinite")
    if len(counts) < 2 or not np.isfinite(counts).all():
        return None
    units, after = _units(view, site), float(counts[1:].max())
    broken = _since(view, f"layer/{site}.bias/weight_nonfinite")
    if after > counts[0] or (units and len(broken) and broken.max() == units):
        return int(max(after, counts[0]))
    return None


def _units(view: View, site: str) -> int:
    """Of a layer with a bias, as many as there are elements in it, all of whose gradients broke; 0 if that is not known."""
    counts = [_since(view, f"layer/{site}.bias/{what}") for what in ("grad_nonfinite", "weight_nonfinite")]
    return int(np.nan_to_num(max((float(c.max()) for c in counts if len(c)), default=0.0)))


def _since(view: View, name: str) -> FloatArray:
    """Values from the onset to the end of the window."""
    steps, values = view.series(name)
    return values[steps >= view.onset]

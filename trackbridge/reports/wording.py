"""Words that page, post-mortem and demo share; those that trackers use too are in `trackbridge.answers`."""

from __future__ import annotations

from trackbridge.answers import INTERVENTIONS, how_to_test, moved_first, peak, plural, shown, sigmas

__all__ = ["GRADIENT_NORM", "INTERVENTIONS", "how_to_test", "moved_first", "peak", "plural", "shown", "sigmas"]

GRADIENT_NORM = "gradient norm (before clipping where that is recorded)"

"""TensorBoard's custom-scalars page, laid out from the panels: a category per section, a chart per panel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trackbridge import names, panels
from trackbridge.panels import CONDITIONAL, PANELS, SECTIONS, Panel


def layout(present: Collection[str]) -> bytes:
    """The plugin's `Layout` message. `present` are the series of the first rows: a panel is in it if one of its series is among
    them, or comes in any run. A conditional one that comes later has no chart here (TensorBoard reads the first layout only);
    it is under Scalars."""
    from tensorboard.plugins.custom_scalar import layout_pb2 as pb

    def chart(panel: Panel) -> Any:
        title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
        return pb.Chart(title=title, multiline=pb.MultilineChartContent(tag=[panel.regex]))

    drawn = [panel for panel in PANELS if panel.view in ("line", "scalar") and _comes(panel, present)]
    categories = [
        pb.Category(title=heading, chart=[chart(panel) for panel in drawn if panel.section == section])
        for section, heading in SECTIONS.items()
        if any(panel.section == section for panel in drawn)
    ]
    return bytes(pb.Layout(category=categories).SerializeToString())


def _comes(panel: Panel, present: Collection[str]) -> bool:
    if any(map(panel.draws, present)):
        return True
    return any(series not in CONDITIONAL and not names.is_wide(series) for series in panels.catalogued(panel))

// Replays and counterfactuals: the loss of each beside the recorded one.

function outcomes() {
  for (const host of document.querySelectorAll("[data-curves]")) {
    const curves = page.curves[host.dataset.curves];
    if (!curves) continue;
    const lines = curves.map(({ label, line: [grid, values, bad], recorded }) => ({
      label, name: label, steps: store.steps(grid), values: decode(values, Float32Array), bad, dash: recorded ? [6, 4] : undefined,
    }));
    host.style.setProperty("--height", "260px");
    lazily(host, () => { lineChart(host, lines, { height: 220 }); host.dataset.drawn = "yes"; });
  }
}

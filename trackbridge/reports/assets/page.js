"use strict";
// Draws the series of the page's data block with uPlot: anomalies as bands, non-finite values as triangles at the top edge.
(() => {
  const { charts, marks } = JSON.parse(document.getElementById("data").textContent);
  const host = document.getElementById("charts");
  host.textContent = "";
  if (!charts.length) { host.textContent = "No series were recorded."; return; }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const show = (v) => (v == null ? "" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(3) : String(+v.toPrecision(4)));
  const plots = [];
  let zooming = false;

  function zoom(min, max) {
    zooming = true;
    for (const plot of plots) plot.setScale("x", { min, max });
    zooming = false;
  }

  function drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    let free = -Infinity;
    for (const mark of [...marks].sort((a, b) => a.from - b.from)) {
      const left = plot.valToPos(mark.from - 0.5, "x", true);
      const right = Math.max(plot.valToPos(mark.to + 0.5, "x", true), left + 2 * ratio);
      ctx.fillStyle = css("--mark");
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      ctx.fillStyle = css("--accent");
      ctx.fillRect(left, bbox.top, ratio, bbox.height);
      const width = ctx.measureText(mark.label).width;
      const before = left - width - 5 * ratio;  // a label left of its band covers no data of the anomaly
      const x = before > Math.max(bbox.left, free) ? before : right + 5 * ratio;
      if (x > free) {
        ctx.fillText(mark.label, x, bbox.top + 13 * ratio);
        free = x + width + 4 * ratio;
      }
    }
    ctx.restore();
  }

  function drawNonfinite(plot, steps) {
    const { ctx, bbox } = plot;
    const size = 5 * (devicePixelRatio || 1);
    ctx.save();
    ctx.fillStyle = css("--accent");
    for (const step of steps) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x - size, bbox.top);
      ctx.lineTo(x + size, bbox.top);
      ctx.lineTo(x, bbox.top + 1.6 * size);
      ctx.fill();
    }
    ctx.restore();
  }

  function draw(chart, place) {
    const wide = place < 2;
    const box = document.createElement("div");
    box.className = wide ? "chart wide" : "chart";
    const title = document.createElement("h3");
    const unit = document.createElement("span");
    const reading = document.createElement("output");
    unit.textContent = chart.unit ? `  ${chart.unit}` : "";
    title.append(chart.name, unit, reading);
    box.append(title);
    host.append(box);

    const values = chart.values.filter((v) => v !== null);
    const least = Math.min(...values), greatest = Math.max(...values);
    const log = values.length > 0 && least > 0 && greatest / least > 100;
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot(
      {
        width: box.clientWidth,
        height: wide ? 230 : 150,
        legend: { show: false },
        cursor: { sync: { key: "steps", setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
        axes: [{ ...axis, size: 26 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(show) }],
        series: [
          {},
          {
            stroke: () => css("--series"),
            width: 1.6,
            points: { show: values.length < 60, size: 4, fill: () => css("--series") },
          },
        ],
        hooks: {
          drawAxes: [drawMarks],
          draw: [(p) => drawNonfinite(p, chart.nonfinite)],
          setCursor: [
            (p) => {
              const i = p.cursor.idx;
              reading.textContent = i == null ? "" : `step ${p.data[0][i]}: ${p.data[1][i] == null ? "not finite" : show(p.data[1][i])}`;
            },
          ],
          setScale: [(p, key) => { if (key === "x" && !zooming) zoom(p.scales.x.min, p.scales.x.max); }],
        },
      },
      [chart.steps, chart.values],
      box,
    );
    new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: wide ? 230 : 150 })).observe(box);
    return plot;
  }

  charts.forEach((chart, place) => plots.push(draw(chart, place)));

  const first = Math.min(...charts.map((c) => c.steps[0] ?? Infinity));
  const last = Math.max(...charts.map((c) => c.steps[c.steps.length - 1] ?? -Infinity));
  const bar = document.createElement("div");
  bar.className = "zoom";
  const button = (text, min, max) => {
    const made = document.createElement("button");
    made.textContent = text;
    made.addEventListener("click", () => zoom(min, max));
    bar.append(made);
  };
  button("Everything", first, last);
  marks.slice(0, 6).forEach((m) => button(m.label, Math.max(first, m.from - 20), Math.min(last, m.to + 20)));
  bar.append("Drag over a chart to zoom.");
  host.prepend(bar);

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((p) => p.redraw()));
})();

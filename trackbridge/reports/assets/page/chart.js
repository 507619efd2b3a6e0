// A line chart of one or several series over the step: anomalies as bands, non-finite values as triangles at the top edge.

const charts = new Set();

/**
 * Draws into `host`. `lines`: [{label, name, steps, values, bad, dash}]. `options`: {height, unit, marks, log}.
 * Returns {plot, update(lines)}.
 */
function lineChart(host, lines, options = {}) {
  const height = options.height ?? 160;
  const unit = options.unit ?? "";
  const readings = lines.map(() => el("span", { class: "reading" }));
  const legend = el("ul", { class: lines.length > 1 ? "legend" : "legend single" });
  lines.forEach((line, i) => {
    const swatch = el("i", { class: line.dash ? "swatch dashed" : "swatch" });
    swatch.style.setProperty("--colour", `var(--s${(i % 8) + 1})`);
    legend.append(el("li", {}, swatch, el("span", { class: "name", title: line.label }, line.label), readings[i]));
  });
  const frame = el("div", { class: "plot", role: "img", "aria-label": spoken(lines, unit) });
  host.append(legend, frame);

  let shown = lines;
  const table = align(lines);
  const log = options.log ?? spansDecades(lines);
  const axis = {
    stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  const plot = new uPlot(
    {
      width: Math.max(120, frame.clientWidth),
      height,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false, dist: 6, setScale: false } },
      scales: {
        x: { time: false, range: (_, low, high) => view.range ?? padded(low, high) },
        y: log ? { distr: 3, range: (_, low, high) => (low > 0 ? [low / 1.3, high * 1.3] : [0.1, 10]) } : {},
      },
      axes: [
        { ...axis, size: 28, gap: 4, values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? t.toLocaleString("en") : "")) },
        { ...axis, grid: log ? { ...axis.grid, filter: decades } : axis.grid, size: 62, gap: 6, space: 32, values: (_, ticks) => ticks.map((t) => (t == null ? "" : show(t, unit))) },
      ],
      series: [{}, ...lines.map((line, i) => ({
        stroke: () => css(`--s${(i % 8) + 1}`),
        width: line.dash ? 1.5 : 1.75,
        dash: line.dash,
        points: { show: (p) => p.data[0].length < 64, size: 5, stroke: () => css(`--s${(i % 8) + 1}`), fill: () => css("--card") },
      }))],
      hooks: {
        drawAxes: [(p) => { if (options.marks !== false) drawMarks(p, height > 140); }],
        draw: [(p) => shown.forEach((line) => drawBad(p, line.bad ?? []))],
        setCursor: [(p) => { if (p.cursor.idx != null && pointed(p)) view.point(p.data[0][p.cursor.idx]); }],
        setSelect: [(p) => {
          if (!p.select.width) return;
          const first = p.posToVal(p.select.left, "x"), last = p.posToVal(p.select.left + p.select.width, "x");
          p.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          view.zoom([first, last]);
        }],
      },
    },
    table,
    frame,
  );
  plot.over.addEventListener("dblclick", () => view.zoom(null));
  const resize = new ResizeObserver(() => {
    if (Math.abs(plot.width - frame.clientWidth) >= 1 && frame.clientWidth > 0) plot.setSize({ width: frame.clientWidth, height });
  });
  resize.observe(frame);

  function read() {
    const step = view.step;
    shown.forEach((line, i) => {
      if (step == null || !line.steps.length) { readings[i].textContent = ""; return; }
      const at = nearest(line.steps, step);
      const gap = Number.isNaN(line.values[at]) && !(line.bad ?? []).some(([first, last]) => first <= line.steps[at] && line.steps[at] <= last);
      readings[i].textContent = (gap ? "–" : show(line.values[at], unit)) + (shown.length === 1 ? ` at step ${line.steps[at].toLocaleString("en")}` : "");
    });
  }

  const made = {
    plot,
    lines: () => shown,
    update(next) {
      shown = next;
      plot.setData(align(next));
      frame.setAttribute("aria-label", spoken(next, unit));
      read();
    },
    follow(what) {
      if (what === "range") plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][plot.data[0].length - 1] });
      else if (view.step != null && !pointed(plot)) {
        const left = plot.valToPos(view.step, "x");
        plot.setCursor({ left, top: 0 }, false);
      }
      read();
    },
    remove() { charts.delete(made); resize.disconnect(); plot.destroy(); },
  };
  charts.add(made);
  made.follow("step");
  return made;
}

/** Of the places on a logarithmic axis, the powers of ten; all where it spans less than two of them. */
const decades = (_, places) => {
  const shown = places.map((v) => (Number.isInteger(+Math.log10(v).toFixed(9)) ? v : null));
  return shown.filter((v) => v != null).length > 1 ? shown : places;
};

/** Whether the mouse is in the chart, which then leads. */
const pointed = (plot) => plot.over.matches(":hover");

const padded = (low, high) => (low == null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high]);

/** uPlot's table: the union of the steps, a column per line; a value that is not finite is a gap. */
function align(lines) {
  const tables = lines.map((line) => [line.steps, Array.from(line.values, (v) => (Number.isFinite(v) ? v : null))]);
  if (!tables.length) return [[]];
  const same = tables.every((table) => table[0] === tables[0][0]);
  return same ? [tables[0][0], ...tables.map((table) => table[1])] : uPlot.join(tables);
}

function spansDecades(lines) {
  let least = Infinity, greatest = -Infinity;
  for (const line of lines) for (const v of line.values) if (Number.isFinite(v)) { least = Math.min(least, v); greatest = Math.max(greatest, v); }
  return least > 0 && greatest / least > 100;
}

/** What a chart says to somebody who does not see it. */
function spoken(lines, unit) {
  return lines.map((line) => {
    let least = -1, greatest = -1;
    line.values.forEach((v, i) => {
      if (!Number.isFinite(v)) return;
      if (least < 0 || v < line.values[least]) least = i;
      if (greatest < 0 || v > line.values[greatest]) greatest = i;
    });
    if (least < 0) return `${line.label}: no finite value`;
    const say = (i) => `${show(line.values[i], unit)} at step ${line.steps[i]}`;
    return `${line.label}, steps ${line.steps[0]} to ${line.steps[line.steps.length - 1]}: lowest ${say(least)}, highest ${say(greatest)}`
      + (line.bad?.length ? `, not finite at ${line.bad.length} place${line.bad.length > 1 ? "s" : ""}` : "");
  }).join("; ") || "empty chart";
}

function drawMarks(plot, named) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${11.5 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  let free = -Infinity;
  for (const mark of page.marks) {
    const left = plot.valToPos(mark.from - 0.5, "x", true);
    const right = Math.max(plot.valToPos(mark.to + 0.5, "x", true), left + 2 * ratio);
    if (right < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.fillStyle = css("--mark");
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.fillStyle = css("--accent");
    ctx.fillRect(left, bbox.top, ratio, bbox.height);
    if (!named) continue;
    const width = ctx.measureText(mark.label).width;
    const before = left - width - 6 * ratio;  // a label left of its band covers no data of the anomaly
    const x = before > Math.max(bbox.left, free) ? before : right + 6 * ratio;
    if (x > free && x + width < bbox.left + bbox.width) {
      ctx.fillText(mark.label, x, bbox.top + 14 * ratio);
      free = x + width + 6 * ratio;
    }
  }
  ctx.restore();
}

function drawBad(plot, spans) {
  const { ctx, bbox } = plot;
  const size = 5 * (devicePixelRatio || 1);
  ctx.save();
  ctx.fillStyle = css("--accent");
  for (const [first, last] of spans) {
    const a = plot.valToPos(first, "x", true), b = plot.valToPos(last, "x", true);
    if (b < bbox.left || a > bbox.left + bbox.width) continue;
    const left = clamp(a, bbox.left, bbox.left + bbox.width), right = clamp(b, bbox.left, bbox.left + bbox.width);
    ctx.beginPath();
    ctx.moveTo(left - size, bbox.top);
    ctx.lineTo(right + size, bbox.top);
    ctx.lineTo(right, bbox.top + 1.6 * size);
    ctx.lineTo(left, bbox.top + 1.6 * size);
    ctx.fill();
  }
  ctx.restore();
}

view.onChange((what) => { for (const chart of charts) chart.follow(what); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts) chart.plot.redraw(); });

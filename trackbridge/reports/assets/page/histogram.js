// Histograms of weights and gradients: decoded per step, drawn as shares over bins that are the same for every tensor.

class Shapes {
  constructor(block) { this.take(block); }

  take(block) {
    this.block = block;
    this.steps = block ? block.steps : [];
    this.cache = new Map();
  }

  has(name) { return this.block?.names.includes(name) ?? false; }

  /** Counts of `name` at the `place`-th step, length bins; null when it was not recorded there. */
  counts(name, place) {
    let step = this.cache.get(place);
    if (!step) {
      step = new Map();
      const raw = decode(this.block.counts[place], Uint32Array);
      let at = 0;
      for (const each of this.block.names) {
        const first = raw[at], length = raw[at + 1];
        if (length) step.set(each, [first, raw.subarray(at + 2, at + 2 + length)]);
        at += 2 + length;
      }
      this.cache.set(place, step);
    }
    const found = step.get(name);
    if (!found) return null;
    const counts = new Float64Array(this.block.bins);
    counts.set(found[1], found[0]);
    return counts;
  }

  /** Where the value `v` lies on the axis of bins. */
  position(v) {
    const edges = this.block.edges;
    return lowerBound(edges, v) + (v < 0 ? 1 : v > 0 ? 1 : 0);
  }

  /** A value that stands for a finite bin. */
  center(bin) {
    const { edges, zero } = this.block;
    if (bin === zero) return 0;
    if (bin === 0) return edges[0];
    if (bin >= edges.length) return edges[edges.length - 1];
    const a = edges[bin - 1], b = edges[bin];
    return Math.sign(a + b) * Math.sqrt(Math.abs(a * b));
  }

  quantile(counts, share) {
    let total = 0, below = 0;
    for (let bin = 0; bin < this.block.nonfinite; bin += 1) total += counts[bin];
    for (let bin = 0; bin < this.block.nonfinite; bin += 1) {
      below += counts[bin];
      if (below >= share * total) return this.center(bin);
    }
    return NaN;
  }
}

/** D(now || before) in nats; half a count is added to each bin that either uses (Krichevsky and Trofimov, 1981). */
function divergence(before, now) {
  let all = 0, allBefore = 0;
  for (let bin = 0; bin < now.length; bin += 1) if (now[bin] > 0 || before[bin] > 0) { all += now[bin] + 0.5; allBefore += before[bin] + 0.5; }
  let sum = 0;
  for (let bin = 0; bin < now.length; bin += 1) {
    if (!(now[bin] > 0 || before[bin] > 0)) continue;
    const p = (now[bin] + 0.5) / all, q = (before[bin] + 0.5) / allBefore;
    sum += p * Math.log(p / q);
  }
  return Math.max(0, sum);
}

/** The last histogram step before the subject, else the first. */
function referencePlace() {
  const at = page.subject ? lowerBound(shapes.steps, page.subject.from) - 1 : 0;
  return clamp(at, 0, Math.max(0, shapes.steps.length - 1));
}

/** Fills `host` with the histograms of a parameter (key "layer/<parameter>") and a slider over their steps. */
function histogramOf(host, key) {
  const names = ["weight", "grad"].flatMap((kind) => [`${key}/${kind}`, `${key}/${kind}_local`]).filter((name) => shapes.has(name));
  if (!names.length) {
    host.replaceChildren(el("p", { class: "empty" }, !shapes.steps.length ? "No histograms were recorded." : key.startsWith("act/") ? "Histograms are of parameters and gradients; choose a parameter." : "No histogram of this layer is on this page."));
    return;
  }
  const before = referencePlace();
  const slider = el("input", { type: "range", id: "histogram-step", min: "0", max: String(shapes.steps.length - 1), step: "1", value: String(Math.min(before + 1, shapes.steps.length - 1)) });
  const reading = el("output", { for: "histogram-step", id: "histogram-reading" });
  const boxes = names.map((name) => {
    const canvas = el("canvas", { role: "img" });
    const words = el("p", { class: "soft" });
    return { name, canvas, words, box: el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, name.includes("/weight") ? "Weights" : "Gradients")), canvas, words) };
  });
  host.replaceChildren(
    el("div", { class: "toolbar" }, el("label", { for: "histogram-step" }, "Histograms at"), slider, reading),
    el("div", { class: "panels" }, ...boxes.map((each) => each.box)),
  );
  const draw = () => {
    const place = Number(slider.value);
    reading.textContent = `step ${shapes.steps[place].toLocaleString("en")}`;
    slider.setAttribute("aria-valuetext", reading.textContent);
    for (const each of boxes) {
      const now = shapes.counts(each.name, place), then = shapes.counts(each.name, before);
      drawShape(each.canvas, now, then);
      each.words.textContent = now ? describeShape(now, then, before) : "not recorded at this step";
      each.canvas.setAttribute("aria-label", `Histogram of ${each.name} at step ${shapes.steps[place]}: ${each.words.textContent}`);
    }
  };
  slider.addEventListener("input", draw);
  if (shaped) shaped.disconnect();
  shaped = new ResizeObserver(draw);
  shaped.observe(host);
  draw();
}

let shaped = null;

function describeShape(now, then, before) {
  const [low, middle, high] = [0.01, 0.5, 0.99].map((share) => show(shapes.quantile(now, share)));
  const bad = now[shapes.block.nonfinite];
  const far = then ? `, ${show(divergence(then, now))} nats (KL) from step ${shapes.steps[before].toLocaleString("en")}, the outline` : "";
  return `1% below ${low}, half below ${middle}, 99% below ${high}${far}${bad ? `, ${bad} not finite` : ""}.`;
}

function drawShape(canvas, now, then) {
  const ratio = devicePixelRatio || 1, height = 150, foot = 22;
  const width = canvas.clientWidth || canvas.parentElement.clientWidth;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const all = [now, then].filter(Boolean);
  let first = Infinity, last = -Infinity;
  for (const counts of all) for (let bin = 0; bin < shapes.block.nonfinite; bin += 1) if (counts[bin]) { first = Math.min(first, bin); last = Math.max(last, bin); }
  if (!all.length || first > last) return;
  const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(...all.map((counts) => Math.max(...counts.subarray(0, shapes.block.nonfinite)) / total(counts)));
  const x = (bin) => (bin - first) / (last - first + 1) * width;
  const y = (share) => (height - foot) * (1 - share / most * 0.94);
  ctx.font = "11.5px system-ui, sans-serif";
  ctx.textAlign = "center";
  let free = -Infinity;
  for (const v of [-100, -1, -0.01, -1e-4, -1e-6, 0, 1e-6, 1e-4, 0.01, 1, 100]) {
    const bin = v === 0 ? shapes.block.zero + 0.5 : shapes.position(v) + (v < 0 ? -1 : 0) + (v < 0 ? 1 : 0);
    if (bin < first || bin > last + 1) continue;
    const at = x(bin), words = show(v), half = ctx.measureText(words).width / 2;
    ctx.fillStyle = css("--grid");
    ctx.fillRect(at, 0, 1, height - foot);
    const place = clamp(at, half, width - half);
    if (place - half < free) continue;
    ctx.fillStyle = css("--soft");
    ctx.fillText(words, place, height - 6);
    free = place + half + 8;
  }
  const path = (counts, close) => {
    const sum = total(counts);
    ctx.beginPath();
    ctx.moveTo(x(first), height - foot);
    for (let bin = first; bin <= last; bin += 1) {
      ctx.lineTo(x(bin), y(counts[bin] / sum));
      ctx.lineTo(x(bin + 1), y(counts[bin] / sum));
    }
    ctx.lineTo(x(last + 1), height - foot);
    if (close) ctx.closePath();
  };
  if (now) { path(now, true); ctx.fillStyle = css("--fill"); ctx.fill(); ctx.strokeStyle = css("--s1"); ctx.lineWidth = 1.5; ctx.stroke(); }
  if (then) { path(then, false); ctx.strokeStyle = css("--soft"); ctx.lineWidth = 1.25; ctx.setLineDash([4, 3]); ctx.stroke(); ctx.setLineDash([]); }
}

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

  /** The bin of a value that is not zero. */
  bin(v) {
    const { edges, zero } = this.block;
    const side = (edges.length >> 1) - 1 + lowerBound(edges.slice(edges.length >> 1), Math.abs(v) * (1 + 1e-12));
    return v > 0 ? side + 1 : 2 * zero - side - 1;
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
  const last = shapes.steps.length - 1;
  const start = host.dataset.step ? nearest(shapes.steps, Number(host.dataset.step)) : Math.min(before + 1, last);  // where the reader put it
  const slider = el("input", { type: "range", id: "histogram-step", min: "0", max: String(last), step: "1", value: String(start) });
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
  slider.addEventListener("input", () => { host.dataset.step = shapes.steps[Number(slider.value)]; draw(); });
  if (shaped) shaped.disconnect();
  shaped = new ResizeObserver(draw);
  shaped.observe(host);
  redrawShapes = draw;
  draw();
}

let shaped = null, redrawShapes = () => {};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawShapes());

function describeShape(now, then, before) {
  const [low, middle, high] = [0.01, 0.5, 0.99].map((share) => show(shapes.quantile(now, share)));
  const bad = now[shapes.block.nonfinite];
  const far = then ? `, ${show(divergence(then, now))} nats (KL) from step ${shapes.steps[before].toLocaleString("en")}, the outline` : "";
  return `1% below ${low}, half below ${middle}, 99% below ${high}${far}${bad ? `, ${bad} not finite` : ""}.`;
}

const NEAR_ZERO = 0.005;  // the share of values that may be shown as one bar around zero
const ZERO_BAR = 3;  // its width, in bins

/** Which bins are drawn where: {first, last, inner, place(bin), width}. The bins around zero that hold next to nothing are one. */
function scaleOf(all) {
  const { zero, nonfinite } = shapes.block;
  let first = Infinity, last = -Infinity;
  for (const counts of all) for (let bin = 0; bin < nonfinite; bin += 1) if (counts[bin]) { first = Math.min(first, bin); last = Math.max(last, bin); }
  if (first > last) return null;
  const totals = all.map((counts) => counts.reduce((sum, count) => sum + count, 0));
  const within = all.map((counts) => counts[zero]);
  let inner = 0;  // bins on each side of zero's own that join it
  for (;;) {
    all.forEach((counts, i) => { within[i] += counts[zero - inner - 1] + counts[zero + inner + 1]; });
    if (within.some((count, i) => count > NEAR_ZERO * totals[i]) || zero - inner - 1 <= 0) break;
    inner += 1;
  }
  const low = Math.min(first, zero - inner), high = Math.max(last, zero + inner);
  const left = zero - inner - low, width = left + ZERO_BAR + high - zero - inner;
  /** The left edge of a bin. */
  const place = (bin) => (bin < zero - inner ? bin - low : bin <= zero + inner ? left : left + ZERO_BAR + bin - zero - inner - 1);
  return { low, high, inner, left, width, place };
}

/** The shares of `counts`, a bar each: [left edge, width, share]. */
function bars(counts, scale) {
  const { zero } = shapes.block;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const found = [];
  let around = 0;
  for (let bin = scale.low; bin <= scale.high; bin += 1) {
    if (Math.abs(bin - zero) <= scale.inner) around += counts[bin];
    else found.push([scale.place(bin), 1, counts[bin] / total]);
  }
  found.push([scale.left, ZERO_BAR, around / total]);
  return found.sort((a, b) => a[0] - b[0]);
}

function drawShape(canvas, now, then) {
  const ratio = devicePixelRatio || 1, height = 150, foot = 22;
  const width = canvas.clientWidth || canvas.parentElement.clientWidth;
  const all = [now, then].filter(Boolean);
  const scale = all.length ? scaleOf(all) : null;
  if (!width || !scale) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const drawn = all.map((counts) => bars(counts, scale));
  const most = Math.max(...drawn.flat().map((bar) => bar[2]));
  const x = (place) => place / scale.width * width;
  const y = (share) => (height - foot) * (1 - share / most * 0.94);
  drawTicks(ctx, scale, x, width, height, foot);
  const path = (shown) => {
    ctx.beginPath();
    ctx.moveTo(x(0), height - foot);
    for (const [place, wide, share] of shown) { ctx.lineTo(x(place), y(share)); ctx.lineTo(x(place + wide), y(share)); }
    ctx.lineTo(x(scale.width), height - foot);
  };
  if (now) { path(drawn[0]); ctx.fillStyle = css("--fill"); ctx.fill(); ctx.strokeStyle = css("--s1"); ctx.lineWidth = 1.5; ctx.stroke(); }
  if (then) { path(drawn[drawn.length - 1]); ctx.strokeStyle = css("--soft"); ctx.lineWidth = 1.25; ctx.setLineDash([4, 3]); ctx.stroke(); ctx.setLineDash([]); }
}

/** Powers of ten that fall on the axis, zero first. */
function drawTicks(ctx, scale, x, width, height, foot) {
  const { zero } = shapes.block;
  ctx.font = "12px system-ui, sans-serif";
  ctx.textAlign = "center";
  const taken = [];
  const powers = [0, -1, -2, -3, -4, -5, -6, -7, -8, 1, 2, 3, 4];
  for (const v of [0, ...powers.flatMap((power) => [10 ** power, -(10 ** power)])]) {
    const bin = v === 0 ? zero : shapes.bin(v);
    if (bin < scale.low || bin > scale.high || (v !== 0 && Math.abs(bin - zero) <= scale.inner)) continue;
    const at = x(v === 0 ? scale.left + ZERO_BAR / 2 : scale.place(bin) + 0.5);
    const words = v === 0 && scale.inner ? `±${show(+shapes.center(zero + scale.inner).toPrecision(1))}` : show(v);
    const half = ctx.measureText(words).width / 2, place = clamp(at, half, width - half);
    if (taken.some(([low, high]) => place + half + 10 > low && place - half - 10 < high)) continue;
    taken.push([place - half, place + half]);
    ctx.fillStyle = css("--grid");
    ctx.fillRect(at, 0, 1, height - foot);
    ctx.fillStyle = css("--soft");
    ctx.fillText(words, place, height - 6);
  }
}

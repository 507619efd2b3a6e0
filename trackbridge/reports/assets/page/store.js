// The recorded series, decoded when they are first asked for.

class Store {
  constructor(block) {
    this.block = block;
    this.grids = new Map();
    this.cache = new Map();
  }

  get names() { return Object.keys(this.block.series); }

  has(name) { return name in this.block.series; }

  /** {steps, values, bad}: ascending steps; values with NaN where not finite; bad: spans [first, last] of such steps. */
  get(name) {
    let found = this.cache.get(name);
    if (!found) {
      const [grid, values, bad] = this.block.series[name];
      found = { steps: this.steps(grid), values: decode(values, Float32Array), bad };
      this.cache.set(name, found);
    }
    return found;
  }

  steps(number) {
    let found = this.grids.get(number);
    if (!found) {
      const grid = this.block.grids[number];
      if (grid.all !== undefined) found = decode(grid.all, Float64Array);
      else {
        const gaps = decode(grid.gaps, Uint16Array);
        found = new Float64Array(gaps.length + 1);
        found[0] = grid.first;
        for (let i = 0; i < gaps.length; i += 1) found[i + 1] = found[i] + gaps[i];
      }
      this.grids.set(number, found);
    }
    return found;
  }

  /** The value of `name` at the recorded step nearest to `step`; null when there is none. */
  at(name, step) {
    if (!this.has(name)) return null;
    const { steps, values } = this.get(name);
    return steps.length ? values[nearest(steps, step)] : null;
  }

  /** The first and last step of all series. */
  get extent() {
    let first = Infinity, last = -Infinity;
    for (const name of this.names) {
      if (wide(name)) continue;
      const { steps } = this.get(name);
      if (!steps.length) continue;
      first = Math.min(first, steps[0]);
      last = Math.max(last, steps[steps.length - 1]);
    }
    return first <= last ? [first, last] : [0, 1];
  }

  /** Adds points at the end; what is longer than `limit` loses every second point of its older half, extremes last. */
  append(name, steps, values, limit) {
    const old = this.has(name) ? this.get(name) : { steps: new Float64Array(0), values: new Float32Array(0), bad: [] };
    const keep = steps.length ? lowerBound(old.steps, steps[0]) : old.steps.length;  // a resumed run writes steps again
    let allSteps = concat(Float64Array, old.steps.subarray(0, keep), steps);
    let allValues = concat(Float32Array, old.values.subarray(0, keep), values);
    if (allSteps.length > limit) [allSteps, allValues] = halve(allSteps, allValues);
    const bad = old.bad.filter(([first]) => !steps.length || first < steps[0]);
    steps.forEach((step, i) => { if (!Number.isFinite(values[i])) extend(bad, step, i > 0 && !Number.isFinite(values[i - 1])); });
    this.block.series[name] = this.block.series[name] ?? [];
    this.cache.set(name, { steps: allSteps, values: allValues, bad });
  }
}

const wide = (name) => name.startsWith("layer/") || name.startsWith("act/");

/** ["layer", "blocks.0.qkv.weight", "grad_norm"] of a layer's series. */
function parts(name) {
  const first = name.indexOf("/"), last = name.lastIndexOf("/");
  return [name.slice(0, first), name.slice(first + 1, last), name.slice(last + 1)];
}

/** "layer/grad_norm", as `page.statistics` calls it. */
function statistic(name) {
  const [family, , last] = parts(name);
  return `${family}/${last}`;
}

function concat(Type, one, other) {
  const joined = new Type(one.length + other.length);
  joined.set(one);
  joined.set(other, one.length);
  return joined;
}

function extend(spans, step, follows) {
  if (follows && spans.length) spans[spans.length - 1][1] = step;
  else spans.push([step, step]);
}

/** The older half with the least and the greatest of each four points, the newer half as it is. */
function halve(steps, values) {
  const half = steps.length >> 1;
  const keep = [];
  for (let start = 0; start < half; start += 4) {
    const end = Math.min(start + 4, half);
    let least = -1, greatest = -1, bad = -1;
    for (let i = start; i < end; i += 1) {
      if (!Number.isFinite(values[i])) { if (bad < 0) bad = i; continue; }
      if (least < 0 || values[i] < values[least]) least = i;
      if (greatest < 0 || values[i] > values[greatest]) greatest = i;
    }
    for (const i of [...new Set([least, greatest, bad])].filter((i) => i >= 0).sort((a, b) => a - b)) keep.push(i);
  }
  for (let i = half; i < steps.length; i += 1) keep.push(i);
  return [Float64Array.from(keep, (i) => steps[i]), Float32Array.from(keep, (i) => values[i])];
}

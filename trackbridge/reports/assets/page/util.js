// Small tools that every part of the page uses.

/** An element with properties and children; text children are text, never markup. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

/** A number for a reader: four significant digits; bytes and large counts get a prefix. */
function show(value, unit = "") {
  if (value == null) return "–";
  if (Number.isNaN(value)) return "not finite";
  if (unit === "B") return scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) {
    const power = Math.floor(Math.log10(size));
    return `${+(value / 10 ** power).toPrecision(3)}e${power}`.replaceAll("-", "−");
  }
  return String(+value.toPrecision(4)).replace("-", "−");
}

function scaled(value, base, units) {
  let place = 0;
  while (Math.abs(value) >= base && place < units.length - 1) { value /= base; place += 1; }
  return `${+value.toPrecision(4)} ${units[place]}`;
}

/** "×12.3" of a ratio; below one as "÷12.3". */
function times(ratio) {
  if (!Number.isFinite(ratio) || ratio <= 0) return "–";
  return ratio >= 1 ? `×${show(ratio)}` : `÷${show(1 / ratio)}`;
}

/** The typed array in base64 `text`. */
function decode(text, Type) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return new Type(bytes.buffer);
}

function median(values) {
  const kept = Array.from(values).filter(Number.isFinite).sort((a, b) => a - b);
  if (!kept.length) return NaN;
  const middle = kept.length >> 1;
  return kept.length % 2 ? kept[middle] : (kept[middle - 1] + kept[middle]) / 2;
}

/** The first place in ascending `steps` whose step is not below `step`. */
function lowerBound(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low;
}

/** The place in ascending `steps` that is nearest to `step`. */
function nearest(steps, step) {
  const at = lowerBound(steps, step);
  if (at === 0) return 0;
  if (at === steps.length) return steps.length - 1;
  return step - steps[at - 1] <= steps[at] - step ? at - 1 : at;
}

/** Does `make`, which replaces elements; the focus goes back to the one of the same id. */
function keepingFocus(make) {
  const id = document.activeElement?.id;
  make();
  if (id && document.activeElement?.id !== id) byId(id)?.focus({ preventScroll: true });
}

/** Calls `draw` once, when `place` comes near the screen (or is printed). */
const waiting = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawNow(entry.target);
}, { rootMargin: "500px 0px" });

function lazily(place, draw) {
  waiting.set(place, draw);
  watcher.observe(place);
}

function drawNow(place) {
  const draw = waiting.get(place);
  if (!draw) return;
  waiting.delete(place);
  watcher.unobserve(place);
  draw();
}

addEventListener("beforeprint", () => [...waiting.keys()].forEach(drawNow));

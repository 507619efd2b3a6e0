// The timeline: loss and gradient norm large, the rest in groups that are drawn when they are opened.

const MOST_LINES = 8;
const MOST_ZOOMS = 6;

function timeline() {
  const host = byId("charts");
  host.replaceChildren();
  if (!store.names.length) { host.append(el("p", { class: "empty" }, "No series were recorded.")); return; }
  host.append(toolbar());
  grown.push({ update: growToolbar });
  const first = page.panels.filter((panel) => panel.first);
  const large = el("div", { class: "panels large" });
  host.append(large);
  first.forEach((panel) => placePanel(large, panel, 210));
  const groups = new Map();
  for (const panel of page.panels) if (!panel.first && panel.view === "line") groups.set(panel.group, [...(groups.get(panel.group) ?? []), panel]);
  const more = byId("more");
  more.replaceChildren();
  for (const [title, panels] of groups) {
    const inside = el("div", { class: "panels" });
    const summary = el("summary", {}, title, el("small", {}, `${panels.length} chart${panels.length > 1 ? "s" : ""}`));
    const group = el("details", { class: "group" }, summary, inside);
    group.addEventListener("toggle", () => {
      if (group.open && !inside.childElementCount) panels.forEach((panel) => placePanel(inside, panel, 150));
    });
    more.append(group);
  }
}

function placePanel(host, panel, height) {
  const names = panel.series.filter((name) => store.has(name));
  const chosen = names.length > MOST_LINES ? mostChanged(names, MOST_LINES) : names;
  const note = names.length > chosen.length ? `${chosen.length} of ${names.length}, those that changed most` : "";
  const box = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, panel.title), panel.unit ? el("span", { class: "unit" }, panel.unit) : "", note ? el("span", { class: "unit" }, note) : ""));
  host.append(box);
  box.style.setProperty("--height", `${height + 30}px`);
  const lines = () => chosen.map((name) => ({ label: label(name, chosen), name, ...store.get(name) }));
  lazily(box, () => {
    const drawn = lines();
    const log = panel.scale === "log" && drawn.every((line) => line.values.every((v) => !(v <= 0)));
    const chart = lineChart(box, drawn, { height, unit: panel.unit, marks: panel.marked, log });
    box.dataset.drawn = "yes";
    grown.push({ update: () => chart.update(lines()) });
  });
}

const grown = [];  // charts that a live page updates

/** What tells a line from its neighbours. */
function label(name, among) {
  if (!wide(name)) return name;
  const [family, layer, statistic] = parts(name);
  return among.every((other) => wide(other) && parts(other)[2] === statistic && parts(other)[0] === family) ? layer : `${layer} ${statistic}`;
}

/** Those whose values around the subject, or at the end, are farthest from their usual size. In the given order. */
function mostChanged(names, count) {
  const scored = names.map((name) => [change(name), name]).sort((a, b) => b[0] - a[0]).slice(0, count).map((pair) => pair[1]);
  return names.filter((name) => scored.includes(name));
}

/** The values that a layer is compared with: up to 256 points before the subject, or everything. */
function usual(name) {
  const { steps, values } = store.get(name);
  const until = page.subject ? lowerBound(steps, page.subject.from) : 0;
  return until ? values.subarray(Math.max(0, until - 256), until) : values;
}

function change(name) {
  const { steps, values } = store.get(name);
  const far = scale(name, usual(name));
  const after = page.subject ? values.subarray(lowerBound(steps, page.subject.from), lowerBound(steps, page.subject.to + 1.5)) : values;
  let most = 0;
  for (const v of after) { const distance = Math.abs(far(v)); if (distance > most) most = distance; }
  return most;
}

/** Whether a layer's statistic may be zero or negative, so that "times as large" says nothing. */
const signed = (name) => page.statistics[statistic(name)]?.signed;

/** How far a value is from the usual ones: in doublings for sizes, in robust sigmas for what may be zero or negative. */
function scale(name, before) {
  const middle = median(before);
  if (!signed(name) && middle > 0) return (v) => (v > 0 ? Math.log2(v / middle) : NaN);
  const spread = 1.4826 * median(Array.from(before, (v) => Math.abs(v - middle))) || Math.abs(middle) / 10 || 1;
  return (v) => (v - middle) / spread / 3;
}

/** Buttons that zoom, and a slider that reads all charts at one step. */
function toolbar() {
  const [first, last] = store.extent;
  const buttons = el("div", { class: "buttons", id: "zooms", role: "group", "aria-label": "Zoom" }, ...zooms());
  const [low, high] = view.range ?? [first, last];
  const start = view.step ?? page.subject?.from ?? last;
  const slider = el("input", { type: "range", id: "step", min: String(Math.ceil(low)), max: String(Math.floor(high)), step: "1", value: String(start) });
  slider.addEventListener("input", () => view.point(Number(slider.value)));
  const made = el("div", { class: "toolbar", id: "toolbar" }, buttons, el("label", { for: "step" }, "Step"), slider,
    el("output", { for: "step", id: "step-reading" }), el("small", {}, "Drag over a chart to zoom, double-click to see everything."));
  readStep(made);
  return made;
}

/** Of everything, and of the worst anomalies in the order of their steps. */
function zooms() {
  const worst = [...page.marks].sort((a, b) => a.rank - b.rank).slice(0, MOST_ZOOMS).sort((a, b) => a.from - b.from);
  const near = (label) => {
    const [first, last] = store.extent, mark = page.marks.find((each) => each.label === label);
    const margin = Math.max(12, 2 * (mark.to - mark.from));
    view.zoom([Math.max(first, mark.from - margin), Math.min(last, mark.to + margin)]);
  };
  return [
    el("button", { type: "button", onclick: () => view.zoom(null) }, "Everything"),
    ...worst.map(({ label }) => el("button", { type: "button", onclick: () => near(label) }, label)),
  ];
}

/** On a live page: the slider reaches as far as the data, in its place, because somebody may be using it. */
function growToolbar() {
  const there = byId("zooms"), now = zooms();
  const labels = (buttons) => Array.from(buttons, (button) => button.textContent).join("\n");
  if (labels(there.children) !== labels(now)) there.replaceChildren(...now);
  fitSlider();
  if (view.step == null) byId("step").value = byId("step").max;
  readStep();
}

/** The slider goes over the steps that are seen. */
function fitSlider() {
  const slider = byId("step"), [low, high] = view.range ?? store.extent;
  slider.min = String(Math.ceil(low));
  slider.max = String(Math.floor(high));
}

/** What the slider's step says. */
function readStep(bar = byId("toolbar")) {
  const slider = bar.querySelector("#step");
  const step = Number(slider.value);
  const large = page.panels.filter((panel) => panel.first).flatMap((panel) => panel.series).filter((name) => store.has(name));
  const words = [`step ${step.toLocaleString("en")}`, ...large.map((name) => `${name} ${show(store.at(name, step))}`)].join(", ");
  const reading = bar.querySelector("output");
  if (reading.textContent === words) return;  // an output that changes is read aloud
  reading.textContent = words;
  slider.setAttribute("aria-valuetext", words);
}

view.onChange((what) => {
  const slider = byId("step");
  if (!slider) return;
  if (what === "step" && view.step != null) slider.value = String(view.step);
  if (what === "range") fitSlider();
  readStep();
});

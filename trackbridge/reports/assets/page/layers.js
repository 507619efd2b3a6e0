// One layer: every statistic of a parameter and of the module it belongs to, and its histograms.

let openLayer = () => {};

function layers() {
  const host = byId("layer");
  if (!host) return;
  const known = new Map();  // "layer/blocks.0.qkv.weight" -> its series
  for (const name of store.names.filter(wide)) {
    const [family, layer] = parts(name);
    const key = `${family}/${layer}`;
    known.set(key, [...(known.get(key) ?? []), name]);
  }
  if (!known.size) { host.closest("section").hidden = true; return; }
  const group = (family, text) => {
    const keys = [...known.keys()].filter((key) => key.startsWith(`${family}/`));
    return keys.length ? el("optgroup", { label: text }, ...keys.map((key) => el("option", { value: key }, key.slice(family.length + 1)))) : "";
  };
  const choice = el("select", { id: "layer-choice" }, group("layer", "parameters"), group("act", "modules"));
  const panels = el("div", { class: "panels three" });
  const histograms = el("div", { class: "shapes" });
  host.replaceChildren(el("div", { class: "toolbar" }, el("label", { for: "layer-choice" }, "Layer"), choice), panels, histograms);
  let drawn = [], counted = null;  // charts, and the steps of the histograms that are shown

  function choose() {
    drawn.forEach((chart) => chart.remove());
    drawn = [];
    panels.replaceChildren();
    for (const [name, of] of seriesOf(choice.value)) {
      const box = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, sentence(title(statistic(name)))), of ? el("span", { class: "unit" }, `of ${of}`) : ""));
      panels.append(box);
      drawn.push(lineChart(box, [line(name)], { height: 130 }));
      box.dataset.drawn = "yes";
    }
    histogramOf(histograms, choice.value);
    counted = shapes.steps;
  }

  const line = (name) => ({ label: name, name, ...store.get(name) });

  /** On a live page: what is new goes into what is there; somebody may be using it. */
  function grow() {
    if (!drawn.length) return;
    const names = drawn.map((chart) => chart.lines()[0].name);
    const now = seriesOf(choice.value).map(([name]) => name);
    if (now.join("\n") !== names.join("\n")) { choose(); return; }
    drawn.forEach((chart, i) => chart.update([line(names[i])]));
    if (counted !== shapes.steps) histogramOf(histograms, choice.value);
    counted = shapes.steps;
  }

  /** The layer's own series, then those of the module around it: [name, module or ""]. */
  function seriesOf(key) {
    const own = known.get(key).map((name) => [name, ""]);
    const around = key.startsWith("layer/") ? module(key.slice("layer/".length)) : null;
    const its = around ? known.get(`act/${around}`).map((name) => [name, around]) : [];
    const order = Object.keys(page.statistics);
    const place = ([name]) => order.indexOf(statistic(name));
    const tells = ([name]) => !name.endsWith("nonfinite") || store.get(name).values.some((v) => v !== 0);
    return [...own, ...its].filter(tells).sort((a, b) => place(a) - place(b)).slice(0, 12);
  }

  function module(parameter) {
    const path = parameter.split(".");
    for (let length = path.length; length > 0; length -= 1) {
      const name = path.slice(0, length).join(".");
      if (known.has(`act/${name}`)) return name;
    }
    return null;
  }

  openLayer = (name) => {
    const key = known.has(name) ? name : `${parts(name)[0]}/${parts(name)[1]}`;
    if (!known.has(key)) return;
    choice.value = key;
    drawNow(host);
    choose();
    byId("layers").scrollIntoView({ behavior: calm() ? "auto" : "smooth" });
    choice.focus({ preventScroll: true });
  };

  const grewMost = document.querySelector("td[data-layer]")?.dataset.layer;
  const start = [page.subject?.layer, grewMost].find((key) => known.has(key));
  if (start) choice.value = start;
  choice.addEventListener("change", choose);
  lazily(host, choose);
  grown.push({ update: grow });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

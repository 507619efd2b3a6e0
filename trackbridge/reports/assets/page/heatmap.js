// Layers by steps: how far each layer's statistic is from its own usual size. The rows' names are buttons.

const ROW = 18;
const HEAD = 8;  // above the rows: where anomalies are marked, so that they hide no cell
const MOST_ROWS = 24;

function heatmap() {
  const host = byId("heatmap");
  if (!host) return;
  const statistics = new Map();  // "layer/grad_norm" -> names
  for (const name of store.names.filter(wide)) {
    const key = statistic(name);
    statistics.set(key, [...(statistics.get(key) ?? []), name]);
  }
  host.hidden = byId("changed").hidden = !statistics.size;  // the timeline above stays: a run may have no layers
  if (!statistics.size) return;
  const keys = Object.keys(page.statistics).filter((key) => statistics.has(key));
  const choice = el("select", { id: "heatmap-statistic" }, ...keys.map((key) => el("option", { value: key }, title(key))));
  const all = el("input", { type: "checkbox", id: "heatmap-all" });
  const rows = el("div", { class: "heat-rows" });
  const canvas = el("canvas", { role: "img" });
  const axis = el("div", { class: "heat-axis" });
  const legend = el("p", { class: "heat-legend" });
  const tip = el("p", { class: "heat-tip" });
  const some = Math.max(...[...statistics.values()].map((names) => names.length)) > MOST_ROWS;
  host.replaceChildren(
    el("div", { class: "toolbar" }, el("label", { for: "heatmap-statistic" }, "Statistic"), choice,
      some ? el("label", { class: "check" }, all, `all layers, not only the ${MOST_ROWS} that changed most`) : "", tip),
    el("div", { class: "heat" }, rows, el("div", { class: "heat-plot" }, canvas, axis)),
    legend,
  );

  let cells = null;
  function choose() {
    const names = statistics.get(choice.value);
    const shown = all.checked || names.length <= MOST_ROWS ? names : mostChanged(names, MOST_ROWS);
    const lines = shown.map((name) => {
      const { steps, values } = store.get(name);
      return { name, steps, values, far: scale(name, usual(name)) };
    });
    const same = cells?.lines.length === lines.length && lines.every((line, row) => line.name === cells.lines[row].name);
    if (!same) rows.replaceChildren(...lines.map((line) => {  // who has the focus in them keeps it
      const layer = parts(line.name)[1];
      return el("button", { type: "button", title: `${layer}: show this layer`, onclick: () => openLayer(line.name) }, layer);
    }));
    cells = { lines, signed: page.statistics[choice.value].signed };
    draw();
  }

  function draw() {
    if (!cells) return;
    const [first, last] = view.range ?? store.extent;
    const ratio = devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth, height = HEAD + cells.lines.length * ROW;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const columns = Math.min(canvas.width, Math.max(1, Math.ceil(last - first) + 1), 600);
    const ctx = canvas.getContext("2d");
    const colour = colours();
    cells.lines.forEach((line, row) => {
      const strongest = new Float32Array(columns).fill(NaN);
      const bad = new Uint8Array(columns);
      const column = (step) => clamp(Math.floor((step - first + 0.5) / (last - first + 1) * columns), 0, columns - 1);
      for (let i = lowerBound(line.steps, first); i < line.steps.length && line.steps[i] <= last; i += 1) {
        const far = line.far(line.values[i]), at = column(line.steps[i]);
        if (Number.isFinite(far) && !(Math.abs(strongest[at]) >= Math.abs(far))) strongest[at] = far;
      }
      for (const [from, to] of store.get(line.name).bad) {
        if (to < first || from > last) continue;
        for (let at = column(Math.max(from, first)); at <= column(Math.min(to, last)); at += 1) bad[at] = 1;
      }
      let held = NaN;
      for (let at = 0; at < columns; at += 1) {
        if (Number.isFinite(strongest[at])) held = strongest[at];
        ctx.fillStyle = bad[at] ? css("--ink") : Number.isFinite(held) ? colour(held) : "transparent";
        const x = Math.floor(at * canvas.width / columns);
        ctx.fillRect(x, (HEAD + row * ROW) * ratio, Math.ceil((at + 1) * canvas.width / columns) - x, ROW * ratio - ratio);
      }
    });
    for (const mark of page.marks) {
      const x = (mark.from - first) / (last - first + 1) * canvas.width;
      if (x < 0 || x > canvas.width) continue;
      const half = HEAD / 2 * ratio, middle = x + Math.max(1, canvas.width / (last - first + 1)) / 2;
      ctx.fillStyle = css("--accent");
      ctx.beginPath();
      ctx.moveTo(middle - half, 0);
      ctx.lineTo(middle + half, 0);
      ctx.lineTo(middle, HEAD * ratio);
      ctx.fill();
    }
    axis.replaceChildren(el("span", {}, `step ${Math.round(first).toLocaleString("en")}`), el("span", {}, Math.round(last).toLocaleString("en")));
    const what = cells.signed ? ["−12 sigma", "+12 sigma"] : ["÷16", "×16"];
    const swatch = (fill) => {
      const made = el("i");
      made.style.background = fill;
      return made;
    };
    legend.replaceChildren(
      el("span", {}, what[0]), ...[-4, -2, -1, 0, 1, 2, 4].map((v) => swatch(colour(v))), el("span", {}, what[1]),
      el("span", { class: "soft" }, `against the median ${page.subject ? "before the onset" : "of all steps"}`),
      swatch("var(--ink)"), el("span", { class: "soft" }, "not finite"),
    );
    canvas.setAttribute("aria-label", `${title(choice.value)} of ${cells.lines.length} layers over steps ${Math.round(first)} to ${Math.round(last)}, as a heat map; the layers are the buttons before it`);
  }

  canvas.addEventListener("mousemove", (event) => {
    const line = cells?.lines[Math.floor((event.offsetY - HEAD) / ROW)];
    if (!line) return;
    const [first, last] = view.range ?? store.extent;
    const step = first + event.offsetX / canvas.clientWidth * (last - first + 1) - 0.5;
    const at = nearest(line.steps, step);
    tip.textContent = `${parts(line.name)[1]}, step ${line.steps[at].toLocaleString("en")}: ${show(line.values[at])}`;
  });
  canvas.addEventListener("mouseleave", () => { tip.textContent = ""; });
  canvas.addEventListener("click", (event) => {
    const line = cells?.lines[Math.floor((event.offsetY - HEAD) / ROW)];
    if (line) openLayer(line.name);
  });
  choice.addEventListener("change", choose);
  all.addEventListener("change", choose);
  view.onChange((what) => { if (what === "range") draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas.parentElement);
  lazily(host, choose);
  grown.push({ update: choose });
}

/** A colour for a distance from the usual: cold below, the card's colour at it, hot above. */
function colours() {
  const [cold, middle, hot] = ["--cold", "--middle", "--hot"].map((name) => css(name).match(/\w\w/g).map((part) => parseInt(part, 16)));
  return (far) => {
    const share = Math.min(1, Math.abs(far) / 4) ** 0.7;
    const end = far < 0 ? cold : hot;
    return `rgb(${middle.map((from, i) => Math.round(from + (end[i] - from) * share)).join(",")})`;
  };
}

/** What a reader calls a statistic. */
const title = (key) => page.statistics[key].title;

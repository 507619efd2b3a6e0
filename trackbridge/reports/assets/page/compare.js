// Two steps side by side, layer by layer: divergence of the distributions where histograms were kept, sizes in any case.

const MOST_COMPARED = 30;

function compare() {
  const host = byId("comparison");
  host.closest("section").hidden = false;
  const layersHere = [...new Set(store.names.filter((name) => name.startsWith("layer/")).map((name) => parts(name)[1]))];
  if (!layersHere.length) { host.closest("section").hidden = true; return; }
  const some = store.names.find((name) => name.startsWith("layer/"));
  const steps = shapes.steps.length ? shapes.steps : Array.from(store.get(some).steps);
  if (steps.length < 2) { host.closest("section").hidden = true; return; }
  const onset = page.subject ? clamp(lowerBound(steps, page.subject.from), 1, steps.length - 1) : steps.length - 1;
  const slider = (id, at) => el("input", { type: "range", id, min: "0", max: String(steps.length - 1), step: "1", value: String(at) });
  const place = (name, usual) => (host.dataset[name] ? nearest(steps, Number(host.dataset[name])) : usual);  // where the reader put it
  const a = slider("compare-a", place("from", page.subject ? onset - 1 : 0)), b = slider("compare-b", place("to", onset));
  const sayA = el("output", { for: "compare-a" }), sayB = el("output", { for: "compare-b" });
  const all = el("button", { type: "button", onclick: () => { everything = true; draw(); table.focus(); } }, `All ${layersHere.length} layers`);
  const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Layers ranked by how much they changed" });
  let everything = layersHere.length <= MOST_COMPARED;
  host.replaceChildren(
    el("div", { class: "toolbar two" }, el("label", { for: "compare-a" }, "From"), a, sayA, el("label", { for: "compare-b" }, "to"), b, sayB),
    table,
    el("p", { class: "soft" }, shapes.steps.length
      ? "KL: Kullback–Leibler divergence of the later from the earlier distribution, in nats. Ranked by that of the weights."
      : "No histograms were recorded, so there is no divergence of distributions here; ranked by how much the gradient norm changed."),
    all,
  );

  function draw() {
    const [from, to] = [Number(a.value), Number(b.value)];
    sayA.textContent = `step ${steps[from].toLocaleString("en")}`;
    sayB.textContent = `step ${steps[to].toLocaleString("en")}`;
    a.setAttribute("aria-valuetext", sayA.textContent);
    b.setAttribute("aria-valuetext", sayB.textContent);
    const rows = layersHere.map((layer) => row(layer, from, to));
    rows.sort((x, y) => y.rank - x.rank);
    all.hidden = everything;
    const columns = ["layer", ...(shapes.steps.length ? ["KL of weights", "KL of gradients"] : []), "gradient norm", "times", "weight norm", "times"];
    const body = (everything ? rows : rows.slice(0, MOST_COMPARED)).map((each) => el("tr", {},
      el("td", {}, el("button", { type: "button", class: "link", onclick: () => openLayer(`layer/${each.layer}`) }, each.layer)),
      ...each.cells.map((cell) => el("td", { class: "n" }, cell))));
    table.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...columns.map((text, i) => el("th", { scope: "col", class: i ? "n" : "" }, text)))), el("tbody", {}, ...body)));
  }

  function row(layer, from, to) {
    const cells = [];
    let rank = NaN;
    if (shapes.steps.length) {
      const [weights, gradients] = ["weight", "grad"].map((kind) => between(`layer/${layer}/${kind}`, from, to));
      cells.push(weights == null ? "–" : show(weights), gradients == null ? "–" : show(gradients));
      rank = weights ?? gradients ?? -1;
    }
    for (const statistic of ["grad_norm", "weight_norm"]) {
      const one = local(layer, statistic, steps[from]), other = local(layer, statistic, steps[to]);
      cells.push(one == null ? "–" : `${show(one)} → ${show(other)}`, one == null ? "" : times(other / one));
      if (Number.isNaN(rank)) rank = one > 0 && other > 0 ? Math.abs(Math.log(other / one)) : Number.isNaN(other) ? Infinity : -1;
    }
    return { layer, cells, rank };
  }

  function local(layer, statistic, step) {
    const name = [`layer/${layer}/${statistic}`, `layer/${layer}/${statistic}_local`].find((each) => store.has(each));
    return name ? store.at(name, step) : null;
  }

  function between(name, from, to) {
    const each = shapes.has(name) ? name : `${name}_local`;
    if (!shapes.has(each)) return null;
    const before = shapes.counts(each, from), now = shapes.counts(each, to);
    return before && now ? divergence(before, now) : null;
  }

  a.addEventListener("input", () => { host.dataset.from = steps[Number(a.value)]; draw(); });
  b.addEventListener("input", () => { host.dataset.to = steps[Number(b.value)]; draw(); });
  lazily(host, draw);
}

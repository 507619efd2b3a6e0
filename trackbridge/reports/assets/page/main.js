// The parts of the page, put together.

const page = JSON.parse(byId("data").textContent);
const store = new Store(page.block);
const shapes = new Shapes(page.histograms);

/** The bar of sections: marks where the reader is; works in frames in which links to places do not. */
let seen = null;
function navigation() {
  const links = [...document.querySelectorAll("nav a")];
  for (const link of links) {
    const target = byId(link.hash.slice(1));
    link.hidden = !target || target.hidden;
    link.onclick = (event) => {
      event.preventDefault();
      target.scrollIntoView({ behavior: calm() ? "auto" : "smooth" });
      target.querySelector("h2")?.focus({ preventScroll: true });
    };
  }
  seen?.disconnect();
  const inBand = new Set();
  seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? inBand.add(target.id) : inBand.delete(target.id);
    const current = links.find((link) => inBand.has(link.hash.slice(1)));
    for (const link of links) link.toggleAttribute("aria-current", link === current);
  }, { rootMargin: "-30% 0px -65% 0px" });
  links.forEach((link) => { const target = byId(link.hash.slice(1)); if (target) seen.observe(target); });
}

view.step = page.subject?.from ?? null;
timeline();
heatmap();
layers();
compare();
outcomes();
spikes();
navigation();
live();
document.documentElement.dataset.ready = "yes";

/** For people with a console open, and for tests: what is drawn, as data. */
globalThis.trackbridge = {
  charts: () => [...charts].map((chart) => chart.lines().map((line) => ({
    label: line.label, steps: Array.from(line.steps), values: Array.from(line.values, (v) => (Number.isFinite(v) ? v : null)),
  }))),
  range: () => view.range,
  ranges: () => [...charts].map(({ plot }) => [plot.scales.x.min, plot.scales.x.max]),
  marks: () => {
    const { plot } = [...charts][0], mark = page.marks[0];
    const pixels = [mark.from - 0.5, mark.to + 0.5].map((step) => plot.valToPos(step, "x", true));
    return { ...mark, pixels, top: plot.bbox.top, at: plot.posToVal(pixels[0] / devicePixelRatio - plot.over.offsetLeft, "x") };
  },
};

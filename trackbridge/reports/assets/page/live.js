// Following a run: asks for what is new, one request at a time, less often while there is nothing; stops when the run has ended.

const LIVE_POINTS = 12000;
const QUICK = 1000, SLOW = 15000;

function live() {
  if (!page.live) return;
  const state = byId("live");
  let after = page.live.after, wait = QUICK, timer = 0, asking = false;

  async function ask() {
    if (asking || document.hidden) return;
    asking = true;
    clearTimeout(timer);
    let more = true;
    try {
      const answer = await fetch(`rows?after=${after}`, { cache: "no-store", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw new Error(String(answer.status));
      const news = await answer.json();
      if (news.reload) { location.reload(); return; }
      wait = news.after > after ? QUICK : Math.min(SLOW, wait * 1.5);
      after = news.after;
      take(news);
      more = !news.ended;
      state.textContent = more ? `live, ${store.extent[1].toLocaleString("en")} steps` : "the run has ended";
      state.dataset.state = more ? "live" : "ended";
    } catch {
      wait = Math.min(SLOW, wait * 2);
      state.textContent = "no answer from trackbridge view";
      state.dataset.state = "lost";
    } finally {
      asking = false;
      if (more) timer = setTimeout(ask, wait);
    }
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  ask();
}

/** News: {blocks: [{names, steps, values}], marks, sections: {id: html}, histograms}. Values are row by row. */
function take(news) {
  for (const block of news.blocks) {
    const steps = decode(block.steps, Float64Array), values = decode(block.values, Float32Array);
    const count = block.names.length;
    block.names.forEach((name, column) => {
      const own = Float32Array.from({ length: steps.length }, (_, row) => values[row * count + column]);
      store.append(name, steps, own, LIVE_POINTS);
    });
  }
  for (const [id, html] of Object.entries(news.sections ?? {})) {
    const place = byId(id);
    if (place) place.outerHTML = html;  // made by trackbridge, which escapes what it was given
  }
  if (news.marks) { page.marks = news.marks; page.subject = news.subject; }
  if (news.sections) { spikes(); navigation(); }
  if (news.blocks.length || news.marks) refresh();
}

let refreshing = 0;
function refresh() {
  cancelAnimationFrame(refreshing);
  refreshing = requestAnimationFrame(() => {
    const slider = byId("step");
    if (slider && !view.range) slider.max = String(store.extent[1]);
    for (const each of grown) each.update();
  });
}

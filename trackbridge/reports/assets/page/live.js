// Following a run: asks for what is new, one request at a time, less often while there is nothing; stops when the run has ended.

const LIVE_POINTS = 12000, ALL_LIVE_POINTS = 4e6;  // of a series, and of all of them: 12 bytes each
const QUICK = 1000, SLOW = 15000;

function live() {
  if (!page.live) return;
  let after = page.live.after, changed = after, wait = QUICK, timer = 0, asking = false;

  async function ask() {
    if (asking || document.hidden) return;
    asking = true;
    clearTimeout(timer);
    let more = true;
    const say = (words, state) => {
      byId("live").textContent = words;
      if (byId("live").dataset.state !== state) byId("told").textContent = words;  // read aloud, unlike every step
      byId("live").dataset.state = state;
    };
    try {
      const answer = await fetch(`rows?after=${after}&changed=${changed}`, { cache: "no-store", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw new Error(String(answer.status));
      const news = await answer.json();
      if (news.reload || hasMore(news)) { location.reload(); return; }
      wait = news.after > after ? QUICK : Math.min(SLOW, wait * 1.5);
      after = news.after;
      changed = news.changed;
      take(news);
      more = !news.ended;
      say(more ? `live, step ${store.extent[1].toLocaleString("en")}` : "followed to its end", more ? "live" : "ended");
    } catch {
      wait = Math.min(SLOW, wait * 2);
      say("no answer from trackbridge view", "lost");
    } finally {
      asking = false;
      if (more) timer = setTimeout(ask, wait);
    }
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  ask();
}

let lacking = false;

/** Whether loading the page again brings a chart for a series that has none on it. Not for one that a page has no room for. */
function hasMore(news) {
  lacking ||= page.live.complete && news.blocks.some((block) => block.names.some((name) => !store.has(name)));
  return lacking && news.page > page.live.after;
}

const told = {};  // the words of each section as they are

/** News: {blocks: [{names, steps, values}], marks, sections: {id: html}, histograms}. Values are row by row. */
function take(news) {
  const limit = clamp(Math.floor(ALL_LIVE_POINTS / store.names.length), 256, LIVE_POINTS);
  for (const block of news.blocks) {
    const steps = decode(block.steps, Float64Array), values = decode(block.values, Float32Array);
    const count = block.names.length;
    block.names.forEach((name, column) => {
      if (store.has(name)) store.append(name, steps, Float32Array.from(steps, (_, row) => values[row * count + column]), limit);
    });
  }
  keepingFocus(() => hear(news));
}

/** New words: {sections: {id: html}, marks, subject, histograms}. */
function hear(news) {
  let spoke = false;
  for (const [id, html] of Object.entries(news.sections ?? {})) {
    if (told[id] === html) continue;
    told[id] = html;
    byId(id).outerHTML = html;  // made by trackbridge, which escapes what it was given
    spoke = true;
  }
  if (news.sections) {
    Object.assign(page, { marks: news.marks, subject: news.subject });
    shapes.take(news.histograms);
  }
  if (spoke) { spikes(); compare(); navigation(); }
  if (news.blocks.length || spoke) refresh();
}

let refreshing = 0;
function refresh() {
  cancelAnimationFrame(refreshing);
  refreshing = requestAnimationFrame(() => {
    keepingFocus(() => { for (const each of grown) each.update(); });
  });
}

// The anomalies' inspectors: one is shown, a choice switches; names of layers open the layer's view; commands can be copied.

function spikes() {
  const choice = byId("spike-choice");
  const shown = [...document.querySelectorAll("[data-spike]")];
  const pick = () => shown.forEach((each) => { each.hidden = each.dataset.spike !== choice.value; });
  if (choice) { choice.addEventListener("change", pick); pick(); }
  for (const place of document.querySelectorAll("td[data-layer]")) {
    const name = place.dataset.layer;
    if (!store.names.some((each) => each.startsWith(`${name}/`))) continue;
    place.replaceChildren(el("button", { type: "button", class: "link", onclick: () => openLayer(name) }, place.textContent));
  }
  for (const code of document.querySelectorAll("pre[data-copy]")) {
    if (code.querySelector("button")) continue;
    const text = code.textContent;
    const button = el("button", { type: "button", class: "copy" }, "Copy");
    button.addEventListener("click", async () => { button.textContent = (await copy(text)) ? "Copied" : "Select and copy"; });
    code.append(button);
  }
}

async function copy(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* a page from disk may not be allowed to */ }
  const area = el("textarea", { class: "off" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

"use strict";
// Pages are complete without this: it keeps them up to date and opens experiments in place. Everything it shows comes
// from our own server, escaped there; it is parsed as a document of its own and moved in as nodes, so no script runs.
const status = document.getElementById("live");
let revisions = JSON.parse(document.body.dataset.live || "null");
let busy = false;
let again = false;

async function parsed(address) {
  const answer = await fetch(address, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

function changed(now) {
  const names = Object.keys(revisions);
  const all = location.pathname === "/" || location.pathname === "/kernels";
  return names.some((name) => now[name] !== revisions[name]) || (all && Object.keys(now).length !== names.length);
}

function replaceList(old, fresh) {
  const known = new Map([...old.children].map((item) => [item.id, item]));
  const items = [...fresh.children].map((item) => {
    const before = known.get(item.id);
    return before && before.dataset.version === item.dataset.version ? before : document.adoptNode(item);
  });
  old.replaceChildren(...items);
}

function keepOpen(old, fresh) {
  for (const details of old.querySelectorAll("details[data-key][open]"))
    for (const twin of fresh.querySelectorAll("details[data-key]")) if (twin.dataset.key === details.dataset.key) twin.open = true;
  for (const chosen of old.querySelectorAll("input:checked"))
    for (const twin of fresh.querySelectorAll("input")) if (twin.name === chosen.name && twin.value === chosen.value) twin.checked = true;
}

function replacePart(old, fresh) {
  if (old.tagName === "OL") return replaceList(old, fresh);
  if (fresh.isEqualNode(old)) return;
  keepOpen(old, fresh);
  const focused = old.contains(document.activeElement) && document.activeElement;
  const places = focused ? [...old.querySelectorAll("a, input, summary, [tabindex]")].indexOf(focused) : -1;
  const scrolls = [...old.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  old.replaceChildren(...[...fresh.childNodes].map((node) => document.adoptNode(node)));
  [...old.querySelectorAll(".scroll")].forEach((one, place) => { one.scrollLeft = scrolls[place] || 0; });
  if (places >= 0) old.querySelectorAll("a, input, summary, [tabindex]")[places]?.focus({ preventScroll: true });
}

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const page = await parsed(location.href);
    for (const old of document.querySelectorAll("[data-part]")) {
      const fresh = page.querySelector(`[data-part="${old.dataset.part}"]`);
      if (fresh) replacePart(old, fresh);
    }
    revisions = JSON.parse(page.body.dataset.live || "null") || revisions;
    status.textContent = `live, updated ${new Date().toLocaleTimeString()}`;
  } catch {
    status.textContent = "this could not be updated; trying again with the next change";
  } finally {
    busy = false;
    if (again) { again = false; refresh(); }
  }
}

async function fill(details) {
  const address = details.dataset.src;
  if (!address || !details.open || details.dataset.filled) return;
  details.dataset.filled = "yes";
  try {
    const body = (await parsed(address)).querySelector(".body");
    if (body) details.querySelector(".body").replaceWith(document.adoptNode(body));
  } catch {
    delete details.dataset.filled;
  }
}

document.addEventListener("toggle", (event) => fill(event.target), true);

if (revisions) {
  const source = new EventSource("/events");
  source.addEventListener("revisions", (event) => { if (changed(JSON.parse(event.data))) refresh(); });
  source.addEventListener("error", () => { status.textContent = "not connected: the dashboard or the network is gone; trying again"; });
  source.addEventListener("open", () => { status.textContent = "live"; });
  addEventListener("pagehide", () => source.close());
}

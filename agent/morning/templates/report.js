"use strict";
// The page is complete without this: it adds a filter, j and k inside the list, and opens what a link points at.
const list = document.querySelector("ol.experiments");
const items = list ? [...list.children] : [];
const form = document.querySelector("form.filters");

function filter() {
  const text = form.elements.text.value.trim().toLowerCase();
  const status = form.elements.status.value;
  let shown = 0;
  for (const item of items) {
    const fits = (!status || item.dataset.status === status) && (!text || item.textContent.toLowerCase().includes(text));
    item.hidden = !fits;
    shown += fits;
  }
  form.querySelector("output").textContent = `${shown} of ${items.length} shown`;
}

function move(event) {
  const step = { j: 1, k: -1 }[event.key];
  const current = event.target.closest("ol.experiments > li");
  if (!step || !current || event.ctrlKey || event.metaKey || event.altKey) return;
  const visible = items.filter((item) => !item.hidden);
  const next = visible[visible.indexOf(current) + step];
  if (next) next.querySelector("summary").focus();
}

function openTarget() {
  const found = location.hash && document.getElementById(location.hash.slice(1));
  const details = found && found.querySelector("details");
  if (details) details.open = true;
}

if (form) {
  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("keydown", move);
  filter();
}
addEventListener("hashchange", openTarget);
openTarget();

"use strict";
(() => {
  const every = 2000;
  const state = document.getElementById("state");
  const stop = document.getElementById("stop");
  let wanted = true;
  let last = Date.now();

  function local(root) {
    for (const time of root.querySelectorAll("time")) {
      time.title = new Date(time.dateTime).toLocaleString();
    }
    for (const button of root.querySelectorAll("button[data-copy]")) {
      button.hidden = !navigator.clipboard;
    }
  }

  async function refresh() {
    const selected = document.getSelection();
    const typing = document.activeElement && document.activeElement.closest("main input");
    const busy = typing || (selected && !selected.isCollapsed);
    if (!wanted || document.hidden || busy) return;
    try {
      const answer = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(5 * every) });
      const text = await answer.text();
      if (!answer.ok) throw new Error(text.trim());
      const found = new DOMParser().parseFromString(text, "text/html").querySelector("main");
      local(found);
      const open = new Set([...document.querySelectorAll("details[open]")].map((details) => details.dataset.name));
      for (const details of found.querySelectorAll("details")) details.open = open.has(details.dataset.name);
      document.querySelector("main").replaceWith(document.adoptNode(found));
      last = Date.now();
      state.textContent = "live";
      state.className = "good";
    } catch (error) {
      const seconds = Math.round((Date.now() - last) / 1000);
      state.textContent = "no answer for " + seconds + " s; this is how it looked then";
      state.className = "bad";
    }
  }

  async function again() {
    await refresh();
    setTimeout(again, every);
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  });
  stop.addEventListener("click", () => {
    wanted = !wanted;
    stop.textContent = wanted ? "hold" : "go on";
    state.textContent = wanted ? "live" : "held";
    state.className = wanted ? "good" : "warn";
  });
  stop.hidden = false;
  state.textContent = "live";
  state.className = "good";
  local(document);
  setTimeout(again, every);
})();

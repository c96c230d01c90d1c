"use strict";
(() => {
  const slow = document.querySelector("main [data-refresh-seconds]");
  const interval = slow ? 1000 * slow.dataset.refreshSeconds : 2000;
  const state = document.getElementById("state");
  const stop = document.getElementById("stop");
  let refreshing = true;
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
    const typing = document.activeElement && document.activeElement.closest("main input, main select");
    const busy = typing || (selected && !selected.isCollapsed);
    if (!refreshing || document.hidden || busy) return;
    try {
      const answer = await fetch(location.pathname + location.search, { cache: "no-store", signal: AbortSignal.timeout(5 * interval) });
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
      document.dispatchEvent(new Event("refreshed"));
    } catch (error) {
      const seconds = Math.round((Date.now() - last) / 1000);
      state.textContent = "no response for " + seconds + " s; showing the last known state";
      state.className = "bad";
    }
  }

  async function loop() {
    await refresh();
    setTimeout(loop, interval);
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  });
  stop.addEventListener("click", () => {
    refreshing = !refreshing;
    stop.textContent = refreshing ? "pause refresh" : "resume refresh";
    state.textContent = refreshing ? "live" : "paused";
    state.className = refreshing ? "good" : "warn";
  });
  stop.hidden = false;
  state.textContent = "live";
  state.className = "good";
  local(document);
  setTimeout(loop, interval);
})();

"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const [state, stop, ask, field, use, message, aside] = ["state", "stop", "ask", "token", "use", "message", "aside"].map(get);
  const main = document.querySelector("main");
  const interval = 1000 * main.dataset.refreshSeconds;
  // Kept in this tab only.
  let token = "";
  // The path of what is shown beside `main`.
  let shown = "";
  let refreshing = true;
  let last = Date.now();

  function say(text, ok) {
    message.textContent = text;
    message.className = ok ? "good" : "bad";
  }

  async function call(path, body) {
    const headers = { accept: body ? "application/json" : "text/html" };
    if (token) headers.authorization = "Bearer " + token;
    if (body) headers["content-type"] = "application/json";
    const signal = AbortSignal.timeout(30000);
    const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body, cache: "no-store", signal });
    const text = await answer.text();
    const isPage = (answer.headers.get("content-type") ?? "").startsWith("text/html");
    if (answer.ok && (body || isPage)) return text;
    let why = isPage ? new DOMParser().parseFromString(text, "text/html").querySelector("main")?.textContent : text.trim();
    try {
      why = JSON.parse(text).message;
    } catch {}
    if (answer.ok) why = "this is no page";
    if (answer.status === 401) {
      may("");
      say("failed: " + why, false);
    }
    throw new Error(why);
  }

  function local(root) {
    for (const time of root.querySelectorAll("time")) time.title = new Date(time.dateTime).toLocaleString();
  }

  // Shows what is in `main` of another page.
  async function load(path, target) {
    const given = token;
    const found = new DOMParser().parseFromString(await call(path), "text/html").querySelector("main");
    if (token !== given) return;
    local(found);
    const open = new Map([...target.querySelectorAll("details")].map((details) => [details.dataset.name, details.open]));
    for (const details of found.querySelectorAll("details")) details.open = open.get(details.dataset.name) ?? details.open;
    const root = document.documentElement;
    const isAtEnd = root.scrollTop + root.clientHeight > root.scrollHeight - 40;
    target.replaceChildren(...found.childNodes);
    if (isAtEnd && "follows" in main.dataset) root.scrollTop = root.scrollHeight;
  }

  async function refresh() {
    try {
      await load(location.pathname + location.search, main);
      last = Date.now();
      state.textContent = "live";
      state.className = "good";
    } catch (error) {
      const seconds = Math.round((Date.now() - last) / 1000);
      state.textContent = "no response for " + seconds + " s; showing the last known state";
      state.className = "bad";
    }
  }

  async function loop() {
    const typing = document.activeElement && document.activeElement.closest("main input, main select");
    const selected = document.getSelection();
    const busy = typing || (selected && !selected.isCollapsed) || [...main.querySelectorAll("input, select, textarea")].some(isEdited);
    if (refreshing && !document.hidden && !busy) await refresh();
    if (interval) setTimeout(loop, interval);
  }

  function may(given) {
    token = given;
    if (given) sessionStorage.setItem("token", given);
    else sessionStorage.removeItem("token");
    field.value = shown = "";
    document.body.classList.toggle("may", token !== "");
    field.hidden = use.hidden = true;
    ask.textContent = token === "" ? "use a token" : "forget the token";
    aside.replaceChildren();
  }

  // The numbers beside a button have their places in its body.
  function bodyOf(button) {
    const body = JSON.parse(button.dataset.body);
    for (const input of button.parentElement.querySelectorAll("input[data-place]")) {
      const names = input.dataset.place.split(".");
      const last = names.pop();
      const part = names.reduce((part, name) => part[name], body);
      part[last] = input.value === "" ? null : Number(input.value) * input.dataset.times;
    }
    return body;
  }

  function answerOf(path, text) {
    const answer = JSON.parse(text);
    if (answer.href) location = answer.href;
    if (!answer.succeeded) return answer.message ?? path.split("/").slice(2).map(decodeURIComponent).join(" ") + ": done";
    return [answer.succeeded.length + " done", ...Object.entries(answer.failed).map(([id, why]) => id + ": " + why)].join("; ");
  }

  // Some at a time, so that each answer comes soon.
  async function changeMany(path, tasks) {
    const sum = { succeeded: [], failed: {} };
    for (let at = 0; at < tasks.length; at += 40) {
      const part = JSON.parse(await call(path, JSON.stringify({ tasks: tasks.slice(at, at + 40) })));
      sum.succeeded.push(...part.succeeded);
      Object.assign(sum.failed, part.failed);
      say(sum.succeeded.length + " of " + tasks.length + " done", true);
    }
    return answerOf(path, JSON.stringify(sum));
  }

  async function press(button) {
    const { path, body, reason, confirm: sure } = button.dataset;
    if (sure && !confirm(sure)) return;
    button.disabled = true;
    try {
      if (body === undefined) {
        shown = path;
        await load(path, aside);
        aside.scrollIntoView();
      } else {
        const sent = bodyOf(button);
        if (reason && (sent.note = prompt(reason)) === null) return;
        if (sent.tasks) {
          say(await changeMany(path, sent.tasks), true);
          shown = "";
          aside.replaceChildren();
        } else say(answerOf(path, await call(path, JSON.stringify(sent))), true);
        if (shown) await load(shown, aside);
        await refresh();
      }
    } catch (error) {
      say("failed: " + error.message, false);
    } finally {
      button.disabled = false;
    }
  }

  function isEdited(field) {
    // Without a `selected` option the first one is.
    if (field.tagName === "SELECT") return field.selectedIndex !== Math.max(0, [...field.options].findIndex((option) => option.defaultSelected));
    return field.value !== field.defaultValue;
  }

  async function create(button) {
    try {
      const form = button.closest(".form");
      const name = form.querySelector("[data-name]").value;
      const { create: path, queue, from } = button.dataset;
      // What is left as it is stays what it was.
      const changed = [...form.querySelectorAll("[data-field]")].filter(isEdited);
      const changes = changed.map((field) => [field.dataset.field, field.dataset.kind, field.value]);
      const body = JSON.stringify({ queue, name, from, changes });
      say(answerOf(path, await call(path, body)), true);
    } catch (error) {
      say("failed: " + error.message, false);
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-path], button[data-create]");
    if (!button || !token) return;
    if (button.dataset.create) create(button);
    else press(button);
  });
  stop.addEventListener("click", () => {
    refreshing = !refreshing;
    stop.textContent = refreshing ? "pause refresh" : "resume refresh";
    state.textContent = refreshing ? "live" : "paused";
    state.className = refreshing ? "good" : "warn";
  });
  local(document);
  if (interval) {
    stop.hidden = false;
    state.textContent = "live";
    state.className = "good";
    setTimeout(loop, interval);
  }
  if (!ask) return;
  ask.addEventListener("click", () => {
    if (token) {
      may("");
      return refresh();
    }
    field.hidden = use.hidden = !field.hidden;
    if (!field.hidden) field.focus();
  });
  use.addEventListener("click", () => {
    if (!field.value) return;
    may(field.value.trim());
    if (interval || main.querySelector("[data-ask]")) refresh();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") use.click();
  });
  ask.hidden = false;
  const kept = sessionStorage.getItem("token");
  if (kept) {
    may(kept);
    if (interval || main.querySelector("[data-ask]")) refresh();
  }
})();

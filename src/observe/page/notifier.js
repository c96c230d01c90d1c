"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const [ask, field, use, message, aside] = ["ask", "token", "use", "message", "aside"].map(get);
  // Kept in this page only.
  let token = "";

  function say(text, ok) {
    message.textContent = text;
    message.className = ok ? "good" : "bad";
  }

  async function call(path, body) {
    const answer = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: { authorization: "Bearer " + token, "content-type": "application/json" },
      body: body && JSON.stringify(body),
      cache: "no-store",
      signal: AbortSignal.timeout(30000),
    });
    const found = await answer.json();
    if (answer.status === 401) may("");
    if (!answer.ok) throw new Error(found.message);
    return found;
  }

  // Control characters, and those that reorder the text around them.
  const unsafe = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

  function made(name, text, more) {
    return Object.assign(document.createElement(name), { textContent: String(text ?? "").replace(unsafe, " ") }, more);
  }

  // `past` is said of a time that has come.
  function time(at, past) {
    if (at == null || at > 8e15) return at == null ? "–" : "no end";
    const seconds = Math.round(Math.abs(Date.now() - at) / 1000);
    const text = seconds < 60 ? seconds + "s" : seconds < 3600 ? Math.floor(seconds / 60) + "m" : Math.floor(seconds / 3600) + "h" + String(Math.floor(seconds / 60) % 60).padStart(2, "0") + "m";
    return made("time", at >= Date.now() ? "in " + text : past ?? text + " ago", { title: new Date(at).toLocaleString() });
  }

  function button(text, path, more) {
    const button = made("button", text, { type: "button" });
    Object.assign(button.dataset, { path, ...more });
    return button;
  }

  function table(title, names, rows, empty) {
    const parts = [made("h2", title)];
    if (rows.length === 0) return [...parts, made("p", empty, { className: "empty" })];
    const table = made("table");
    const head = table.createTHead().insertRow();
    for (const name of names) head.append(made("th", name));
    const body = table.createTBody();
    for (const cells of rows) {
      const row = body.insertRow();
      cells.forEach((cell, index) => {
        const td = row.insertCell();
        td.dataset.label = names[index];
        for (const part of [cell].flat()) td.append(part instanceof Node ? part : made("span", part));
      });
    }
    return [...parts, table];
  }

  const failure = (one) => one && (one.error ?? "HTTP " + one.status) + (one.detail ? ": " + one.detail.slice(0, 200) : "");

  function endpoint([name, one]) {
    const path = "/v1/endpoints/" + encodeURIComponent(name) + "/";
    const act = (action, more) => [button(action, path + action, more), " "];
    const notes = [one.why, one.last_failure && "last error: " + failure(one.last_failure), one.note && "“" + one.note + "”"];
    return [
      [made("code", name)],
      [made("strong", one.state, { className: one.state === "active" ? "good" : "bad" }), ...notes.filter(Boolean).map((note) => made("small", note))],
      [time(one.health.failing_since)],
      [time(one.next_try, "now")],
      [one.messages ? made("span", one.messages, { className: "name" }) : "–", made("small", one.messages ? "lanes: " + one.lanes : "")],
      [time(one.oldest)],
      [...(one.state === "paused" ? act("resume") : act("pause", { note: "Why?" })), ...(one.disabled ? act("enable") : act("disable", { note: "Why? It gets nothing until it is enabled." })),
        ...act("redeliver", { confirm: "Try all of its heads at once?" }), ...act("test")],
    ];
  }

  function lane(one) {
    const path = "/v1/lanes/" + one.id + "/";
    return [
      [made("code", one.key), made("small", "lane " + one.id + " of " + one.endpoint)],
      [made("strong", one.state, { className: one.state === "open" ? "good" : "warn" }), made("small", one.note)],
      [made("span", one.head_type ?? "–"), made("small", "position " + one.head + ", epoch " + one.epoch)],
      [time(one.head_since)],
      [String(one.waiting)],
      [String(one.attempts)],
      [time(one.due_at, "due")],
      [...(one.state === "open" ? [button("pause", path + "pause", { note: "Why?" })] : [button("resume", path + "resume")]), " ",
        button("skip head", path + "skip-head", { note: "Why is message " + one.head + " (" + one.head_type + ") never sent?", position: one.head })],
    ];
  }

  function attempt(one) {
    const answer = made("strong", one.error ?? "HTTP " + one.status, { className: one.status >= 200 && one.status < 300 ? "good" : "bad" });
    const detail = made("details");
    detail.dataset.name = [one.lane, one.position, one.number].join("/");
    detail.append(made("summary", "answer"), made("pre", one.detail));
    return [
      [time(one.started_at)],
      [made("code", one.key), made("small", one.endpoint)],
      [one.type, made("small", one.event_id)],
      [one.epoch + "/" + one.seq],
      [String(one.number)],
      [one.took_ms + " ms"],
      one.detail ? [answer, detail] : [answer],
    ];
  }

  async function refresh() {
    if (!token) return;
    try {
      const [status, lanes, attempts] = await Promise.all([call("/v1/status"), call("/v1/lanes"), call("/v1/attempts?limit=50")]);
      if (!token) return;
      const open = new Set([...aside.querySelectorAll("details[open]")].map((details) => details.dataset.name));
      aside.replaceChildren(
        ...table("Endpoints", ["endpoint", "state", "failing since", "next try", "waiting", "oldest", ""], Object.entries(status.endpoints).map(endpoint), "No endpoints."),
        ...table("Lanes with messages, oldest head first", ["key", "state", "head", "age", "waiting", "attempts", "next try", ""], lanes.map(lane), "Nothing waits."),
        ...table("Attempts, latest first", ["when", "key", "event", "epoch/seq", "attempt", "took", "answer"], attempts.map(attempt), "None yet."),
      );
      for (const details of aside.querySelectorAll("details")) details.open = open.has(details.dataset.name);
    } catch (error) {
      say("failed: " + error.message, false);
    }
  }

  function may(given) {
    token = given;
    field.value = "";
    document.body.classList.toggle("may", token !== "");
    field.hidden = use.hidden = true;
    ask.textContent = token === "" ? "use a token" : "forget the token";
    if (token === "") aside.replaceChildren();
    refresh();
  }

  async function press(button) {
    const { path, note, confirm: sure, position } = button.dataset;
    const body = position === undefined ? {} : { position: Number(position) };
    if (note && (body.note = prompt(note)) === null) return;
    if (sure && !confirm(sure)) return;
    try {
      await call(path, body);
      say(path.split("/").slice(2).map(decodeURIComponent).join(" ") + ": done", true);
    } catch (error) {
      say("failed: " + error.message, false);
    }
    await refresh();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("#aside button[data-path]");
    if (button && token) press(button);
  });
  document.addEventListener("refreshed", refresh);
  ask.addEventListener("click", () => {
    if (token) return may("");
    field.hidden = use.hidden = !field.hidden;
    if (!field.hidden) field.focus();
  });
  use.addEventListener("click", () => field.value && may(field.value.trim()));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") use.click();
  });
  ask.textContent = "use a token";
  ask.hidden = false;
})();

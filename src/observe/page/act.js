"use strict";
(() => {
  const ask = document.getElementById("ask");
  const field = document.getElementById("token");
  const use = document.getElementById("use");
  const message = document.getElementById("message");
  const aside = document.getElementById("aside");
  // Kept in this page only.
  let token = "";

  function showMessage(text, ok) {
    message.textContent = text;
    message.className = ok ? "good" : "bad";
  }

  function may(given) {
    token = given;
    field.value = "";
    document.body.classList.toggle("may", token !== "");
    field.hidden = use.hidden = true;
    ask.textContent = token === "" ? "send commands" : "forget the token";
    if (token === "") aside.replaceChildren();
  }

  // Sends an authenticated request.
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

  function numbers(button) {
    const box = button.closest(".numbers");
    const read = (name) => {
      const value = box.querySelector("input[name=" + name + "]").value;
      return value === "" ? null : Number(value);
    };
    const scale = { key: box.dataset.key, min: read("min"), max: read("max"), seconds: (read("minutes") ?? 0) * 60 };
    return { pool: box.dataset.pool, command: { scale } };
  }

  async function send(button) {
    const request = button.dataset.command ? JSON.parse(button.dataset.command) : numbers(button);
    const answer = await call("/v1/commands", { ...request, note: { by: "the page" } });
    showMessage(answer.message, true);
  }

  // Control characters, and those that reorder the text around them.
  const unsafe = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

  function made(name, text, more) {
    return Object.assign(document.createElement(name), { textContent: String(text).replace(unsafe, " ") }, more);
  }

  function button(text, settle, confirm) {
    const button = made("button", text, { type: "button" });
    button.dataset.settle = JSON.stringify(settle);
    if (confirm) button.dataset.confirm = confirm;
    return button;
  }

  // A row of the poison queue.
  function row(pool, entry) {
    const key = entry.key === undefined ? "not known" : entry.key === "" ? "the empty key" : entry.key;
    const tried = (entry.attempts === undefined ? "" : entry.attempts + " attempts") + (entry.poison_count > 1 ? ", " + entry.poison_count + " times in the poison queue" : "");
    const worker = entry.worker === undefined ? [made("span", "not known", { className: "dim" })]
      : [made("code", entry.worker), made("small", entry.worker_exit ?? "")];
    if (entry.worker_log.length > 0) {
      const log = made("details", "");
      log.append(made("summary", "log"), made("pre", entry.worker_log.join("\n")));
      worker.push(log);
    }
    const these = { pool, selection: { ids: [entry.id] } };
    const cells = [
      ["request", [made("code", entry.id), made("small", entry.body_bytes + " bytes")]],
      ["key", [made("code", key)]],
      ["reason", [entry.reason, made("small", tried)]],
      ["moved at", [entry.poisoned_at === undefined ? "–" : made("time", new Date(entry.poisoned_at).toLocaleString(), { dateTime: entry.poisoned_at })]],
      ["worker", worker],
      ["", [button("requeue", { ...these, action: "requeue" }), " ",
        button("discard", { ...these, action: "discard" }, "Discard " + entry.id + "? This cannot be undone.")]],
    ];
    const row = document.createElement("tr");
    for (const [label, inside] of cells) {
      const cell = document.createElement("td");
      cell.dataset.label = label;
      cell.append(...inside);
      row.append(cell);
    }
    return row;
  }

  async function show(pool) {
    const { requests, not_scanned } = (await call("/v1/poison?pool=" + encodeURIComponent(pool)))[pool];
    const title = made("h2", "Poison queue of ");
    title.append(made("code", pool), " ", button("requeue all", { pool, selection: "all", action: "requeue" }, "Requeue all of them?"),
      " ", button("discard all", { pool, selection: "all", action: "discard" }, "Discard all of them? This cannot be undone."), " ",
      made("button", "close", { type: "button", onclick: () => aside.replaceChildren() }));
    if (requests.length === 0) {
      aside.replaceChildren(title, made("p", "The poison queue is empty.", { className: "empty" }));
      return;
    }
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const name of ["request", "key", "reason", "moved at", "last worker", ""]) head.append(made("th", name));
    table.createTBody().append(...requests.map((entry) => row(pool, entry)));
    const rest = not_scanned > 0 ? [made("p", not_scanned + " more were not scanned", { className: "dim" })] : [];
    aside.replaceChildren(title, table, ...rest);
  }

  async function settle(button) {
    const asked = JSON.parse(button.dataset.settle);
    const settled = await call("/v1/poison", { ...asked, by: "the page" });
    const not = Object.entries(settled.failed).map(([id, why]) => id + ": " + why);
    showMessage([settled.succeeded.length + (asked.action === "discard" ? " discarded" : " requeued"), ...not].join("; "), not.length === 0);
    await show(asked.pool);
  }

  async function press(button) {
    if (button.dataset.confirm && !confirm(button.dataset.confirm)) return;
    button.disabled = true;
    try {
      if (button.dataset.poison) {
        await show(button.dataset.poison);
        aside.scrollIntoView();
      } else if (button.dataset.settle) await settle(button);
      else await send(button);
    } catch (error) {
      showMessage("failed: " + error.message, false);
    }
    button.disabled = false;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("main button[data-command], main .numbers button, main button[data-poison], #aside button[data-settle]");
    if (button && token) press(button);
  });
  ask.addEventListener("click", () => {
    if (token) return may("");
    field.hidden = use.hidden = !field.hidden;
    if (!field.hidden) field.focus();
  });
  use.addEventListener("click", () => field.value && may(field.value.trim()));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") use.click();
  });
  ask.hidden = false;
})();

"use strict";
(() => {
  const ask = document.getElementById("ask");
  const field = document.getElementById("token");
  const use = document.getElementById("use");
  const said = document.getElementById("said");
  const aside = document.getElementById("aside");
  // It is kept nowhere else, and goes with the page.
  let token = "";

  function tell(text, well) {
    said.textContent = text;
    said.className = well ? "good" : "bad";
  }

  function may(given) {
    token = given;
    field.value = "";
    document.body.classList.toggle("may", token !== "");
    field.hidden = use.hidden = true;
    ask.textContent = token === "" ? "give orders" : "no more orders";
    if (token === "") aside.replaceChildren();
  }

  // What is answered to those who have the token, or an error that says why not.
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
    if (!answer.ok) throw new Error(found.said);
    return found;
  }

  function numbers(button) {
    const box = button.closest(".numbers");
    const read = (name) => {
      const value = box.querySelector("input[name=" + name + "]").value;
      return value === "" ? null : Number(value);
    };
    const order = { key: box.dataset.key, min: read("min"), max: read("max"), seconds: (read("minutes") ?? 0) * 60 };
    return { pool: box.dataset.pool, order: { scale: order } };
  }

  async function order(button) {
    const ordered = button.dataset.order ? JSON.parse(button.dataset.order) : numbers(button);
    const answer = await call("/v1/orders", { ...ordered, note: { by: "the page" } });
    tell(answer.said, true);
  }

  function made(name, text, more) {
    return Object.assign(document.createElement(name), { textContent: text }, more);
  }

  function button(text, settle, confirm) {
    const button = made("button", text, { type: "button" });
    button.dataset.settle = JSON.stringify(settle);
    if (confirm) button.dataset.confirm = confirm;
    return button;
  }

  // A request that was put aside, as a row.
  function row(pool, entry) {
    const key = entry.key === undefined ? "not known" : entry.key === "" ? "the empty key" : entry.key;
    const tried = (entry.tries === undefined ? "" : entry.tries + " tries") + (entry.times > 1 ? ", put aside " + entry.times + " times" : "");
    const worker = entry.worker === undefined ? [made("span", "not known", { className: "dim" })]
      : [made("code", entry.worker), made("small", entry.end ?? "")];
    if (entry.log.length > 0) {
      const log = made("details", "");
      log.append(made("summary", "last words"), made("pre", entry.log.join("\n")));
      worker.push(log);
    }
    const these = { pool, which: { these: [entry.id] } };
    const cells = [
      ["request", [made("code", entry.id), made("small", entry.bytes + " bytes")]],
      ["key", [made("code", key)]],
      ["reason", [entry.reason, made("small", tried)]],
      ["put aside", [entry.put_aside === undefined ? "–" : made("time", new Date(entry.put_aside).toLocaleString(), { dateTime: entry.put_aside })]],
      ["worker", worker],
      ["", [button("requeue", { ...these, fate: "requeue" }), " ",
        button("drop", { ...these, fate: "drop" }, "Drop " + entry.id + " for good?")]],
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
    const { requests, more } = (await call("/v1/poison?pool=" + encodeURIComponent(pool)))[pool];
    const title = made("h2", "Put aside in ");
    title.append(made("code", pool), " ", button("requeue all", { pool, which: "all", fate: "requeue" }, "Try all of them once more?"),
      " ", button("drop all", { pool, which: "all", fate: "drop" }, "Drop all of them for good?"), " ",
      made("button", "close", { type: "button", onclick: () => aside.replaceChildren() }));
    if (requests.length === 0) {
      aside.replaceChildren(title, made("p", "Nothing is put aside: no request has ended its workers.", { className: "empty" }));
      return;
    }
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const name of ["request", "key", "reason", "put aside", "worker that ended under it", ""]) head.append(made("th", name));
    table.createTBody().append(...requests.map((entry) => row(pool, entry)));
    const rest = more > 0 ? [made("p", "and " + more + " more that were not looked at", { className: "dim" })] : [];
    aside.replaceChildren(title, table, ...rest);
  }

  async function settle(button) {
    const asked = JSON.parse(button.dataset.settle);
    const settled = await call("/v1/poison", { ...asked, by: "the page" });
    const not = Object.entries(settled.not).map(([id, why]) => id + ": " + why);
    tell([settled.done.length + (asked.fate === "drop" ? " dropped" : " requeued"), ...not].join("; "), not.length === 0);
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
      else await order(button);
    } catch (error) {
      tell("this did not work: " + error.message, false);
    }
    button.disabled = false;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("main button[data-order], main .numbers button, main button[data-poison], #aside button[data-settle]");
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

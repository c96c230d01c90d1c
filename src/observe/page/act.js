"use strict";
(() => {
  const ask = document.getElementById("ask");
  const field = document.getElementById("token");
  const use = document.getElementById("use");
  const said = document.getElementById("said");
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

  async function send(button) {
    const ordered = button.dataset.order ? JSON.parse(button.dataset.order) : numbers(button);
    if (button.dataset.confirm && !confirm(button.dataset.confirm)) return;
    button.disabled = true;
    try {
      const answer = await fetch("/v1/orders", {
        method: "POST",
        headers: { authorization: "Bearer " + token, "content-type": "application/json" },
        body: JSON.stringify({ ...ordered, note: { by: "the page" } }),
        signal: AbortSignal.timeout(20000),
      });
      tell((await answer.json()).said, answer.ok);
      if (answer.status === 401) may("");
    } catch (error) {
      tell("no answer to the order: " + error.message, false);
    }
    button.disabled = false;
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("main button[data-order], main .numbers button");
    if (button && token) send(button);
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

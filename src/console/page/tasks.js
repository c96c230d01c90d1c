"use strict";
(() => {
  const log = document.getElementById("log");
  if (!log) return;
  const note = document.getElementById("lognote");
  const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
  const pieces = 5000;
  // Control characters, and those that reorder the text around them.
  const unsafe = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
  const escape = /\x1b(?:\[([0-9;:?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])/g;
  let classes = "";
  let rest = "";

  function color(codes) {
    const kept = new Set(classes.split(" "));
    const drop = (test) => { for (const name of kept) if (test.test(name)) kept.delete(name); };
    for (const code of codes.split(";").map(Number)) {
      if (code === 0) kept.clear();
      else if (code === 1) kept.add("bold");
      else if (code === 22) kept.delete("bold");
      else if (code === 39) drop(/^ink/);
      else if (code >= 30 && code <= 37) { drop(/^ink/); kept.add("ink" + (code - 30)); }
      else if (code >= 90 && code <= 97) { drop(/^ink/); kept.add("ink" + (code - 90)); }
      else if (code === 38 || code === 48) break;
    }
    classes = [...kept].join(" ").trim();
  }

  function put(text) {
    text = text.replace(unsafe, "");
    if (text === "") return;
    const last = log.lastChild;
    if (last && last.className === classes && last.textContent.length < 16384) last.append(text);
    else log.append(Object.assign(document.createElement("span"), { className: classes, textContent: text }));
    while (log.childNodes.length > pieces) log.firstChild.remove();
  }

  function write(text) {
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    text = (rest + text);
    // An escape sequence or a line end may be divided.
    const open = /(?:\x1b[^@-Z\\^_a-z\x07]{0,64}|\r)$/.exec(text);
    rest = open ? open[0] : "";
    if (open) text = text.slice(0, open.index);
    text = text.replace(/\r\n?/g, "\n");
    let at = 0;
    for (const found of text.matchAll(escape)) {
      put(text.slice(at, found.index));
      if (found[2] === "m") color(found[1]);
      at = found.index + found[0].length;
    }
    put(text.slice(at));
    if (follows) log.scrollTop = log.scrollHeight;
  }

  // The run that `main` shows now: its log, and whether it may grow.
  function shown() {
    const run = document.querySelector("main [data-log]");
    return run ? { address: run.dataset.log, grows: run.dataset.grows === "yes" } : { address: "", grows: false };
  }

  async function read(address, from) {
    const answer = await fetch(address + "?from=" + from, { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    const reader = answer.body.getReader();
    const decoder = new TextDecoder();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return from;
      from += value.length;
      note.textContent = "";
      write(decoder.decode(value, { stream: true }));
    }
  }

  async function follow() {
    let address = "";
    let from = 0;
    for (;;) {
      const run = shown();
      if (run.address !== address) {
        address = run.address;
        from = 0;
        log.replaceChildren();
        classes = rest = "";
      }
      try {
        if (address) from = await read(address, from);
        if (from === 0) note.textContent = run.grows ? "The log is empty so far." : "The log is empty.";
        else note.textContent = run.grows ? "The log follows the task." : "";
      } catch (error) {
        note.textContent = error.message;
      }
      // What ended the run may have added to its log.
      if (!run.grows) while (!shown().grows && shown().address === address) await pause(1000);
      await pause(1000);
    }
  }
  follow();
})();

// Keeps the status page up to date: the daemon sends the parts that have changed, as HTML that it has escaped.
"use strict";
(() => {
  const SILENT = 25000;          // ms without a word after which the page is stale; the daemon says something every 10 s
  const FIRST = 1000, LONGEST = 15000; // ms until the next try to connect
  const HIDDEN = 60000;          // ms for which a hidden page stays connected

  const state = document.getElementById("connection");
  const words = document.getElementById("connection-state");
  const asOf = document.getElementById("as-of");
  let source = null, pause = FIRST, heard = 0, ahead = 0, retry = 0, leaving = 0, said = "";

  const known = () => document.getElementById("headline-text")?.textContent ?? "";
  const utc = (date) => date.toISOString().replace("T", " ").slice(0, 19) + " UTC";

  function age(seconds) {
    if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ago`;
    return `${Math.floor(seconds / 86400)} days ago`;
  }

  function ages() {
    const now = (Date.now() + ahead) / 1000;
    for (const each of document.querySelectorAll("[data-since]")) {
      const text = ` (${age(now - Number(each.dataset.since))})`;
      if (each.textContent !== text) each.textContent = text;
    }
  }

  // Makes a node like another one, changing no more than it must: focus, selection and what is unfolded stay.
  function become(old, wanted) {
    if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName || old.id !== wanted.id) {
      old.replaceWith(wanted);
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== wanted.data) old.data = wanted.data;
      return;
    }
    for (const {name, value} of [...wanted.attributes]) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const {name} of [...old.attributes]) {
      if (!wanted.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    }
    if (!old.hasAttribute("data-since")) children(old, wanted);
  }

  function children(old, wanted) {
    const before = [...old.childNodes], after = [...wanted.childNodes];
    after.forEach((node, at) => (at < before.length ? become(before[at], node) : old.append(node)));
    before.slice(after.length).forEach((node) => node.remove());
  }

  function show(told) {
    for (const [id, html] of Object.entries(told.parts)) {
      const part = document.getElementById(id);
      if (!part) continue;
      const wanted = document.createElement("template");
      wanted.innerHTML = html;
      children(part, wanted.content);
    }
    const headline = known(), name = document.getElementById("headline")?.dataset.title || "gpu-plugin";
    document.title = `${headline} - ${name}`;
    if (said && headline !== said) document.getElementById("announcement").textContent = headline;
    said = headline;
    ages();
  }

  function hear(event) {
    const told = JSON.parse(event.data);
    pause = FIRST;
    take(told);
    status("live", "Live");
    return told;
  }

  function take(told) {
    heard = Date.now();
    ahead = told.at * 1000 - heard;
    const at = new Date(told.at * 1000);
    asOf.textContent = utc(at);
    asOf.dateTime = at.toISOString();
  }

  // Without a stream the whole page is asked for: there are no more streams than a few, and others may have them.
  async function poll() {
    try {
      const answer = await fetch("./", {cache: "no-store", signal: AbortSignal.timeout(5000)});
      if (!answer.ok) throw new Error(answer.statusText);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (source) return;
      const parts = ["summary", ...[...page.querySelectorAll("main > section > div")].map((part) => part.id)];
      take({at: Date.parse(page.getElementById("as-of").dateTime) / 1000});
      show({parts: Object.fromEntries(parts.map((id) => [id, page.getElementById(id).innerHTML]))});
      status("still", "Updated every few seconds");
    } catch {
      if (!source) stale();
    }
  }

  function status(kind, text) {
    if (state.className !== kind) state.className = kind;
    document.body.classList.toggle("is-stale", kind === "stale");
    if (words.textContent !== text) words.textContent = text;
  }

  function stale() {
    const text = "Stale: the daemon does not answer; trying again.";
    if (state.className !== "stale") document.getElementById("announcement").textContent = text;
    status("stale", text);
  }

  function disconnect() {
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  function connect() {
    disconnect();
    heard = Date.now();
    source = new EventSource("status.stream");
    source.addEventListener("hello", (event) => {
      const told = hear(event);
      if (told.assets === document.documentElement.dataset.assets) return;
      const last = Number(sessionStorage.getItem("reloaded") ?? 0); // another version of the daemon has another page
      if (Date.now() - last < 60000) return;
      sessionStorage.setItem("reloaded", Date.now());
      location.reload();
    });
    source.addEventListener("parts", (event) => show(hear(event)));
    source.addEventListener("beat", hear);
    source.onerror = again;
  }

  function again() {
    disconnect();
    poll();
    retry = setTimeout(connect, pause * (0.75 + Math.random() / 2));
    pause = Math.min(pause * 2, LONGEST);
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(leaving);
    if (document.hidden) leaving = setTimeout(() => { disconnect(); status("still", "Paused while hidden"); }, HIDDEN);
    else if (!source) { pause = FIRST; connect(); }
  });
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", (event) => { if (event.persisted) connect(); });

  setInterval(() => {
    ages();
    if (source && Date.now() - heard > SILENT) { stale(); again(); }
  }, 1000);
  said = known();
  status("still", "Connecting");
  ages();
  connect();
})();

// Renders the status page from /status.json. Text of the daemon becomes text nodes and attributes only.
"use strict";
(() => {
  const EVERY = 2000, HIDDEN = 30000, PATIENCE = 10000; // ms between requests, the same if the page is hidden, and for an answer
  const STALE = 10000; // ms without an answer after which the page is marked
  const STATES = {
    unhealthy: ["✕", "Unhealthy"], withheld: ["▲", "withheld"], degraded: ["▲", "degraded"],
    "held-back": ["■", "held back"], healthy: ["✓", "Healthy"],
  };
  const SEVERITIES = { critical: "✕", warning: "▲", note: "■" };
  const NAMED = 3; // pods that are named before the fold
  const phone = window.matchMedia("(max-width: 30rem)");
  let body = "", answered = 0, status = null, timer = 0;

  const place = (id) => document.getElementById(id);

  // Make an element. Children are elements, texts, or nothing.
  function make(name, attributes, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  const utc = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";

  function age(seconds) {
    if (seconds < 60) return `${Math.max(0, Math.floor(seconds))}s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)}m`;
    if (seconds < 86400) return `${Math.floor(seconds / 3600)}h`;
    return `${Math.floor(seconds / 86400)}d`;
  }

  const since = (at) => at === null || at === undefined ? "" :
    make("time", { class: "muted", datetime: new Date(at * 1000).toISOString(), title: utc(at) }, ` ${age(status.at - at)}`);
  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const badge = (state) => make("span", { class: `badge ${state}` },
    make("span", { "aria-hidden": "true" }, STATES[state][0]), ` ${STATES[state][1]}`);
  const fold = (id, summary, ...content) => make("details", { id }, make("summary", {}, summary), ...content);
  const unfolded = (id, summary, ...content) => make("details", { id, open: true }, make("summary", {}, summary), ...content);

  function table(caption, heads, rows) {
    const head = make("tr", {}, heads.map((text) => make("th", { scope: "col" }, text)));
    const cells = (row) => row.map((cell, at) => at ? make("td", { "data-head": heads[at] }, cell) : make("th", { scope: "row" }, cell));
    return make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, head),
      make("tbody", {}, rows.map((row) => make("tr", {}, cells(row)))));
  }

  // Names of pods: the first ones, and the others folded.
  function names(id, pods) {
    if (pods === null) return make("span", { class: "muted" }, "not known");
    if (!pods.length) return make("span", { class: "muted" }, "none");
    const list = (some) => make("ul", { class: "plain" }, some.map((pod) => make("li", {}, pod)));
    if (pods.length <= NAMED) return list(pods);
    return [list(pods.slice(0, NAMED)), fold(id, `and ${pods.length - NAMED} more`, list(pods.slice(NAMED)))];
  }

  // Sections

  function card(problem, at) {
    const key = `problem-${problem.kind}-${problem.object}-${at}`;
    const steps = problem.steps.map((step) => make("li", {}, step.text, step.command &&
      make("div", { class: "command" }, make("code", {}, step.command),
        make("button", { type: "button", "data-copy": step.command, "aria-label": `Copy: ${step.text}` }, "copy"))));
    return make("article", { class: `card ${problem.severity}` },
      make("h2", {}, make("span", { "aria-hidden": "true" }, SEVERITIES[problem.severity], " "), problem.title, since(problem.since)),
      problem.cause !== problem.title && make("p", {}, problem.cause),
      problem.pods === null || problem.pods.length ? make("div", { class: "pods" }, make("b", {}, "Affected pods"),
        problem.pods === null ? " " : ` (${problem.pods.length})`, names(`${key}-pods`, problem.pods)) : null,
      steps.length ? (problem.severity === "note" ? fold : unfolded)(`${key}-steps`, "What to do", make("ol", {}, steps)) : null,
      problem.recovers && make("p", { class: "muted" }, `Recovers when ${problem.recovers}.`));
  }

  function problems() {
    const serious = status.problems.filter((each) => each.severity !== "note");
    const notes = status.problems.filter((each) => each.severity === "note");
    return [make("div", { class: "cards" }, serious.map(card)),
      notes.length ? fold("notes", counted(notes.length, "note"), make("div", { class: "cards" }, notes.map(card))) : null];
  }

  const number = (value, unit, digits = 0) => typeof value === "number" ? `${value.toFixed(digits)}${unit}` : "-";
  const percent = (value) => typeof value === "number" ? `${(value * 100).toFixed(0)} %` : "-";
  const gib = (value) => typeof value === "number" ? (value / 2 ** 30).toFixed(0) : "-";
  const total = (gpu, name) => gpu.devices.reduce((sum, each) => sum + (each[name] || 0), 0);

  function tile(gpu) {
    const held = gpu.devices.some((each) => each.held === null) ? "?" : total(gpu, "held");
    return make("a", { class: `tile ${gpu.state}`, href: `#gpu-${gpu.uuid}`, title: gpu.model },
      make("b", {}, `GPU ${gpu.index}`), badge(gpu.state),
      make("span", { class: "muted" }, `${number(gpu.readings.temperature_celsius, " °C")}, ${percent(gpu.readings.utilization_ratio)}`),
      make("span", { class: "muted" }, `${held}/${total(gpu, "listed")} held`));
  }

  function tiles() {
    const missing = status.missing.map((gpu) => make("span", { class: "tile unhealthy" },
      make("b", {}, "missing"), make("span", {}, gpu.bus_id || gpu.uuid)));
    const well = status.gpus.filter((gpu) => gpu.state === "healthy"), others = status.gpus.filter((gpu) => gpu.state !== "healthy");
    if (!phone.matches || !well.length) return make("div", { class: "tiles" }, missing, status.gpus.map(tile));
    return [make("div", { class: "tiles" }, missing, others.map(tile)),
      fold("well", `${counted(well.length, "healthy GPU")}`, make("div", { class: "tiles" }, well.map(tile)))];
  }

  function resources() {
    const rows = Object.entries(status.resources).map(([name, each]) => [name, `${each.healthy} of ${each.devices - each.retired}` +
      (each.retired ? `, ${each.retired} gone` : ""), each.held === null ? "?" : String(each.held), each.sharing.join(", ") || "-",
      each.registration.registered ? ["yes", since(each.registration.since)] : status.kubelet.socket ? make("b", { class: "bad" }, "no") : "off"]);
    return rows.length ? table("Resources", ["Resource", "Healthy", "Held", "Shared by", "Registered"], rows) : null;
  }

  function meter(value, limit, high) {
    if (typeof value !== "number" || typeof limit !== "number" || limit <= 0) return null;
    return make("meter", { min: 0, max: limit, value: Math.min(value, limit), high, optimum: 0, "aria-hidden": "true" });
  }

  function detail(gpu) {
    const read = gpu.readings;
    const facts = [
      ["Bus id", gpu.bus_id || "-"], ["uuid", make("code", {}, gpu.uuid)], ["Model", gpu.model || "-"],
      ["Temperature", [number(read.temperature_celsius, " °C"), meter(read.temperature_celsius, read.shutdown_celsius, read.slowdown_celsius),
        typeof read.slowdown_celsius === "number" ? make("span", { class: "muted" }, ` slows down at ${read.slowdown_celsius} °C`) : null]],
      ["Power", [number(read.power_watts, " W"), meter(read.power_watts, read.power_limit_watts)]],
      ["Memory", [`${gib(read.memory_used_bytes)} of ${gib(read.memory_total_bytes)} GiB`, meter(read.memory_used_bytes, read.memory_total_bytes)]],
      ["Use", percent(read.utilization_ratio)],
      ["Pods", names(`pods-of-${gpu.uuid}`, gpu.holders)],
    ];
    const signals = gpu.signals.map((each) => make("li", {}, make("b", {}, each.verdict), ` ${each.name}: ${each.detail}`, since(each.since),
      each.note && make("div", { class: "muted" }, each.note)));
    const withheld = gpu.withheld.map((why) => make("li", {}, `withheld: ${why}`));
    const rows = gpu.devices.map((each) => [`${each.kind === "mig" ? "MIG device" : "GPU"} ${each.index}`, each.resource,
      `${each.healthy} of ${each.listed}${each.shared ? ` (${each.shared})` : ""}`, each.held === null ? "?" : String(each.held), each.reason || "-"]);
    return fold(`gpu-${gpu.uuid}`, [make("b", {}, `GPU ${gpu.index}`), " ", badge(gpu.state), since(gpu.since)],
      signals.length + withheld.length ? make("ul", {}, signals, withheld) : null,
      make("dl", {}, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
      rows.length ? table(`Devices of GPU ${gpu.index}`, ["Device", "Resource", "Healthy", "Held", "Reason"], rows) : null);
  }

  function pods() {
    const found = new Map();
    for (const gpu of status.gpus) {
      for (const each of gpu.devices) {
        for (const holder of each.holders) {
          const name = `${holder.namespace}/${holder.pod}`;
          const row = found.get(name) || { gpus: new Set(), resources: new Map() };
          row.gpus.add(gpu.index);
          row.resources.set(each.resource, (row.resources.get(each.resource) || 0) + holder.devices);
          found.set(name, row);
        }
      }
    }
    if (status.pods && status.pods.trouble) return make("p", { class: "muted" }, `Pods are not known: ${status.pods.trouble}`);
    const rows = [...found].sort().map(([name, row]) => [name, [...row.gpus].join(", "),
      [...row.resources].map(([resource, count]) => `${count} x ${resource}`).join(", ")]);
    return rows.length ? fold("pods-all", `${counted(rows.length, "pod")} with devices`, table("Pods", ["Pod", "GPUs", "Devices"], rows)) : null;
  }

  function links() {
    if (!status.links) return null;
    const picture = make("img", { src: `links.svg?v=${encodeURIComponent(status.links.version)}`, alt: status.links.words.join(" ") });
    const rows = status.links.rows.map((row, at) => [`GPU ${status.links.gpus[at]}`, ...row]);
    const heads = ["GPU", ...status.links.gpus.map((index) => `GPU ${index}`)];
    return [picture, make("ul", { class: "plain muted" }, status.links.words.map((words) => make("li", {}, words))),
      fold("link-table", "Table of links", make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of links" }, table("Links", heads, rows)),
        make("dl", {}, Object.entries(status.links.legend).map(([word, text]) => [make("dt", {}, word), make("dd", {}, text)])))];
  }

  function events() {
    const row = (each) => make("li", {}, make("time", { class: "muted", datetime: new Date(each.at * 1000).toISOString() }, utc(each.at)),
      ` ${each.text}${each.reason ? `; reason: ${each.reason}` : ""}${each.by ? `; by ${each.by}` : ""}`);
    if (!status.events.length) return null;
    return fold("events-all", counted(status.events.length, "event"), make("ul", { class: "plain" }, status.events.map(row)));
  }

  function facts() {
    const { configuration, driver, device_list_strategy: strategy, cdi, cluster } = status;
    const shown = [
      ["Driver", driver.version || "not known"],
      ["Configuration", [configuration.file || "no file", since(configuration.since)]],
      ["Device list strategy", strategy.used.join(", ") + (strategy.reason ? ` (${strategy.reason})` : "")],
      ["CDI", cdi && `${counted(cdi.devices, "device")} in ${cdi.directory}`],
      ["Cluster", cluster && `node ${cluster.node}`],
    ].filter(([, value]) => value);
    return make("dl", {}, shown.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  // Updates

  const SECTIONS = {
    problems: ["Problems", problems], tiles: ["GPUs", tiles], resources: ["Resources", resources],
    details: ["Details", () => status.gpus.map(detail)], pods: ["Pods", pods], links: ["Links", links],
    events: ["Events", events], facts: ["Configuration", facts],
  };

  // Make a node equal to another one with as few changes as possible: focus, selection and open folds stay.
  function become(old, wanted) {
    if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName || (old.id || "") !== (wanted.id || "")) {
      old.replaceWith(wanted);
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== wanted.data) old.data = wanted.data;
      return;
    }
    for (const { name, value } of [...wanted.attributes]) {
      if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (name !== "open" && name !== "data-revealed" && !wanted.hasAttribute(name)) old.removeAttribute(name);
    }
    const before = [...old.childNodes], after = [...wanted.childNodes];
    after.forEach((node, at) => (at < before.length ? become(before[at], node) : old.append(node)));
    before.slice(after.length).forEach((node) => node.remove());
  }

  function show() {
    const worst = status.problems.find((each) => each.severity !== "note");
    const severity = worst ? worst.severity : status.waiting ? "warning" : "fine";
    place("node").textContent = status.node || "this node";
    document.title = `${severity === "fine" ? "" : `${SEVERITIES[severity]} `}${status.node || "gpu-plugin"}: ${status.headline}`;
    const headline = place("headline");
    const text = status.waiting && !status.problems.length ? `${status.headline}: ${status.waiting}` : status.headline;
    if (headline.textContent !== text) headline.textContent = text;
    headline.className = `headline ${severity}`;
    place("version").textContent = status.daemon.version;
    for (const [id, [title, content]] of Object.entries(SECTIONS)) {
      const section = place(id), wanted = section.cloneNode(false);
      const children = [content()].flat(Infinity).filter((child) => child);
      if (children.length && !["problems", "tiles"].includes(id)) wanted.append(make("h2", {}, title));
      wanted.append(...children);
      become(section, wanted);
    }
    reveal();
  }

  // Open the fold that the address names.
  function reveal() {
    const target = location.hash && place(decodeURIComponent(location.hash.slice(1)));
    if (target && target.nodeName === "DETAILS" && target.dataset.revealed !== location.hash) {
      target.open = true;
      target.dataset.revealed = location.hash;
    }
  }

  function connection() {
    const stale = !answered || Date.now() - answered > STALE;
    document.body.classList.toggle("is-stale", stale && Boolean(answered));
    place("connection").className = stale ? "stale" : "live";
    place("connection-state").textContent = stale ? "The daemon does not answer; this is the state of" : "as of";
    place("as-of").textContent = status ? utc(status.at) : "never";
  }

  async function update() {
    clearTimeout(timer);
    try {
      const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      answered = Date.now();
      if (text !== body) {
        status = JSON.parse(text);
        body = text;
        show();
      }
    } catch (error) {
      console.debug("the status could not be read:", error);
    }
    connection();
    timer = setTimeout(update, document.hidden ? HIDDEN : EVERY);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  window.addEventListener("hashchange", reveal);
  phone.addEventListener("change", () => { if (status) show(); });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  });
  update();
})();

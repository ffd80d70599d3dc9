// Renders the status page from /status.json. Text of the daemon becomes text nodes and attributes only.
"use strict";
(() => {
  const EVERY = 2000, HIDDEN = 30000, PATIENCE = 10000; // ms between requests, the same if the page is hidden, and for an answer
  const STALE = 25000; // ms for which the daemon may send the same state
  const STATES = {
    unhealthy: ["✕", "Unhealthy"], withheld: ["▲", "withheld"], degraded: ["▲", "degraded"],
    "held-back": ["■", "held back"], healthy: ["✓", "Healthy"],
  };
  const SEVERITIES = { critical: "✕", warning: "▲", note: "■" };
  const WORDS = { critical: "Critical", warning: "Warning", note: "Note", fine: "OK" };
  const NAMED = 3; // pods that are named before the fold
  const EVENTS = 10, EVENTS_ON_PHONE = 3; // events that are shown before the fold
  const phone = window.matchMedia("(max-width: 30rem)");
  let body = "", changed = 0, status = null, timer = 0;

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
  const sentence = (text) => /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  const id = (...words) => words.map(encodeURIComponent).join("-");
  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const badge = (state) => make("span", { class: `badge ${state}` },
    make("span", { "aria-hidden": "true" }, STATES[state][0]), ` ${STATES[state][1]}`);
  const fold = (key, summary, ...content) => make("details", { id: key }, make("summary", {}, summary), ...content);
  const unfolded = (key, summary, ...content) => make("details", { id: key, open: true }, make("summary", {}, summary), ...content);

  function table(caption, heads, rows) {
    const head = make("tr", {}, heads.map((text) => make("th", { scope: "col" }, text)));
    const cells = (row) => row.map((cell, at) => at ? make("td", { "data-head": heads[at] }, cell) : make("th", { scope: "row" }, cell));
    return make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, head),
      make("tbody", {}, rows.map((row) => make("tr", {}, cells(row)))));
  }

  // Names of pods: the first ones, and the others folded.
  function names(key, pods) {
    if (pods === null) return make("span", { class: "muted" }, "not known");
    if (!pods.length) return make("span", { class: "muted" }, "none");
    const list = (some) => make("ul", { class: "plain inline" }, some.map((pod) => make("li", {}, pod)));
    if (pods.length <= NAMED) return list(pods);
    return [list(pods.slice(0, NAMED)), fold(key, `and ${pods.length - NAMED} more`, list(pods.slice(NAMED)))];
  }

  // Sections

  function card(problem) {
    const steps = problem.steps.map((step) => make("li", {}, step.text, step.command &&
      make("div", { class: "command" }, make("code", {}, step.command),
        make("button", { type: "button", "aria-label": `Copy: ${step.text}` }, "copy"))));
    return make("article", { id: problem.key, class: `card ${problem.severity}` },
      make("h2", {}, make("span", { "aria-hidden": "true" }, SEVERITIES[problem.severity], " "), problem.title, since(problem.since)),
      problem.cause !== problem.title && make("p", {}, sentence(problem.cause)),
      problem.pods === null || problem.pods.length ? make("div", { class: "pods" },
        make("b", {}, "Affected pods", problem.pods === null ? ": " : ` (${problem.pods.length}): `), names(`${problem.key}-pods`, problem.pods)) : null,
      steps.length ? (problem.severity === "note" ? fold : unfolded)(`${problem.key}-steps`, "What to do", make("ol", {}, steps)) : null,
      problem.recovers && make("p", { class: "muted" }, `Recovers when ${problem.recovers}.`));
  }

  // The problems with a key each, which stays the same while other problems come and go.
  function keyed() {
    const seen = new Map();
    return status.problems.map((problem) => {
      const name = id("problem", problem.kind, problem.object), before = seen.get(name) || 0;
      seen.set(name, before + 1);
      return { ...problem, key: before ? `${name}-${before}` : name };
    });
  }

  function problems() {
    const all = keyed(), serious = all.filter((each) => each.severity !== "note"), notes = all.filter((each) => each.severity === "note");
    return [status.waiting && !all.length ? make("p", { class: "card warning" }, `${sentence(status.waiting)}.`) : null,
      serious.length ? make("div", { class: "cards" }, serious.map(card)) : null,
      notes.length ? fold("notes", counted(notes.length, "note"), make("div", { class: "cards" }, notes.map(card))) : null];
  }

  const number = (value, unit, digits = 0) => typeof value === "number" ? `${value.toFixed(digits)}${unit}` : "-";
  const percent = (value) => typeof value === "number" ? `${(value * 100).toFixed(0)} %` : "-";
  const gib = (value) => typeof value === "number" ? (value / 2 ** 30).toFixed(0) : "-";
  const total = (gpu, name) => gpu.devices.reduce((sum, each) => sum + (each[name] || 0), 0);

  function tile(gpu) {
    const held = gpu.devices.some((each) => each.held === null) ? "?" : total(gpu, "held");
    return make("a", { id: `tile-${gpu.uuid}`, class: `tile ${gpu.state}`, href: `#gpu-${gpu.uuid}`, title: gpu.model },
      make("b", {}, `GPU ${gpu.index}`), badge(gpu.state),
      make("span", { class: "muted" }, `${number(gpu.readings.temperature_celsius, " °C")}, ${percent(gpu.readings.utilization_ratio)}`),
      make("span", { class: "muted" }, `${held}/${total(gpu, "listed")} held`));
  }

  function tiles() {
    const missing = status.missing.map((gpu) => make("div", { id: id("missing", gpu.name), class: "tile unhealthy" },
      make("b", {}, gpu.name), make("span", { class: "badge unhealthy" }, make("span", { "aria-hidden": "true" }, "✕"), " missing"),
      gpu.bus_id && gpu.bus_id !== gpu.name ? make("span", { class: "muted" }, gpu.bus_id) : null));
    if (!missing.length && !status.gpus.length) return null;
    const well = status.gpus.filter((gpu) => gpu.state === "healthy"), others = status.gpus.filter((gpu) => gpu.state !== "healthy");
    if (!phone.matches || !well.length) return make("div", { class: "tiles" }, missing, status.gpus.map(tile));
    return [make("div", { class: "tiles" }, missing, others.map(tile)),
      fold("well", `${counted(well.length, "healthy GPU")}`, make("div", { class: "tiles" }, well.map(tile)))];
  }

  function resources() {
    const rows = Object.entries(status.resources).map(([name, each]) => [name, `${each.healthy} of ${each.devices - each.retired}` +
      (each.retired ? `, ${each.retired} gone` : ""), each.held === null ? "?" : String(each.held), each.sharing.join(", ") || "-",
      each.registration.registered ? ["yes", since(each.registration.since)] : status.kubelet.socket ? [make("b", { class: "bad" }, "no"), since(each.registration.since), each.registration.why && `: ${each.registration.why}`] : "off"]);
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
      ["Memory temperature", typeof read.memory_temperature_celsius === "number" ? [number(read.memory_temperature_celsius, " °C"),
        meter(read.memory_temperature_celsius, read.memory_max_celsius, read.memory_max_celsius)] : null],
      ["Power", [number(read.power_watts, " W"), meter(read.power_watts, read.power_limit_watts),
        typeof read.power_limit_watts === "number" ? make("span", { class: "muted" }, ` of ${number(read.power_limit_watts, " W")}`) : null]],
      ["Memory", [`${gib(read.memory_used_bytes)} of ${gib(read.memory_total_bytes)} GiB`, meter(read.memory_used_bytes, read.memory_total_bytes)]],
      ["Use", percent(read.utilization_ratio)],
      ["Pods", names(`pods-of-${gpu.uuid}`, gpu.holders)],
    ].filter(([, value]) => value !== null);
    const signals = gpu.signals.map((each) => make("li", {}, make("b", {}, each.verdict), ` ${each.name}: ${each.detail}`, since(each.since),
      each.note && make("div", { class: "muted" }, each.note)));
    const withheld = gpu.withheld.map((why) => make("li", {}, `withheld: ${why}`));
    const heldBack = gpu.signals.length ? [] : gpu.held_back.map((why) => make("li", {}, `held back: ${why}`));
    const rows = gpu.devices.map((each) => [`${each.kind === "mig" ? "MIG device" : "GPU"} ${each.index}`, each.resource,
      `${each.healthy} of ${each.listed}${each.shared ? ` (${each.shared})` : ""}`, each.held === null ? "?" : String(each.held), each.reason || "-"]);
    return fold(`gpu-${gpu.uuid}`, [make("b", {}, `GPU ${gpu.index}`), " ", badge(gpu.state), since(gpu.since)],
      signals.length + heldBack.length + withheld.length ? make("ul", {}, signals, heldBack, withheld) : null,
      make("dl", {}, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
      rows.length ? table(`Devices of GPU ${gpu.index}`, ["Device", "Resource", "Healthy", "Held", "Reason"], rows) : null);
  }

  function pods() {
    const found = new Map();
    let others = 0; // containers that the status counts without their names
    for (const gpu of status.gpus) {
      for (const each of gpu.devices) {
        others += each.left_out;
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
    return rows.length ? fold("pods-all", `${counted(rows.length, "pod")} with devices${others ? `, and ${counted(others, "container")} not listed` : ""}`,
      table("Pods", ["Pod", "GPUs", "Devices"], rows)) : null;
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
      make("span", {}, each.text, each.reason && `; reason: ${each.reason}`, each.by && `; by ${each.by}`));
    const shown = phone.matches ? EVENTS_ON_PHONE : EVENTS;
    const list = (some) => make("ul", { class: "plain events" }, some.map(row));
    if (!status.events.length) return null;
    return [list(status.events.slice(0, shown)), status.events.length > shown ?
      fold("events-all", `${status.events.length - shown} earlier`, list(status.events.slice(shown))) : null];
  }

  function facts() {
    const { configuration, daemon, driver, kubelet, labels, state, device_list_strategy: strategy, cdi, cluster } = status;
    const reloads = Object.entries(configuration.reloads).filter(([, count]) => count).map(([outcome, count]) => `${count} ${outcome}`);
    const shown = [
      ["Driver", driver.version || (status.waiting ? "" : "not known")],
      ["Configuration", status.waiting ? configuration.file : [configuration.file || "no file", since(configuration.since)]],
      ["Wanted configuration", configuration.wanted],
      ["Reads of the file", reloads.join(", ")],
      ["Device list strategy", strategy.used.join(", ") + (strategy.reason ? ` (${strategy.reason})` : "")],
      ["CDI", cdi && `${counted(cdi.devices, "device")} in ${cdi.directory}`],
      ["Kubelet", kubelet.socket],
      ["State", state.directory],
      ["Node", cluster && cluster.node],
      ["Labels", labels.way],
      ["Process", daemon.started ? [`${daemon.pid}, Python ${daemon.python}, started`, since(daemon.started), " ago"] : ""],
    ].filter(([, value]) => value);
    return shown.length ? make("dl", {}, shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))) : null;
  }

  // Updates

  const SECTIONS = {
    problems: ["Problems", problems], tiles: ["GPUs", tiles], resources: ["Resources", resources],
    details: ["Details", () => status.gpus.map(detail)], pods: ["Pods", pods], links: ["Links", links],
    events: ["Events", events], facts: ["Configuration", facts],
  };

  // Make a node equal to another one with as few changes as possible: focus, selection and open folds stay.
  function become(old, wanted) {
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== wanted.data) old.data = wanted.data;
      return;
    }
    for (const { name, value } of wanted.attributes) {
      if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (name !== "open" && !wanted.hasAttribute(name)) old.removeAttribute(name);
    }
    children(old, wanted);
  }

  // Children with an id are kept wherever they are; the others are matched in their order.
  function children(old, wanted) {
    const kept = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
    const next = [...wanted.childNodes], ids = new Set(next.map((node) => node.id));
    for (const [key, child] of kept) if (!ids.has(key)) child.remove();
    let at = old.firstChild;
    for (const node of next) {
      const same = node.id ? kept.get(node.id) : at && !at.id ? at : null;
      if (!same || same.nodeName !== node.nodeName) {
        old.insertBefore(node, at);
        continue;
      }
      if (same === at) at = at.nextSibling;
      else old.insertBefore(same, at);
      become(same, node);
    }
    while (at) {
      const after = at.nextSibling;
      at.remove();
      at = after;
    }
  }

  function show(first) {
    const [worst] = status.problems; // before there is a daemon, a status that waits has no problems
    const severity = worst ? worst.severity : status.waiting ? "warning" : "fine";
    const sign = severity === "fine" ? "✓" : SEVERITIES[severity], focused = document.activeElement;
    place("node").textContent = status.node || "this node";
    document.title = `${severity === "fine" ? "" : `${sign} `}${status.node || "gpu-plugin"}: ${status.headline}`;
    const headline = place("headline");
    if (headline.textContent !== status.headline) headline.textContent = status.headline;
    headline.className = `headline ${severity}`;
    place("severity").textContent = `${sign} ${WORDS[severity]}`;
    place("severity").className = `severity ${severity}`;
    place("version").textContent = `gpu-plugin ${status.daemon.version}`;
    for (const [key, [title, content]] of Object.entries(SECTIONS)) {
      const section = place(key), wanted = section.cloneNode(false);
      const parts = [content()].flat(Infinity).filter((part) => part);
      if (parts.length && !["problems", "tiles"].includes(key)) wanted.append(make("h2", {}, title));
      wanted.append(...parts);
      become(section, wanted);
    }
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true }); // it was moved
    if (first) reveal(location.hash);
  }

  // Open the fold that an address names.
  function reveal(hash) {
    const target = hash && place(decodeURIComponent(hash.slice(1)));
    if (!target || target.nodeName !== "DETAILS") return;
    target.open = true;
    target.scrollIntoView({ block: "nearest" });
  }

  function connection(trouble) {
    document.body.classList.toggle("is-stale", Boolean(trouble && status));
    place("connection").className = trouble ? "stale" : "live";
    place("connection-state").textContent = !trouble ? "as of" : status ? `${trouble}; shown is the state of` : trouble;
    place("as-of").textContent = status ? utc(status.at) : "";
  }

  async function read() {
    let answer, text;
    try {
      answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      text = await answer.text();
    } catch {
      return "The daemon does not answer";
    }
    if (!answer.ok) return `The daemon does not show its status (HTTP ${answer.status})`;
    if (text !== body) {
      const first = status === null, next = JSON.parse(text);
      if (!first && next.daemon.version !== status.daemon.version) location.reload(); // another version has another page
      body = text;
      status = next;
      changed = Date.now();
      show(first);
    }
    return Date.now() - changed > STALE ? "The daemon does not update its state" : "";
  }

  async function update() {
    clearTimeout(timer);
    try {
      connection(await read());
    } finally {
      clearTimeout(timer);
      timer = setTimeout(update, document.hidden ? HIDDEN : EVERY);
    }
  }

  // Copy a command. Browsers have no clipboard on pages without TLS: then the command is selected and copied as a selection.
  async function copy(button) {
    const code = button.previousElementSibling;
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(code.textContent);
    } else {
      window.getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  window.addEventListener("hashchange", () => reveal(location.hash));
  phone.addEventListener("change", () => { if (status) show(false); });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".command button"), tile = event.target.closest("a.tile");
    if (button) copy(button);
    if (tile) reveal(tile.hash); // also if the address names it already
  });
  update();
})();

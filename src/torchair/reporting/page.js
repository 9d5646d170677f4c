"use strict";
// Draws the page from the JSON in #data. Texts of the model go into text nodes only.

const at = (id) => document.getElementById(id);

function fail(message) {
  const box = at("errors");
  box.hidden = false;
  box.append(document.createTextNode(message + "\n"));
}
window.addEventListener("error", (e) => fail(`${e.message} (line ${e.lineno})`));
window.addEventListener("unhandledrejection", (e) => fail(String(e.reason)));

const data = JSON.parse(at("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const ROW = 20;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value);
  }
  node.append(...children.map((c) => (c instanceof Node ? c : document.createTextNode(c))));
  return node;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const empty = (node) => { node.replaceChildren(); return node; };

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (bytes >= 1024 && k < units.length - 1) { bytes /= 1024; k += 1; }
  return `${k ? bytes.toFixed(bytes < 10 ? 2 : 1) : bytes} ${units[k]}`;
}
function figure(x) {
  const units = ["", "k", "M", "G", "T", "P"];
  let k = 0;
  while (x >= 1000 && k < units.length - 1) { x /= 1000; k += 1; }
  return `${x >= 100 || Number.isInteger(x) ? Math.round(x) : x.toPrecision(2)}${units[k]}`;
}
function time(us) {
  return us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1000 ? `${(us / 1000).toFixed(2)} ms` : `${us.toFixed(1)} us`;
}
const short = (text, most) => (text.length <= most ? text : text.slice(0, most - 1) + "…");

// A list of which only the rows in sight exist.
function rows(box, count, draw) {
  empty(box);
  box.scrollTop = 0;
  const inner = h("div", { class: "inner" });
  inner.style.height = `${count * ROW}px`;
  box.append(inner);
  const shown = new Map();
  function paint() {
    const from = Math.max(0, Math.floor(box.scrollTop / ROW) - 8);
    const to = Math.min(count, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 8);
    for (const [k, row] of shown) if (k < from || k >= to) { row.remove(); shown.delete(k); }
    for (let k = from; k < to; k += 1) {
      if (shown.has(k)) continue;
      const row = draw(k);
      row.style.top = `${k * ROW}px`;
      inner.append(row);
      shown.set(k, row);
    }
  }
  box.onscroll = paint;
  paint();
  return {
    paint,
    again() { for (const row of shown.values()) row.remove(); shown.clear(); paint(); },
    show(k) {
      const y = k * ROW;
      if (y < box.scrollTop || y > box.scrollTop + box.clientHeight - ROW) box.scrollTop = Math.max(0, y - box.clientHeight / 3);
    },
  };
}

// ---- one graph ----

let g = null; // what is shown
let lists = {};
let lit = null; // sets of numbers: source, fx, ge, steps
const nothing = () => ({ source: new Set(), fx: new Set(), ge: new Set(), steps: new Set() });
let redraw = []; // called when the choice changes

function prepare(graph) {
  if (graph.fxOf) return;
  graph.fxOf = new Map();
  graph.fx.forEach(([, line], k) => {
    if (!graph.fxOf.has(line)) graph.fxOf.set(line, []);
    graph.fxOf.get(line).push(k);
  });
  graph.stepsOf = new Map();
  graph.steps.forEach((step, k) => step.ge.forEach((n) => {
    if (!graph.stepsOf.has(n)) graph.stepsOf.set(n, []);
    graph.stepsOf.get(n).push(k);
  }));
}

function choose(kind, k) {
  const made = nothing();
  made[kind].add(k);
  if (kind === "source") for (const n of g.fxOf.get(k) || []) made.fx.add(n);
  if (kind === "steps") for (const n of g.steps[k].ge) made.ge.add(n);
  if (kind === "source" || kind === "fx") for (const n of made.fx) for (const m of g.fx[n][2] || []) made.ge.add(m);
  if (kind === "steps" || kind === "ge") for (const n of made.ge) for (const m of g.ge[n][1]) made.fx.add(m);
  if (kind !== "source") for (const n of made.fx) if (g.fx[n][1] >= 0) made.source.add(g.fx[n][1]);
  if (kind !== "steps") for (const n of made.ge) for (const m of g.stepsOf.get(n) || []) made.steps.add(m);
  lit = made;
  for (const name of Object.keys(lists)) {
    lists[name].again();
    if (made[name].size) lists[name].show(Math.min(...made[name]));
  }
  describe();
  for (const again of redraw) again();
}

function describe() {
  const box = empty(at("chosen"));
  box.className = "";
  const part = (title, texts) => {
    if (!texts.length) return;
    box.append(h("b", {}, `${title}\n`), texts.slice(0, 12).map((t) => `  ${t}\n`).join(""));
    if (texts.length > 12) box.append(`  and ${texts.length - 12} more\n`);
  };
  const of = (name, text) => [...lit[name]].sort((a, b) => a - b).map(text);
  part("Source", of("source", (k) => place(k)));
  part("FX", of("fx", (k) => g.fx[k][0]));
  part("GE", of("ge", (k) => g.ge[k][0]));
  part("Steps", of("steps", (k) => stepText(k)));
}

function place(k) {
  let file = k;
  while (file > 0 && g.source[file].length !== 1) file -= 1;
  const [number, text] = g.source[k];
  return `${g.source[file][0]}:${number}  ${text.trim()}`;
}
function stepText(k) {
  const x = g.steps[k];
  const cost = x.us === undefined ? "" : `  ${time(x.us)}`;
  const moved = x.bytes === undefined ? "" : `, ${size(x.bytes)} moved, ${figure(x.operations)} operations`;
  return `${k} ${x.kind} ${x.name}${cost}${moved}${x.why ? `  (${x.why})` : ""}`;
}

const mark = (kind, k, more = "") => `row ${more}${lit[kind].has(k) ? " lit" : ""}`;

function sourceRow(k) {
  const row = g.source[k];
  if (row.length === 0) return h("div", { class: "row plain" }, "   ⋮");
  if (row.length === 1) return h("div", { class: "row plain head", title: row[0] }, row[0].split(/[\\/]/).slice(-3).join("/"));
  const [number, text] = row;
  const known = g.fxOf.has(k);
  const made = h("div", { class: mark("source", k, known ? "" : "plain"), title: text.trim() },
    h("span", { class: "number" }, String(number)), text);
  if (known) made.addEventListener("click", () => choose("source", k));
  return made;
}
const textRow = (kind, text) => (k) =>
  h("div", { class: mark(kind, k), title: text(k), onclick: () => choose(kind, k) }, text(k));

// A list whose arguments are one row until the reader opens it, or chooses one of them.
function folding(kind) {
  const box = at(`list-${kind}`);
  const hidden = new Set(g.arguments[kind]);
  const row = textRow(kind, (k) => g[kind][k][0]);
  let open = hidden.size < 4;
  let [order, place, list] = [[], new Map(), null];
  const head = () => h("div", { class: "row fold", onclick: () => { open = !open; draw(); } }, `${open ? "▾" : "▸"} ${hidden.size} arguments`);
  function draw() {
    order = g[kind].map((_, k) => k).filter((k) => open || !hidden.has(k));
    if (hidden.size >= 4) order.unshift(-1);
    place = new Map(order.map((k, n) => [k, n]));
    list = rows(box, order.length, (n) => (order[n] < 0 ? head() : row(order[n])));
  }
  draw();
  return {
    paint: () => list.paint(),
    again() {
      const wanted = [...lit[kind]];
      if (!open && wanted.length && wanted.every((k) => hidden.has(k))) { open = true; draw(); } else list.again();
    },
    show() {
      const seen = [...lit[kind]].filter((k) => place.has(k)); // what is chosen and not folded
      if (seen.length) list.show(place.get(Math.min(...seen)));
    },
  };
}
function stepRow(k) {
  const x = g.steps[k];
  return h("div", { class: mark("steps", k), title: stepText(k), onclick: () => choose("steps", k) },
    h("span", { class: "number" }, String(k)), h("span", { class: `kind ${x.kind}` }, x.kind), x.name);
}

function drawCode() {
  const longest = Math.max(g.source.length, g.fx.length, g.ge.length, g.steps.length);
  for (const name of ["source", "fx", "ge", "steps"]) at(`list-${name}`).style.height = `${ROW * Math.min(22, Math.max(6, longest))}px`;
  lists = {
    source: rows(at("list-source"), g.source.length, sourceRow),
    fx: folding("fx"),
    ge: folding("ge"),
    steps: rows(at("list-steps"), g.steps.length, stepRow),
  };
  for (const [name, what] of [["source", "lines"], ["fx", "nodes"], ["ge", "nodes"], ["steps", "steps"]])
    at(`count-${name}`).textContent = `${g[name].length} ${what}`;
}

function drawFacts() {
  const facts = [
    ["graph", `${g.name}, ${g.phase}`], ["mode", g.mode], ["device", g.device || "-"],
    ["FX nodes", g.fx.length], ["GE nodes", g.ge.length], ["steps", g.steps.length],
    ["native steps", g.steps.filter((x) => x.kind === "native").length], ["kernels", g.kernels.length],
    ["passes with changes", g.passes.length],
  ];
  if (g.memory) facts.push(["planned memory", size(g.memory.size)]);
  if (g.timeline && g.timeline.slices.length)
    facts.push(["steps took", time(g.timeline.slices.reduce((sum, x) => sum + x[3] - x[2], 0))]);
  empty(at("facts")).append(...facts.map(([a, b]) => h("div", {}, h("dt", {}, a), h("dd", { title: String(b) }, String(b)))));
  const busy = g.others ? `Other programs kept ${g.others.toFixed(1)} cores busy while steps were timed: they took longer than they have to.` : "";
  at("note").textContent = [g.note, busy].filter(Boolean).join(" ");
  at("model").textContent = g.model || data.title;
}

// ---- graph ----

const [WIDE, HIGH, BOX] = [230, 58, [200, 34]];

// What is in sight: steps, and in their place modules that are not open.
function visible(open) {
  const items = new Map();
  const of = g.steps.map((step, k) => {
    const words = step.module ? step.module.split(".") : [];
    let key = `#${k}`;
    for (let depth = 1; depth <= words.length; depth += 1) {
      const path = words.slice(0, depth).join(".");
      if (!open.has(path) && g.modules.get(path).length > 1) { key = path; break; }
    }
    if (!items.has(key)) items.set(key, { key, steps: [], before: new Set(), layer: 0 });
    items.get(key).steps.push(k);
    return key;
  });
  g.steps.forEach((step, k) => step.reads.forEach((r) => { if (of[r] !== of[k]) items.get(of[k]).before.add(of[r]); }));
  return items;
}

function laidOut(items) {
  const order = [...items.values()]; // by their first steps
  order.forEach((x, k) => { x.number = k; });
  const layers = [];
  for (const x of order) {
    const before = [...x.before].map((key) => items.get(key)).filter((y) => y.number < x.number);
    x.layer = before.reduce((most, y) => Math.max(most, y.layer + 1), 0);
    x.wish = before.length ? before.reduce((sum, y) => sum + y.column, 0) / before.length : 0;
    const row = (layers[x.layer] ||= new Set());
    x.column = Math.max(0, Math.round(x.wish));
    while (row.has(x.column)) x.column += 1;
    row.add(x.column);
  }
  return { order, height: layers.length, width: Math.max(1, ...layers.map((row) => Math.max(...row) + 1)) };
}

function modules() {
  g.modules = new Map();
  g.steps.forEach((step, k) => {
    const words = step.module ? step.module.split(".") : [];
    words.forEach((_, depth) => {
      const path = words.slice(0, depth + 1).join(".");
      if (!g.modules.has(path)) g.modules.set(path, []);
      g.modules.get(path).push(k);
    });
  });
}

// The modules that are open at first: as many as can be looked at.
function openAtFirst() {
  const open = new Set();
  const paths = [...g.modules.keys()].sort((a, b) => a.split(".").length - b.split(".").length);
  for (const path of paths) {
    open.add(path);
    if (visible(open).size > 60) { open.delete(path); break; }
  }
  return open;
}

function drawGraph() {
  const stage = empty(at("graph-stage"));
  const chips = at("opened");
  if (!g.steps.length) { empty(chips); stage.append(h("p", { class: "quiet" }, "There is no plan, so there are no steps.")); return; }
  modules();
  let open = openAtFirst();
  let drawn = null;
  const svg = s("svg", { role: "img", "aria-label": "graph of steps" });
  stage.append(svg);
  const x = (item) => 24 + item.column * WIDE;
  const y = (item) => 16 + item.layer * HIGH;

  function label(item) {
    const [first] = item.steps;
    if (item.key[0] === "#") return `${first} ${g.steps[first].name}`;
    return `▸ ${item.key} (${item.steps.length})`;
  }
  function box(item) {
    const single = item.key[0] === "#";
    const kind = single ? g.steps[item.steps[0]].kind : "group";
    const on = item.steps.some((k) => lit.steps.has(k)) ? " lit" : "";
    const click = single ? () => choose("steps", item.steps[0]) : () => { open.add(item.key); again(); };
    return s("g", { class: "item" },
      s("rect", { class: `box ${kind}${on}`, x: x(item), y: y(item), width: BOX[0], height: BOX[1], rx: 6, onclick: click },
        s("title", {}, single ? stepText(item.steps[0]) : `${item.key}: ${item.steps.length} steps`)),
      s("text", { class: "label", x: x(item) + 10, y: y(item) + 21 }, short(label(item), 27)));
  }
  function edge(from, to) {
    const [x1, y1, x2, y2] = [x(from) + BOX[0] / 2, y(from) + BOX[1], x(to) + BOX[0] / 2, y(to)];
    const on = from.steps.some((k) => lit.steps.has(k)) || to.steps.some((k) => lit.steps.has(k)) ? " lit" : "";
    const aside = y2 - y1 > HIGH && x1 === x2 ? (BOX[0] / 2 + 14) / 0.75 : 0; // around the boxes between
    return s("path", { class: `edge${on}`, d: `M${x1},${y1} C${x1 + aside},${y1 + 24} ${x2 + aside},${y2 - 24} ${x2},${y2}` });
  }
  function paint() {
    const [top, bottom] = [stage.scrollTop - 200, stage.scrollTop + stage.clientHeight + 200];
    const parts = [];
    for (const item of drawn.order) {
      for (const key of item.before) {
        const from = drawn.items.get(key);
        if (y(from) < bottom && y(item) > top) parts.push(edge(from, item));
      }
    }
    for (const item of drawn.order) if (y(item) > top && y(item) < bottom) parts.push(box(item));
    svg.replaceChildren(...parts);
  }
  function again() {
    const items = visible(open);
    drawn = { items, ...laidOut(items) };
    svg.setAttribute("width", drawn.width * WIDE + 60);
    svg.setAttribute("height", drawn.height * HIGH + 20);
    const some = [...open].filter((path) => g.modules.get(path).length > 1);
    const close = (path) => h("button", { title: `close ${path}`, onclick: () => { open.delete(path); again(); } }, `▾ ${path}`);
    empty(chips);
    if (g.modules.size) chips.append(
      h("button", { onclick: () => { open = new Set(); again(); } }, "close all"),
      h("button", { onclick: () => { open = new Set(g.modules.keys()); again(); } }, "open all"),
      ...some.slice(0, 24).map(close), ...(some.length > 24 ? [`and ${some.length - 24} more`] : []));
    paint();
  }
  stage.onscroll = paint;
  again();
  redraw.push(() => {
    const found = drawn.order.find((item) => item.steps.some((k) => lit.steps.has(k)));
    if (found && (y(found) < stage.scrollTop || y(found) > stage.scrollTop + stage.clientHeight - HIGH))
      stage.scrollTop = Math.max(0, y(found) - stage.clientHeight / 3);
    paint();
  });
}

// ---- memory ----

function drawMemory() {
  const stage = empty(at("memory-stage"));
  const about = at("memory-about");
  const plan = g.memory;
  if (!plan) { about.textContent = "There is no memory plan."; return; }
  const others = Object.entries(plan.others).map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(", ");
  about.textContent = `Time goes to the right, step by step; addresses go up. Each box is a buffer: as wide as it lives, ` +
    `as high as it is large. ${plan.boxes.length} buffers share ${size(plan.size)}; at most ${size(plan.floor)} are alive at once` +
    `${others ? `. Outside of it: ${others}` : ""}.`;
  if (!plan.boxes.length) { stage.append(h("p", { class: "quiet" }, "No step keeps a result for a later one.")); return; }
  const [left, top, width, height] = [86, 10, Math.max(900, stage.clientWidth - 110), 380];
  const x = (step) => left + (width * step) / Math.max(1, plan.steps);
  const y = (address) => top + height - (height * address) / Math.max(1, plan.size);
  const svg = s("svg", { width: left + width + 20, height: height + 40, role: "img", "aria-label": "memory plan" });
  for (let k = 0; k <= 4; k += 1) {
    const address = (plan.size * k) / 4;
    svg.append(s("line", { class: "axis", x1: left, x2: left + width, y1: y(address), y2: y(address) }),
      s("text", { class: "quiet", x: left - 6, y: y(address) + 4, "text-anchor": "end" }, size(Math.round(address))));
    const step = Math.round((plan.steps * k) / 4);
    svg.append(s("text", { class: "quiet", x: x(step), y: top + height + 18, "text-anchor": "middle" }, k ? String(step) : "step 0"));
  }
  const made = plan.boxes.map(([name, writers, first, last, offset, bytes]) => {
    const box = s("rect", {
      class: "buffer", x: x(first), y: y(offset + bytes), width: Math.max(1, x(last + 1) - x(first)),
      height: Math.max(1, y(offset) - y(offset + bytes)),
    }, s("title", {}, `${name}: ${size(bytes)} at ${offset}, steps ${first} to ${last}`));
    box.addEventListener("click", () => choose("steps", writers.length ? writers[0] : first));
    return box;
  });
  svg.append(...made);
  stage.append(svg);
  redraw.push(() => made.forEach((box, k) => box.classList.toggle("lit", plan.boxes[k][1].some((step) => lit.steps.has(step)))));
}

// ---- timeline ----

function drawTimeline() {
  const stage = empty(at("timeline-stage"));
  const zoom = empty(at("timeline-zoom"));
  const about = at("timeline-about");
  if (!g.timeline || !g.timeline.slices.length) { about.textContent = "No call was timed."; return; }
  const { lanes, slices, events } = g.timeline;
  const end = Math.max(...slices.map((x) => x[3]));
  about.textContent = `When each step ran, and on which stream, in one call of ${time(end)} whose steps ran one by one. ` +
    `Without being looked at, consecutive native steps are one call and take less.`;
  const draw = (times) => {
    empty(stage);
    const [left, width, high] = [130, (Math.max(900, stage.clientWidth - 150)) * times, 34];
    const x = (us) => left + (width * us) / Math.max(end, 1e-9);
    const svg = s("svg", { width: left + width + 20, height: lanes.length * high + 34, role: "img", "aria-label": "timeline of lanes" });
    lanes.forEach((lane, k) => svg.append(
      s("text", { x: 8, y: k * high + 24 }, short(lane, 17), s("title", {}, lane)),
      s("line", { class: "axis", x1: left, x2: left + width, y1: (k + 1) * high, y2: (k + 1) * high })));
    for (let k = 0; k <= 4 * times; k += 1) {
      const us = (end * k) / (4 * times);
      svg.append(s("text", { class: "quiet", x: x(us), y: lanes.length * high + 20, "text-anchor": !k ? "start" : k === 4 * times ? "end" : "middle" }, time(us)));
    }
    const made = slices.map(([lane, step, from, to]) => s("rect", {
      class: `slice ${g.steps[step].kind}${lit.steps.has(step) ? " lit" : ""}`, x: x(from), y: lane * high + 6,
      width: Math.max(1, x(to) - x(from)), height: high - 10, onclick: () => choose("steps", step),
    }, s("title", {}, `${stepText(step)}\n${time(to - from)}`)));
    const when = new Map(slices.map((slice) => [slice[1], slice]));
    for (const [before, after] of events) {
      const [a, b] = [when.get(before), when.get(after)];
      if (a && b) svg.append(s("path", { class: "edge", d: `M${x(a[3])},${a[0] * high + high / 2} L${x(b[2])},${b[0] * high + high / 2}` }));
    }
    svg.append(...made);
    stage.append(svg);
    return made;
  };
  let made = draw(1);
  let buttons = [];
  const chosen = (k) => buttons.forEach((b, j) => b.setAttribute("aria-pressed", String(j === k)));
  buttons = [1, 4, 16].map((times, k) => h("button", { onclick: () => { made = draw(times); chosen(k); } }, `${times} x`));
  zoom.append(...buttons);
  chosen(0);
  redraw.push(() => made.forEach((box, k) => box.classList.toggle("lit", lit.steps.has(slices[k][1]))));
}

// ---- roofline ----

function drawRoofline() {
  const stage = empty(at("roofline-stage"));
  const about = at("roofline-about");
  const dots = g.steps.map((x, k) => ({ k, x })).filter(({ x }) => x.us > 0 && x.bytes > 0 && x.operations > 0);
  if (!g.rates || !dots.length) { about.textContent = "No step was timed that computes something."; return; }
  const { bytes, near, operations } = g.rates;
  about.textContent = `One dot a step, larger the longer it takes: to the right the more it computes with each byte, higher the ` +
    `faster. Lines are what this machine can do: ${size(bytes)}/s from memory, ${size(near)}/s from a cache, ` +
    `${figure(operations)} operations/s. Dots near a line cannot become faster without doing less.` +
    (g.rates.others > 0.25 ? ` Other programs kept ${g.rates.others.toFixed(1)} cores busy when this was measured: the machine can do more.` : "");
  const [left, top, width, height] = [86, 16, Math.max(900, stage.clientWidth - 120), 400];
  const across = ({ x }) => x.operations / x.bytes;
  const up = ({ x }) => x.operations / (x.us * 1e-6);
  const log = Math.log10;
  const xs = [Math.floor(log(Math.min(0.1, ...dots.map(across)))), Math.ceil(log(Math.max(100, ...dots.map(across), operations / bytes)))];
  const ys = [Math.floor(log(Math.min(...dots.map(up)))), Math.ceil(log(Math.max(operations, ...dots.map(up))))];
  const px = (v) => left + (width * (log(v) - xs[0])) / (xs[1] - xs[0]);
  const py = (v) => top + height - (height * (log(v) - ys[0])) / (ys[1] - ys[0]);
  const svg = s("svg", { width: left + width + 30, height: top + height + 44, role: "img", "aria-label": "roofline" },
    s("clipPath", { id: "frame" }, s("rect", { x: left, y: top, width, height })));
  for (let e = xs[0]; e <= xs[1]; e += 1)
    svg.append(s("line", { class: "axis", x1: px(10 ** e), x2: px(10 ** e), y1: top, y2: top + height }),
      s("text", { class: "quiet", x: px(10 ** e), y: top + height + 18, "text-anchor": "middle" }, String(e < 0 ? (10 ** e).toFixed(-e) : 10 ** e)));
  for (let e = ys[0]; e <= ys[1]; e += 1)
    svg.append(s("line", { class: "axis", x1: left, x2: left + width, y1: py(10 ** e), y2: py(10 ** e) }),
      s("text", { class: "quiet", x: left - 6, y: py(10 ** e) + 4, "text-anchor": "end" }, `${figure(10 ** e)}/s`));
  svg.append(s("text", { class: "quiet", x: left + width / 2, y: top + height + 36, "text-anchor": "middle" }, "operations for each byte"));
  for (const [rate, name, aside] of [[bytes, "memory", 16], [near, "cache", -14]]) {
    const [from, knee, to] = [10 ** xs[0], operations / rate, 10 ** xs[1]];
    svg.append(s("path", { class: "roof", "clip-path": "url(#frame)",
      d: `M${px(from)},${py(from * rate)} L${px(knee)},${py(operations)} L${px(to)},${py(operations)}` }, s("title", {}, name)));
    const shown = Math.max(from, (10 ** ys[0]) / rate) * 1.6;
    svg.append(s("text", { class: "quiet", x: px(shown) + aside - 4, y: py(shown * rate) + aside }, name));
  }
  const most = Math.max(...dots.map(({ x }) => x.us));
  const made = dots.map((dot) => s("circle", {
    class: `dot ${dot.x.kind}`, cx: px(across(dot)), cy: py(up(dot)), r: 3 + 9 * Math.sqrt(dot.x.us / most), onclick: () => choose("steps", dot.k),
  }, s("title", {}, stepText(dot.k))));
  svg.append(...made);
  stage.append(svg);
  redraw.push(() => made.forEach((dot, k) => dot.classList.toggle("lit", lit.steps.has(dots[k].k))));
}

// ---- kernels ----

const TEXTS = [["nest", "Loops"], ["text", "LLVM"], ["machine", "Machine code"]];

function drawKernels() {
  const kinds = empty(at("kernel-kinds"));
  const text = at("kernel-text");
  const users = g.kernels.map(() => []);
  g.steps.forEach((x, k) => { if (x.kernel >= 0) users[x.kernel].push(k); });
  let [kernel, kind] = [0, "nest"];
  let list = null;
  const buttons = TEXTS.map(([name, title]) => h("button", { onclick: () => { kind = name; draw(); } }, title));
  kinds.append(...buttons);
  const draw = () => {
    const x = g.kernels[kernel];
    TEXTS.forEach(([name], k) => {
      buttons[k].hidden = !x || !x[name];
      buttons[k].setAttribute("aria-pressed", String(name === kind));
    });
    text.textContent = x ? x[kind] || x.nest : "No kernel was generated.";
    text.scrollTop = 0;
    if (list) list.again();
  };
  list = rows(at("list-kernels"), g.kernels.length, (k) => {
    const used = users[k].some((step) => lit.steps.has(step));
    const title = `${g.kernels[k].name}, ${users[k].length} steps`;
    return h("div", { class: `row${used || k === kernel ? " lit" : ""}`, title, onclick: () => { kernel = k; draw(); } },
      h("span", { class: "number" }, `${users[k].length}x`), g.kernels[k].name);
  });
  draw();
  redraw.push(() => {
    const used = users.findIndex((steps) => steps.some((step) => lit.steps.has(step)));
    if (used >= 0) { kernel = used; list.show(used); }
    draw();
  });
}

// ---- passes ----

const SIGNS = { "+": "plus", "-": "minus", "@": "at" };

function drawPasses() {
  const about = at("pass-about");
  let chosen = Math.max(0, g.passes.findIndex((x) => x.lines.length));
  let list = null;
  const draw = () => {
    const x = g.passes[chosen];
    about.textContent = x ? `${x.name}: ${x.about || "no description"}  ${x.before} nodes before, ${x.after} after, ${time(x.seconds * 1e6)}` : "No pass changed the graph.";
    rows(at("list-lines"), x ? x.lines.length : 0, (k) =>
      h("div", { class: `row plain ${SIGNS[x.lines[k][0]] || ""}`, title: x.lines[k] }, x.lines[k]));
    if (list) list.again();
  };
  list = rows(at("list-passes"), g.passes.length, (k) => {
    const x = g.passes[k];
    return h("div", { class: `row${k === chosen ? " lit" : ""}`, title: x.about, onclick: () => { chosen = k; draw(); } },
      h("span", { class: "kind" }, x.kind.toUpperCase()), `${x.name}  ${x.after - x.before >= 0 ? "+" : ""}${x.after - x.before}`);
  });
  draw();
}

// ---- all ----

const SECTIONS = ["overview", "code", "graph", "memory", "timeline", "roofline", "kernels", "passes"];
const DRAWN = [drawFacts, drawCode, drawGraph, drawMemory, drawTimeline, drawRoofline, drawKernels, drawPasses];

function show(number) {
  g = data.graphs[number];
  prepare(g);
  lit = nothing();
  redraw = [];
  empty(at("chosen")).append("Nothing is chosen.");
  for (const draw of DRAWN) draw();
}

function start() {
  at("title").textContent = data.title;
  const named = data.graphs.find((x) => x.model);
  document.title = `${named ? named.model : data.title}: torchair report`;
  at("nav").append(...SECTIONS.map((id) => h("a", { href: `#${id}` }, id[0].toUpperCase() + id.slice(1))));
  const select = at("graphs");
  select.append(...data.graphs.map((x, k) => h("option", { value: String(k) }, `${x.name}, ${x.model}, ${x.phase}, ${x.fx.length} nodes`)));
  select.addEventListener("change", () => show(Number(select.value)));
  at("choice").hidden = data.graphs.length < 2;
  if (!data.graphs.length) { at("note").textContent = "No graph was compiled."; return; }
  show(0);
  const wish = /^#(source|fx|ge|steps)=(\d+)$/.exec(location.hash); // a link to something chosen
  if (wish && Number(wish[2]) < g[wish[1]].length) choose(wish[1], Number(wish[2]));
  window.addEventListener("resize", () => Object.values(lists).forEach((list) => list.paint()));
}

start();
document.body.dataset.milliseconds = String(Math.round(performance.now())); // since the page was asked for;

"use strict";
// Draws the page from the JSON in #data. Texts of the model go into text nodes only.

const begun = performance.now();
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
    if (name !== kind && made[name].size) lists[name].show(Math.min(...made[name]));
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
  if (row.length === 1) return h("div", { class: "row plain head", title: row[0] }, h("bdi", {}, row[0]));
  const [number, text] = row;
  const known = g.fxOf.has(k);
  const made = h("div", { class: mark("source", k, known ? "" : "plain"), title: text.trim() },
    h("span", { class: "number" }, String(number)), text);
  if (known) made.addEventListener("click", () => choose("source", k));
  return made;
}
const textRow = (kind, text) => (k) =>
  h("div", { class: mark(kind, k), title: text(k), onclick: () => choose(kind, k) }, text(k));
function stepRow(k) {
  const x = g.steps[k];
  return h("div", { class: mark("steps", k), title: stepText(k), onclick: () => choose("steps", k) },
    h("span", { class: "number" }, String(k)), h("span", { class: `kind ${x.kind}` }, x.kind), x.name);
}

function drawCode() {
  lists = {
    source: rows(at("list-source"), g.source.length, sourceRow),
    fx: rows(at("list-fx"), g.fx.length, textRow("fx", (k) => g.fx[k][0])),
    ge: rows(at("list-ge"), g.ge.length, textRow("ge", (k) => g.ge[k][0])),
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
  at("note").textContent = g.note;
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
  const made = plan.boxes.map(([name, step, first, last, offset, bytes]) => {
    const box = s("rect", {
      class: "buffer", x: x(first), y: y(offset + bytes), width: Math.max(1, x(last + 1) - x(first)),
      height: Math.max(1, y(offset) - y(offset + bytes)),
    }, s("title", {}, `${name}: ${size(bytes)} at ${offset}, steps ${first} to ${last}`));
    if (step >= 0) box.addEventListener("click", () => choose("steps", step));
    return box;
  });
  svg.append(...made);
  stage.append(svg);
  redraw.push(() => made.forEach((box, k) => box.classList.toggle("lit", lit.steps.has(plan.boxes[k][1]))));
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

const SECTIONS = ["overview", "code", "memory", "timeline", "kernels", "passes"];
const DRAWN = [drawFacts, drawCode, drawMemory, drawTimeline, drawKernels, drawPasses];

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
  document.title = `torchair report: ${data.title}`;
  at("nav").append(...SECTIONS.map((id) => h("a", { href: `#${id}` }, id[0].toUpperCase() + id.slice(1))));
  const select = at("graphs");
  select.append(...data.graphs.map((x, k) => h("option", { value: String(k) }, `${x.name}, ${x.phase}, ${x.fx.length} nodes`)));
  select.addEventListener("change", () => show(Number(select.value)));
  at("choice").hidden = data.graphs.length < 2;
  if (!data.graphs.length) { at("note").textContent = "No graph was compiled."; return; }
  show(0);
  const wish = /^#(source|fx|ge|steps)=(\d+)$/.exec(location.hash); // a link to something chosen
  if (wish && Number(wish[2]) < g[wish[1]].length) choose(wish[1], Number(wish[2]));
  window.addEventListener("resize", () => Object.values(lists).forEach((list) => list.paint()));
}

start();
document.body.dataset.milliseconds = String(Math.round(performance.now() - begun));

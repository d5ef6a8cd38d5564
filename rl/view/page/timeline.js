// Spans of every process, and where the time of the steps goes.

import { choice, el, get, link, note, number, seconds, svg, table, visible } from "./base.js";
import { inside, range, shadeOf, ticks } from "./charts.js";
import { profile, profileLinks } from "./profile.js";

const WAITS = ["wait", "starved", "push_wait"];
const LANE = 15;

// The ranks of a mesh, such as trainer[1], follow their mesh.
const rank = (process) => ["controller", "trainer"].indexOf(process.split("[")[0]) + 1 || 9;

function lanes(spans) {
  const found = new Map();
  for (const span of spans) {
    const key = `${span[0]}\n${span[1]}`;
    if (!found.has(key)) found.set(key, { process: span[0], name: span[1], spans: [] });
    found.get(key).spans.push(span);
  }
  return [...found.values()].sort((a, b) => rank(a.process) - rank(b.process)
    || a.process.localeCompare(b.process, "en", { numeric: true })
    || a.spans[0][2] - b.spans[0][2]);
}

// Seconds in which any of the spans ran.
function union(spans) {
  let sum = 0, until = -Infinity;
  for (const [, , begin, end] of [...spans].sort((a, b) => a[2] - b[2])) {
    sum += Math.max(0, end - Math.max(begin, until));
    until = Math.max(until, end);
  }
  return sum;
}

function drawing(rows, marks, begin, end, view) {
  const width = Math.max(700, view.width - 60), left = 190, top = 20;
  const x = (time) => left + (time - begin) / (end - begin || 1) * (width - left - 8);
  const nodes = [];
  const height = top + rows.length * LANE + 24;
  for (const at of ticks(0, end - begin, 8)) {
    const place = x(begin + at);
    const text = at ? seconds(at) : "0";
    nodes.push(svg("line", { class: "grid", x1: place, x2: place, y1: top, y2: height - 20 }),
      svg("text", { x: inside(place, text, width), y: 12, "text-anchor": "middle" }, text));
  }
  let process = null;
  rows.forEach((row, index) => {
    const y = top + index * LANE;
    if (row.process !== process) {
      process = row.process;
      nodes.push(svg("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }),
        svg("text", { x: 4, y: y + 11, "font-weight": 600 }, visible(process).slice(0, 16)));
    }
    nodes.push(svg("text", { x: left - 6, y: y + 11, "text-anchor": "end" },
      visible(row.name).slice(0, 18)));
    for (const [, name, from, to, step] of row.spans) {
      nodes.push(svg("rect", {
        class: `f${shadeOf(name)}`, x: x(from).toFixed(2), y: y + 2, height: LANE - 4, rx: 1,
        width: Math.max(0.8, x(to) - x(from)).toFixed(2),
      }, svg("title", {}, `${row.process} · ${name} · ${seconds(to - from)} · step ${step}`)));
    }
  });
  for (const mark of marks) {
    if (mark.time < begin || mark.time > end) continue;
    const text = [mark.kind, mark.process, mark.version ?? mark.step, mark.text].join(" ");
    const bad = ["warning", "lost", "failed"].includes(mark.kind);
    nodes.push(svg("path", {
      class: bad ? "f1" : "f0", d: `M${x(mark.time)} ${height - 20}l4 9h-8z`,
    }, svg("title", {}, visible(text))));
  }
  return svg("svg", { id: "spans", width, height, role: "img", "aria-label": "spans" }, ...nodes);
}

function costs(rows, begin, end) {
  const whole = end - begin || 1;
  const found = [];
  for (const process of new Set(rows.map((row) => row.process))) {
    const own = rows.filter((row) => row.process === process);
    const busy = union(own.filter((row) => !WAITS.includes(row.name)).flatMap((row) => row.spans));
    found.push({ process, name: "idle", time: whole - busy, count: "", idle: true });
    for (const row of own) {
      found.push({ process, name: row.name, time: union(row.spans), count: row.spans.length });
    }
  }
  const bar = (row) => svg("svg", { width: 160, height: 9, viewBox: "0 0 160 9" },
    svg("rect", { class: `f${row.idle ? "idle" : shadeOf(row.name)}`, height: 9,
      width: Math.max(0, Math.min(1, row.time / whole)) * 160 }));
  return table([
    { name: "process", show: (row) => row.idle ? visible(row.process) : "" },
    { name: "work", show: (row) =>
      row.idle ? el("span", { class: "dim" }, "idle") : visible(row.name) },
    { name: "times", n: true, show: (row) => row.count },
    { name: "time", n: true, show: (row) => seconds(row.time) },
    { name: "share", n: true, show: (row) => `${(row.time / whole * 100).toFixed(1)} %` },
    { name: "", show: bar },
  ], found);
}

export async function timeline(view) {
  const { query, state } = view;
  const stored = state.timeline_steps;
  const newest = Math.max(1, stored ? stored.at(-1) || 1 : state.step);
  const step = Math.max(1, Number(query.step) || newest);
  const count = stored ? 1 : Number(query.count) || 1;
  const data = await get("timeline", { run: view.run, step, count });
  view.rows = { next: () => view.change({ step: Math.min(newest + 1, step + count) }),
    previous: () => view.change({ step: Math.max(1, step - count) }) };
  const controls = el("div", { class: "bar" },
    el("button", { onclick: view.rows.previous, title: "previous (k)" }, "‹"),
    el("label", { class: "dim" }, "step ", el("input", {
      type: "number", min: 1, value: step,
      onchange: (event) => view.change({ step: event.target.value }),
    })),
    el("button", { onclick: view.rows.next, title: "next (j)" }, "›"),
    stored ? null : choice("steps at once", [1, 2, 5, 10, 20, 50], count,
      (value) => view.change({ count: value, step })),
    el("span", { class: "grow" }),
    link("rollouts", { run: view.run, step }, "rollouts of this step"));
  if (data.error) return [controls, note(data.error, "warn")];
  if (query.profile) return profile(view, data.profiles);
  const profiles = profileLinks(view, data.profiles);
  if (profiles.length) controls.append(el("span", { id: "profiles" }, "profiles:", ...profiles));
  const rows = lanes(data.spans);
  if (!rows.length) return [controls, note("events.jsonl has no spans of this step")];
  const [begin] = range(data.spans.map((span) => span[2]));
  const [, end] = range(data.spans.map((span) => span[3]));
  return [
    controls,
    data.left_out ? note(`${number(data.left_out)} shorter spans are left out`) : null,
    el("div", { class: "panel pad wide" }, drawing(rows, data.marks, begin, end, view)),
    el("h2", {}, `Where the time goes: ${seconds(end - begin)}`),
    el("div", { class: "panel wide" }, costs(rows, begin, end)),
  ];
}

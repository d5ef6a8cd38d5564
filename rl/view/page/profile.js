// A trace of torch's profiler: what a rank computed in a step, read by this page.

import { el, EXPORTED, link, note, number, seconds, svg, table, visible } from "./base.js";
import { chart, inside, LETTER, shadeOf, ticks } from "./charts.js";

const MAX_TRACE = 400e6; // characters; a string of a browser holds about 500 million
const DRAWN = 3000;
const OPERATORS = 60;
const ROW = 13;
const OUTSIDE = ["Trace", "cpu_instant_event", "ac2g", "fwdbwd"]; // no work of its own
const traces = new Map();

const address = (run, step, file) => `/profiles/${run}/${step}/${encodeURIComponent(file)}`;
const isDevice = (event) => /^(kernel|gpu_)/.test(event.cat);

async function readTrace(run, step, file) {
  const url = address(run, step, file);
  if (!traces.has(url)) {
    const response = await fetch(url);
    if (!response.ok) throw new Error(await response.text());
    const text = await new Response(
      response.body.pipeThrough(new DecompressionStream("gzip"))).text();
    if (text.length > MAX_TRACE) throw new Error("the trace is too large for a page");
    traces.clear();
    traces.set(url, analysed(JSON.parse(text).traceEvents));
  }
  return traces.get(url);
}

// Spans by thread or stream, each with its depth and the time that is not in spans within it.
function analysed(events) {
  const threads = new Map(), names = new Map(), memory = new Map();
  for (const event of events) {
    const key = `${event.pid} ${event.tid}`;
    if (event.ph === "M" && event.name === "thread_name") names.set(key, event.args.name);
    if (event.name === "[memory]") {
      const { "Device Type": type, "Device Id": id, "Total Allocated": bytes } = event.args;
      const device = type ? `GPU ${id}` : "CPU";
      if (!memory.has(device)) memory.set(device, []);
      memory.get(device).push([event.ts, bytes]);
    }
    if (event.ph !== "X" || OUTSIDE.includes(event.cat)) continue;
    if (!threads.has(key)) threads.set(key, []);
    threads.get(key).push({ name: event.name, device: isDevice(event), begin: event.ts,
      end: event.ts + (event.dur || 0), own: event.dur || 0 });
  }
  let begin = Infinity, end = -Infinity;
  for (const spans of threads.values()) {
    spans.sort((a, b) => a.begin - b.begin || b.end - a.end);
    const open = [];
    for (const span of spans) {
      while (open.length && open.at(-1).end <= span.begin) open.pop();
      span.depth = open.length;
      span.again = open.some((each) => each.name === span.name);
      if (open.length) open.at(-1).own -= Math.min(span.end, open.at(-1).end) - span.begin;
      open.push(span);
      begin = Math.min(begin, span.begin);
      end = Math.max(end, span.end);
    }
  }
  const found = [...threads].map(([key, spans]) => ({ name: names.get(key) || key, spans }));
  for (const points of memory.values()) points.sort((a, b) => a[0] - b[0]);
  return { threads: found, begin, end, memory };
}

function operators(threads) {
  const rows = new Map();
  for (const span of threads.flatMap((thread) => thread.spans)) {
    const key = `${span.device} ${span.name}`;
    if (!rows.has(key)) rows.set(key, { ...span, count: 0, own: 0, total: 0 });
    const row = rows.get(key);
    row.count += 1;
    row.own += span.own;
    if (!span.again) row.total += span.end - span.begin;
  }
  return [...rows.values()].sort((a, b) => b.own - a.own);
}

// The longest spans between two times, a row for each depth of each thread.
function flames(trace, from, until, view) {
  const width = Math.max(700, view.width - 60), margin = 4;
  const x = (time) => margin + (time - from) / (until - from || 1) * (width - margin);
  const nodes = [];
  let top = 18;
  for (const at of ticks(0, until - from, 8)) {
    const text = at ? seconds(at / 1e6) : "0";
    nodes.push(svg("text",
      { x: inside(x(from + at), text, width), y: 11, "text-anchor": "middle" }, text),
    svg("line", { class: "grid", x1: x(from + at), x2: x(from + at), y1: 15, y2: 2000 }));
  }
  const within = (span) => span.end > from && span.begin < until;
  const length = (span) => Math.min(span.end, until) - Math.max(span.begin, from);
  const lengths = trace.threads.flatMap((thread) => thread.spans.filter(within).map(length));
  const least = lengths.sort((a, b) => b - a)[DRAWN] ?? -1;
  for (const thread of trace.threads) {
    const spans = thread.spans.filter((span) => within(span) && length(span) > least);
    if (!spans.length) continue;
    nodes.push(svg("text", { x: margin, y: top + 10, "font-weight": 600 }, visible(thread.name)));
    top += ROW + 1;
    for (const span of spans) {
      const left = Math.max(margin, x(span.begin)), size = Math.min(width, x(span.end)) - left;
      const y = top + span.depth * ROW;
      const title = `${span.name} · ${seconds((span.end - span.begin) / 1e6)}`;
      const window_ = { from: span.begin - trace.begin, until: span.end - trace.begin };
      nodes.push(svg("rect", {
        class: `f${shadeOf(span.name)}`, x: left.toFixed(2), y, height: ROW - 1, rx: 1,
        width: Math.max(0.5, size - 0.5).toFixed(2), cursor: "zoom-in",
        onclick: () => view.change(window_),
      }, svg("title", {}, visible(title))));
      const label = visible(span.name.replace(/^aten::/, "")).slice(0, (size - 4) / LETTER);
      if (label.length > 1) {
        nodes.push(svg("text", { class: "inner", x: left + 3, y: y + 9.5 }, label));
      }
    }
    top += (Math.max(...spans.map((span) => span.depth)) + 1) * ROW + 6;
  }
  const left_out = lengths.length - lengths.filter((each) => each > least).length;
  return [svg("svg", { id: "flames", width, height: top, role: "img", "aria-label": "trace" },
    ...nodes), left_out];
}

// The highest points of a curve of memory, in MiB by ms.
function memoryChart(device, points, begin) {
  const every = Math.ceil(points.length / 1000);
  const kept = points.filter((_, index) => index % every === 0).map((_, index) =>
    points.slice(index * every, (index + 1) * every).reduce((a, b) => a[1] > b[1] ? a : b));
  const values = kept.map(([, bytes]) => bytes / 2 ** 20);
  return chart(`${device}: at most ${number(Math.max(...values))} MiB, by ms`, [{
    shade: 2, steps: kept.map(([time]) => (time - begin) / 1e3), values,
  }]);
}

export const profileLinks = (view, files) => files.filter(([, file]) => file.endsWith(".json.gz")).map(
  ([step, file]) => link("timeline", { run: view.run, step, profile: file },
    ` ${visible(file.slice(0, -8))}`));

export async function profile(view, files) {
  const { run, query } = view;
  const step = Number(query.step), file = query.profile;
  const rank = file.replace(".json.gz", "");
  const snapshot = files.find((each) => each[0] === step && each[1] === `${rank}.pickle`);
  const back = link("timeline", { run, step }, `‹ timeline of step ${step}`);
  if (EXPORTED) return [back, note("this file has no profiles; serve the run folder for them")];
  const trace = await readTrace(run, step, file);
  const from = trace.begin + (Number(query.from) || 0);
  const until = query.until ? trace.begin + Number(query.until) : trace.end;
  const [picture, left_out] = flames(trace, from, until, view);
  const rows = operators(trace.threads);
  const sum = rows.reduce((all, row) => all + row.own, 0) || 1;
  return [
    el("div", { class: "bar" }, back, el("b", {}, visible(rank)),
      query.until && el("button",
        { onclick: () => view.change({ from: null, until: null }) }, "whole step"),
      el("span", { class: "grow" }),
      el("a", { href: address(run, step, file), download: `step-${step}-${file}` },
        "trace, for ui.perfetto.dev"),
      snapshot && el("a", { href: address(run, step, snapshot[1]), download: snapshot[1] },
        "memory snapshot, for pytorch.org/memory_viz")),
    left_out ? note(`${number(left_out)} shorter spans are left out; a click shows a part`) : null,
    el("div", { class: "panel pad wide" }, picture),
    trace.memory.size ? el("h2", {}, "Memory that was allocated since the begin") : null,
    el("div", { class: "charts" }, ...[...trace.memory].map(([device, points]) =>
      memoryChart(device, points, trace.begin))),
    el("h2", {}, `Operators by their own time: ${seconds(sum / 1e6)}`),
    el("div", { class: "panel wide", id: "operators" }, table([
      { name: "operator", show: (row) => visible(row.name) },
      { name: "on", show: (row) => row.device ? "GPU" : "CPU" },
      { name: "calls", n: true, show: (row) => number(row.count) },
      { name: "own time", n: true, show: (row) => seconds(row.own / 1e6) },
      { name: "share", n: true, show: (row) => `${(row.own / sum * 100).toFixed(1)} %` },
      { name: "with calls within", n: true, show: (row) => seconds(row.total / 1e6) },
    ], rows.slice(0, OPERATORS))),
  ];
}

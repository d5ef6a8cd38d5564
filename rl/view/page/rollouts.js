// The rollouts of a step: a table to filter and sort, a scatter, and groups of one prompt.

import { choice, el, get, link, note, number, oneLine, svg, table } from "./base.js";
import { range, scatter } from "./charts.js";
import { tile } from "./overview.js";

export const MOST_ROWS = 400;
const COLUMNS = [
  ["reward", "reward"], ["length", "length", "sampled tokens"],
  ["turns", "seqs", "sequences of tokens"],
  ["advantage", "advantage", "mean of the sampled tokens"],
  ["staleness", "stale", "mean of the sampled tokens, in optimizer steps"],
  ["gap", "gap", "largest difference of the trainer's and the generator's log-prob"],
  ["entropy", "entropy", "mean of the sampled tokens"],
  ["logprob", "log-prob", "mean of the sampled tokens"],
];
const TESTS = {
  ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
  "=": (a, b) => a === b,
};

// "reward>=1 stop=length words": every word must hold.
export function fits(row, filter) {
  return filter.split(/\s+/).filter(Boolean).every((word) => {
    const parts = word.match(/^(\w+)(>=|<=|>|<|=)(.*)$/);
    const name = parts && { stop: "stop_reason", prompt: "prompt_id" }[parts[1]];
    const value = parts && row[name || parts[1]];
    if (value === undefined || value === null) {
      const text = `${row.prompt || ""}\n${row.text || ""}\n${row.stop_reason ?? ""}\n${row.task}`;
      return text.toLowerCase().includes(word.toLowerCase());
    }
    if (typeof value === "number") return TESTS[parts[2]](value, Number(parts[3]));
    return String(value).includes(parts[3]);
  });
}

export function stepBar(view, page, step, ...others) {
  const steps = view.state.rollout_steps;
  const at = steps.indexOf(step);
  const to = (index) => () => steps[index] && view.change({ step: steps[index], index: null });
  const shown = steps.slice(Math.max(0, at - 500), at + 500);
  return el("div", { class: "bar" },
    el("button", { onclick: to(at - 1), title: "earlier step", disabled: at <= 0 }, "‹"),
    choice("step", shown, step, (value) => view.change({ step: value })),
    el("button", { onclick: to(at + 1), title: "later step",
      disabled: at >= steps.length - 1 }, "›"),
    ...others);
}

export async function tableOf(view) {
  const steps = view.state.rollout_steps;
  const step = Number(view.query.step) || steps.at(-1);
  if (!steps.length) return { nothing: [note("no rollouts are recorded in rollouts/")] };
  if (!steps.includes(step)) {
    return { step, nothing: [stepBar(view, view.page, step),
      note(`the rollouts of step ${step} are not recorded; choose another step`)] };
  }
  const data = await get("table", { run: view.run, step });
  if (data.error) {
    return { step, nothing: [stepBar(view, view.page, step), note(data.error, "bad")] };
  }
  data.rows.forEach((row, index) => { row.index = index; });
  return { step, data };
}

export function sorted(rows, sort) {
  const down = sort.startsWith("-");
  const name = sort.replace("-", "");
  if (!name) return rows;
  const value = (row) => row[name] ?? -Infinity;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return (x < y ? -1 : x > y ? 1 : a.index - b.index) * (down ? -1 : 1);
  });
}

export async function rollouts(view) {
  const { step, data, nothing } = await tableOf(view);
  if (nothing) return nothing;
  const { query } = view;
  const sort = query.sort || "";
  const filter = query.filter || "";
  const rows = sorted(data.rows.filter((row) => fits(row, filter)), sort);
  const shown = rows.slice(0, MOST_ROWS);
  const open = (row) => view.go("rollout", { run: view.run, step, index: row.index });
  const known = COLUMNS.filter(([key]) => data.rows.some((row) => row[key] != null)
    && (key !== "turns" || data.rows.some((row) => row.turns > 1)));
  const column = ([key, name, title], show = (row) => number(row[key]), n = true) => ({
    name, title, n, show, kind: n ? "n" : "text",
    sorted: sort === key ? 1 : sort === `-${key}` ? -1 : 0,
    sort: () => view.change({ sort: sort === `-${key}` ? key : `-${key}` }),
  });
  const text = (key) => (row) => oneLine(row[key] || "");
  const list = table([
    { ...column(["prompt_id", "prompt"]), show: (row) => `${row.prompt_id}·${row.sample ?? ""}` },
    ...known.map((each) => column(each)),
    column(["stop_reason", "stop"], text("stop_reason"), false),
    { name: "prompt", kind: "text", show: text("prompt") },
    { name: "text", kind: "text", show: text("text") },
  ], shown, { row: (row) => ({ class: "link", onclick: () => open(row) }) });
  view.select([...list.querySelectorAll("tbody tr")]);
  const axis = (name, fallback) => query[name] || fallback;
  const [xKey, yKey] = [axis("x", "length"), axis("y", "reward")];
  const points = rows.map((row) => ({
    x: row[xKey], y: row[yKey], open: () => open(row),
    title: `${row.prompt_id}·${row.sample}: `
      + `${yKey} ${number(row[yKey])}, ${xKey} ${number(row[xKey])}`,
  }));
  const keys = known.map(([key, name]) => [key, name]);
  const hidden = rows.length - shown.length + (data.left_out || 0);
  return [
    stepBar(view, "rollouts", step,
      el("input", { id: "filter", size: 40, value: filter,
        placeholder: "filter: reward>0 stop=length word  /",
        onchange: (event) => view.change({ filter: event.target.value }) }),
      el("span", { class: "dim" }, `${number(rows.length)} of ${number(data.rows.length)} rollouts`,
        data.version != null ? `, trained at version ${data.version}` : ""),
      el("span", { class: "grow" }),
      link("groups", { run: view.run, step }, "groups"),
      link("timeline", { run: view.run, step }, "timeline")),
    el("div", { class: "side" },
      el("div", { class: "panel wide" }, list,
        hidden > 0
          ? el("p", { class: "pad dim" }, `${number(hidden)} more are not shown; filter`) : null),
      el("div", { class: "panel pad stick" }, scatter(points, xKey, yKey),
        el("div", { class: "bar" },
          choice("x", keys, xKey, (value) => view.change({ x: value })),
          choice("y", keys, yKey, (value) => view.change({ y: value }))))),
  ];
}

function groupsOf(rows) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row.prompt_id)) found.set(row.prompt_id, []);
    found.get(row.prompt_id).push(row);
  }
  return [...found.entries()].map(([id, own], index) => {
    const rewards = own.map((row) => row.reward ?? 0);
    const mean = rewards.reduce((a, b) => a + b, 0) / own.length;
    const spread = Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / own.length);
    const length = own.reduce((a, row) => a + (row.length || 0), 0) / own.length;
    return { id, own, mean, spread, length, index, count: own.length, prompt: own[0].prompt,
      min: Math.min(...rewards), max: Math.max(...rewards) };
  });
}

function dots(group, low, high) {
  const x = (value) => 6 + (value - low) / (high - low || 1) * 148;
  return svg("svg", { width: 160, height: 14 },
    svg("line", { class: "grid", x1: 6, x2: 154, y1: 7, y2: 7 }),
    ...group.own.map((row) =>
      svg("circle", { class: "f0", cx: x(row.reward ?? 0), cy: 7, r: 4, opacity: 0.4 })));
}

export async function groups(view) {
  const { step, data, nothing } = await tableOf(view);
  if (nothing) return nothing;
  const { query } = view;
  const all = groupsOf(data.rows);
  const flat = all.filter((group) => group.max === group.min);
  const only = query.only === "flat";
  const sort = query.sort || "-spread";
  const rows = sorted(only ? flat : all, sort).slice(0, MOST_ROWS);
  const [low, high] = range(data.rows.map((row) => row.reward));
  const column = (key, name, title) => ({
    name, title, n: true, show: (row) => number(row[key]),
    sorted: sort === key ? 1 : sort === `-${key}` ? -1 : 0,
    sort: () => view.change({ sort: sort === `-${key}` ? key : `-${key}` }),
  });
  const open = (row) =>
    view.go("rollouts", { run: view.run, step, filter: `prompt_id=${row.id}` });
  const list = table([
    column("id", "prompt"), column("count", "rollouts"), column("mean", "mean"),
    column("spread", "std", "standard deviation of the rewards"),
    column("min", "least"), column("max", "greatest"), column("length", "length", "mean"),
    { name: `rewards, ${number(low)} to ${number(high)}`, show: (row) => dots(row, low, high) },
    { name: "prompt", kind: "text", show: (row) => oneLine(row.prompt || "") },
  ], rows, { row: (row) => ({ class: "link", onclick: () => open(row) }) });
  view.select([...list.querySelectorAll("tbody tr")]);
  const share = all.length ? flat.length / all.length : 0;
  const mean = all.reduce((sum, group) => sum + group.mean, 0) / (all.length || 1);
  return [
    stepBar(view, "groups", step,
      el("label", {}, el("input", { type: "checkbox", checked: only,
        onchange: (event) => view.change({ only: event.target.checked ? "flat" : null }) }),
      " equal rewards only")),
    el("div", { class: "tiles" },
      tile("groups", number(all.length)), tile("mean reward", number(mean)),
      tile("groups of equal rewards", `${flat.length} (${(share * 100).toFixed(0)} %)`,
        share > 0.5 ? "warn" : ""),
      tile("of these at the top", number(flat.filter((group) => group.max === high).length)),
      tile("of these at the bottom", number(flat.filter((group) => group.max === low).length))),
    el("div", { class: "panel wide" }, list),
  ];
}

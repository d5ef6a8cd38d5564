// Where the run stands, its curves, and what it warned of.

import { choice, clock, el, get, note, number, seconds, table, visible } from "./base.js";
import { chart, SHADES } from "./charts.js";

const FIRST = [
  "reward/mean", "eval/exact_match", "loss/mean", "entropy/mean", "trainer/grad_norm",
  "kl/behaviour", "completion/length_mean", "reward/zero_std_groups", "rollout/staleness_mean",
  "logprob/error_max", "timing/step", "tokens_per_s", "eval/loss", "rewards/margin",
  "rewards/accuracy", "tokens/trained", "memory/peak",
];
const MOST_CHARTS = 12;

export function tile(name, value, kind = "") {
  return el("div", { class: "tile" }, el("b", { class: kind, title: value }, value),
    el("span", {}, name));
}

function tiles(state) {
  const last = state.last;
  const total = state.steps ? ` / ${number(state.steps)}` : "";
  const found = [tile("steps", `${number(state.step)}${total}`)];
  const facts = [
    ["reward", "reward/mean", number], ["loss", "loss/mean", number],
    ["policy version", "policy_version", number], ["a step", "timing/step", seconds],
    ["tokens/s", "tokens_per_s", number], ["peak memory, GiB", "memory/peak", number],
  ];
  for (const [name, key, show] of facts) {
    if (last[key] != null) found.push(tile(name, show(last[key])));
  }
  if (state.begin) found.push(tile("since the start", seconds(state.time - state.begin)));
  if (state.starts.length > 1) found.push(tile("attempts", number(state.starts.length)));
  if (state.status === "running" && state.steps && last["timing/step"]) {
    found.push(tile("left, about", seconds((state.steps - state.step) * last["timing/step"])));
  }
  return el("div", { class: "tiles" }, ...found);
}

export function happened(events) {
  const rows = [...events].reverse();
  if (!rows.length) return el("div", { class: "panel pad dim" }, "none");
  const bad = ["failed", "lost", "warning"];
  return el("div", { class: "panel scroll" }, table([
    { name: "time", show: (row) => clock(row.time) },
    { name: "", show: (row) =>
      el("span", { class: bad.includes(row.kind) ? "warn" : "dim" }, visible(String(row.kind))) },
    { name: "process", show: (row) => visible(row.process || "") },
    { name: "text", kind: "value", show: (row) => visible(told(row)) },
  ], rows));
}

const hidden = (view) => (view.query.hide || "").split(",").filter(Boolean);

// The runs by colour; a click hides a run or shows it again.
export function legend(view) {
  if (view.runs.length < 2) return [];
  return view.runs.map((run, index) => {
    const off = hidden(view).includes(String(index));
    const others = hidden(view).filter((each) => each !== String(index));
    const hide = (off ? others : [...others, index]).join(",") || null;
    return el("button", {
      class: off ? "legend dim" : `legend t${index % SHADES}`, "aria-pressed": String(!off),
      title: off ? "show this run" : "hide this run", onclick: () => view.change({ hide }),
    }, off ? "○ " : "● ", visible(run.name));
  });
}

// A function from a name to the curves of the runs that are shown.
export function seriesOf(view, answers) {
  return (name) => answers.map((each, run) => {
    const [steps, values] = each.curves?.[name] || [[], []];
    return { shade: run % SHADES, run, name: view.runs[run].name, steps, values };
  }).filter((each) => !hidden(view).includes(String(each.run)));
}

function told(event) {
  if (event.text) return String(event.text).slice(0, 2000);
  if (event.kind === "started") {
    return `after step ${event.step}, on ${event.host}, process ${event.pid}`;
  }
  return event.step != null ? `step ${event.step}` : "";
}

function chosenNames(states, filter) {
  const names = [...new Set(states.flatMap((each) => [...each.names, ...each.evaluation_names]))];
  if (filter) {
    const words = filter.toLowerCase().split(/\s+/);
    const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
    return [names.filter(fits).slice(0, 24), names.length];
  }
  return [FIRST.filter((name) => names.includes(name)).slice(0, MOST_CHARTS), names.length];
}

async function curvesOf(view, names) {
  const query = { names: names.join(","), points: 600 };
  const answers = await Promise.all(view.runs.map((_, run) => get("curves", { run, ...query })));
  return seriesOf(view, answers);
}

export async function overview(view) {
  const { query } = view;
  const states = await Promise.all(view.runs.map((_, run) =>
    run === view.run ? view.state : get("state", { run })));
  const [names, all] = chosenNames(states, query.filter);
  const series = await curvesOf(view, names);
  const share = Number(query.smooth || 0);
  const open = (step) => view.go("timeline", { run: view.run, step });
  const filter = el("input", {
    id: "filter", placeholder: `find among ${all} metrics  /`, value: query.filter || "", size: 32,
    onchange: (event) => view.change({ filter: event.target.value }),
  });
  const state = view.state;
  return [
    tiles(state),
    state.status_text ? el("p", { class: state.status === "failed" ? "bad" : "dim" },
      visible(state.status_text)) : null,
    el("div", { class: "bar" }, filter,
      choice("smooth", [[0, "no"], [0.6, "0.6"], [0.9, "0.9"], [0.98, "0.98"]], share,
        (value) => view.change({ smooth: value === "0" ? null : value })),
      ...legend(view), el("span", { class: "grow" }),
      el("span", { class: "dim" }, visible(state.folder))),
    names.length ? el("div", { class: "charts" },
      ...names.map((name) => chart(name, series(name), share, open)))
      : note(query.filter ? "no metric has this name" : "no metrics yet"),
    el("div", { class: "two" },
      el("div", {}, el("h2", {}, "Warnings"), happened(state.warnings)),
      el("div", {}, el("h2", {}, "Events"), happened(state.events))),
  ];
}

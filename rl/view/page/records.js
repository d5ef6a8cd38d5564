// Evaluations, failures and configs.

import { choice, el, get, note, number, table, visible } from "./base.js";
import { chart } from "./charts.js";
import { happened, legend, seriesOf } from "./overview.js";
import { example, examples } from "./examples.js";

export async function evaluation(view) {
  if (view.query.example != null) return example(view);
  const answers = await Promise.all(view.runs.map((_, run) => get("evaluations", { run })));
  const names = [...new Set(answers.flatMap((each) => Object.keys(each.curves || {})))].sort();
  if (!names.length && !view.state.evaluation_steps.length) {
    return [note("no evaluations are recorded in evaluations.jsonl or summary.json")];
  }
  const fitting = names.filter((name) => name.includes(view.query.filter || ""));
  const series = seriesOf(view, answers);
  const rows = fitting.flatMap((name) => series(name).filter((each) => each.steps.length)
    .map((each) => ({ ...each, metric: name })));
  const value = (pick) => (row) => number(pick(row.values.filter((each) => each != null)));
  return [
    el("div", { class: "bar" }, el("input", { id: "filter", size: 32,
      value: view.query.filter || "", placeholder: "find a metric or task  /",
      onchange: (event) => view.change({ filter: event.target.value }) }),
    ...legend(view)),
    el("div", { class: "charts" },
      ...fitting.filter((name) => name !== "eval/prompts").slice(0, 24)
        .map((name) => chart(name, series(name), 0))),
    ...await examples(view),
    el("h2", {}, "All numbers"),
    el("div", { class: "panel wide" }, table([
      { name: "metric", show: (row) => visible(row.metric) },
      ...view.runs.length > 1 ? [{ name: "run", show: (row) =>
        el("span", { class: `t${row.shade}` }, visible(row.name)) }] : [],
      { name: "evaluations", n: true, show: (row) => number(row.steps.length) },
      { name: "last step", n: true, show: (row) => number(row.steps.at(-1)) },
      { name: "first", n: true, show: value((values) => values[0]) },
      { name: "least", n: true, show: value((values) => Math.min(...values)) },
      { name: "greatest", n: true, show: value((values) => Math.max(...values)) },
      { name: "last", n: true, show: value((values) => values.at(-1)) },
    ], rows)),
  ];
}

function fields(content, without) {
  const rows = Object.entries(content || {}).filter(([name]) => !without.includes(name));
  return el("div", { class: "panel" }, table([
    { name: "name", show: (row) => visible(row[0]) },
    { name: "value", kind: "value", show: (row) => visible(
      typeof row[1] === "string" ? row[1] : JSON.stringify(row[1]) ?? "") },
  ], rows));
}

export async function failure(view) {
  const data = await get("failure", { run: view.run });
  if (data.error) return [note(data.error, "warn")];
  const cause = data.failure;
  const found = [];
  if (cause) {
    found.push(el("h2", { class: "bad" }, "First cause"),
      el("div", { class: "panel" }, el("pre", { id: "cause" }, visible(String(cause.error ?? "")))),
      fields(cause, ["error", "detail", "traceback", "command", "advice"]));
    const advice = Array.isArray(cause.advice) ? cause.advice.map(String) : [];
    if (advice.length) {
      found.push(el("h2", {}, "What to do"), el("div", { class: "panel" },
        el("ol", { id: "advice" }, ...advice.map((each) => el("li", {}, visible(each))))));
    } else if (cause.command) {
      found.push(el("h2", {}, "What to do"), note("Fix the cause, then resume with:"),
        el("div", { class: "panel" }, el("pre", {}, visible(String(cause.command)))));
    }
    for (const name of ["detail", "traceback"]) {
      if (cause[name] && cause[name] !== cause.error) {
        found.push(el("h2", {}, name === "detail" ? "Details" : "Traceback"),
          el("div", { class: "panel" }, el("pre", {}, visible(String(cause[name])))));
      }
    }
  } else {
    found.push(note("failure.json does not exist: no failure is recorded."));
    if (data.summary) found.push(el("h2", {}, "Summary"), fields(data.summary, []));
  }
  found.push(el("h2", {}, "Newest events"), happened(data.events));
  if (data.ledger.length) {
    const names = [...new Set(data.ledger.flatMap(Object.keys))]
      .filter((name) => data.ledger.some((row) => typeof row[name] === "number"));
    found.push(el("h2", {}, "Prompts, newest steps of the ledger"),
      el("div", { class: "panel wide" }, table(
        names.map((name) => ({
          name: visible(name).replaceAll("_", " "), n: true, show: (row) => number(row[name]),
        })),
        [...data.ledger].reverse())));
  }
  if (data.logs.length) {
    found.push(el("h2", {}, "Ends of the logs"), el("div", { class: "panel" },
      ...data.logs.map((log, index) => el("details", { open: index === 0 && Boolean(cause) },
        el("summary", {}, visible(log.name)), el("pre", {}, visible(log.text) || "empty")))));
  }
  return found;
}

export async function config(view) {
  const own = await get("config", { run: view.run });
  const others = view.runs.map((run, index) => [index, visible(run.name)])
    .filter(([index]) => index !== view.run);
  const wanted = (view.query.other ?? (others.length ? others[0][0] : "")).toString().trim();
  const other = wanted === "" ? null : await get("config", { run: wanted });
  const filter = (view.query.filter || "").toLowerCase();
  const only = other && view.query.all !== "1";
  const text = (value) => value === undefined ? "–" : JSON.stringify(value);
  const names = [...new Set([...Object.keys(own.fields), ...Object.keys(other?.fields || {})])];
  const rows = names
    .map((name) => ({ name, a: text(own.fields[name]), b: text(other?.fields[name]) }))
    .filter((row) => `${row.name} ${row.a}`.toLowerCase().includes(filter))
    .filter((row) => !only || row.a !== row.b);
  const shown = (key) => (row) => visible(row[key]);
  const controls = others.length ? [
    choice("against", [...others, ["", "none"]], wanted,
      (value) => view.change({ other: value || " " })),
    el("label", {}, el("input", { type: "checkbox", checked: only,
      onchange: (event) => view.change({ all: event.target.checked ? null : "1" }) }),
    " differences only"),
  ] : [];
  return [
    el("div", { class: "bar" },
      el("input", { id: "filter", size: 32, value: view.query.filter || "",
        placeholder: "find a field  /",
        onchange: (event) => view.change({ filter: event.target.value }) }),
      ...controls, el("span", { class: "dim" }, `${rows.length} of ${names.length} fields`)),
    own.command ? el("div", { class: "panel" }, el("pre", {}, visible(own.command))) : null,
    el("h2", {}, visible(own.name)),
    el("div", { class: "panel" }, table([
      { name: "field", show: shown("name") },
      { name: other ? visible(view.runs[view.run].name) : "value", kind: "value",
        show: shown("a") },
      ...other ? [{ name: visible(view.runs[Number(wanted)]?.name || ""), kind: "value",
        show: shown("b") }] : [],
    ], rows, { row: (row) => ({ class: other && row.a !== row.b ? "differs" : "" }) })),
  ];
}

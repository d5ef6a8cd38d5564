// Examples whose result changed between two evaluations.

import { choice, el, get, note, number, oneLine, table, visible } from "./base.js";
import { fits, MOST_ROWS, sorted } from "./rollouts.js";
import { conversation, fact, facts } from "./rollout.js";

const EXAMPLE_SORTS = ["change", "before", "after", "prompt_id"];

// The two evaluations that are compared: by default the last two.
function pairOf(view) {
  const steps = view.state.evaluation_steps;
  const known = (value) => steps.includes(Number(value)) ? Number(value) : null;
  const after = known(view.query.after) ?? steps.at(-1);
  const given = known(view.query.before);
  const before = given !== null && given !== after ? given
    : steps[steps.indexOf(after) - 1] ?? steps[1];
  return { steps, before, after };
}

async function examplesOf(view) {
  const { steps, before, after } = pairOf(view);
  if (steps.length < 2) return null;
  const data = await get("changes", { run: view.run, before, after });
  if (data.error) return { before, after, steps, data, rows: [], all: [] };
  const kinds = [...new Set(data.tasks.map((row) => row.kind))];
  const kind = kinds.includes(view.query.kind) || view.query.kind === "all"
    ? view.query.kind : kinds[0];
  const all = data.rows.filter((row) => kind === "all" || row.kind === kind);
  all.forEach((row, index) => {
    row.index = index;
    row.text = `${row.answer}\n${row.text_before}\n${row.text_after}`;
    row.stop_reason = row.change < 0 ? "worse" : "better";
  });
  const given = (view.query.sort || "").replace("-", "");
  const sort = EXAMPLE_SORTS.includes(given) ? view.query.sort : "change";
  const rows = sorted(all.filter((row) => fits(row, view.query.examples || "")), sort);
  return { before, after, steps, data, kinds, kind, all, rows, sort };
}

function examplesBar(view, found, ...others) {
  const { steps, before, after } = found;
  const to = (by) => () => {
    const step = steps[steps.indexOf(after) + by];
    if (step && (by > 0 || step > steps[0])) {
      view.change({ after: step, before: null, example: null });
    }
  };
  view.byStep = (by) => to(by)();
  return el("div", { class: "bar" },
    el("button", { onclick: to(-1), title: "earlier evaluation ([)",
      disabled: steps.indexOf(after) <= 1 }, "‹"),
    choice("before: step", steps.filter((step) => step !== after), before,
      (value) => view.change({ before: value, example: null })),
    choice("after: step", steps, after,
      (value) => view.change({ after: value, example: null })),
    el("button", { onclick: to(1), title: "later evaluation (])",
      disabled: after === steps.at(-1) }, "›"),
    ...others);
}

const signed = (value) => el("span", { class: value < 0 ? "bad" : "good" },
  `${value > 0 ? "+" : ""}${number(value)}`);

function byTask(found) {
  const rows = found.data.tasks.filter((row) => found.kind === "all" || row.kind === found.kind);
  const share = (name, kind) => (row) => row[name]
    ? el("span", { class: kind }, number(row[name])) : "0";
  return table([
    { name: "answers", show: (row) => visible(row.kind) },
    { name: "task", show: (row) => visible(row.task) },
    { name: "examples", n: true, show: (row) => number(row.examples) },
    { name: "better", n: true, show: share("better", "good") },
    { name: "worse", n: true, show: share("worse", "bad") },
    { name: `mean reward, step ${found.before}`, n: true, show: (row) => number(row.before) },
    { name: `step ${found.after}`, n: true, show: (row) => number(row.after) },
  ], rows);
}

function exampleList(view, found) {
  const shown = found.rows.slice(0, MOST_ROWS);
  const open = (row) => view.change({
    before: found.before, after: found.after, example: row.index_after });
  const column = (key, name, others) => ({
    name, n: true, show: (row) => number(row[key]),
    sorted: found.sort === key ? 1 : found.sort === `-${key}` ? -1 : 0,
    sort: () => view.change({ sort: found.sort === key ? `-${key}` : key }), ...others,
  });
  const text = (key) => (row) => oneLine(row[key] || "");
  const list = table([
    column("prompt_id", "prompt", { show: (row) => `${row.prompt_id}·${row.sample}` }),
    ...found.kind === "all" ? [{ name: "answers", show: (row) => row.kind }] : [],
    ...found.all.some((row) => row.task)
      ? [{ name: "task", kind: "text", show: text("task") }] : [],
    column("before", "before"), column("after", "after"),
    column("change", "change", { show: (row) => signed(row.change) }),
    { name: "prompt", kind: "text", show: text("prompt") },
    { name: "expected", kind: "text", show: text("answer") },
    { name: `answer of step ${found.before}`, kind: "text", show: text("text_before") },
    { name: `answer of step ${found.after}`, kind: "text", show: text("text_after") },
  ], shown, { row: (row) => ({ class: "link", onclick: () => open(row) }) });
  list.id = "changed";
  view.select([...list.querySelectorAll("tbody tr")]);
  const hidden = found.rows.length - shown.length + (found.data.left_out || 0);
  return el("div", { class: "panel wide" }, list,
    hidden > 0 ? el("p", { class: "pad dim" }, `${number(hidden)} more are not shown; filter`)
      : null);
}

// The section of the evaluation page.
export async function examples(view) {
  const title = el("h2", {}, "Examples that changed");
  const found = await examplesOf(view);
  if (!found) {
    return [title, note("two evaluations with recorded rollouts are needed in evaluations/")];
  }
  if (found.data.error) return [title, examplesBar(view, found), note(found.data.error, "bad")];
  const { kinds, kind, rows, all, data } = found;
  const kindChoice = kinds.length > 1
    ? choice("answers", [...kinds, "all"], kind, (value) => view.change({ kind: value })) : null;
  return [
    title,
    examplesBar(view, found, kindChoice,
      el("input", { id: "examples", size: 40, value: view.query.examples || "",
        placeholder: "filter: worse change<0 task=name word  /",
        onchange: (event) => view.change({ examples: event.target.value }) }),
      el("span", { class: "dim" }, `${number(rows.length)} of ${number(all.length)} changed`)),
    el("div", { class: "panel wide" }, byTask(found)),
    data.in_one ? note(`${number(data.in_one)} rollouts are in one of the evaluations alone`)
      : null,
    data.not_compared ? note(`${number(data.not_compared)} rollouts are not compared`) : null,
    rows.length ? exampleList(view, found)
      : note(all.length ? "no example fits the filter" : "no example changed its result"),
  ];
}

function metricsOf(data) {
  const value = (each) => Array.isArray(each) ? each[0] : each;
  const rows = Object.entries(data.metrics).map(([name, each]) => [name, value(each)]);
  return new Map([["reward", data.reward], ["stop", data.stop_reason],
    ["sampled tokens", data.sequences.flatMap((each) => each.sampled).filter(Boolean).length],
    ...rows]);
}

// One example: both answers in full.
export async function example(view) {
  const found = await examplesOf(view);
  const all = () => view.change({ example: null });
  const back = el("button", { onclick: all, title: "all examples" }, "all examples");
  const at = (found?.rows || []).findIndex(
    (row) => row.index_after === Number(view.query.example));
  if (at < 0) return [el("div", { class: "bar" }, back), note("this example did not change")];
  const row = found.rows[at];
  const move = (by) => () => found.rows[at + by]
    && view.change({ example: found.rows[at + by].index_after });
  view.rows = { next: move(1), previous: move(-1) };
  const [before, after] = await Promise.all(["before", "after"].map((side) =>
    get("example", { run: view.run, step: found[side], index: row[`index_${side}`] })));
  const bar = examplesBar(view, found, el("button", { onclick: move(-1), title: "previous (k)" },
    "‹"), el("span", {}, `example ${at + 1} of ${found.rows.length}`),
  el("button", { onclick: move(1), title: "next (j)" }, "›"), back);
  const error = before.error || after.error;
  if (error) return [bar, note(error, "bad")];
  const values = [metricsOf(before), metricsOf(after)];
  const names = [...new Set(values.flatMap((each) => [...each.keys()]))];
  const side = (data, step, id) => el("div", {}, el("h2", {}, `After step ${step}`),
    ...data.cut.map((each) => note(`cut: ${each}`, "warn")), conversation(data, id));
  return [
    bar,
    el("div", { class: "side" },
      el("div", { class: "two" }, side(before, found.before, "before"),
        side(after, found.after, "after")),
      el("div", { class: "stick" },
        el("div", { class: "panel" }, facts([
          ["prompt", row.prompt_id], ["sample", row.sample], ["answers", row.kind],
          ["task", row.task], ["change", signed(row.change)], ["expected", after.answer]])),
        el("div", { class: "panel wide" }, table([
          { name: "after step", show: (name) => visible(name) },
          { name: found.before, n: true, show: (name) => fact(values[0].get(name)) },
          { name: found.after, n: true, show: (name) => fact(values[1].get(name)) },
        ], names)))),
  ];
}

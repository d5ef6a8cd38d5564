// Routes, keys and refreshes. A hash is a deep link: #/page?run=0&step=3

import { el, EXPORTED, get, hash, note, remembered, table, visible } from "./base.js";
import { overview } from "./overview.js";
import { timeline } from "./timeline.js";
import { groups, rollouts } from "./rollouts.js";
import { rollout } from "./rollout.js";
import { experts } from "./experts.js";
import { config, evaluation, failure } from "./records.js";

const PAGES = {
  overview, timeline, rollouts, rollout, groups, evaluation, failure, config, experts,
};
const REFRESH_MS = 2500;
const FOLLOWS = ["overview", "evaluation", "failure", "experts"];
const FILTERS = ["examples", "filter"];
const main = document.getElementById("main");
let runs = [];
let drawing_ = 0;
let seen = "";
let current = null;

function parsed() {
  const [page, rest] = location.hash.replace(/^#\/?/, "").split("?");
  const query = Object.fromEntries(new URLSearchParams(rest || ""));
  const run = Math.min(Math.max(0, Number(query.run) || 0), Math.max(0, runs.length - 1));
  return { page: page in PAGES ? page : "overview", query, run };
}

function viewOf(route, state) {
  return {
    ...route, runs, state, width: main.clientWidth, rows: null, chosen: -1, list: [], byStep: null,
    go: (page, query) => { location.hash = hash(page, query); },
    change(values) { this.go(this.page, { run: this.run, ...this.query, ...values }); },
    select(list) {
      this.list = list;
      const move = (by) => () => this.choose(this.chosen + by);
      this.rows = { next: move(1), previous: move(-1) };
    },
    choose(index) {
      if (!this.list.length) return;
      this.list[this.chosen]?.classList.remove("at");
      this.chosen = Math.min(Math.max(index, 0), this.list.length - 1);
      this.list[this.chosen].classList.add("at");
      this.list[this.chosen].scrollIntoView({ block: "nearest" });
    },
  };
}

const mark = (state) => JSON.stringify([state.rows, state.status, state.warnings.length,
  state.events.length, state.rollout_steps.at(-1), state.evaluation_steps.at(-1)]);

async function draw() {
  const turn_ = ++drawing_;
  const address = location.hash;
  const route = parsed();
  let nodes;
  let view = null;
  try {
    const state = await get("state", { run: route.run });
    if (state.error) throw new Error(state.error);
    view = viewOf(route, state);
    nodes = await PAGES[route.page](view);
    seen = mark(state);
  } catch (error) {
    nodes = [note(`this page failed: ${error.message}`, "bad")];
    console.error(error);
  }
  if (turn_ !== drawing_) return; // another page was opened meanwhile
  current = view;
  const typed = typing() ? document.activeElement.id : null;
  main.replaceChildren(...nodes.filter(Boolean));
  if (typed) focusFilter(typed);
  if (view) head(view);
  document.title = `${route.page} · ${runs[route.run]?.name || ""} · Tiller`;
  document.body.dataset.drawn = `${route.page} ${turn_}`;
  document.body.dataset.address = address;
}

function head(view) {
  const status = document.getElementById("status");
  status.replaceChildren(el("span", { class: `badge ${view.state.status}` }, view.state.status));
  const routed = view.state.names.some((each) => each.startsWith("experts/"));
  document.getElementById("nav").replaceChildren(...Object.keys(PAGES).map((page, index) => {
    if (page === "experts" && !routed && page !== view.page) return "";
    const ofStep = ["timeline", "rollouts", "rollout", "groups"].includes(page);
    const step = ofStep ? view.query.step : null;
    return el("a", { href: hash(page, { run: view.run, step }), title: `key ${index + 1}`,
      class: page === view.page ? "here" : "" }, page);
  }));
  document.querySelector("nav .here").scrollIntoView({ block: "nearest", inline: "nearest" });
  document.getElementById("run").value = view.run;
}

async function refresh() {
  if (document.hidden || !current || typing()) return;
  if (current.chosen >= 0 || current.query.example != null) return;
  const newest = current.page === "timeline" && !current.query.step;
  const follows = FOLLOWS.includes(current.page) || newest;
  if (!follows || window.getSelection()?.toString()) return;
  const before = drawing_;
  try {
    const state = await get("state", { run: current.run });
    if (before === drawing_ && mark(state) !== seen) await draw();
  } catch {
    document.getElementById("status").replaceChildren(
      el("span", { class: "badge stopped" }, "no answer from the server"));
  }
}

// Whether the focus is in a filter.
const typing = () => FILTERS.includes(document.activeElement?.id);

function focusFilter(id = FILTERS.find((each) => document.getElementById(each))) {
  const input = document.getElementById(id);
  input?.focus();
  input?.setSelectionRange(input.value.length, input.value.length);
}

function theme(name) {
  const dark = name ? name === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", dark);
}

function help() {
  const rows = [["1 – 9", "pages"], ["j  k", "next, previous row, rollout, example or step"],
    ["Enter", "open the row"], ["/", "filter"], ["[  ]", "earlier, later step or evaluation"],
    ["d", "light or dark"], ["Esc", "leave the filter"], ["?", "this list"]];
  const dialog = document.getElementById("help");
  dialog.replaceChildren(el("h2", {}, "Keys"), table([
    { name: "", show: (row) => el("kbd", {}, row[0]) }, { name: "", show: (row) => row[1] },
  ], rows), el("p", { class: "dim" }, "The address of a page is a link to it."));
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

function toggleTheme() {
  const dark = !document.documentElement.classList.contains("dark");
  theme(remembered("theme", dark ? "dark" : "light") || (dark ? "dark" : "light"));
}

function byStep(by) {
  if (current.byStep) {
    current.byStep(by);
    return;
  }
  const steps = current.state.rollout_steps;
  const at = steps.indexOf(Number(current.query.step) || steps.at(-1)) + by;
  if (steps[at] && current.page !== "overview") current.change({ step: steps[at], index: null });
}

document.addEventListener("keydown", (event) => {
  const inField = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape" && inField) event.target.blur();
  if (inField || event.ctrlKey || event.metaKey || event.altKey || !current) return;
  const pages = Object.keys(PAGES);
  const keys = {
    "/": () => { event.preventDefault(); focusFilter(); },
    "?": help, d: toggleTheme,
    j: () => current.rows?.next(), k: () => current.rows?.previous(),
    "[": () => byStep(-1), "]": () => byStep(1),
    Enter: () => event.target.tagName !== "BUTTON" && current.list[current.chosen]?.click(),
  };
  if (event.key in keys) keys[event.key]();
  else if (pages[Number(event.key) - 1]) {
    const { run, step } = { ...current.query, run: current.run };
    current.go(pages[Number(event.key) - 1], { run, step });
  }
});

async function start() {
  theme(remembered("theme"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change",
    () => theme(remembered("theme")));
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("keys").addEventListener("click", help);
  const list = await get("runs");
  runs = list.runs;
  const select = document.getElementById("run");
  select.replaceChildren(...runs.map((run, index) =>
    el("option", { value: index }, visible(run.name))));
  select.addEventListener("change", () =>
    current?.go(current.page, { ...current.query, run: select.value, step: null, index: null,
      before: null, after: null, example: null }));
  if (list.exported) {
    const notice = document.getElementById("notice");
    notice.hidden = false;
    notice.replaceChildren(visible(`A copy, written by --export. ${list.exported.join(". ")}.`));
  }
  window.addEventListener("hashchange", () => { scrollTo(0, 0); draw(); });
  await draw();
  if (!EXPORTED) setInterval(refresh, REFRESH_MS);
}

start();

// One rollout: its conversation, and its tokens coloured by a number.

import { choice, el, get, link, note, number, table, visible } from "./base.js";
import { stepBar, tableOf } from "./rollouts.js";

const LEAST_GAP = 0.1; // of the strongest colour; rounding alone stays pale
const DIVERGING = ["advantages", "advantage"];

export function conversation(data, id = "conversation") {
  const turns = [];
  data.sequences.forEach((sequence, index) => {
    const known = (sequence.turns || []).filter((each) => each.parts);
    if (known.length && data.sequences.length > 1) {
      turns.push(el("div", { class: "pad dim" }, `sequence ${index + 1}`));
    }
    for (const each of known) turns.push(turn(each.sampled, `${each.count} tokens`, each.parts));
  });
  if (!turns.length) {
    turns.push(turn(false, "prompt", [["text", data.prompt || ""]]),
      turn(true, "answer", [["text", data.text || ""]]));
  }
  return el("div", { class: "panel conversation", id }, ...turns);
}

const PARTS = {
  text: (text) => visible(text),
  control: (text) => el("span", { class: "control", title: "control tokens" }, visible(text)),
  tools: (text) => el("details", {}, el("summary", { class: "dim" },
    `schemas of tools · ${number(text.length)} characters`), visible(text)),
};

function turn(sampled, words, parts) {
  return el("div", { class: sampled ? "turn sampled" : "turn" },
    el("small", {}, `${sampled ? "sampled" : "fed"} · ${words}`),
    ...parts.map(([kind, text]) => PARTS[kind](text)));
}

// The numbers that tokens can be coloured by: name → function of a sequence and a place.
function colours(data) {
  const found = new Map();
  const columns = new Set(data.sequences.flatMap((each) => Object.keys(each.columns)));
  const column = (name) => (sequence, at) => sequence.columns[name]?.[at];
  if (columns.has("trainer_logprobs")) {
    found.set("gap", (sequence, at) =>
      Math.abs(sequence.columns.trainer_logprobs[at] - sequence.logprobs[at]));
  }
  found.set("logprob", (sequence, at) => sequence.logprobs[at]);
  found.set("version", (sequence, at) => sequence.versions[at]);
  if (data.version != null) {
    found.set("staleness", (sequence, at) => data.version - sequence.versions[at]);
  }
  for (const name of columns) found.set(name, column(name));
  return found;
}

function paint(value, [low, high], diverges) {
  if (value == null) return "";
  if (diverges) {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const share = Math.min(1, Math.abs(value) / most) * 70;
    const colour = value < 0 ? "var(--c1)" : "var(--c0)";
    return `color-mix(in srgb, ${colour} ${share.toFixed(0)}%, transparent)`;
  }
  const share = high > low ? (value - low) / (high - low) : 0;
  return `color-mix(in srgb, var(--c1) ${(share * 75).toFixed(0)}%, transparent)`;
}

function strip(data, name, show) {
  const value = colours(data).get(name);
  const numbers = data.sequences.flatMap((sequence) =>
    sequence.tokens.map((_, at) => sequence.sampled[at] ? value(sequence, at) : null));
  const given = numbers.filter((each) => each != null);
  const bounds = given.length ? [given.reduce((a, b) => Math.min(a, b)),
    given.reduce((a, b) => Math.max(a, b))] : [0, 1];
  if (name === "gap") {
    bounds[0] = 0;
    bounds[1] = Math.max(bounds[1], LEAST_GAP);
  }
  const diverges = DIVERGING.includes(name);
  if (diverges) {
    bounds[1] = Math.max(Math.abs(bounds[0]), Math.abs(bounds[1]));
    bounds[0] = -bounds[1];
  }
  const scale = el("span", { class: "scale" });
  scale.style.background = diverges
    ? "linear-gradient(90deg, var(--c1), transparent, var(--c0))"
    : "linear-gradient(90deg, transparent, var(--c1))";
  const legend = el("span", { class: "dim" }, number(bounds[0], 3), " ", scale, " ",
    number(bounds[1], 3));
  const boxes = data.sequences.map((sequence, row) => el("div", { class: "strip" },
    ...sequence.tokens.map((id, at) => {
      const text = sequence.texts[at];
      const sampled = sequence.sampled[at];
      const node = el("span", {
        class: `tok ${sampled ? "sampled" : "fed"} ${text == null ? "id" : ""} `
          + (sequence.control[at] ? "control" : ""),
        "data-place": `${row} ${at}`,
      }, text == null ? String(id) : visible(text).replaceAll("\n", "⏎\n") || "∅");
      if (sampled) node.style.background = paint(value(sequence, at), bounds, diverges);
      return node;
    })));
  const onover = (event) => {
    const place = event.target.dataset?.place;
    if (place) show(...place.split(" ").map(Number));
  };
  const panel = el("div", { class: "panel", id: "strip", onmouseover: onover }, ...boxes);
  requestAnimationFrame(() => {  // a long prompt does not hide what was sampled
    const first = panel.querySelector(".sampled");
    if (first) panel.scrollTop = first.offsetTop - panel.offsetTop - 60;
  });
  return [legend, panel];
}

const MOST_CHARS = 400;

export function fact(value) {
  if (value instanceof Node) return value;
  const text = number(value);
  return text.length > MOST_CHARS ? `${text.slice(0, MOST_CHARS)}…` : text;
}

export function facts(rows) {
  return table([
    { name: "", show: (row) => el("span", { class: "dim" }, visible(String(row[0]))) },
    { name: "", kind: "fact", show: (row) => fact(row[1]) },
  ], rows.filter((row) => row[1] != null && row[1] !== ""));
}

function tokenFacts(data, row, at) {
  const sequence = data.sequences[row];
  const rows = [["token", sequence.tokens[at]], ["place", at],
    ["", sequence.sampled[at] ? "sampled" : "fed"]];
  if (sequence.texts[at] != null) rows.push(["text", JSON.stringify(sequence.texts[at])]);
  if (sequence.sampled[at]) {
    for (const [name, value] of colours(data)) rows.push([name, value(sequence, at)]);
  }
  return facts(rows);
}

export async function rollout(view) {
  const { step, data: all, nothing } = await tableOf(view);
  if (nothing) return nothing;
  const index = Math.min(Number(view.query.index) || 0, all.rows.length - 1);
  const data = await get("rollout", { run: view.run, step, index });
  const move = (by) => () => {
    const to = index + by;
    if (to >= 0 && to < all.rows.length) view.change({ step, index: to });
  };
  view.rows = { next: move(1), previous: move(-1) };
  const bar = (...others) => stepBar(view, "rollout", step,
    el("button", { onclick: move(-1), title: "previous rollout (k)" }, "‹"),
    el("span", {}, `rollout ${index + 1} of ${all.rows.length}`),
    el("button", { onclick: move(1), title: "next rollout (j)" }, "›"), ...others);
  if (data.error) return [bar(), note(data.error, "bad")];
  const known = [...colours(data).keys()];
  const colour = known.includes(view.query.colour) ? view.query.colour : known[0];
  const panel = el("div", { class: "panel", id: "token" },
    el("p", { class: "pad dim" }, "Point at a token."));
  const [legend, tokens] = strip(data, colour, (row, at) =>
    panel.replaceChildren(tokenFacts(data, row, at)));
  const group = link("rollouts", { run: view.run, step, filter: `prompt_id=${data.prompt_id}` },
    `prompt ${data.prompt_id}`);
  const row = all.rows[index];
  const about = [["prompt", group], ["sample", data.sample], ["task", data.task],
    ["reward", data.reward], ["stop", data.stop_reason], ["answer", data.answer],
    ["rewards of turns", (data.turn_rewards || []).map((each) => number(each)).join("  ")],
    ["sampled tokens", row.length], ["staleness", row.staleness], ["advantage", row.advantage],
    ["largest gap", row.gap], ["trained at version", data.version]];
  const metrics = Object.entries(data.metrics).map(([name, value]) =>
    [name, Array.isArray(value) ? value[0] : value]);
  return [
    bar(el("span", { class: "grow" }), link("rollouts", { run: view.run, step }, "all rollouts")),
    ...data.cut.map((each) => note(`cut: ${each}`, "warn")),
    el("div", { class: "side" },
      el("div", {}, el("h2", {}, "Conversation"), conversation(data),
        el("h2", {}, "Tokens"),
        el("div", { class: "bar" },
          choice("colour", known, colour, (value) => view.change({ step, index, colour: value })),
          legend, el("span", { class: "dim" }, "grey text is fed; sampled tokens are underlined; "
            + "control tokens have a frame")),
        tokens),
      el("div", { class: "stick" }, el("div", { class: "panel" }, facts([...about, ...metrics])),
        el("h2", {}, "Token"), panel)),
  ];
}

// How tokens are routed: a picture of each number by layer and step.

import { el, get, note, number } from "./base.js";
import { range } from "./charts.js";

const ROUTED = [
  ["experts/load_max", "load of the busiest expert over the mean"],
  ["experts/entropy", "entropy of the router, nats per token"],
  ["experts/differing", "share of recorded tokens that the trainer's router sends elsewhere"],
];
const COLUMNS = 240;
const ASKED = 60; // curves of one request; the server answers no more than 64

export async function experts(view) {
  const found = await Promise.all(ROUTED.map(async ([name, title]) => {
    const layers = await layersOf(view, name);
    return layers.length ? layerPicture(name, title, layers, view) : null;
  }));
  return found.some(Boolean) ? found : [note("no step of this run has numbers about experts")];
}

// The steps and values of each layer, in order.
async function layersOf(view, name) {
  const layer = (each) => Number(each.slice(name.length + 1));
  const names = view.state.names.filter((each) => each.startsWith(`${name}/`))
    .sort((one, other) => layer(one) - layer(other));
  const answers = [];
  for (let at = 0; at < names.length; at += ASKED) {
    const query = { names: names.slice(at, at + ASKED).join(","), points: 600 };
    answers.push(get("curves", { run: view.run, ...query }));
  }
  const curves = Object.assign({}, ...(await Promise.all(answers)).map((each) => each.curves));
  return names.map((each) => curves[each]);
}

function layerPicture(name, title, layers, view) {
  const ends = layers.flatMap(([steps]) => [steps[0], steps.at(-1)]);
  const first = Math.min(...ends), span = Math.max(...ends) - first + 1;
  const width = Math.min(COLUMNS, span);
  const column = (step) => Math.floor((step - first) / span * width);
  const rows = layers.map(([steps, values]) => {
    const cells = Array.from({ length: width }, () => []);
    steps.forEach((step, at) => values[at] != null && cells[column(step)].push(values[at]));
    return cells.map((own) => own.length ? own.reduce((a, b) => a + b) / own.length : null);
  });
  const [low, high] = range(rows.flat());
  const readout = el("span", { class: "dim" }, `layers 0 to ${rows.length - 1} from the top, `,
    `steps ${number(first)} to ${number(first + span - 1)}`);
  const cell = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (place, size, count) =>
      Math.min(count - 1, Math.max(0, Math.floor(place / size * count)));
    return [at(event.clientY - box.top, box.height, rows.length),
      at(event.clientX - box.left, box.width, width)];
  };
  const stepOf = (at) => first + Math.floor(at / width * span);
  const canvas = el("canvas", {
    class: "layers", width, height: rows.length, role: "img", "aria-label": `${name} by layer`,
    onmousemove: (event) => {
      const [row, at] = cell(event);
      readout.replaceChildren(`layer ${row}, step ${stepOf(at)}: ${number(rows[row][at])}`);
    },
    onclick: (event) =>
      view.go("timeline", { run: view.run, step: Math.max(1, stepOf(cell(event)[1])) }),
  });
  canvas.style.height = `${Math.max(90, 5 * rows.length)}px`; // the page allows no style attribute
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--c1");
  rows.forEach((values, row) => values.forEach((value, at) => {
    if (value == null) return;
    pen.globalAlpha = Math.min(1, 0.08 + 0.92 * (value - low) / (high - low));
    pen.fillRect(at, row, 1, 1);
  }));
  const scale = el("span", { class: "scale" });
  scale.style.background = "linear-gradient(90deg, transparent, var(--c1))";
  return el("section", { class: "panel pad" },
    el("div", { class: "bar" }, el("b", {}, name), el("span", { class: "dim" }, title),
      el("span", { class: "grow" }), readout),
    canvas, el("div", { class: "bar dim" }, number(low), scale, number(high)));
}

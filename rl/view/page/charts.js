// Line charts and scatters, drawn as SVG.

import { el, number, svg } from "./base.js";

export const SHADES = 6;
const WIDTH = 400, HEIGHT = 128, LEFT = 46, RIGHT = 14, TOP = 8, BOTTOM = 18;
export const LETTER = 6.4;
const WAITS = ["wait", "starved", "push_wait"];
const SHADE_OF = {
  generate: 5, score: 4, train: 0, forward_backward: 0, optim_step: 2, push: 1, publish: 1, pull: 1,
  check: 3, checkpoint: 3, save: 3, evaluate: 4,
};

// The colour of a span: the number of a shade, or idle.
export function shadeOf(name) {
  if (WAITS.includes(name)) return "idle";
  if (name in SHADE_OF) return SHADE_OF[name];
  let sum = 0;
  for (const letter of name) sum += letter.charCodeAt(0);
  return sum % SHADES;
}

export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / unit) * unit; at <= high + unit * 1e-9; at += unit) {
    found.push(Math.abs(at) < unit * 1e-9 ? 0 : at);
  }
  return found;
}

export function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value != null) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [0, 1];
  if (low === high) {
    const room = Math.abs(low) / 10 || 1;
    return [low - room, high + room];
  }
  return [low, high];
}

function smooth(values, share) {
  let mean = null;
  return values.map((value) => {
    if (value == null) return null;
    mean = mean == null ? value : share * mean + (1 - share) * value;
    return mean;
  });
}

function short(value, digits) {
  const size = Math.abs(value);
  if (size && size < 1e-3) return String(Number(value.toPrecision(digits)).toExponential());
  return value.toLocaleString("en",
    { notation: size >= 1e4 ? "compact" : "standard", maximumSignificantDigits: digits });
}

// Places of ticks, each with a label that tells it from its neighbours.
function labelled(places) {
  const most = Math.max(...places.map(Math.abs));
  const parts = places.length > 1 ? most / (places[1] - places[0]) : 1e5;
  const digits = Math.min(15, Math.max(3, 1 + Math.ceil(Math.log10(parts))));
  return places.map((each) => [each, short(each, digits)]);
}

// The middle of a label that ends before the edge of a picture.
export const inside = (place, text, width) => Math.min(place, width - LETTER / 2 * text.length);

function axes(xs, ys, width, height, steps = false) {
  const spread = (ys[1] - ys[0]) * 0.05;
  const low = ys[0] - spread, high = ys[1] + spread;
  const rows = labelled(ticks(low, high, 3));
  const left = Math.max(LEFT, ...rows.map(([, text]) => 6 + LETTER * text.length));
  const x = (value) => left + (value - xs[0]) / (xs[1] - xs[0]) * (width - left - RIGHT);
  const y = (value) => TOP + (high - value) / (high - low) * (height - TOP - BOTTOM);
  const lines = rows.flatMap(([each, text]) => [
    svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(each), y2: y(each) }),
    svg("text", { x: left - 5, y: y(each) + 3.5, "text-anchor": "end" }, text),
  ]);
  const places = ticks(xs[0], xs[1], 5).filter((each) => !steps || Number.isInteger(each));
  const marks = labelled(places).map(([each, text]) => svg("text",
    { x: inside(x(each), text, width), y: height - 4, "text-anchor": "middle" }, text));
  return { x, y, left, nodes: [...lines, ...marks] };
}

function path(steps, values, x, y) {
  let text = "", open = false;
  steps.forEach((step, index) => {
    const value = values[index];
    if (value == null) open = false;
    else {
      text += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      open = true;
    }
  });
  return text;
}

// series: [{shade, name, steps, values}]; open(step) is called by a click
export function chart(title, series, share, open) {
  const drawn = series.filter((each) => each.steps.length);
  const readout = el("span", {}, ...drawn.map((each) =>
    el("span", { class: `t${each.shade}` }, " ", number(each.values.at(-1)))));
  const box = el("section", { class: "chart panel" },
    el("div", { class: "head" }, el("span", { title }, title), readout));
  const lines = drawn.map((each) => share ? smooth(each.values, share) : each.values);
  const xs = range(drawn.flatMap((each) => [each.steps[0], each.steps.at(-1)]));
  const ys = range(drawn.flatMap((each) => each.values));
  const { x, y, left, nodes } = axes(xs, ys, WIDTH, HEIGHT, true);
  const cursor = svg("line",
    { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const at = (event) => {
    const space = picture.getBoundingClientRect();
    const place = (event.clientX - space.left) / space.width * WIDTH;
    return xs[0] + (place - left) / (WIDTH - left - RIGHT) * (xs[1] - xs[0]);
  };
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    "aria-label": title,
    onmousemove: (event) => {
      const step = at(event);
      const found = drawn.map((each) => nearest(each.steps, step));
      const here = drawn.length ? drawn[0].steps[found[0]] : step;
      cursor.setAttribute("x1", x(here));
      cursor.setAttribute("x2", x(here));
      cursor.setAttribute("visibility", "visible");
      readout.replaceChildren(el("span", { class: "dim" }, `step ${here} `),
        ...drawn.map((each, index) =>
          el("span", { class: `t${each.shade}` }, " ", number(each.values[found[index]]))));
    },
    onclick: (event) => open && open(Math.max(1, Math.round(at(event)))),
  }, ...nodes);
  drawn.forEach((each, index) => {
    const style = `curve s${each.shade}`;
    if (share) {
      const rough = path(each.steps, each.values, x, y);
      picture.append(svg("path", { class: `${style} faint`, d: rough }));
    }
    picture.append(svg("path", { class: style, d: path(each.steps, lines[index], x, y) }));
    if (each.steps.length === 1) {
      const point = { cx: x(each.steps[0]), cy: y(each.values[0]), r: 3, class: `f${each.shade}` };
      picture.append(svg("circle", point));
    }
  });
  picture.append(cursor);
  box.append(picture);
  return box;
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

// points: [{x, y, open, title}]
export function scatter(points, xName, yName) {
  const shown = points.filter((each) => each.x != null && each.y != null).slice(0, 2000);
  const width = 316, height = 220;
  const { x, y, nodes } = axes(range(shown.map((each) => each.x)),
    range(shown.map((each) => each.y)), width, height);
  const dots = shown.map((each) => svg("circle", {
    class: "f0", cx: x(each.x).toFixed(1), cy: y(each.y).toFixed(1), r: 3, opacity: 0.55,
    onclick: each.open, cursor: "pointer",
  }, svg("title", {}, each.title)));
  return svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": `${yName} by ${xName}`,
  }, ...nodes, ...dots);
}

// Draws a curve as large as a word: a line, the area under it, a dot for the last value.

import { drawn, setAttribute } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;
const PAD = 2;

export function spark() {
  const svg = drawn("svg", {
    class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
  });
  svg.append(drawn("path", { class: "area" }), drawn("path", { class: "line" }));
  return svg;
}

/** `values` are oldest first, null where there is none; `slots` fit into the width. */
export function drawSpark(svg, values, slots, write) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(...known, 0);
  const x = (i) => WIDTH - ((values.length - 1 - i) * WIDTH) / (slots - 1);
  const y = (value) => HEIGHT - PAD - (most ? value / most : 0) * (HEIGHT - 2 * PAD);
  let line = "";
  let area = "";
  let from = -1;
  values.forEach((value, i) => {
    if (value === null) return;
    const point = `${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    const isFirst = i === 0 || values[i - 1] === null;
    if (isFirst) from = i;
    line += (isFirst ? "M" : "L") + point;
    area += (isFirst ? `M${x(i).toFixed(1)} ${HEIGHT}L` : "L") + point;
    const isLast = i === values.length - 1 || values[i + 1] === null;
    if (isLast) {
      if (from === i) line += "h.1";
      area += `L${x(i).toFixed(1)} ${HEIGHT}Z`;
    }
  });
  setAttribute(svg.firstChild, "d", line ? area : "");
  setAttribute(svg.lastChild, "d", line);
  const told = known.length
    ? `Last five minutes: between ${write(Math.min(...known))} and ${write(most)}.`
    : "No curve yet.";
  setAttribute(svg, "aria-label", told);
}

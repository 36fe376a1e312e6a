// Sorts and folds the tables, draws the plots, and shows in the contents where the reader is.  Downloads and links need no
// script.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const settings = { displayModeBar: false };

// A legend below its plot must not take the plot's height; how many lines it has depends on the width.
function room(plot, width) {
  const figure = figures[plot.dataset.figure];
  const entry = (figure.layout.legend?.entrywidth || 0) + 44;
  if (entry === 44) return figure.height;
  const shown = figure.data.filter((trace) => trace.showlegend !== false).length;
  return figure.height + 19 * Math.ceil(shown / Math.max(Math.floor((width - 20) / entry), 1));
}

// plotly.js is packed into the page; the policy allows the script that comes out by its hash.
async function unpackPlotly() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

// The names of points, as common/present/labels.py places them: beside their own point, off each other, other points and
// lines; where it is crowded farther away, with a line.  Boxes are [left, top, right, bottom] in pixels.
const directions = [
  [1, 1, -1], [-1, -1, -1], [1, 1, 1], [-1, -1, 1], [0, 0, -1], [0, 0, 1], [1, 1, 0], [-1, -1, 0],
  [1, 0, -1], [-1, 0, -1], [1, 0, 1], [-1, 0, 1],
];
const distances = [0, 10, 20, 32, 46, 62, 80];
const markerSize = 8;
const pen = document.createElement("canvas").getContext("2d");

function shared(one, other) {
  const across = Math.min(one[2], other[2]) - Math.max(one[0], other[0]);
  const down = Math.min(one[3], other[3]) - Math.max(one[1], other[1]);
  return Math.max(across, 0) * Math.max(down, 0);
}

function fromBox([x, y], [left, top, right, bottom]) {
  return Math.hypot(Math.max(left - x, 0, x - right), Math.max(top - y, 0, y - bottom));
}

function fromLine([x, y], [beginX, beginY], [endX, endY]) {
  const along = [endX - beginX, endY - beginY];
  const length = along[0] ** 2 + along[1] ** 2;
  const share = length && Math.min(Math.max(((x - beginX) * along[0] + (y - beginY) * along[1]) / length, 0), 1);
  return Math.hypot(x - beginX - share * along[0], y - beginY - share * along[1]);
}

function meets([beginX, beginY], [endX, endY], box) {
  const steps = [...Array(13).keys()].map((at) => [beginX + (at * (endX - beginX)) / 12, beginY + (at * (endY - beginY)) / 12]);
  return steps.some((step) => fromBox(step, box) === 0);
}

function around([x, y], [otherX, otherY], wide) {
  return [Math.min(x, otherX) - wide, Math.min(y, otherY) - wide, Math.max(x, otherX) + wide, Math.max(y, otherY) + wide];
}

function places(points, sizes, size, lines) {
  const keptFree = lines.flatMap((line) => line.slice(1).map((point, at) => around(line[at], point, 2)));
  const placed = [];
  for (let round = 0; round < 4; round++) {
    points.forEach((point, at) => {
      const [width, height] = sizes[at];
      const others = points.filter((_, other) => other !== at);
      const taken = placed.filter((_, other) => other !== at).map((place) => place.box);
      const boxes = [...taken, ...others.map((other) => around(other, other, markerSize)), ...keptFree];
      let best = { cost: Infinity };
      for (const distance of distances) {
        for (const [half, side, down] of directions) {
          const x = (half * width) / 2 + side * (markerSize + distance);
          const y = down * (height / 2 + markerSize + distance);
          const middle = [point[0] + x, point[1] + y];
          const box = [middle[0] - width / 2, middle[1] - height / 2, middle[0] + width / 2, middle[1] + height / 2];
          const far = distance > 0;
          const met = () =>
            others.filter((other) => fromLine(other, point, middle) < markerSize).length +
            taken.filter((other) => meets(point, middle, other)).length;
          const beside = fromBox(point, box) + 3;
          const wrong = far ? 300 * met() : 2000 * others.filter((other) => fromBox(other, box) < beside).length;
          const hidden = boxes.reduce((sum, other) => sum + shared(box, other), 0);
          const outside = width * height - shared(box, [0, 0, ...size]);
          const cost = hidden + 4 * outside + 5 * distance + wrong;
          if (cost < best.cost) best = { cost, x, y, far, box };
        }
      }
      placed[at] = best;
    });
  }
  return placed;
}

function placeNames(plot) {
  const { names } = figures[plot.dataset.figure];
  if (!names) return;
  const { xaxis, yaxis, font } = plot._fullLayout;
  const pixels = ([x, y]) => [xaxis.d2p(x), yaxis.d2p(y)];
  const scale = (axis, value) => (axis.type === "log" ? Math.log10(value) : value);
  pen.font = `12px ${font.family}`;
  const sizes = names.at.map(([, , name]) => [pen.measureText(name).width + 4, 17]);
  const lines = names.lines.map((line) => line.map(pixels));
  const found = places(names.at.map(pixels), sizes, [xaxis._length, yaxis._length], lines);
  const annotations = found.map((place, at) => {
    const [x, y, name] = names.at[at];
    const beside = { showarrow: false, xshift: place.x, yshift: -place.y };
    const away = { showarrow: true, ax: place.x, ay: place.y, arrowhead: 0, arrowwidth: 1, standoff: markerSize };
    const text = name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
    const where = { x: scale(xaxis, x), y: scale(yaxis, y), xanchor: "center", yanchor: "middle" };
    return { ...where, text, font: { size: 12 }, ...(place.far ? away : beside) };
  });
  Plotly.relayout(plot, { annotations });
}

async function draw() {
  for (const plot of plots) {
    const figure = figures[plot.dataset.figure];
    figure.height = figure.layout.height;
    figure.layout.height = room(plot, plot.clientWidth);
    await Plotly.newPlot(plot, figure.data, figure.layout, settings);
    placeNames(plot);
  }
}

function resize(plot, size) {
  Plotly.relayout(plot, size);
  placeNames(plot);
}

function fit() {
  for (const plot of plots) {
    plot.style.zoom = "";
    resize(plot, { width: null, height: room(plot, plot.clientWidth), autosize: true });
  }
}

// A sheet is narrower than a screen and ends, and is laid out without telling the plots.
const paperWidth = 670;
const paperHeight = 800;
function fitPaper() {
  for (const plot of plots) {
    const width = plot.closest(".smalls") ? Math.floor(paperWidth / 3) - 16 : paperWidth;
    const scale = Math.min(0.8, paperHeight / room(plot, width)); // two a sheet; one of many lanes, whole
    plot.style.zoom = scale;
    resize(plot, { width: width / scale, height: room(plot, width / scale), autosize: false });
  }
}

async function start() {
  if (plots.length) {
    await unpackPlotly();
    await draw();
    addEventListener("resize", fit);
    addEventListener("beforeprint", fitPaper);
    addEventListener("afterprint", fit);
  }
  document.documentElement.dataset.plots = "drawn";
}

// Numbers by size, text by the alphabet, what is not known last in both directions.
function compare(one, other, numeric, sign) {
  if (one === "" || other === "") return (one === "") - (other === "");
  if (!numeric) return sign * one.localeCompare(other, "en", { numeric: true });
  return sign * (Number(one) - Number(other) || 0);
}

function sort(table, heading) {
  const column = [...heading.parentNode.children].indexOf(heading);
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = table.tBodies[0];
  const value = (row) => row.cells[column].dataset.value;
  const numeric = heading.classList.contains("number");
  const rows = [...body.rows].sort((one, other) => compare(value(one), value(other), numeric, ascending ? 1 : -1));
  body.append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const button of table.querySelectorAll("th button")) {
    button.addEventListener("click", () => sort(table, button.closest("th")));
  }
}

// A wide table begins with eight columns.
for (const button of document.querySelectorAll("button.more")) {
  const table = button.parentNode.previousElementSibling.querySelector("table");
  const words = { false: button.dataset.more, true: button.textContent };
  const show = (all) => {
    table.classList.toggle("few", !all);
    button.setAttribute("aria-expanded", all);
    button.textContent = words[all];
  };
  button.addEventListener("click", () => show(table.classList.contains("few")));
  button.hidden = false;
  show(false);
}

// The contents mark the section that is read: the last one that began above the middle of the screen.
const contents = document.querySelector("nav");
if (contents) {
  const sections = [...document.querySelectorAll("main > section[id]")];
  const follow = () => {
    const begun = sections.filter((section) => section.getBoundingClientRect().top < innerHeight / 2);
    const here = (begun.pop() || sections[0]).id;
    for (const link of contents.querySelectorAll("nav > ul > li > a")) {
      if (link.hash === `#${here}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  contents.classList.add("follows");
  addEventListener("scroll", follow, { passive: true });
  follow();
}

start();

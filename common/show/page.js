// Sorts and folds the tables, draws the plots, and shows in the contents where the reader is.  Downloads and links need no
// script.
"use strict";

let figures = {};
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

// plotly.js and the figures are packed into the page; the policy allows the script that comes out by its hash.
function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function unpackPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
}

// What is folded has no width: it is drawn when it is opened.
const drawn = new Set();
const isOpen = (plot) => !plot.closest("details:not([open])");

async function draw() {
  for (const plot of plots.filter((each) => isOpen(each) && !drawn.has(each))) {
    drawn.add(plot);
    const figure = figures[plot.dataset.figure];
    figure.height = figure.layout.height;
    figure.layout.height = room(plot, plot.clientWidth);
    await Plotly.newPlot(plot, figure.data, figure.layout, settings);
  }
}

function fit() {
  for (const plot of [...drawn].filter(isOpen)) {
    plot.style.zoom = "";
    Plotly.relayout(plot, { width: null, height: room(plot, plot.clientWidth), autosize: true });
  }
}

async function opened() {
  await draw();
  fit();
}

// A sheet is narrower than a screen and ends, and is laid out without telling the plots.
const paperWidth = 670;
const paperHeight = 800;
function fitPaper() {
  for (const plot of [...drawn].filter(isOpen)) {
    const scale = Math.min(0.72, paperHeight / room(plot, paperWidth)); // two a sheet; one of many lanes, whole
    plot.style.zoom = scale;
    const width = paperWidth / scale;
    Plotly.relayout(plot, { width, height: room(plot, width), autosize: false });
  }
}

async function start() {
  if (plots.length) {
    figures = JSON.parse(await unpacked("figures"));
    await unpackPlotly();
    await draw();
    addEventListener("resize", fit);
    addEventListener("beforeprint", fitPaper);
    addEventListener("afterprint", fit);
    for (const folded of document.querySelectorAll("details.folded")) folded.addEventListener("toggle", opened);
  }
  document.documentElement.dataset.plots = "drawn";
}

// Numbers by size, text by the alphabet, what is not known last in both directions.
function compare(one, other, numeric, sign) {
  if (one === "" || other === "") return (one === "") - (other === "");
  if (!numeric) return sign * one.localeCompare(other, "en", { numeric: true });
  return sign * (parseFloat(one) - parseFloat(other) || 0); // an interval by its lower end
}

function sort(table, heading) {
  const column = [...heading.parentNode.children].indexOf(heading);
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const value = (row) => row.cells[column].dataset.value;
  const numeric = heading.classList.contains("number");
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.classList.contains("kind"));
    body.append(...rows.sort((one, other) => compare(value(one), value(other), numeric, ascending ? 1 : -1)));
  }
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

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.parentNode.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  button.hidden = !navigator.clipboard;
}

// The contents mark what is read: the last one that began above the middle of the screen.
const contents = document.querySelector("nav");
if (contents) {
  const links = [...contents.querySelectorAll("nav > ul > li > a")];
  const targets = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));
  const follow = () => {
    const begun = targets.filter((target) => target.getBoundingClientRect().top < innerHeight / 2);
    const here = (begun.pop() || targets[0]).id;
    for (const link of links) {
      if (link.hash === `#${here}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  addEventListener("scroll", follow, { passive: true });
  follow();
}

start();

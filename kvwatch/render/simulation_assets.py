"""Style and script of the page of `kvwatch simulate`, beside the style of every page and uPlot's own."""

PAGE_STYLE = """
.choice.verdict { background: var(--card); border-color: var(--link); border-top: 1px solid var(--line);
  border-right: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.choice .word { color: var(--link); }
.choice h1 code { font-size: 1em; font-weight: 700; display: inline-block; background: none; padding: 0; }
:root { --now: #b45309; --l0: #0f766e; --l1: #7c3aed; --l2: #be185d; --l3: #4d7c0f; --l4: #0369a1; --l5: #78716c; }
@media (prefers-color-scheme: dark) {
  :root { --now: #fb9a4b; --l0: #2dd4bf; --l1: #b794f6; --l2: #f472b6; --l3: #a3d65c; --l4: #5cc5f5; --l5: #b5aea8; }
}
.engine h2 { margin-bottom: .5rem; }
.engine p:last-child { margin-bottom: 0; }
.scroll th[scope=row] { position: sticky; left: 0; background: var(--card); font-weight: 650; }
.engine table { overflow-wrap: normal; }
.engine th { font-weight: 600; }
.engine .number { white-space: nowrap; }
.engine tr:first-child th { white-space: normal; line-height: 1.25; vertical-align: bottom; }
.engine td:last-child, .engine th:last-child { padding-right: 0; }
tr.chosen td, tr.chosen th { color: var(--link); font-weight: 650; }
.chart { min-width: 0; }
.chart table { width: auto; }
@media (max-width: 30rem) {
  .choice h1 { font-size: 1.1rem; }
  .engine table { font-size: .85rem; }
}
.chart .u-legend { text-align: left; font-size: .85rem; margin: .3rem 0 0; }
.chart .u-legend tr { margin-right: .9rem; }
.chart .u-legend th, .chart .u-legend td { border: 0; padding: .15rem 0; line-height: 1.3; vertical-align: baseline; }
.chart .u-legend th { font-weight: 400; overflow-wrap: normal; }
.chart .u-inline.u-live th::after { content: none; }
.chart .u-legend .u-marker { width: .75em; height: .75em; border-radius: 2px; }
.chart .u-legend .u-value { font-variant-numeric: tabular-nums; min-width: 2.4rem; padding-left: .4rem; }
"""

# Draws both charts, and again when the width or the colour scheme changes.
SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = "12px system-ui, sans-serif";
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const shown = new Map();
  let charts = [];

  const stroke = (kind, place) =>
    kind === "chosen" ? colour("--link") : kind === "now" ? colour("--now") : colour("--l" + (place % 6));
  const axis = (label, more) => ({
    label, labelFont: font, labelSize: 20, font, stroke: colour("--soft"),
    grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line"), width: 1}, ...more,
  });
  const share = (value) => (value == null ? "" : (100 * value).toFixed(0) + "%");
  const named = (line) => [line.kind === "other" ? "" : line.kind, line.label].filter(Boolean).join(": ");
  const place = (section) => {
    section.hidden = false;
    const box = section.querySelector(".chart");
    box.replaceChildren();
    return box;
  };

  const usage = () => {
    const section = document.getElementById("usage"), box = place(section);
    const many = data.lines.length > 4;
    const series = data.lines.map((line, number) => ({
      label: named(line), stroke: stroke(line.kind, number), width: line.kind === "other" ? 1.25 : 2.25,
      show: shown.get(number) ?? (!many || line.kind !== "other"),
      points: {show: false}, value: (_, value) => share(value),
    }));
    const filled = (values) => data.seconds.map((_, column) => values[column] ?? null);
    const options = {
      width: box.clientWidth, height: 260, cursor: {drag: {x: false, y: false}, y: false},
      scales: {x: {time: false}, y: {range: [0, 1.02]}},
      axes: [
        axis("seconds", {size: 34}),
        axis("", {label: null, size: 54, splits: [0, .25, .5, .75, 1], values: (_, ticks) => ticks.map(share)}),
      ],
      legend: {markers: {width: 0, fill: (_, index) => series[index - 1]?.stroke}},
      series: [{label: " ", value: (_, value) => (value == null ? "" : "at " + value.toFixed(0) + " s")}, ...series],
      hooks: {setSeries: [(chart, index, change) => {
        if (index && change.show != null) shown.set(index - 1, change.show);
      }]},
    };
    const words = ["The largest share of the pool that requests hold."];
    if (many) words.push("A line is shown or hidden by its name.");
    if (data.left_out) words.push("Options that are in the table only: " + data.left_out + ".");
    section.querySelector("p").textContent = words.join(" ");
    charts.push(new uPlot(options, [data.seconds, ...data.lines.map((line) => filled(line.usage))], box));
  };

  const trade = () => {
    const section = document.getElementById("trade"), box = place(section), say = section.querySelector("p");
    const points = [...data.points].sort((one, other) => one.preemptions - other.preemptions);
    const kinds = ["other", "now", "chosen"].filter((kind) => points.some((point) => point.kind === kind));
    const hint = "Up and left is better. Point at an option for its settings.";
    const tell = (chart) => {
      const {left, top} = chart.cursor;
      if (left == null || left < 0) { say.textContent = hint; return; }
      const away = (point) => Math.hypot(
        chart.valToPos(point.preemptions, "x") - left, chart.valToPos(point.tokens_per_second, "y") - top);
      const near = points.reduce((best, point) => (away(point) < away(best) ? point : best));
      say.textContent = named(near) + ": " + near.preemptions + " preemptions, "
        + near.tokens_per_second.toFixed(1) + " tokens/s";
    };
    const padded = (_, low, high) => {
      const room = Math.max((high - low) * .12, Math.abs(high) * .01, 1e-9);
      return [low - room, high + room];
    };
    const options = {
      width: box.clientWidth, height: 260,
      cursor: {drag: {x: false, y: false}, points: {show: false}}, legend: {live: false},
      scales: {
        x: {time: false, range: (_, low, high) => [-Math.max(high, 1) * .04, Math.max(high, 1) * 1.06]},
        y: {range: padded},
      },
      axes: [
        axis("preemptions", {size: 34, incrs: [1, 10, 100, 1e3, 1e4, 1e5].flatMap((ten) => [ten, 2 * ten, 5 * ten])}),
        axis("output tokens/s", {size: 56}),
      ],
      series: [{label: " "}, ...kinds.map((kind) => {
        const paint = kind === "other" ? colour("--soft") : stroke(kind, 0);
        return {label: kind === "other" ? "other options" : kind, stroke: paint, fill: paint, paths: () => null,
          points: {show: true, size: kind === "other" ? 8 : 13, stroke: paint, fill: paint}};
      })],
      hooks: {setCursor: [tell]},
    };
    const values = kinds.map((kind) => points.map((point) => (point.kind === kind ? point.tokens_per_second : null)));
    say.textContent = hint;
    charts.push(new uPlot(options, [points.map((point) => point.preemptions), ...values], box));
  };

  const draw = () => {
    for (const chart of charts) chart.destroy();
    charts = [];
    usage();
    trade();
  };
  let width = null, waiting = null;
  const resized = () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 100);
  };
  width = innerWidth;
  draw();
  addEventListener("resize", resized);
  scheme.addEventListener("change", draw);
})();
"""

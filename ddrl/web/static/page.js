// Charts, which follow the server's events, and forms that send themselves.
"use strict";

const COLORS = ["#2f6fb0", "#d55e00", "#009e73", "#b4559a", "#56b4e9", "#c58a00", "#6b7280"];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toFixed(2) + "M";
  if (size >= 1e4) return +(value / 1e3).toFixed(1) + "k";
  return size && size < 0.01 ? value.toExponential(1) : String(+value.toFixed(2));
};

// Lines of `labels`, or of a run: mean of training, evaluations, and their deviation as bars.
function series(kind, chart) {
  const value = (_, number) => (number == null ? "-" : short(number));
  const x = { label: chart.axis, value };
  const points = { show: false };
  if (kind === "run") {
    const hidden = { show: true, stroke: "transparent", points, value };
    return [
      x,
      { label: "training", stroke: COLORS[0], width: 2, spanGaps: true, points, value },
      { label: "evaluation", stroke: COLORS[1], paths: () => null, points: { show: true, size: 8, fill: COLORS[1] }, value },
      { ...hidden, label: "- std" },
      { ...hidden, label: "+ std" },
    ];
  }
  return [x, ...chart.labels.map((label, place) => (
    { label, stroke: COLORS[place % COLORS.length], width: 2, spanGaps: true, points, value,
      dash: place < COLORS.length ? [] : [6, 4] }
  ))];
}

// Bars of the evaluations, the target, and a line with its text for each changed setting.
function decorate(plot, chart) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.lineWidth = ratio;
  const line = (x0, y0, x1, y1) => { ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); };
  if (chart.data.length === 5) {
    ctx.strokeStyle = COLORS[1];
    chart.data[0].forEach((x, place) => {
      if (chart.data[3][place] == null) return;
      const at = plot.valToPos(x, "x", true);
      line(at, plot.valToPos(chart.data[3][place], "y", true), at, plot.valToPos(chart.data[4][place], "y", true));
    });
  }
  if (chart.target != null) {
    ctx.strokeStyle = style("--quiet");
    ctx.setLineDash([5 * ratio, 4 * ratio]);
    const at = plot.valToPos(chart.target, "y", true);
    line(bbox.left, at, bbox.left + bbox.width, at);
    ctx.setLineDash([]);
  }
  ctx.strokeStyle = ctx.fillStyle = style("--mark");
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  (chart.marks || []).forEach(([x, text], place) => {
    const at = plot.valToPos(x, "x", true);
    line(at, bbox.top, at, bbox.top + bbox.height);
    ctx.fillText(text, at + 3 * ratio, bbox.top + (12 + 13 * (place % 4)) * ratio);
  });
  ctx.restore();
}

function draw(element, chart) {
  if (element.plot) {
    element.chart = chart;
    element.plot.setData(chart.data);
    return;
  }
  element.chart = chart;
  const axis = { stroke: style("--text"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
  const format = (_, values) => values.map(short);
  const range = (plot, low, high) => {
    if (element.chart.target != null) [low, high] = [Math.min(low ?? 0, element.chart.target), Math.max(high ?? 0, element.chart.target)];
    return low == null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, true);
  };
  element.plot = new uPlot({
    width: element.clientWidth, height: element.clientHeight - 34,
    scales: { x: { time: false }, y: { range } },
    axes: [{ ...axis, values: format, label: chart.axis, labelSize: 20 }, { ...axis, values: format, size: 60 }],
    series: series(element.dataset.kind, chart),
    hooks: { draw: [(plot) => decorate(plot, element.chart)] },
  }, chart.data, element);
  element.sized ??= new ResizeObserver(() => element.plot?.setSize({ width: element.clientWidth, height: element.clientHeight - 34 }));
  element.sized.observe(element);
}

document.querySelectorAll(".chart").forEach((element) => draw(element, JSON.parse(element.dataset.chart)));
document.body.addEventListener("htmx:sseMessage", (event) => {
  if (event.target.classList.contains("chart")) draw(event.target, JSON.parse(event.detail.data));
});
document.querySelectorAll("[data-submits]").forEach((input) => input.addEventListener("change", () => input.form.submit()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  document.querySelectorAll(".chart").forEach((element) => {
    element.plot.destroy();
    element.plot = null;
    draw(element, element.chart);
  });
});

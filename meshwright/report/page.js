// Draws the charts of the page from the data in it. Colours are those of the style sheet, so that both schemes fit.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const narrow = () => window.innerWidth < 740;
  const axis = document.getElementById("axis"), smooth = document.getElementById("smooth");
  const escape = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const drawn = [], MARK = "started again";

  const figure = (value) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e5 || (size > 0 && size < 1e-3)) return short(value);
    return size >= 100 ? value.toFixed(1) : value.toPrecision(5).replace(/0+$/, "").replace(/\.$/, "");
  };
  const short = (value) => {
    const size = Math.abs(value);
    for (const [unit, by] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]])
      if (size >= by) return `${+(value / by).toPrecision(4)} ${unit}`;
    return size > 0 && size < 1e-3 ? value.toExponential(2) : `${+value.toPrecision(4)}`;
  };
  const clock = (seconds) => {
    const at = new Date(seconds * 1000);
    return at.toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  };
  const onAxis = (value) => (axis.value === "time" ? clock(value) : short(value));

  // Exponential, and right from the first point on. A gap stays a gap.
  const smoothed = (values, share) => {
    if (!share) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  };

  // A curve names its points by number where it has not all of its run.
  const place = (curve, n) => {
    const run = data.runs[curve.run], at = curve.at ? curve.at[n] : n;
    return axis.value === "time" ? run.begin + run.time[at] : run[axis.value][at];
  };

  const curves = (chart) => {
    const share = chart.metric === "train/loss" ? smooth.value / 100 : 0;
    const several = new Map();
    return chart.curves.map((curve) => {
      const y = curve.points ? curve.y : smoothed(curve.y, share);
      const nth = several.get(curve.run) || 0;
      if (!curve.points) several.set(curve.run, nth + 1);
      const coloured = chart.metric === "source" && data.runs.length === 1, ink = colour(`run${(coloured ? nth : curve.run) % 8}`);
      return {
        type: "line", name: curve.label, data: y.map((value, n) => [place(curve, n), value]),
        color: ink, showSymbol: !!curve.points || y.length === 1, symbol: "circle", symbolSize: curve.points ? 6 : 5,
        lineStyle: { width: curve.points ? 1.2 : 1.8, type: curve.points || (nth && !coloured) ? [4, 4] : "solid" },
        emphasis: { disabled: true }, connectNulls: false, animation: false,
      };
    });
  };

  // Where runs were started again: upright lines on an axis of their own, from 0 to 1, with the mesh where it changes.
  // Names that lie close together stand below each other, and those near the right end left of their line.
  const marks = (chart) => data.runs.flatMap((run, number) => run.marks.map((mark, nth) => {
    const at = axis.value === "time" ? run.begin + mark.time : mark[axis.value];
    const late = mark.step > 0.8 * run.step[run.step.length - 1];
    const ink = data.runs.length > 1 ? colour(`run${number % 8}`) : colour("soft");
    const named = chart.metric === "train/loss" && data.runs.length === 1 && mark.mesh;
    const label = { show: !!named, formatter: mark.mesh, color: ink, fontSize: 12, offset: [0, 10 + 16 * (nth % 3)], position: late ? "left" : "right" };
    return {
      type: "line", name: MARK, yAxisIndex: 1, data: [{ value: [at, mark.again ? 0 : 1] }, { value: [at, 1], label }],
      symbol: "circle", symbolSize: 0.1, showSymbol: true, showAllSymbol: true, silent: true, animation: false, z: 1,
      lineStyle: { width: 1, type: [3, 3], color: ink }, itemStyle: { color: ink }, label: { show: false },
    };
  }));

  // The value of each curve that is nearest to the pointer: runs seldom have points at the same place.
  const tip = (chart) => (hovered) => {
    const at = (Array.isArray(hovered) ? hovered[0] : hovered).axisValue;
    const rows = chart.instance.getOption().series.filter((series) => series.name !== MARK).map((series) => {
      const points = series.data.filter((point) => point[0] !== null && point[1] !== null);
      if (!points.length || at < points[0][0] || at > points[points.length - 1][0]) return "";
      const near = points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
      return `<tr><td><i style="background:${series.color}"></i>${escape(series.name)}</td><td>${figure(near[1])}</td></tr>`;
    });
    return `<div class="tip">${axis.value} ${onAxis(at)}<table>${rows.join("")}</table></div>`;
  };

  const look = () => ({
    backgroundColor: "transparent", animation: false,
    textStyle: { fontFamily: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", color: colour("ink") },
  });
  const box = () => ({
    confine: true, backgroundColor: colour("paper"), borderColor: colour("line"), padding: [8, 12],
    textStyle: { color: colour("ink"), fontSize: 13 }, extraCssText: "box-shadow:0 4px 18px rgba(0,0,0,.14);border-radius:8px",
  });

  const draw = (chart) => {
    const lines = [...curves(chart), ...marks(chart)], soft = { color: colour("soft"), fontSize: 12, hideOverlap: true };
    chart.instance.setOption({
      ...look(),
      grid: { left: 6, right: 14, top: 14, bottom: 44, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
      tooltip: { ...box(), trigger: "axis", formatter: tip(chart), axisPointer: { lineStyle: { color: colour("soft"), type: "dashed" } } },
      xAxis: {
        type: "value", scale: true, min: "dataMin", max: "dataMax", splitNumber: narrow() ? 3 : 6, axisLabel: { ...soft, formatter: onAxis },
        axisLine: { lineStyle: { color: colour("line") } }, axisTick: { show: false }, splitLine: { show: false },
      },
      yAxis: [{
        type: "value", scale: !chart.from_zero, splitNumber: 4, axisLabel: { ...soft, formatter: short },
        splitLine: { lineStyle: { color: colour("line") } },
      }, { type: "value", min: 0, max: 1, show: false }],
      dataZoom: [
        { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, moveOnMouseMove: !narrow(), filterMode: "none" },
        {
          type: "slider", height: 16, bottom: 6, showDetail: false, brushSelect: false, filterMode: "none", borderColor: "transparent",
          backgroundColor: colour("raised"), fillerColor: `${colour("accent")}33`, handleStyle: { color: colour("accent") },
          moveHandleSize: 0, dataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
          selectedDataBackground: { lineStyle: { opacity: 0 }, areaStyle: { opacity: 0 } },
        },
      ],
      series: lines,
    }, { replaceMerge: ["series"] });
  };

  // Even, 1, is the middle between an expert that nothing reaches and one with three times its share.
  const shade = (load) => (load <= 1 ? load : Math.min(2, 1 + (load - 1) / 2));

  const heat = (plot, experts) => {
    const instance = charts.init(plot), figureOf = plot.closest("figure");
    const slider = figureOf.querySelector("input"), shown = figureOf.querySelector("output");
    slider.max = experts.steps.length - 1;
    slider.value = slider.max;
    const show = () => {
      const load = experts.loads[slider.value], cells = [];
      shown.textContent = experts.steps[slider.value].toLocaleString();
      load.forEach((row, layer) => row.forEach((value, expert) => cells.push([expert, layer, shade(value / 100), value / 100])));
      const soft = { color: colour("soft"), fontSize: 12, hideOverlap: true };
      const every = (num, most) => ({ ...soft, interval: Math.ceil(num / most) - 1 });
      instance.setOption({
        ...look(),
        grid: { left: 6, right: 14, top: 10, bottom: 74, outerBoundsMode: "same", outerBoundsContain: "all" },
        tooltip: { ...box(), formatter: (at) => `layer ${at.value[1]}, expert ${at.value[0]}: <b>${at.value[3].toFixed(2)}</b>` },
        xAxis: {
          type: "category", data: load[0].map((_, n) => n), name: "expert", nameLocation: "middle", nameGap: 26,
          nameTextStyle: soft, axisLabel: every(load[0].length, narrow() ? 6 : 16), axisTick: { show: false }, axisLine: { show: false },
        },
        yAxis: {
          type: "category", data: load.map((_, n) => n), name: "layer", nameLocation: "middle", nameGap: 32, nameTextStyle: soft,
          axisLabel: every(load.length, 8), axisTick: { show: false }, axisLine: { show: false },
        },
        visualMap: {
          dimension: 2, min: 0, max: 2, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemHeight: 180, itemWidth: 10,
          text: ["3 and more", "0"], textStyle: { color: colour("soft"), fontSize: 12 },
          inRange: { color: [colour("bad"), colour("raised"), colour("accent")] },
        },
        series: [{ type: "heatmap", data: cells, progressive: 0, emphasis: { disabled: true }, animation: false }],
      });
    };
    slider.addEventListener("input", show);
    show();
    drawn.push({ instance, draw: show });
  };

  for (const chart of data.charts) {
    chart.instance = charts.init(document.querySelector(`[data-metric="${chart.metric}"]`));
    chart.instance.group = "curves";
    draw(chart);
    drawn.push({ instance: chart.instance, draw: () => draw(chart) });
  }
  charts.connect("curves");
  document.querySelectorAll(".heat").forEach((plot) => heat(plot, data.experts[plot.dataset.run]));
  const again = () => drawn.forEach((each) => each.draw());
  axis.addEventListener("change", again);
  smooth.addEventListener("input", () => data.charts.filter((chart) => chart.metric === "train/loss").forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  new ResizeObserver(() => drawn.forEach((each) => each.instance.resize())).observe(document.body);
})();
